"""Try a bundle's variant in a throw-away worker, before anything depends on it.

Daemon's side; the toolchain measures with it too. Loads the variant, runs the golden requests, compares the answers
within the manifest's tolerance, and times it. A variant that is wrong, crashes or hangs is a verdict, not an exception:
only this worker pays. What follows from the verdict is `store`'s and `execution`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from edgeinfer import oip
from edgeinfer.artifact.bundle import read_golden
from edgeinfer.artifact.manifest import Manifest, Variant
from edgeinfer.clock import NS_PER_S, MonotonicClock
from edgeinfer.errors import ArtifactError, ManifestInvalid, ProtocolError, RuntimeUnusable, SessionError
from edgeinfer.request import Payload
from edgeinfer.worker.memory import anonymous_bytes, resident_file_bytes
from edgeinfer.worker.messages import LoadSpec, Memory
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import limits_for, load_spec
from edgeinfer.worker.worker import RunResult, Worker

_STREAM: Final = "golden"
_LOOK_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe found."""

    accepted: bool
    reason: str = ""
    """Why not, in a short word: `golden_mismatch`, `golden_invalid`, `run_timeout`, or the load's or run's own."""
    detail: str = ""
    max_difference: float = 0.0
    """Largest absolute difference from the golden outputs."""
    load_ns: int = 0
    memory: Memory | None = None
    """After the last run; its peak covers load and runs."""
    durations_ns: tuple[int, ...] = ()
    """Time inside ONNX Runtime of each repeated run, golden ones not counted."""
    cpu_ns: int = 0
    """CPU time of all threads over the repeated runs."""
    load_peak_bytes: int = 0
    """Anonymous memory at the peak of loading, looked at every `_LOOK_S`; what is shared with the zygote included."""
    hot_bytes: int = 0
    """How much of the mapped weight files the runs have touched."""
    further_failed: int = 0
    """Requests of `further` that were not answered."""


async def probe(
    nursery: Nursery,
    manifest: Manifest,
    bundle: Path,
    variant_name: str,
    *,
    threads: int = 1,
    load_timeout_ns: int = 120 * NS_PER_S,
    run_timeout_ns: int = 30 * NS_PER_S,
    repeat: int = 0,
    spec: LoadSpec | None = None,
    further: Sequence[Payload] = (),
) -> Verdict:
    """Load a variant in a worker of its own and run its golden requests, then the first one `repeat` times more.

    `spec` is the load order where it isn't the plain one: another form of the same variant. The requests of `further`
    are run as well, for what they cost; their answers are not judged.
    Those of other variants are left alone. The golden requests of a stateful model are one sequence. The caller has
    reserved the memory and has verified the bundle's files.

    Raises:
        RuntimeUnusable: ONNX Runtime cannot be imported here: nothing is said about the bundle.
        ManifestInvalid: there is no such variant.
    """
    variant = manifest.variant(variant_name)
    clock = MonotonicClock()
    order = spec or load_spec(manifest, bundle, variant_name, threads=threads)
    try:
        goldens = read_goldens(manifest, bundle, variant_name)
        limits = limits_for(manifest)
        start = Worker.start(nursery, order, deadline_ns=clock.now_ns() + load_timeout_ns, limits=limits)
        worker, load_peak_bytes = await _watch_loading(nursery, start)
    except RuntimeUnusable:
        raise
    except SessionError as error:
        return Verdict(accepted=False, reason=error.reason, detail=error.detail)
    except ArtifactError as error:
        return Verdict(accepted=False, reason="golden_invalid", detail=str(error))
    try:
        verdict = await _examine(worker, variant, goldens, run_timeout_ns=run_timeout_ns, repeat=repeat)
        if not verdict.accepted:
            return verdict
        failed = 0
        for request in further:
            deadline_ns = clock.now_ns() + run_timeout_ns
            ending = await worker.run(request, deadline_ns=deadline_ns, stream=_STREAM, sequence_start=True)
            if isinstance(ending, RunResult):
                ending.release()
            else:
                failed += 1
        mapped = [file.path for file in order.mapped]
        hot_bytes = resident_file_bytes(worker.pid, mapped) if mapped else 0
        return replace(
            verdict,
            memory=worker.memory() or verdict.memory,
            load_peak_bytes=load_peak_bytes,
            hot_bytes=hot_bytes,
            further_failed=failed,
        )
    finally:
        await worker.stop(grace_ns=0)


