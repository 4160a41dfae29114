"""Choose among measured forms of a model: the front, the winner with its reasons, and the ladder below it.

Pure. What the budget bounds is a condition; what it leaves free is what is optimised: without a bound on the drop the
best quality wins, with one the quality may be spent down to it, and the fastest wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer_tools.choice import SAME
from edgeinfer_tools.search.budget import Budget, Figures, Miss
from edgeinfer_tools.sizes import human

SAME_QUALITY = 0.001
"""So are qualities, where the evaluation has fewer than a thousand requests."""


SAME_PEAK = 1.05
"""And peaks of memory: allocators round."""


@dataclass(frozen=True, slots=True)
class Point:
    """One form, with everything measured."""

    name: str
    quality: float
    drop: float
    """Quality that it loses against the float model."""
    size_bytes: int
    peak_bytes: int
    p50_us: int
    p99_us: int
    """Both at the budget's thread count."""

    @property
    def figures(self) -> Figures:
        """As the budget looks at it."""
        return Figures(self.drop, self.size_bytes, self.peak_bytes, self.p99_us)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the search came to."""

    winner: Point
    misses: tuple[Miss, ...]
    """Of the winner: empty when the budget is met."""
    reason: str
    front: tuple[Point, ...]
    """Forms that no other beats in everything; the winner among them, best quality first."""
    ladder: tuple[Point, ...]
    """The winner, then what the device may step down to: each faster or smaller than the one before, and no better."""
    why_not: dict[str, str]
    """Of every other form, in words."""


def dominates(one: Point, other: Point) -> bool:
    """Whether `one` is nowhere clearly worse than `other`, and clearly better somewhere."""
    pairs = [
        (1 - one.quality, 1 - other.quality, 1.0),
        (one.size_bytes, other.size_bytes, 1.0),
        (one.peak_bytes, other.peak_bytes, SAME_PEAK),
        (one.p50_us, other.p50_us, SAME),
    ]
    return all(mine <= theirs * same for mine, theirs, same in pairs) and any(
        mine * same < theirs for mine, theirs, same in pairs
    )


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that no other dominates, best quality first, then the fastest."""
    kept = [point for point in points if not any(dominates(other, point) for other in points)] or list(points)
    return tuple(sorted(kept, key=lambda point: (-point.quality, point.p50_us, point.size_bytes, point.name)))


def decide(points: Sequence[Point], budget: Budget, *, keep: int) -> Verdict:
    """Return the winner, and what a bundle with at most `keep` variants holds.

    When no point meets the budget, the winner is the one that misses it least: whose worst excess, as a share of the
    bound, is smallest.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("there is nothing to choose from")
    within = [point for point in points if not budget.misses(point.figures)]
    if within:
        winner = _best(within, spend_quality=budget.drop is not None)
    else:
        winner = min(points, key=lambda point: (_badness(point, budget), -point.quality, point.p50_us))
    misses = budget.misses(winner.figures)
    why_not = {point.name: _why_not(point, winner, budget) for point in points if point is not winner}
    return Verdict(
        winner=winner,
        misses=misses,
        reason=_reason(winner, within, budget),
        front=front(points),
        ladder=_ladder(winner, within or points, budget, keep),
        why_not=why_not,
    )


def _best(within: Sequence[Point], *, spend_quality: bool) -> Point:
    if not spend_quality:
        top = max(point.quality for point in within)
        within = [point for point in within if point.quality >= top - SAME_QUALITY]
    quickest = min(point.p50_us for point in within)
    fast = [point for point in within if point.p50_us <= quickest * SAME]
    return min(fast, key=lambda point: (point.size_bytes, -point.quality, point.p50_us, point.name))


def _badness(point: Point, budget: Budget) -> float:
    return max((miss.excess for miss in budget.misses(point.figures)), default=0.0)


def _ladder(winner: Point, candidates: Sequence[Point], budget: Budget, keep: int) -> tuple[Point, ...]:
    """Return the winner and the rungs below it, spread evenly when there are too many.

    `candidates` meet the budget; where none does, they are all, and a rung still keeps the bound on quality.
    """
    allowed = [
        point
        for point in candidates
        if point is not winner and not any(miss.bound == "drop" for miss in budget.misses(point.figures))
    ]
    below = [
        point
        for point in allowed
        if point.quality <= winner.quality
        and (point.p50_us * SAME < winner.p50_us or point.size_bytes < winner.size_bytes)
        and not any(dominates(other, point) for other in (winner, *allowed))
    ]
    below.sort(key=lambda point: (-point.quality, point.p50_us, point.size_bytes, point.name))
    room = max(0, keep - 1)
    if len(below) > room:  # the lowest rung always stays
        below = [below[(index + 1) * len(below) // room - 1] for index in range(room)]
    return (winner, *below)


def _reason(winner: Point, within: Sequence[Point], budget: Budget) -> str:
    figures = f"quality {winner.quality:.4f}, p99 {winner.p99_us / 1000:.2f} ms, {human(winner.size_bytes)}"
    if not within:
        return f"no form meets the budget; this one misses it least ({figures})"
    among = "the only form" if len(within) == 1 else f"of {len(within)} forms"
    if budget.drop is None:
        return f"{among} that meet{'s' * (len(within) == 1)} the budget, the best quality ({figures})"
    return f"{among} that meet{'s' * (len(within) == 1)} the budget, the fastest ({figures})"


def _why_not(point: Point, winner: Point, budget: Budget) -> str:
    if misses := budget.misses(point.figures):
        return "; ".join(str(miss) for miss in misses)
    if dominates(winner, point):
        return f"{winner.name} is nowhere worse"
    slower = f"p50 {point.p50_us / 1000:.2f} ms against {winner.p50_us / 1000:.2f} ms"
    if budget.drop is None and point.quality < winner.quality - SAME_QUALITY:
        return f"quality {point.quality:.4f} against {winner.quality:.4f}, and no drop was allowed for speed"
    if point.p50_us > winner.p50_us * SAME:
        return slower
    return f"as fast, {human(point.size_bytes)} against {human(winner.size_bytes)}"
