"""Time two forms of one model, run by run by turns, in two workers: whatever else the machine does hits both alike.

Daemon's side. Which differences matter is decided elsewhere; answers are not judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgeinfer.clock import NS_PER_S, MonotonicClock
from edgeinfer.request import Payload
from edgeinfer.worker.messages import LoadSpec
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import WorkerLimits
from edgeinfer.worker.worker import RunResult, Worker

MIN_RUNS: Final = 8
MAX_RUNS: Final = 200
_RUN_TIMEOUT_NS: Final = 30 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Pair:
    """How long one thing takes in either form."""

    first_ns: int
    second_ns: int


@dataclass(frozen=True, slots=True)
class SideBySide:
    """What two forms of a model take beside each other."""

    load_ns: Pair
    pairs: tuple[Pair | None, ...]
    """Of each request; None for one that failed in either."""


async def time_side_by_side(
    nursery: Nursery,
    first: LoadSpec,
    second: LoadSpec,
    requests: Sequence[Payload],
    *,
    limits: WorkerLimits,
    each_ns: int,
    deadline_ns: int,
) -> SideBySide:
    """Load both, and return what each request takes in either.

    Each is run by turns for about `each_ns`, at least `MIN_RUNS` times in either form, and the first run does not
    count. The time is the fastest quarter's slowest: what else goes on only ever adds to a run.

    Raises:
        RuntimeUnusable: ONNX Runtime cannot be imported here.
        SessionError: one of the two cannot be loaded until `deadline_ns`.
    """
    workers: list[Worker] = []
    try:
        for spec in (first, second):
            worker = await Worker.start(nursery, spec, deadline_ns=deadline_ns, limits=limits)
            workers.append(worker)
        pairs = [await _time(workers, request, each_ns, deadline_ns) for request in requests]
        return SideBySide(Pair(*(worker.loaded.load_ns for worker in workers)), tuple(pairs))
    finally:
        for worker in workers:
            await worker.stop(grace_ns=0)


async def _time(workers: Sequence[Worker], request: Payload, each_ns: int, deadline_ns: int) -> Pair | None:
    clock = MonotonicClock()
    until_ns = min(clock.now_ns() + each_ns, deadline_ns)
    durations: tuple[list[int], list[int]] = ([], [])
    while len(durations[0]) <= MIN_RUNS or (clock.now_ns() < until_ns and len(durations[0]) <= MAX_RUNS):
        for worker, mine in zip(workers, durations, strict=True):
            ending = await worker.run(
                request, deadline_ns=clock.now_ns() + _RUN_TIMEOUT_NS, stream="timing", sequence_start=True
            )
            if not isinstance(ending, RunResult):
                return None
            mine.append(ending.marks.finished_ns - ending.marks.started_ns)
            ending.release()
    return Pair(*(sorted(mine[1:])[len(mine[1:]) // 4] for mine in durations))
