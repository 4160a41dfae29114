"""Jobs and loads in milliseconds, for the tests of pure decisions. The present is 0."""

from __future__ import annotations

from edgeinfer.limits import Limits
from edgeinfer.scheduling.admission import Load
from edgeinfer.scheduling.forecast import Job, Machine, Occupied, Rank
from edgeinfer.scheduling.pacing import UNPACED
from tests.scheduling.world import limits

MS = 1_000_000
NOW_NS = 0


def job(
    id: int,  # noqa: A002 - it is the job's id
    due_ms: float,
    run_ms: float,
    *,
    p99_ms: float | None = None,
    firm: bool = True,
    priority: int = 0,
    cores: int = 1,
    lanes: int = 99,
    key: str = "",
    wait_ms: float = 0,
    start_by_ms: float | None = None,
    spare: bool = False,
) -> Job:
    """Make a job; each has a model of its own unless `key` says otherwise."""
    due_ns = round(due_ms * MS)
    return Job(
        id=id,
        key=(key or f"model-{id}", ""),
        rank=Rank(spare, due_ns, -priority, id),
        due_ns=due_ns,
        start_by_ns=due_ns if start_by_ms is None else round(start_by_ms * MS),
        firm=firm,
        priority=priority,
        p50_ns=round(run_ms * MS),
        p99_ns=round((run_ms if p99_ms is None else p99_ms) * MS),
        cores=cores,
        lanes=lanes,
        wait_ns=round(wait_ms * MS),
    )


def running(end_ms: float, *, cores: int = 1, key: str = "other", spread_ms: float = 0) -> Occupied:
    """Make a run that is expected to end at `end_ms`."""
    return Occupied((key, ""), cores, round(end_ms * MS), round(spread_ms * MS))


def load(
    *waiting: Job, runs: tuple[Occupied, ...] = (), cores: int = 1, limit: int = 64, bounds: Limits | None = None
) -> Load:
    """Make a load of waiting jobs, in any order."""
    bounds = bounds or limits()
    pace = UNPACED.under(duty_cycle=bounds.duty_cycle, cores=cores, now_ns=NOW_NS)
    return Load(sorted(waiting, key=lambda job: job.rank), Machine(cores, runs, pace), bounds, limit)
