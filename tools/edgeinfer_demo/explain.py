"""Say in words why requests were not answered. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TOP = 3
ON_PURPOSE = (
    "The phases overload, heat and cool ask for more than the board can do at that moment: that is what the demo is "
    "for. What can't be ready in time is refused or given up, and its caller is told so by the deadline."
)
WORDS = {
    "rejected.superseded": "a newer frame took its place",
    "rejected.displaced": "more urgent work took its place",
    "rejected.deadline_unreachable": "it could not have been ready in time",
    "rejected.thermal": "the board was too hot",
    "rejected.queue_full": "too many were waiting",
    "rejected.model_unavailable": "its model was not loaded",
    "rejected.memory": "no memory for its model",
    "rejected.draining": "the service was stopping",
    "expired.queued": "its time was up while it waited",
    "expired.running": "its time was up while it ran",
    "expired.finished": "it was ready, but too late",
}
"""What the frequent reasons mean; docs/mqtt.md describes the counts."""


def explain(loops: dict[str, Any], frames: dict[str, dict[str, int]]) -> Iterator[str]:
    """Yield a line per loop about what was not answered, and in the end why there is so much of it."""
    troubled = False
    for name, loop in loops.items():
        reasons = sorted(loop["reasons"].items(), key=lambda item: -item[1])
        named = [_words(reason, count) for reason, count in reasons[:_TOP]]
        if rest := sum(count for _, count in reasons[_TOP:]):
            named.append(f"{rest} for other reasons")
        unasked = [f"{count} {what}" for what, count in frames.get(name, {}).items() if what in _UNASKED and count]
        troubled = troubled or bool(reasons)
        line = f"{name}: {', '.join(named) or 'every request was answered in time'}"
        yield line + (f"; frames never asked about: {', '.join(unasked)}" if unasked else "")
    if troubled:
        yield ON_PURPOSE


_UNASKED = frozenset({"skipped", "stale"})


def _words(reason: str, count: int) -> str:
    return f"{count} {reason}" + (f" ({WORDS[reason]})" if reason in WORDS else "")
