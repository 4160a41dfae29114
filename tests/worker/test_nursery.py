"""A runtime that cannot be imported is a state with a reason, never a crash or a restart loop."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer.errors import RuntimeUnusable, SessionError
from edgeinfer.worker import nursery as nursery_module
from edgeinfer.worker.nursery import Nursery, NurseryState
from edgeinfer.worker.spec import bare_spec
from edgeinfer.worker.worker import Worker
from tests.worker import graphs
from tests.worker.conftest import floats, in_ms, output, request_of

pytestmark = pytest.mark.system

BROKEN = {
    "raises": ("raise ImportError('libonnxruntime.so: cannot open shared object file')", "cannot open shared object"),
    "not_an_import_error": ("raise RuntimeError('cpuinfo: failed to parse')", "cpuinfo"),
    "sigill": ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
    "exits": ("import os; os._exit(9)", "code 9"),
    "hangs": ("import time; time.sleep(60)", "more than 0.3 s"),
    "starts_threads": (
        """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
__version__ = "9"
def get_available_providers(): return []
""",
        "started 1 threads",
    ),
}


def fake_runtime(folder: Path, code: str) -> dict[str, str]:
    package = folder / "onnxruntime"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(code)
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}:{root}"}


@pytest.mark.parametrize("kind", BROKEN)
async def test_runtime_that_cannot_be_imported_is_a_state_with_its_reason(tmp_path: Path, kind: str) -> None:
    code, reason = BROKEN[kind]
    timeout_ns = 300 * NS_PER_MS if kind == "hangs" else 10 * NS_PER_S
    nursery = Nursery(environment=fake_runtime(tmp_path, code), import_timeout_ns=timeout_ns)
    snapshot = await nursery.start()
    assert snapshot.state is NurseryState.UNUSABLE
    assert reason in snapshot.reason
    began = time.monotonic()
    for _ in range(3):  # answered from what is known, without another import
        with pytest.raises(RuntimeUnusable, match=r"runtime_unusable"):
            await nursery.fork(deadline_ns=in_ms(5000))
    assert time.monotonic() - began < 0.05
    assert nursery.snapshot().zygote_pid is None
    await nursery.close()


async def test_runtime_that_was_repaired_is_found_after_the_cool_down(tmp_path: Path) -> None:
    environment = fake_runtime(tmp_path, "raise ImportError('half installed')")
    nursery = Nursery(environment=environment, cool_down_ns=50 * NS_PER_MS)
    assert (await nursery.start()).state is NurseryState.UNUSABLE
    (tmp_path / "onnxruntime" / "__init__.py").unlink()
    (tmp_path / "onnxruntime").rmdir()
    time.sleep(0.06)
    model = graphs.write(tmp_path / "model.onnx", graphs.identity())
    worker = await Worker.start(nursery, bare_spec(model, threads=1), deadline_ns=in_ms(10_000))
    assert output(await worker.run(request_of(x=floats(1)), deadline_ns=in_ms(1000))).tolist() == [1]
    await worker.stop()
    await nursery.close()


async def test_an_unusable_runtime_says_when_it_is_tried_again_and_is_tried_at_once_when_asked_to(
    tmp_path: Path,
) -> None:
    environment = fake_runtime(tmp_path, "raise ImportError('half installed')")
    nursery = Nursery(environment=environment, cool_down_ns=30 * NS_PER_S)
    await nursery.start()
    with pytest.raises(RuntimeUnusable) as caught:
        await nursery.fork(deadline_ns=in_ms(5000))
    assert caught.value.retry_ns is not None
    assert 20 * NS_PER_S < caught.value.retry_ns - time.monotonic_ns() <= 30 * NS_PER_S
    nursery.retry_now()
    with pytest.raises(RuntimeUnusable) as again:
        await nursery.fork(deadline_ns=in_ms(10_000))
    assert again.value.retry_ns is not None
    assert again.value.retry_ns - time.monotonic_ns() > 50 * NS_PER_S, "twice as long, for it has failed again"
    (tmp_path / "onnxruntime" / "__init__.py").unlink()
    (tmp_path / "onnxruntime").rmdir()
    nursery.retry_now()
    newborn = await nursery.fork(deadline_ns=in_ms(10_000))
    newborn.sock.close()
    assert await newborn.child.killed()
    await nursery.close()


async def test_closed_nursery_refuses_to_fork() -> None:
    nursery = Nursery()
    with pytest.raises(SessionError, match="closed"):
        await nursery.fork(deadline_ns=in_ms(100))


def failing(times: int, number: int, real: Callable[..., int]) -> Callable[..., int]:
    left = [times]

    def call(*arguments: object, **named: object) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*arguments, **named)

    return call


@pytest.mark.parametrize("what", ["posix_spawn", "pidfd_open"])
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
async def test_a_zygote_that_cannot_be_started_just_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    monkeypatch.setattr(os, what, failing(2, number, getattr(os, what)))
    nursery = Nursery()
    snapshot = await nursery.start()
    assert snapshot.state is NurseryState.READY
    newborn = await nursery.fork(deadline_ns=in_ms(5000))
    newborn.sock.close()
    assert await newborn.child.killed()
    await nursery.close()


async def test_a_zygote_that_may_not_be_started_is_a_state_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_spawn", failing(1, errno.EACCES, os.posix_spawn))
    nursery = Nursery(cool_down_ns=50 * NS_PER_MS)
    snapshot = await nursery.start()
    assert snapshot.state is NurseryState.UNUSABLE
    assert "Permission denied" in snapshot.reason
    with pytest.raises(RuntimeUnusable, match="Permission denied"):
        await nursery.fork(deadline_ns=in_ms(5000))
    time.sleep(0.06)
    newborn = await nursery.fork(deadline_ns=in_ms(10_000))
    newborn.sock.close()
    assert await newborn.child.killed()
    await nursery.close()


async def test_no_descriptors_for_a_worker_are_no_crash_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = Nursery()
    await nursery.start()
    monkeypatch.setattr(os, "pidfd_open", failing(1, errno.EMFILE, os.pidfd_open))
    with pytest.raises(SessionError, match="fork_failed: the worker cannot be followed: Too many open files"):
        await nursery.fork(deadline_ns=in_ms(5000))
    newborn = await nursery.fork(deadline_ns=in_ms(5000))
    newborn.sock.close()
    assert await newborn.child.killed()
    await nursery.close()


async def test_a_zygote_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery_module, "_FORK_PATIENCE_S", 0.2)
    nursery = Nursery()
    zygote = (await nursery.start()).zygote_pid
    assert zygote is not None
    os.kill(zygote, signal.SIGSTOP)
    newborn = await nursery.fork(deadline_ns=in_ms(20_000))
    assert nursery.snapshot().zygote_pid not in {None, zygote}
    newborn.sock.close()
    assert await newborn.child.killed()
    await nursery.close()


VENDOR = """
import os
__version__ = "1.23.0+jp62"
class OrtAllocatorType: ORT_ARENA_ALLOCATOR = 0
class SessionOptions: pass
class RunOptions: pass
class NodeArg: pass
class InferenceSession: pass
def get_available_providers(): return ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
"""


async def test_the_board_vendors_own_build_is_taken_as_it_is(tmp_path: Path) -> None:
    """Another distribution's name, another version, no plug-ins: what counts is the module `onnxruntime`."""
    environment = fake_runtime(tmp_path, VENDOR)
    metadata = tmp_path / "onnxruntime_gpu-1.23.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.23.0\n")
    nursery = Nursery(environment=environment)
    snapshot = await nursery.start()
    try:
        assert snapshot.state is NurseryState.READY, snapshot.reason
        assert snapshot.onnxruntime == "1.23.0+jp62"
        assert snapshot.providers == ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
    finally:
        await nursery.close()


async def test_order_that_cannot_be_written_asks_nobody() -> None:
    nursery = Nursery()
    await nursery.start()
    before = nursery.snapshot(), len(os.listdir("/proc/self/fd")), nursery.pids()  # noqa: PTH208

    def fail(_: socket.socket) -> None:
        raise SessionError("fork_failed", "no descriptors")

    with pytest.raises(SessionError, match="no descriptors"):
        await nursery.fork(deadline_ns=in_ms(5000), write=fail)
    await asyncio.sleep(0.05)
    assert (nursery.snapshot(), len(os.listdir("/proc/self/fd")), nursery.pids()) == before  # noqa: PTH208
    newborn = await nursery.fork(deadline_ns=in_ms(5000))
    newborn.sock.close()
    await newborn.child.ended
    await nursery.close()
