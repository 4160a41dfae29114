"""Measure what a variant costs, in the very worker that a device would run it in.

One throw-away worker per thread count: so loading, decoding, memory and timing are the device's own code, and what
is reported means the same on both sides of the manifest. Whatever else runs on this machine only ever makes a run
slower, so latency is taken in several short rounds and the quietest one is reported.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer import oip
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.artifact.profile import Latency, OperatingCost
from edgeinfer.clock import NS_PER_S, MonotonicClock
from edgeinfer.errors import SessionError
from edgeinfer.request import Payload
from edgeinfer.worker.messages import LoadSpec
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import WorkerLimits
from edgeinfer.worker.worker import RunResult, Worker
from edgeinfer_tools.golden import raw_bytes
from edgeinfer_tools.recipe import Recipe, VariantRecipe
from edgeinfer_tools.samples import NUMPY_TYPES, Array, Inputs, Media

WARM_UP = 3
ROUNDS = 5
MIN_RUNS = 12
MAX_RUNS = 200
"""Runs of one round."""
LARGEST_RUNS = 2
ARENA_MAX_BYTES = 1 << 36
"""Activations live in one capped arena, as on a device; the cap is out of the way, since it is what we look for."""
LOAD_TIMEOUT_NS = 120 * NS_PER_S
RUN_TIMEOUT_NS = 60 * NS_PER_S
MAX_SLOT_BYTES = 1 << 30
HEADROOM = 1.1
"""On the memory peak: another allocator rounds differently."""
_STREAM = "measure"


def measure(
    model: Path, *, variant: VariantRecipe, recipe: Recipe, threads: Sequence[int], typical: Inputs, seconds: float
) -> list[OperatingCost]:
    """Return what one variant costs here at each thread count.

    Latency is that of the request `typical`, inside the runtime, over the round with the lowest median of `ROUNDS`
    that share `seconds`; memory is that of loading, running it, and running the largest request that the contract
    allows.

    Raises:
        SessionError: a worker could not load or run it.
    """
    specs = [
        LoadSpec(
            model=recipe.file.name,
            version=recipe.file.version,
            variant=variant.name,
            path=str(model),
            providers=variant.providers,
            provider_options=variant.provider_options,
            intra_threads=count,
            arena_max_bytes=ARENA_MAX_BYTES,
            inputs=recipe.inputs,
            outputs=recipe.outputs,
            state=recipe.state,
            classes=recipe.classes,
        )
        for count in threads
    ]
    requests = request_payload(typical, recipe.inputs), request_payload(largest(typical, recipe.inputs), recipe.inputs)
    return asyncio.run(_measure_all(specs, requests, seconds))


async def _measure_all(specs: list[LoadSpec], requests: tuple[Payload, Payload], seconds: float) -> list[OperatingCost]:
    nursery = Nursery()
    await nursery.start()
    try:
        return [await _measure(nursery, spec, requests, seconds) for spec in specs]
    finally:
        await nursery.close()


async def _measure(
    nursery: Nursery, spec: LoadSpec, requests: tuple[Payload, Payload], seconds: float
) -> OperatingCost:
    clock = MonotonicClock()
    limits = WorkerLimits(max_slot_bytes=MAX_SLOT_BYTES)
    worker = await Worker.start(nursery, spec, deadline_ns=clock.now_ns() + LOAD_TIMEOUT_NS, limits=limits)
    try:
        for _ in range(WARM_UP):
            await _run(worker, requests[0], clock)
        rounds = [await _round(worker, requests[0], clock, seconds / ROUNDS) for _ in range(ROUNDS)]
        quiet = quietest(rounds)
        for _ in range(LARGEST_RUNS):
            await _run(worker, requests[1], clock)
        memory = worker.memory()
        if memory is None:
            raise SessionError("crashed", f"{spec.title} ended while it was measured")
        return OperatingCost(
            variant=spec.variant,
            provider=spec.providers[0],
            threads=spec.intra_threads,
            latency=quiet.latency,
            load_ms=round(worker.loaded.load_ns / 1e6, 3),
            load_peak_bytes=_round_up(max(memory.peak_anon_bytes, memory.anon_bytes) * HEADROOM),
            steady_bytes=_round_up(memory.anon_bytes),
            cpu_us_per_run=round(quiet.cpu_us),
        )
    finally:
        await worker.stop(grace_ns=0)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of runs took."""

    latency: Latency
    cpu_us: float
    """CPU time of one run, over all threads."""


