"""Choose among forms of a model that are all good enough: by measured latency, never by the number of bits.

8 bits are slower than float where a CPU lacks the instructions or a graph has odd operators. Pure; what was measured,
and where, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer_tools.sizes import human

SAME = 1.03
"""Latencies closer than this are the same: measuring again would give another order."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One form that passed its gates."""

    name: str
    quality: float
    p50_us: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The form to prefer, and why."""

    name: str
    reason: str
    dominated: tuple[str, ...]
    """Forms than which another is better in nothing less than latency, size and quality: nobody should load them."""


def choose(candidates: Sequence[Candidate]) -> Choice:
    """Return the fastest; among equally fast ones the smallest, then the best.

    Raises:
        ValueError: there are none.
    """
    if not candidates:
        raise ValueError("there is nothing to choose from")
    quickest = min(item.p50_us for item in candidates)
    fast = [item for item in candidates if item.p50_us <= quickest * SAME]
    best = min(fast, key=lambda item: (item.size_bytes, -item.quality, item.p50_us))
    others = ", ".join(f"{item.name} {item.p50_us / 1000:.2f} ms" for item in candidates if item is not best)
    reason = f"p50 {best.p50_us / 1000:.2f} ms, {human(best.size_bytes)}" + (f"; {others}" if others else "")
    dominated = [item.name for item in candidates if any(_beats(other, item) for other in candidates)]
    return Choice(best.name, reason, tuple(dominated))


def _beats(one: Candidate, other: Candidate) -> bool:
    """Whether `one` is clearly faster, and neither larger nor worse."""
    return one.p50_us * SAME < other.p50_us and one.size_bytes <= other.size_bytes and one.quality >= other.quality
