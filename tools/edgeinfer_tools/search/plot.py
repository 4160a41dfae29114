"""Draw a search as one SVG picture: latency against quality, a circle per candidate by its size, the front, the bounds.

Written out by hand, because a plotting library would be larger than all the rest of the toolchain's extra. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.search.pareto import Point, Verdict
from edgeinfer_tools.sizes import human

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, FLOOR = 70, 30, 48, 428
SMALLEST, LARGEST = 4.0, 18.0
"""Radii in pixels."""
WINNER, RUNG, OTHER, BOUND = "#c2410c", "#1d4ed8", "#64748b", "#b91c1c"
_LABEL_STEP = 13
_DOTTED = f'stroke="{BOUND}" stroke-dasharray="2 3"'


@dataclass(frozen=True, slots=True)
class Axes:
    """The plane: latency to the right on a log scale, quality upwards."""

    fastest_ms: float
    slowest_ms: float
    worst: float
    best: float

    def x(self, value_ms: float) -> float:
        """Return where a latency is, in pixels."""
        low, high = math.log10(self.fastest_ms) - 0.08, math.log10(self.slowest_ms) + 0.25  # room for labels
        return LEFT + (math.log10(value_ms) - low) / (high - low) * (WIDTH - RIGHT - LEFT)

    def y(self, quality: float) -> float:
        """Return where a quality is, in pixels."""
        return FLOOR - (quality - self.worst) / (self.best - self.worst) * (FLOOR - TOP)

    def draw(self, what: str) -> list[str]:
        """Return both axes with their marks; `what` the latency is."""
        middle = (TOP + FLOOR) / 2
        parts = [
            f'<line x1="{LEFT}" y1="{FLOOR}" x2="{WIDTH - RIGHT}" y2="{FLOOR}" stroke="black"/>',
            f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{FLOOR}" stroke="black"/>',
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, what, anchor="middle"),
            f'<g transform="rotate(-90 16 {middle:.0f})">'
            + _text(16, middle, "quality (1 = as the float model)", anchor="middle")
            + "</g>",
        ]
        for mark in log_marks(self.fastest_ms, self.slowest_ms):
            at = self.x(mark)
            parts.append(f'<line x1="{at:.1f}" y1="{FLOOR}" x2="{at:.1f}" y2="{FLOOR + 4}" stroke="black"/>')
            parts.append(_text(at, FLOOR + 17, f"{mark:g}", anchor="middle"))
        for step in range(5):
            value = self.worst + (self.best - self.worst) * step / 4
            parts.append(_text(LEFT - 6, self.y(value) + 4, f"{value:.3f}", anchor="end"))
        return parts

    def bounds(self, budget: Budget, float_quality: float) -> list[str]:
        """Return the budget's bounds as lines, those that lie in the plane."""
        parts = []
        if budget.p99_us is not None:
            at = self.x(budget.p99_us / 1000)
            parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{FLOOR}" {_DOTTED}/>')
            parts.append(_text(at - 4, TOP + 10, f"bound {budget.p99_us / 1000:g} ms", BOUND, anchor="end"))
        if budget.drop is not None and float_quality - budget.drop > self.worst:
            at = self.y(float_quality - budget.drop)
            parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" {_DOTTED}/>')
            parts.append(_text(WIDTH - RIGHT, at - 4, f"allowed drop {budget.drop:g}", BOUND, anchor="end"))
        return parts


def svg(points: Sequence[Point], verdict: Verdict, budget: Budget, *, title: str, estimated: bool) -> str:
    """Return the picture."""
    axes = _axes(points, budget)
    kind = "estimated" if estimated else "measured"
    what = f"p99 in ms with {budget.threads} thread{'s'[: budget.threads > 1]} ({kind})"
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11"'
    line = sorted(verdict.front, key=lambda point: point.p99_us)
    corners = " ".join(f"{axes.x(point.p99_us / 1000):.1f},{axes.y(point.quality):.1f}" for point in line)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        _text(LEFT, 38, f"circles: file size; dashed: Pareto front; budget: {budget}", OTHER),
        *axes.draw(what),
        *axes.bounds(budget, max(point.quality + point.drop for point in points)),
        f'<polyline points="{corners}" fill="none" stroke="{RUNG}" stroke-dasharray="4 3" opacity="0.6"/>',
    ]
    rungs = {point.name for point in verdict.ladder}
    largest = max(point.size_bytes for point in points)
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda item: -item.size_bytes):
        colour = WINNER if point.name == verdict.winner.name else RUNG if point.name in rungs else OTHER
        x, y = axes.x(point.p99_us / 1000), axes.y(point.quality)
        radius = SMALLEST + (LARGEST - SMALLEST) * math.sqrt(point.size_bytes / largest)
        told = f"{point.name}: p99 {point.p99_us / 1000:.2f} ms, quality {point.quality:.4f}, {human(point.size_bytes)}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity="0.35" '
            f'stroke="{colour}"><title>{escape(told)}</title></circle>'
        )
        parts.append(_text(*_free(x + radius + 3, y + 4, taken), point.name, colour))
    return "\n".join([*parts, "</svg>", ""])


def _axes(points: Sequence[Point], budget: Budget) -> Axes:
    latencies = [point.p99_us / 1000 for point in points]
    if budget.p99_us is not None:
        latencies.append(budget.p99_us / 1000)
    lowest, highest = min(point.quality for point in points), max(point.quality for point in points)
    margin = max(0.002, (highest - lowest) * 0.12)
    return Axes(min(latencies), max(latencies), lowest - margin, highest + margin)


def log_marks(low: float, high: float) -> list[float]:
    """Return the round numbers (1, 2, 5 times a power of ten) between two."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    marks = [float(f"{digit * 10.0**power:.6g}") for power in powers for digit in (1, 2, 5)]
    return [mark for mark in marks if low * 0.85 <= mark <= high * 1.6]


def _text(x: float, y: float, words: str, colour: str = "black", *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


def _free(x: float, y: float, taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Return a place for a label near (x, y) that no other label has."""
    while any(abs(x - other[0]) < 90 and abs(y - other[1]) < _LABEL_STEP - 1 for other in taken):
        y += _LABEL_STEP
    taken.append((x, y))
    return x, y