def quietest(rounds: Sequence[Round]) -> Round:
    """Return the round with the lowest median."""
    return min(rounds, key=lambda found: found.latency.p50_us)


async def _round(worker: Worker, request: Payload, clock: MonotonicClock, seconds: float) -> Round:
    before_ns, until_ns = _cpu_ns(worker.pid), clock.now_ns() + int(seconds * NS_PER_S)
    micros: list[float] = []
    while len(micros) < MIN_RUNS or (clock.now_ns() < until_ns and len(micros) < MAX_RUNS):
        micros.append(await _run(worker, request, clock) / 1000)
    return Round(_latency(micros), (_cpu_ns(worker.pid) - before_ns) / 1000 / len(micros))


async def _run(worker: Worker, request: Payload, clock: MonotonicClock) -> int:
    """Return the nanoseconds that one run took inside the runtime."""
    ending = await worker.run(request, deadline_ns=clock.now_ns() + RUN_TIMEOUT_NS, stream=_STREAM, sequence_start=True)
    if not isinstance(ending, RunResult):
        raise SessionError(str(getattr(ending, "reason", "run_timeout")), f"{worker.spec.title}: {ending}")
    took = ending.marks.finished_ns - ending.marks.started_ns
    ending.release()
    return took


def _latency(micros: list[float]) -> Latency:
    p50, p90, p99 = (max(1, round(float(np.quantile(micros, share)))) for share in (0.5, 0.9, 0.99))
    return Latency(p50_us=p50, p90_us=p90, p99_us=p99, mean_us=max(1, round(float(np.mean(micros)))), runs=len(micros))


def _round_up(size_bytes: float) -> int:
    """To whole 64 KiB."""
    return -(-int(size_bytes) // 65536) * 65536


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process, in nanoseconds; 0 when the kernel does not say."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(task.read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return total


def request_payload(inputs: Inputs, specs: list[TensorSpec]) -> Payload:
    """Return one request as an OIP body: media as they are, tensors raw."""
    tensors, content_types = [], {}
    for spec in specs:
        value = inputs[spec.name]
        if isinstance(value, Media):
            content_types[spec.name] = value.content_type
            tensors.append((spec.name, "BYTES", [1], oip.bytes_element(value.data)))
        else:
            tensors.append((spec.name, spec.datatype, list(value.shape), raw_bytes(value)))
    return oip.encode_request(tensors, content_types=content_types)


def largest(typical: Inputs, specs: list[TensorSpec]) -> dict[str, Array | Media]:
    """Return the largest request that the contract allows; a picture stays a picture, since decoding costs too."""
    return {spec.name: _largest(spec, typical[spec.name]) for spec in specs}


def _largest(spec: TensorSpec, typical: Array | Media) -> Array | Media:
    if isinstance(typical, Media) and spec.decode is not None and spec.decode.kind == "image":
        from PIL import Image

        out = io.BytesIO()
        with Image.open(io.BytesIO(typical.data)) as image:
            image.convert("RGB").resize((spec.bound[2], spec.bound[1])).save(out, "JPEG")
        return Media(out.getvalue(), "image/jpeg")
    if spec.datatype == "BYTES":
        return np.full(spec.bound, "a", dtype=object)
    if isinstance(typical, Media) or typical.size == 0:
        return np.zeros(spec.bound, NUMPY_TYPES[spec.datatype])
    return np.resize(typical, spec.bound)
