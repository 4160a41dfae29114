"""Bundles made of small real graphs, and a model cache over real workers that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from edgeinfer import oip
from edgeinfer.artifact.bundle import encode_golden
from edgeinfer.artifact.manifest import (
    File,
    Golden,
    Manifest,
    Runtime,
    StateSpec,
    TensorSpec,
    Variant,
    encode_manifest,
)
from edgeinfer.clock import MonotonicClock
from edgeinfer.config import ModelSection
from edgeinfer.execution.crash_book import CrashBook
from edgeinfer.execution.ledger import MemoryLedger
from edgeinfer.execution.loader import Loader
from edgeinfer.execution.local import LocalExecutor
from edgeinfer.execution.model_cache import ModelCache
from edgeinfer.execution.resident import CrashNote, ResidentModel
from edgeinfer.request import Deadlines, InferRequest, Payload, Result, Timeline
from edgeinfer.store.crashes import CrashFile
from edgeinfer.store.store import BundleStore, Installed
from edgeinfer.worker.nursery import Nursery
from tests.worker import graphs

MIB = 1 << 20
ECHO = ([TensorSpec("x", "FP32", [-1], max_shape=[1024])], [TensorSpec("y", "FP32", [-1], max_shape=[1024])])
LOOP = ([TensorSpec("n", "INT64", [1]), TensorSpec("x", "FP32", [1])], [TensorSpec("y", "FP32", [1])])
FILLED = ([TensorSpec("shape", "INT64", [1])], [TensorSpec("y", "FP32", [-1], max_shape=[1024])])
SUM = ([TensorSpec("x", "FP32", [1])], [TensorSpec("y", "FP32", [1])])
SUM_STATE = [StateSpec("total", "total_out", "FP32", [1])]


def write_bundle(
    folder: Path,
    name: str,
    graph: ModelProto,
    contract: tuple[list[TensorSpec], list[TensorSpec]] = ECHO,
    *,
    version: str = "1.0.0",
    variants: Sequence[Variant] = (),
    peak_bytes: int = 8 * MIB,
    state: Iterable[StateSpec] = (),
    golden: tuple[Payload, Payload] | None = None,
    deadline_ms: float | None = None,
) -> Path:
    """Write a bundle whose variants all are `graph`; the folder is new, or replaced."""
    variants = variants or [variant("fp32", peak_bytes)]
    contents: dict[str, bytes] = dict.fromkeys((variant.file for variant in variants), graph.SerializeToString())
    if golden is not None:
        contents["golden/0.request"], contents["golden/0.response"] = map(encode_golden, golden)
    manifest = Manifest(
        schema=1,
        name=name,
        version=version,
        task="test",
        inputs=contract[0],
        outputs=contract[1],
        variants=list(variants),
        runtime=Runtime(onnxruntime="1.32.0", opset=17, ir_version=8),
        files={path: File(hashlib.sha256(data).hexdigest(), len(data)) for path, data in contents.items()},
        state=list(state),
        golden=[Golden("golden/0.request", "golden/0.response")] if golden else [],
        deadline_ms=deadline_ms,
    )
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    return folder


def variant(name: str, peak_bytes: int = 8 * MIB, instruction_sets: Sequence[str] = (), **more: Any) -> Variant:
    return Variant(
        name=name, file=f"model/{name}.onnx", quality=1.0, load_peak_bytes=peak_bytes, steady_bytes=peak_bytes // 2,
        instruction_sets=list(instruction_sets), **more,
    )  # fmt: skip


@dataclass
class ShiftedClock:
    """The monotonic clock, some time ahead: what waits for minutes is due at once."""

    ahead_ns: int = 0
    real: MonotonicClock = field(default_factory=MonotonicClock)

    def now_ns(self) -> int:
        return self.real.now_ns() + self.ahead_ns


@dataclass
class Place:
    """A model cache over real workers, and what a test must see of it."""

    folder: Path
    store: BundleStore
    nursery: Nursery
    ledger: MemoryLedger
    loader: Loader
    cache: ModelCache
    executor: LocalExecutor
    clock: ShiftedClock
    crashes: list[CrashNote]

    def install(self, name: str, graph: ModelProto | None = None, *more: Any, **options: Any) -> Installed:
        """Add a bundle to the store; default an echo of its input."""
        source = self.folder / f"source-{name}-{options.get('version', '')}"
        write_bundle(source, name, graph or graphs.identity(), *more, **options)
        return self.store.add(source, lambda *_: None)

    def want(self, name: str, **settings: Any) -> ModelSection:
        section = ModelSection(name=name, **settings)
        self.cache.want(section)
        return section

    async def load(self, name: str, **settings: Any) -> ResidentModel:
        return await self.cache.load(self.want(name, **settings))

    def cost(self, installed: Installed, variant: int = 0, **settings: Any) -> int:
        section = ModelSection(name=installed.manifest.name, **settings)
        return self.loader.cost_bytes(section, installed, installed.manifest.variants[variant])

    def loaded(self) -> set[str]:
        return {status.name for status in self.cache.status() if status.state == "loaded"}

    def status(self, name: str) -> Any:
        return next(status for status in self.cache.status() if status.name == name)

    def workers(self) -> set[int]:
        """Return the worker processes that live, whoever they belong to."""
        return set(self.nursery.pids()) - {self.nursery.snapshot().zygote_pid}

    async def until(self, happened: Callable[[], object], seconds: float = 8.0) -> None:
        async with asyncio.timeout(seconds):
            while not happened():
                await asyncio.sleep(0.005)

    async def ask(self, model: str, x: float = 1.0, *, within_ms: float = 5000, **more: Any) -> object:
        """Send `x` and return y when there is a result, else the ending."""
        payload = request_of(x=np.array([x], np.float32), **more.pop("inputs", {}))
        ending = await self.executor.execute(self.request(model, payload, within_ms=within_ms, **more))
        return y_of(ending) if isinstance(ending, Result) else ending

    def request(self, model: str, payload: Payload, *, within_ms: float = 5000, **more: Any) -> InferRequest:
        now_ns = MonotonicClock().now_ns()
        return InferRequest(model, payload, Deadlines(now_ns + round(within_ms * 1e6)), Timeline(now_ns), **more)


@contextlib.asynccontextmanager
async def open_place(
    folder: Path,
    nursery: Nursery | None = None,
    *,
    ceiling_bytes: int = 512 * MIB,
    cpu_flags: Iterable[str] = (),
    running: bool = True,
) -> AsyncIterator[Place]:
    """Have a cache that runs; `nursery` when it is shared, which must be this loop's."""
    own = nursery is None
    nursery = nursery or Nursery()
    if own:
        await nursery.start()
    clock, ledger, crashes = ShiftedClock(), MemoryLedger(ceiling_bytes), list[CrashNote]()
    storage = ThreadPoolExecutor(1)
    store = BundleStore(folder / "state")
    loader = Loader(
        store=store,
        nursery=nursery,
        clock=clock,
        cpus=frozenset(os.sched_getaffinity(0)),
        cpu_flags=frozenset(cpu_flags),
        cancel_grace_ns=100_000_000,
        storage=storage,
    )
    book = CrashBook(CrashFile(store.state_dir), storage, boot="this boot")
    cache = ModelCache(loader, ledger, book, clock=clock, on_crash=crashes.append)
    executor = LocalExecutor(cache, where="here", clock=clock.real)
    task = asyncio.create_task(cache.run()) if running else None
    try:
        yield Place(folder, store, nursery, ledger, loader, cache, executor, clock, crashes)
    finally:
        if task is not None:
            if task.done():
                task.result()  # it runs for ever, or failed
            task.cancel()
            await asyncio.wait([task])
        await cache.close()
        storage.shutdown()
        if own:
            await nursery.close()
        assert ledger.snapshot().reserved_bytes == 0, f"still reserved: {ledger.snapshot().by_owner}"


def request_of(**inputs: Any) -> Payload:
    kinds = {"float32": "FP32", "int64": "INT64"}
    return oip.encode_request(
        [(name, kinds[str(array.dtype)], array.shape, array.tobytes()) for name, array in inputs.items()]
    )


def y_of(result: Result) -> float:
    """Return the first output's first element; the result is given back."""
    value = float(np.frombuffer(bytes(result.payload.tensors[0]), np.float32)[0])
    result.release()
    return value
