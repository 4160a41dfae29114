"""Decide what follows when a worker dies: try again after a pause, or leave the variant alone.

Pure. `resident` keeps the history and acts on the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeinfer.clock import NS_PER_S


@dataclass(frozen=True, slots=True)
class CrashPolicy:
    """How often a worker may die before its variant is quarantined."""

    max_crashes: int = 3
    """So many within the window and the variant is quarantined."""
    window_ns: int = 60 * NS_PER_S
    first_pause_ns: int = NS_PER_S // 5
    """Before the first respawn; doubles with each crash in the window."""
    longest_pause_ns: int = 10 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do now."""

    quarantine: bool
    pause_ns: int = 0
    crashes: int = field(default=1, compare=False)
    """Within the window, the newest included."""


def judge_crash(crashes_ns: tuple[int, ...], policy: CrashPolicy, *, now_ns: int) -> Verdict:
    """Return what follows from the crashes at these monotonic times, the newest included."""
    recent = sum(now_ns - at_ns <= policy.window_ns for at_ns in crashes_ns)
    if recent >= policy.max_crashes:
        return Verdict(quarantine=True, crashes=recent)
    pause_ns = policy.first_pause_ns << max(0, recent - 1)
    return Verdict(quarantine=False, pause_ns=min(pause_ns, policy.longest_pause_ns), crashes=recent)
