"""Measure what a model costs on this machine, in a throw-away worker: latency, load time, memory, CPU time.

Daemon's side, no NumPy. The toolchain measures its candidates with it on the workstation, and `edgeinfer measure` on
a board, so that both mean the same. Whatever else runs on the machine only ever makes a run slower, so latency is taken
in several short rounds and the quietest one is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import structs

from edgeinfer.artifact.bundle import read_golden
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.artifact.profile import Latency, OperatingCost
from edgeinfer.clock import NS_PER_S, Clock, MonotonicClock
from edgeinfer.errors import ManifestInvalid, RuntimeUnusable, SessionError
from edgeinfer.request import Payload
from edgeinfer.worker.largest import largest_request
from edgeinfer.worker.messages import LoadSpec
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import WorkerLimits, limits_for, load_spec
from edgeinfer.worker.worker import RunResult, Worker

WARM_UP: Final = 3
ROUNDS: Final = 5
MIN_RUNS: Final = 12
MAX_RUNS: Final = 200
"""Runs of one round."""
SLOW_RUNS: Final = 5
SLOW_NS: Final = 2 * NS_PER_S
"""Of a slow model so many runs of a round are enough, once they have taken so long."""
LARGEST_RUNS: Final = 2
ARENA_MAX_BYTES: Final = 1 << 36
"""Activations live in one capped arena, as on a device; the cap is out of the way, since it is what we look for."""
LOAD_TIMEOUT_NS: Final = 120 * NS_PER_S
RUN_TIMEOUT_NS: Final = 60 * NS_PER_S
HEADROOM: Final = 1.1
"""On the memory peak: another allocator rounds differently."""
_STREAM: Final = "measure"


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of runs took."""

    latency: Latency
    cpu_us: float
    """CPU time of one run, over all threads."""


async def measure_spec(
    nursery: Nursery,
    spec: LoadSpec,
    typical: Payload,
    largest: Payload | None,
    *,
    seconds: float,
    limits: WorkerLimits,
) -> OperatingCost:
    """Return what `spec` costs here.

    Latency is that of the request `typical`, inside the runtime, over the round with the lowest median of `ROUNDS` that
    share `seconds`; memory is that of loading, running it, and running `largest`, where there is one.

    Raises:
        SessionError: the worker could not load or run it.
    """
    clock = MonotonicClock()
    worker = await Worker.start(nursery, spec, deadline_ns=clock.now_ns() + LOAD_TIMEOUT_NS, limits=limits)
    try:
        for _ in range(WARM_UP):
            await _run(worker, typical, clock)
        quiet = quietest([await _round(worker, typical, clock, seconds / ROUNDS) for _ in range(ROUNDS)])
        for _ in range(LARGEST_RUNS if largest is not None else 0):
            assert largest is not None
            await _run(worker, largest, clock)
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
            covers_largest=largest is not None,
        )
    finally:
        await worker.stop(grace_ns=0)


async def measure_variants(
    manifest: Manifest, bundle: Path, *, threads: Sequence[int], seconds: float
) -> tuple[str, list[OperatingCost]]:
    """Return the version of ONNX Runtime, and what every variant of a verified bundle costs at each thread count.

    Latency is that of the variant's first golden request.

    Raises:
        ManifestInvalid: a variant has no golden request.
        RuntimeUnusable: ONNX Runtime cannot be imported here.
        SessionError: a variant does not load or run.
    """
    largest, limits = largest_request(manifest), limits_for(manifest)
    nursery = Nursery()
    runtime = await nursery.start()
    try:
        if not runtime.onnxruntime:
            raise RuntimeUnusable(runtime.reason)
        found = []
        for variant in manifest.variants:
            golden = manifest.golden_for(variant.name)
            if not golden:
                raise ManifestInvalid(
                    f"{manifest.name}: variant {variant.name!r} has no golden request to measure with"
                )
            typical = read_golden(bundle, golden[0])[0]
            for count in threads:
                plain = load_spec(manifest, bundle, variant.name, threads=count)
                # Measured without the fences that the manifest's own figures would set.
                spec = structs.replace(plain, arena_max_bytes=ARENA_MAX_BYTES, data_limit_bytes=None)
                found.append(await measure_spec(nursery, spec, typical, largest, seconds=seconds, limits=limits))
        return runtime.onnxruntime, found
    finally:
        await nursery.close()


def quietest(rounds: Sequence[Round]) -> Round:
    """Return the round with the lowest median."""
    return min(rounds, key=lambda found: found.latency.p50_us)


async def _round(worker: Worker, request: Payload, clock: Clock, seconds: float) -> Round:
    before_ns, began_ns = _cpu_ns(worker.pid), clock.now_ns()
    micros: list[float] = []
    while not _enough(len(micros), clock.now_ns() - began_ns, int(seconds * NS_PER_S)):
        micros.append(await _run(worker, request, clock) / 1000)
    return Round(latency_of(micros), (_cpu_ns(worker.pid) - before_ns) / 1000 / len(micros))


def _enough(runs: int, took_ns: int, wanted_ns: int) -> bool:
    """Whether a round that has so many runs may end."""
    least = SLOW_RUNS if took_ns >= SLOW_NS else MIN_RUNS
    return runs >= MAX_RUNS or (runs >= least and took_ns >= wanted_ns)


async def _run(worker: Worker, request: Payload, clock: Clock) -> int:
    """Return the nanoseconds that one run took inside the runtime."""
    ending = await worker.run(request, deadline_ns=clock.now_ns() + RUN_TIMEOUT_NS, stream=_STREAM, sequence_start=True)
    if not isinstance(ending, RunResult):
        raise SessionError(str(getattr(ending, "reason", "run_timeout")), f"{worker.spec.title}: {ending}")
    took = ending.marks.finished_ns - ending.marks.started_ns
    ending.release()
    return took


def latency_of(micros: Sequence[float]) -> Latency:
    """Return the distribution of some runs, by percentiles that are interpolated between neighbours."""
    runs = sorted(micros)

    def at(share: float) -> int:
        place = share * (len(runs) - 1)
        low = int(place)
        high = min(low + 1, len(runs) - 1)
        return max(1, round(runs[low] + (runs[high] - runs[low]) * (place - low)))

    return Latency(at(0.5), at(0.9), at(0.99), max(1, round(statistics.fmean(runs))), len(runs))


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
