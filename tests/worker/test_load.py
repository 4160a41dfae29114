"""Loading what cannot be loaded ends in a typed failure that names the thing, and costs only its own worker."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.artifact.manifest import StateSpec, TensorSpec
from edgeinfer.errors import SessionError
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import bare_spec
from edgeinfer.worker.worker import Worker
from tests.worker import graphs
from tests.worker.conftest import StartWorker, floats, in_ms, output, process_is_gone, request_of

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

HALF = graphs.linear(64).SerializeToString()[:9000]
GARBAGE = {
    "empty": b"",
    "zeros": bytes(4096),
    "half": HALF,
    "html": b"<!doctype html><title>404 Not Found</title>",
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 132\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_file_that_is_no_model_is_refused_in_our_own_words(
    start_worker: StartWorker, tmp_path: Path, kind: str
) -> None:
    (path := tmp_path / "model.onnx").write_bytes(GARBAGE[kind])
    with pytest.raises(SessionError) as caught:
        await start_worker(path)
    assert caught.value.reason == "model_invalid"
    assert "test 1.0.0 fp32 (model.onnx)" in caught.value.detail
    assert "[ONNXRuntimeError]" not in caught.value.detail


async def test_missing_file_unknown_operator_and_newer_format_are_told_apart(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    with pytest.raises(SessionError) as missing:
        await start_worker(tmp_path / "nothing.onnx")
    assert missing.value.reason == "model_missing"
    unknown = graphs.identity()
    unknown.graph.node[0].op_type = "Nope"
    with pytest.raises(SessionError, match="Nope") as invalid:
        await start_worker(unknown)
    assert invalid.value.reason == "model_invalid"
    newer = graphs.identity()
    newer.ir_version = 99
    with pytest.raises(SessionError, match=r"IR version 99, onnxruntime \S+ reads up to \d+: update") as unsupported:
        await start_worker(newer)
    assert unsupported.value.reason == "model_unsupported"
    assert ".cc" not in unsupported.value.detail


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"inputs": [TensorSpec("image", "FP32", [1, 8])]}, "no input 'image'; it has x"),
        ({"inputs": [TensorSpec("x", "INT64", [1, 8])]}, "input 'x' is FP32, declared INT64"),
        ({"outputs": [TensorSpec("scores", "FP32", [1, 8])]}, "no output 'scores'"),
        ({"state": [StateSpec("h", "hn", "FP32", [1])]}, "no input 'h'"),
    ],
)
async def test_graph_that_is_not_what_the_manifest_says_is_refused_at_loading(
    start_worker: StartWorker, spec: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SessionError, match="contract_mismatch") as caught:
        await start_worker(graphs.linear(8), **spec)
    assert complaint in caught.value.detail


async def test_provider_that_is_not_installed_is_named_beside_those_that_are(start_worker: StartWorker) -> None:
    with pytest.raises(
        SessionError, match=r"CUDAExecutionProvider is not installed here; .*there are .*CPUExecutionProvider"
    ):
        await start_worker(graphs.identity(), providers=["CUDAExecutionProvider"])


async def test_mask_without_any_usable_cpu_is_refused(start_worker: StartWorker) -> None:
    with pytest.raises(SessionError, match=r"affinity: .* allowed are"):
        await start_worker(graphs.identity(), cpus=[1000])


async def test_load_beyond_its_memory_limit_is_a_failure_of_that_model(start_worker: StartWorker) -> None:
    with pytest.raises(SessionError) as caught:
        await start_worker(graphs.linear(1024, layers=24), data_limit_bytes=48 << 20)  # 96 MB of weights
    assert caught.value.reason in {"out_of_memory", "load_crashed"}


async def test_load_that_hangs_is_killed_at_its_deadline(nursery: Nursery, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")  # opening it waits for a writer that never comes
    began = time.monotonic()
    with pytest.raises(SessionError, match="load_timeout"):
        await Worker.start(nursery, bare_spec(tmp_path / "pipe.onnx", threads=1), deadline_ns=in_ms(200))
    assert time.monotonic() - began < 1


async def test_worker_that_dies_while_it_loads_is_a_failure_with_the_signals_name(
    nursery: Nursery, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    before = set(children())
    loading = asyncio.create_task(
        Worker.start(nursery, bare_spec(tmp_path / "pipe.onnx", threads=1), deadline_ns=in_ms(10_000))
    )
    while not (born := set(children()) - before):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    os.kill(born.pop(), signal.SIGSEGV)
    with pytest.raises(SessionError, match="SIGSEGV") as caught:
        await loading
    assert caught.value.reason == "load_crashed"


async def test_caller_that_leaves_during_a_load_leaves_no_process(nursery: Nursery, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    before = set(children())
    loading = asyncio.create_task(
        Worker.start(nursery, bare_spec(tmp_path / "pipe.onnx", threads=1), deadline_ns=in_ms(10_000))
    )
    while not (born := set(children()) - before):
        await asyncio.sleep(0.005)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    pid = born.pop()
    async with asyncio.timeout(2):
        while not process_is_gone(pid):
            await asyncio.sleep(0.005)


async def test_memory_is_told_before_and_after_and_freed_memory_went_back(start_worker: StartWorker) -> None:
    weights_bytes = 12 * 4 * 1024 * 1024
    worker = await start_worker(graphs.linear(1024, layers=12), weighed=True)
    loaded = worker.loaded
    grown = loaded.after.anon_bytes - loaded.before.anon_bytes
    assert 0.8 * weights_bytes < grown < 1.5 * weights_bytes
    assert loaded.after.peak_anon_bytes >= loaded.after.anon_bytes
    assert loaded.load_ns > 0
    rollup = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().split("Pss_Anon:")[1].split()[0]
    now = worker.memory()
    assert now is not None
    assert now.anon_bytes == pytest.approx(int(rollup) << 10, rel=0.1)


async def test_thirty_failed_loads_and_thirty_good_ones_leave_nothing(
    start_worker: StartWorker, nursery: Nursery, tmp_path: Path
) -> None:
    (bad := tmp_path / "bad.onnx").write_bytes(b"nonsense")
    good = graphs.write(tmp_path / "good.onnx", graphs.identity())
    gc.collect()  # what earlier tests of this run left to it
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    children_before = set(children())
    for _ in range(30):
        with pytest.raises(SessionError):
            await start_worker(bad)
        worker = await Worker.start(nursery, bare_spec(good, threads=1), deadline_ns=in_ms(5000))
        output(await worker.run(request_of(x=floats(1)), deadline_ns=in_ms(1000)))
        await worker.stop()
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before
    assert set(children()) <= children_before


async def test_runtimes_own_log_comes_through_ours(start_worker: StartWorker, caplog: pytest.LogCaptureFixture) -> None:
    worker = await start_worker(graphs.one_long_matmul())
    with caplog.at_level(logging.WARNING, logger="edgeinfer.worker.worker"):
        await worker.run(request_of(v=floats(1), shape=np.array([2, 3], np.int64)), deadline_ns=in_ms(1000))
        await worker.stop()
    lines = [record.getMessage() for record in caplog.records]
    assert any("MatMul" in line for line in lines)
    assert all("test 1.0.0 fp32" in line and "/onnxruntime_src" not in line for line in lines)


def children() -> list[int]:
    task = f"/proc/self/task/{os.getpid()}/children"
    return [int(pid) for pid in Path(task).read_text().split()]
