"""Nobody outlives the daemon, the zygote's death kills nobody, and it stays fit to fork."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.worker.lineage import Child, ExitStatus, become_subreaper, reap_group
from edgeinfer.worker.nursery import Nursery, NurseryState
from tests.worker import graphs
from tests.worker.conftest import StartWorker, floats, in_ms, output, process_is_gone, request_of

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_zygote_has_one_thread_and_no_session_and_workers_are_the_daemons_children(
    nursery: Nursery, start_worker: StartWorker
) -> None:
    worker = await start_worker(graphs.linear(64), intra_threads=2)
    zygote = nursery.snapshot().zygote_pid
    assert zygote is not None
    assert status(zygote)["Threads"] == "1"
    assert status(zygote)["PPid"] == status(worker.pid)["PPid"] == str(os.getpid())
    maps = Path(f"/proc/{zygote}/maps").read_text()
    assert "onnxruntime" in maps  # imported
    assert ".onnx\n" not in maps


async def test_telemetry_is_off_before_the_import_in_every_process(nursery: Nursery, start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.identity())
    for pid in (nursery.snapshot().zygote_pid, worker.pid):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"ORT_DISABLE_TELEMETRY=1" in environment
        assert b"OPENBLAS_NUM_THREADS=1" in environment
    tasks = list(Path(f"/proc/{worker.pid}/task").iterdir())
    assert len(tasks) == 2  # main and the reader: none of the runtime's own


async def test_killing_the_zygote_kills_no_worker_and_it_comes_back(
    nursery: Nursery, start_worker: StartWorker
) -> None:
    worker = await start_worker(graphs.slow_loop())
    steps = request_of(n=np.array([20_000], np.int64), x=floats(0))
    running = asyncio.create_task(worker.run(steps, deadline_ns=in_ms(5000)))
    await asyncio.sleep(0.01)
    first = nursery.snapshot()
    assert first.zygote_pid is not None
    os.kill(first.zygote_pid, signal.SIGKILL)
    other = await start_worker(graphs.identity())  # waits for the next zygote
    assert nursery.snapshot().zygote_pid != first.zygote_pid
    assert nursery.snapshot().restarts == first.restarts + 1
    assert output(await running).tolist() == [20_000]
    assert output(await other.run(request_of(x=floats(1)), deadline_ns=in_ms(1000))).tolist() == [1]
    assert worker.is_alive


async def test_zygote_killed_while_it_forks_loses_no_caller_and_leaves_no_zombie(
    nursery: Nursery, start_worker: StartWorker
) -> None:
    async def kill_soon() -> None:
        for _ in range(3):
            await asyncio.sleep(0.004)
            if (pid := nursery.snapshot().zygote_pid) is not None:
                os.kill(pid, signal.SIGKILL)

    others = set(children_of_this_process()) - {nursery.snapshot().zygote_pid}  # left by other tests of this run
    workers = asyncio.gather(*(start_worker(graphs.identity(), timeout_s=20) for _ in range(6)))
    await kill_soon()
    for worker in await workers:
        assert output(await worker.run(request_of(x=floats(2)), deadline_ns=in_ms(2000))).tolist() == [2]
        await worker.stop()
    async with asyncio.timeout(3):
        while set(children_of_this_process()) - others != {nursery.snapshot().zygote_pid}:
            await asyncio.sleep(0.02)


def children_of_this_process() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


DAEMON = """
    import asyncio, sys, time
    from pathlib import Path
    import numpy as np
    from edgeinfer.worker.nursery import Nursery
    from edgeinfer.worker.spec import bare_spec
    from edgeinfer.worker.worker import Worker
    from tests.worker.conftest import in_ms, floats, request_of

    async def main(loop_model, long_model):
        nursery = Nursery()
        await nursery.start()
        workers = [await Worker.start(nursery, bare_spec(Path(p), threads=2), deadline_ns=in_ms(10_000))
                   for p in (loop_model, long_model, loop_model)]
        forever = request_of(n=np.array([1 << 50], np.int64), x=floats(0))
        long = request_of(v=floats(1), shape=np.array([6000, 6000], np.int64))
        runs = [asyncio.create_task(workers[0].run(forever, deadline_ns=in_ms(60_000))),
                asyncio.create_task(workers[1].run(long, deadline_ns=in_ms(60_000)))]
        await asyncio.sleep(0.05)
        print(nursery.snapshot().zygote_pid, *(worker.pid for worker in workers), flush=True)
        await asyncio.gather(*runs)

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_daemon_that_is_killed_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals, wait_for: Callable[[Callable[[], bool]], bool]
) -> None:
    loop_model = graphs.write(tmp_path / "loop.onnx", graphs.slow_loop())
    long_model = graphs.write(tmp_path / "long.onnx", graphs.one_long_matmul())
    daemon = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), str(loop_model), str(long_model)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert daemon.stdout is not None
    pids = [int(pid) for pid in daemon.stdout.readline().split()]
    assert len(pids) == 4
    assert not any(process_is_gone(pid) for pid in pids)
    daemon.send_signal(number)
    daemon.wait(5)
    daemon.stdout.close()
    assert wait_for(lambda: all(process_is_gone(pid) for pid in pids)), pids
    for pid in pids:  # orphans of the daemon; this process may be the subreaper that has them now
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(3)", ExitStatus(code=3)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", ExitStatus(signal=signal.SIGILL)),
    ],
)
async def test_child_tells_how_it_ended_and_is_reaped(code: str, expected: ExitStatus) -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    child = Child(pid, asyncio.get_running_loop())
    assert await asyncio.wait_for(child.ended, 5) == expected
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
    child.kill()  # harmless: the pid may be anybody's by now


