"""The memory budget of a whole device, against the kernel's own figures: what is told is so, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.client import Client
from edgeinfer.errors import EdgeInferError
from edgeinfer.store.store import BundleStore
from tests.execution.local_rig import FILLED, MIB, variant, write_bundle
from tests.system.broker import Broker
from tests.system.programs import Program, wait_until
from tests.system.test_daemon_commands import Operator
from tests.worker import graphs

pytestmark = [pytest.mark.system, pytest.mark.slow]

ROW = [TensorSpec("x", "FP32", [1, 1024])], [TensorSpec("y", "FP32", [1, 1024])]
SMALL = [TensorSpec("x", "FP32", [1, 512])], [TensorSpec("y", "FP32", [1, 512])]
PICTURE = (
    [TensorSpec("x", "FP32", [1, 3, -1, -1], max_shape=[1, 3, 512, 512])],
    [TensorSpec("y", "FP32", [1, 32, 1, 1])],
)
_V1 = Path("/sys/fs/cgroup/memory")


def add(program: Program, name: str, graph: Any, contract: Any, *, peak_bytes: int, version: str = "1.0.0") -> None:
    source = program.folder / f"{name}-{version}"
    write_bundle(source, name, graph, contract, variants=[variant("fp32", peak_bytes)], version=version)
    BundleStore(program.state_dir).add(source, lambda *_: None)


def models(*names: str, more: str = "") -> str:
    return "".join(f'[[model]]\nname = "{name}"\n{more}\n' for name in names)


def rollup(pid: int) -> dict[str, int]:
    """What the kernel says of a process, in bytes: written apart from the product on purpose."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/smaps_rollup").open() as file:
        for line in file:
            words = line.split()
            if words[-1] == "kB":
                found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def in_use(program: Program) -> int:
    """Anonymous memory and shared memory of the daemon and all its processes, each shared page once."""
    return sum(
        found.get("Pss_Anon", 0) + found.get("Pss_Shmem", 0)
        for found in map(rollup, [program.process.pid, *program.children()])
    )


def memory(program: Program) -> dict[str, Any]:
    found: dict[str, Any] = program.status()["state"]["memory"]
    return found


def see(client: Client, side: int) -> None:
    client.infer("eye", {"x": np.ones((1, 3, side, side), np.float32)}, deadline_ms=20_000)


def settled(program: Program) -> tuple[int, int]:
    """Return what is told and what the kernel says, at a moment at which nothing moves."""
    time.sleep(1.5)  # it is read once a second
    return memory(program)["used_bytes"], in_use(program)


def test_what_is_told_is_what_the_kernel_says_within_a_tenth(tmp_path: Path) -> None:
    config = models("eye", "chain", more="workers = 2")
    with Program(tmp_path / "device", config) as program:
        add(program, "eye", graphs.convolutions(32, 4, table_mib=64), PICTURE, peak_bytes=200 * MIB)
        add(program, "chain", graphs.linear(1024, 8), ROW, peak_bytes=80 * MIB)
        program.ready()
        told, real = settled(program)
        assert abs(told - real) < 0.1 * real
        before = real
        with program.client() as client:
            see(client, 384)
            told, real = settled(program)
            assert real > before + 10 * MIB
            assert abs(told - real) < 0.1 * real
        figures = memory(program)
        assert real <= figures["reserved_bytes"] <= figures["ceiling_bytes"]
        assert figures["peak_used_bytes"] >= told
        ours = sum(rollup(pid).get("Pss_Anon", 0) for pid in (program.process.pid, program.zygote()))
        assert 0.9 * ours < figures["itself_bytes"] < ours + 40 * MIB, "with what the workers share with the zygote"


def test_a_worker_that_one_request_has_made_large_is_small_again_in_seconds(tmp_path: Path) -> None:
    with Program(tmp_path / "device", models("eye")) as program:
        add(program, "eye", graphs.convolutions(32, 4, table_mib=64), PICTURE, peak_bytes=110 * MIB)
        program.ready()
        with program.client() as client:
            see(client, 64)
            small = in_use(program)
            see(client, 512)
            assert in_use(program) > small + 60 * MIB
            wait_until(lambda: in_use(program) < small + 20 * MIB, "the worker has shrunk", 8)
            see(client, 64)
        assert "remedy=shrink" in program.log()
        wait_until(lambda: memory(program)["beyond_bytes"] == 0, "nothing is above its reservation")


