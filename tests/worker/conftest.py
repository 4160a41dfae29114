"""A nursery per test module, and workers that end with their test."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from onnx import ModelProto

from edgeinfer import oip
from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer.request import Payload
from edgeinfer.worker.messages import LoadSpec
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import WorkerLimits
from edgeinfer.worker.worker import RunResult, Worker
from tests.worker import graphs

_OIP_TYPES = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "uint8": "UINT8"}


def in_ms(milliseconds: float) -> int:
    """The absolute deadline that many milliseconds from now."""
    return time.monotonic_ns() + round(milliseconds * NS_PER_MS)


def request_of(**inputs: NDArray[Any]) -> Payload:
    return oip.encode_request(
        [(name, _OIP_TYPES[str(array.dtype)], array.shape, array.tobytes()) for name, array in inputs.items()]
    )


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def output(result: object, name: str = "y") -> NDArray[np.float32]:
    """Copy an output out of a result, which is given back."""
    assert isinstance(result, RunResult), result
    header = oip.response_header(result.payload)
    at = [tensor.name for tensor in header.outputs].index(name)
    array = np.frombuffer(bytes(result.payload.tensors[at]), np.float32).reshape(header.outputs[at].shape)
    result.release()
    return array


class StartWorker(Protocol):
    def __call__(
        self, graph: ModelProto | Path, *, limits: WorkerLimits | None = None, timeout_s: float = 10, **spec: Any
    ) -> Awaitable[Worker]: ...


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nursery() -> AsyncIterator[Nursery]:
    nursery = Nursery()
    await nursery.start()
    yield nursery
    await nursery.close()


@pytest_asyncio.fixture(loop_scope="module")
async def start_worker(nursery: Nursery, tmp_path: Path) -> AsyncIterator[StartWorker]:
    workers: list[Worker] = []
    numbers = itertools.count()

    async def start(
        graph: ModelProto | Path, *, limits: WorkerLimits | None = None, timeout_s: float = 10, **spec: Any
    ) -> Worker:
        path = graph if isinstance(graph, Path) else graphs.write(tmp_path / f"{next(numbers)}.onnx", graph)
        fields: dict[str, Any] = {
            "model": "test",
            "version": "1.0.0",
            "variant": "fp32",
            "path": str(path),
            "providers": ["CPUExecutionProvider"],
            "intra_threads": 1,
            **spec,
        }
        deadline_ns = time.monotonic_ns() + round(timeout_s * NS_PER_S)
        worker = await Worker.start(nursery, LoadSpec(**fields), deadline_ns=deadline_ns, limits=limits)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.stop(grace_ns=0)


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], bool]:
    """Wait up to five seconds until something outside of this process has happened."""

    def wait(happened: Callable[[], bool]) -> bool:
        give_up = time.monotonic() + 5
        while not happened():
            if time.monotonic() > give_up:
                return False
            time.sleep(0.005)
        return True

    return wait


def process_is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that its parent has not reaped yet has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in {"Z", "X"}
