"""What others may see of the scheduler: frozen, at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """The scheduler at one moment."""

    queue_length: int
    queue_limit: int
    work_ahead_ns: int
    """Core-nanoseconds (medians) that wait for this machine."""
    running_local: int
    running_nearby: int
    cores: int
    """Cores that may be used now."""
    cores_busy: int
    paced: bool
    """Whether local work is held to a duty cycle."""
    stopped: bool
    """Whether heat forbids all local work."""
    offload_open: bool
    """Whether requests went next door lately."""
    draining: bool
    in_flight: int
    abandoned_runs: int
    """Runs whose executor neither ended nor could be cancelled; their cores were given up."""
    raised_runs: int
    """Runs whose executor raised: bugs, each logged with its traceback."""
    progress: int