def test_the_daemons_own_growth_is_charged_once(tmp_path: Path) -> None:
    with Program(tmp_path / "device", models("eye")) as program:
        add(program, "eye", graphs.convolutions(), PICTURE, peak_bytes=60 * MIB)
        program.ready()
        time.sleep(1.2)
        before, small = memory(program), rollup(program.process.pid)["Pss_Anon"]
        with contextlib.ExitStack() as stack:
            for _ in range(3):  # bodies that do not end: their buffers are the daemon's
                stack.enter_context(half_a_body(program.socket, 10 * MIB))
            time.sleep(2.5)
            figures, grown = memory(program), rollup(program.process.pid)["Pss_Anon"]
            assert figures["reserved_bytes"] >= in_use(program)
        assert figures["itself_bytes"] <= before["itself_bytes"] + (grown - small) + 2 * MIB
        assert figures["itself_bytes"] >= before["itself_bytes"]


@contextlib.contextmanager
def half_a_body(path: Path, size: int) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(3)
        peer.connect(str(path))
        head = f"POST /v2/models/eye/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
        with contextlib.suppress(OSError):
            peer.sendall(head.encode() + b"x" * (size // 2))
        yield


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 1 with another inside, where this machine lets us."""
    outer = _V1 / f"edgeinfer-test-{uuid.uuid4().hex[:8]}"
    try:
        (outer / "inner").mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(256 * MIB))
        (outer / "inner" / "memory.limit_in_bytes").write_text(str(512 * MIB))
    except OSError:
        pytest.skip("no control group of version 1 may be made here")
    yield outer
    for folder in (outer / "inner", outer):
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
            if not folder.exists():
                break
            time.sleep(0.05)


def inside(group: Path) -> list[str]:
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]


def test_the_tightest_of_nested_limits_is_the_budget(tmp_path: Path, group: Path) -> None:
    config = '[memory]\nceiling = "2 GiB"\nreserve = "16 MiB"\n' + models("small", "large")
    with Program(tmp_path / "device", config, wrapper=inside(group / "inner")) as program:
        add(program, "small", graphs.linear(1024, 4), ROW, peak_bytes=48 * MIB)
        add(program, "large", graphs.linear(1024, 4), ROW, peak_bytes=260 * MIB)
        program.ready()
        time.sleep(1.2)
        figures = memory(program)
        assert 190 * MIB < figures["ceiling_bytes"] <= 240 * MIB, "256 MiB of the outer group, less the reserve"
        state = program.models()
        assert state["small"]["state"] == "loaded"
        assert state["large"]["state"] == "refused"
        assert "large/fp32 needs 26" in state["large"]["detail"]
        (group / "memory.limit_in_bytes").write_text(str(160 * MIB))  # somebody tightens it while we run
        wait_until(lambda: memory(program)["ceiling_bytes"] <= 144 * MIB, "the budget follows", 5)


def test_a_model_that_is_all_weights_stays_below_its_budget_while_it_loads(tmp_path: Path) -> None:
    """50 MB in the file, 120 MB in the budget of the model: read once, not twice."""
    table = graphs.convolutions(8, 1, table_mib=50)
    with Program(tmp_path / "device", models("eye")) as program:
        add(program, "eye", table, PICTURE, peak_bytes=120 * MIB)
        program.ready()
        [worker] = set(program.children()) - {program.zygote()}
        status = Path(f"/proc/{worker}/status").read_text()
        fields = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.endswith("kB")}
        mapped = int(fields["RssFile"]) + int(fields["RssShmem"])
        found = rollup(worker)
        zygotes = found["Anonymous"] - found["Private_Dirty"]  # as it was forked
        peak = (int(fields["VmHWM"]) - mapped) * 1024 - zygotes
        print(f"peak {peak / MIB:.0f} MiB, then {found['Private_Dirty'] / MIB:.0f} MiB for 50 MiB of weights")
        assert peak < 120 * MIB
        figures = memory(program)
        assert figures["peak_used_bytes"] <= figures["reserved_bytes"]


def test_a_request_that_asks_for_all_memory_fails_alone(tmp_path: Path) -> None:
    with Program(tmp_path / "device", models("filled", "chain")) as program:
        add(program, "filled", graphs.filled(), FILLED, peak_bytes=64 * MIB)
        add(program, "chain", graphs.linear(1024, 2), ROW, peak_bytes=48 * MIB)
        program.ready()
        workers = program.children()
        with program.client() as client:
            for _ in range(3):
                with pytest.raises(EdgeInferError, match="memory"):
                    client.infer("filled", {"shape": np.array([1 << 31], np.int64)}, deadline_ms=5000)
                client.infer("chain", {"x": np.zeros((1, 1024), np.float32)}, deadline_ms=5000)
                client.infer("filled", {"shape": np.array([5], np.int64)}, deadline_ms=5000)
        assert program.children() == workers, "nobody died of it"


def test_shared_memory_of_one_megabyte_is_enough(tmp_path: Path) -> None:
    """Tensors travel in memory of our own: a /dev/shm that a container made tiny costs nothing, above all no SIGBUS."""
    try:
        subprocess.run(["unshare", "-m", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount namespace may be made here")
    tiny = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    with Program(tmp_path / "device", models("eye", more="workers = 2"), wrapper=tiny) as program:
        add(program, "eye", graphs.convolutions(), PICTURE, peak_bytes=150 * MIB)
        program.ready()
        inside = subprocess.run(
            ["nsenter", "-m", "-t", str(program.process.pid), "stat", "-f", "-c", "%b %S", "/dev/shm"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        blocks, size = map(int, inside.stdout.split())
        assert blocks * size == MIB
        with program.client() as client:
            for _ in range(8):
                see(client, 512)  # 3 MB each
        assert "SIGBUS" not in program.log()


async def test_thirty_swaps_and_thirty_failed_loads_leave_nothing(tmp_path: Path, broker: Broker) -> None:
    config = f'[mqtt.site]\nhost = "127.0.0.1"\nport = {broker.port}\n' + models("swap", "broken")
    with Program(tmp_path / "cam1", config) as program:
        for version, seed in (("1.0.0", 1), ("2.0.0", 2)):
            add(program, "swap", graphs.linear(1024, 5, seed), ROW, peak_bytes=64 * MIB, version=version)
        unknown = graphs.model(
            [helper.make_node("NoSuchOperator", ["x"], ["y"], domain="nowhere")],
            [graphs.value("x", graphs.FLOAT, [1, 1024])], [graphs.value("y", graphs.FLOAT, [1, 1024])],
        )  # fmt: skip
        add(program, "broken", unknown, ROW, peak_bytes=64 * MIB)
        await asyncio.to_thread(program.ready)
        resident: list[float] = []
        async with Operator(broker).listening() as operator:
            for cycle in range(30):
                version = ("1.0.0", "2.0.0")[cycle % 2]
                swapped = await operator.command("load", model="swap", version=version)
                assert swapped["outcome"] == "ok", swapped
                failed = await operator.command("load", model="broken")
                assert failed["outcome"] != "ok"
                resident.append(sum(rollup(pid)["Pss"] for pid in (program.process.pid, program.zygote())) / 1e6)
        slope = float(np.polyfit(range(20), resident[10:], 1)[0])
        print(
            f"daemon and zygote: {resident[9]:.1f} MB after ten cycles, {resident[-1]:.1f} after thirty, {slope:.3f} a cycle"
        )
        assert slope < 1.0
        assert len(program.children()) == 2, "the zygote and one worker"
        assert len(os.listdir(f"/proc/{program.process.pid}/fd")) < 80  # noqa: PTH208


THRASH = """
import mmap, os, sys, time
with open(sys.argv[1], "r+b") as file:
    area = mmap.mmap(file.fileno(), 0)
    area.madvise(mmap.MADV_RANDOM)
    size, at = len(area), 0
    while True:
        at = (at + 1_000_003 * 4096) % size
        area[at]
"""


def test_a_page_cache_that_does_not_hold_what_is_in_use_is_noticed_and_nothing_more_is_loaded(
    tmp_path: Path, group: Path
) -> None:
    config = (
        '[memory]\nreserve = "4 MiB"\n' + models("small", more="pinned = true") + models("late", more="preload = false")
    )
    (group / "memory.limit_in_bytes").write_text(str(200 * MIB))
    file = tmp_path / "weights"
    with file.open("wb") as weights:
        for _ in range(256):
            weights.write(os.urandom(MIB))
        weights.flush()
        os.fsync(weights.fileno())
        os.posix_fadvise(weights.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # who reads it first is charged for it
    with Program(tmp_path / "device", config, wrapper=inside(group / "inner")) as program:
        for name in ("small", "late"):
            add(program, name, graphs.linear(512, 2), SMALL, peak_bytes=16 * MIB)
        program.ready()
        quiet = memory(program)
        assert quiet["pressure"] == "none"
        thrash = subprocess.Popen([*inside(group / "inner"), sys.executable, "-c", THRASH, str(file)])
        try:
            wait_until(lambda: memory(program)["pressure"] != "none", "the faults are noticed", 40)
            pressed = memory(program)
            print(pressed, program.log().splitlines()[-1])
            assert pressed["pressure_reason"]
            assert pressed["ceiling_bytes"] < quiet["ceiling_bytes"]
            with program.client() as client, pytest.raises(EdgeInferError, match="memory pressure"):
                client.infer("late", {"x": np.zeros((1, 512), np.float32)}, deadline_ms=5000)
        finally:
            thrash.kill()
            thrash.wait()
        assert program.model_state("small") == "loaded", "what is used is not evicted at once"
        wait_until(lambda: memory(program)["pressure"] == "none", "it passes", 30)
