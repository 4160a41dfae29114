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

MIN_RUNS: Final = 3
MAX_RUNS: Final = 200
_DOUBT: Final = (1.05, 2.0)
_PATIENCE: Final = 4
"""How many times longer is looked when in doubt."""
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
    """Of each request; None for one that failed in either, or for which there was no time."""


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

    Each is run by turns for about `each_ns`, longer while in doubt, and at least `MIN_RUNS` times in either form; the
    first run does not count. The time is that of the fastest run: what else goes on only ever adds to one.

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
    began_ns = clock.now_ns()
    durations: tuple[list[int], list[int]] = ([], [])
    while not _is_settled(durations, clock.now_ns() - began_ns, each_ns):
        if clock.now_ns() >= deadline_ns:
            return None
        for worker, mine in zip(workers, durations, strict=True):
            ending = await worker.run(
                request, deadline_ns=clock.now_ns() + _RUN_TIMEOUT_NS, stream="timing", sequence_start=True
            )
            if not isinstance(ending, RunResult):
                return None
            mine.append(ending.marks.finished_ns - ending.marks.started_ns)
            ending.release()
    return Pair(*(min(mine[1:]) for mine in durations))


def _is_settled(durations: tuple[list[int], list[int]], spent_ns: int, each_ns: int) -> bool:
    """Whether there are enough runs: more are made while the second form seems a little slower, which may be chance."""
    first, second = durations
    if len(second) <= MIN_RUNS:
        return False
    doubtful = _DOUBT[0] * min(first[1:]) < min(second[1:]) < _DOUBT[1] * min(first[1:])
    return len(second) > MAX_RUNS or spent_ns >= each_ns * (_PATIENCE if doubtful else 1)