async def test_child_that_somebody_else_reaped_is_still_seen_to_end() -> None:
    pid = os.posix_spawn("/bin/true", ["/bin/true"], os.environ)
    child = Child(pid, asyncio.get_running_loop())
    os.waitpid(pid, 0)
    assert str(await asyncio.wait_for(child.ended, 5)) == "gone"


async def test_what_a_child_left_behind_is_reaped_but_not_what_somebody_waits_for() -> None:
    become_subreaper()
    command = ["/bin/sh", "-c", "sleep 60 & echo $! && exec sleep 60"]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert shell.stdout is not None
    orphan = int(shell.stdout.readline())
    os.killpg(shell.pid, signal.SIGKILL)
    os.waitid(os.P_PID, shell.pid, os.WEXITED | os.WNOWAIT)
    reap_group(shell.pid, known={shell.pid})
    assert shell.wait(1) == -signal.SIGKILL  # its status was left for us
    async with asyncio.timeout(3):
        while Path(f"/proc/{orphan}").exists():
            reap_group(shell.pid)
            await asyncio.sleep(0.01)
    shell.stdout.close()


async def test_exit_status_reads_well() -> None:
    assert str(ExitStatus(signal=signal.SIGSEGV)) == "killed by SIGSEGV"
    assert str(ExitStatus(code=70)) == "exited with code 70"
    assert re.fullmatch(r"killed by (signal 40|SIG\w+)", str(ExitStatus(signal=40)))


async def test_closing_ends_the_zygote_but_no_worker(start_worker: StartWorker) -> None:
    nursery = Nursery()
    snapshot = await nursery.start()
    assert snapshot.state is NurseryState.READY
    assert snapshot.zygote_pid is not None
    newborn = await nursery.fork(deadline_ns=in_ms(5000))
    await nursery.close()
    assert process_is_gone(snapshot.zygote_pid)
    assert newborn.child.is_running
    newborn.sock.close()  # the end of its channel is the end of a worker
    assert (await asyncio.wait_for(newborn.child.ended, 5)).code == 0


GIVING_WAY = """
import os, resource, sys, threading
from edgeinfer.worker import lineage

def nice(task=0):
    return os.getpriority(os.PRIO_PROCESS, task)

if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
    os.setuid(65534)
release, started = threading.Event(), threading.Event()
def live():
    started.set()
    release.wait()
with lineage.giving_way():
    thread = threading.Thread(target=live)
    thread.start()
    started.wait()
    inside = nice(), nice(thread.native_id)
after = nice(), nice(thread.native_id)
release.set()
print(*inside, *after)
"""


@pytest.mark.parametrize(("right", "expected"), [("full", "5 5 0 0"), ("limited", "0 0 0 0")])
async def test_who_loads_gives_way_only_where_it_may_come_back(right: str, expected: str) -> None:
    if os.geteuid() != 0 or os.getpriority(os.PRIO_PROCESS, 0) != 0:
        pytest.skip("needs root, and a normal priority of its own")
    done = subprocess.run(
        [sys.executable, "-c", GIVING_WAY, right], check=True, capture_output=True, text=True, timeout=30, cwd="/"
    )
    assert done.stdout.strip() == expected
