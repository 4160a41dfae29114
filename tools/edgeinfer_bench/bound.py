"""How much service time any scheduler could have delivered on time: an upper bound for a trace. Pure, exact integers.

The bound knows all arrivals beforehand, may interrupt at any instant for nothing, and is paid for parts of jobs: the
linear-programming relaxation. On one core that is a matching between instants of the machine and units of work, where
an instant can serve every unit that has arrived and is not due yet. Such a graph is convex, and serving at each instant
the available unit that is due first makes a largest matching (Glover 1967). So preemptive earliest-deadline-first, with
what is due and undone thrown away, *is* the optimum, and no solver is needed.

On several cores this lets a job use all of them at once, which no real one can: the bound is then above the relaxation,
and still a bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One job, in any one unit of time."""

    arrival: int
    due: int
    work: int
    """On one core, undisturbed."""


def most_on_time(jobs: Iterable[Job], *, cores: int = 1) -> int:
    """Return the most work, in core time, that can be done between arrival and due time of its job."""
    if cores < 1:
        raise ValueError(f"{cores} cores")
    # Cores that work together on one job are one core that is so many times faster: stretch time instead.
    coming = sorted((job.arrival * cores, job.due * cores, job.work) for job in jobs)
    waiting: list[tuple[int, int]] = []  # (due, work that is left)
    done = now = index = 0
    while index < len(coming) or waiting:
        if not waiting:
            now = max(now, coming[index][0])
        while index < len(coming) and coming[index][0] <= now:
            heapq.heappush(waiting, coming[index][1:])
            index += 1
        due, left = heapq.heappop(waiting)
        until = min(due, now + left)
        if index < len(coming):
            until = min(until, coming[index][0])
        if until <= now:
            continue  # it is due: what is left of it is lost
        done += until - now
        if left > until - now:
            heapq.heappush(waiting, (due, left - (until - now)))
        now = until
    return done