async def _watch_loading(nursery: Nursery, start: Coroutine[Any, Any, Worker]) -> tuple[Worker, int]:
    """Start a worker; return it with the most anonymous memory that any new worker was seen to have meanwhile."""
    known, peak_bytes = set(nursery.pids()), 0
    starting = asyncio.ensure_future(start)
    try:
        while not starting.done():
            peak_bytes = max([peak_bytes, *(anonymous_bytes(pid) for pid in nursery.pids() if pid not in known)])
            await asyncio.wait([starting], timeout=_LOOK_S)
    except asyncio.CancelledError:
        starting.cancel()
        await asyncio.wait([starting])
        raise
    return starting.result(), peak_bytes


def read_goldens(manifest: Manifest, bundle: Path, variant_name: str) -> list[tuple[Payload, Payload]]:
    """Return the requests that judge a variant, each with the response that it must get.

    Raises:
        ManifestInvalid: a file is missing, too large, or no OIP body.
    """
    pairs = []
    for golden in manifest.golden_for(variant_name):
        request, response = read_golden(bundle, golden)
        try:
            _, request = oip.decode_request(request.header, b"".join(request.tensors))
            _, response = oip.decode_response(response.header, b"".join(response.tensors))
        except ProtocolError as error:
            raise ManifestInvalid(f"golden {golden.request} with {golden.response}: {error}") from error
        pairs.append((request, response))
    return pairs


async def _examine(
    worker: Worker, variant: Variant, goldens: list[tuple[Payload, Payload]], *, run_timeout_ns: int, repeat: int
) -> Verdict:
    clock = MonotonicClock()
    worst = 0.0
    for number, (request, response) in enumerate(goldens):
        ending = await worker.run(
            request,
            deadline_ns=clock.now_ns() + run_timeout_ns,
            stream=_STREAM,
            sequence_start=number == 0,
            expected=response,
            tolerance=variant.tolerance,
        )
        if not isinstance(ending, RunResult):
            return _rejected(f"golden request {number}", ending)
        comparison = ending.comparison
        ending.release()
        assert comparison is not None
        worst = max(worst, comparison.max_difference)
        if comparison.problem:
            return Verdict(
                accepted=False,
                reason="golden_mismatch",
                detail=f"golden request {number}: {comparison.problem}",
                max_difference=worst,
            )
    durations, before_ns = [], _cpu_ns(worker.pid)
    for _ in range(repeat if goldens else 0):
        ending = await worker.run(
            goldens[0][0], deadline_ns=clock.now_ns() + run_timeout_ns, stream=_STREAM, sequence_start=True
        )
        if not isinstance(ending, RunResult):
            return _rejected("a repeated run", ending)
        durations.append(ending.marks.finished_ns - ending.marks.started_ns)
        ending.release()
    return Verdict(
        accepted=True,
        max_difference=worst,
        load_ns=worker.loaded.load_ns,
        memory=worker.memory(),
        durations_ns=tuple(durations),
        cpu_ns=_cpu_ns(worker.pid) - before_ns,
    )


def _rejected(what: str, ending: object) -> Verdict:
    reason = str(getattr(ending, "reason", "run_timeout"))
    return Verdict(accepted=False, reason=reason, detail=f"{what}: {getattr(ending, 'detail', ending)}")


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of a process over all its threads, 0 when it is gone."""
    try:
        return time.clock_gettime_ns(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0


_CPUCLOCK_SCHED: Final = 2
"""The kernel's clock id of a process's CPU time is made of its pid and this (see clock_getcpuclockid(3))."""
