"""Tell what a search came to: a table for people, JSON for programs. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.search.explore import Explored, Row
from edgeinfer_tools.search.pareto import Verdict
from edgeinfer_tools.sizes import human

SCHEMA = 1


def shortfall(verdict: Verdict, *, out_of_time: bool = False) -> str:
    """Return the sentence that says which bounds failed by how much; empty when the budget is met."""
    if not verdict.misses:
        return ""
    told = "; ".join(str(miss) for miss in verdict.misses)
    head = "the budget was not met in the time given" if out_of_time else "the budget cannot be met"
    again = "; run it again to go on from here" if out_of_time else ""
    return f"{head}: the best candidate, {verdict.winner.name}, misses it: {told}{again}"


def as_text(explored: Explored, verdict: Verdict, budget: Budget, *, where: str, estimated: bool) -> str:
    """Return the table, the front marked with `*`, the ladder with its rungs, and why the others did not win."""
    front = {point.name for point in verdict.front}
    rungs = {point.name: index for index, point in enumerate(verdict.ladder)}
    kind = "estimated" if estimated else "measured"
    latency = f"p50 and p99 with {budget.threads} thread{'s'[: budget.threads > 1]}, {kind}"
    width = max([9, *(len(row.candidate.name) for row in explored.rows)])
    lines = [
        f"budget    {budget}",
        f"measured  {where}; {latency}",
        "",
        f"  {'candidate':<{width}} {'quality':>8} {'p50 ms':>9} {'p99 ms':>9} {'size':>9} {'peak':>9}  ",
    ]
    for point in sorted(explored.points, key=lambda point: (-point.quality, point.p50_us)):
        mark = "*" if point.name in front else " "
        rung = "winner" if rungs.get(point.name) == 0 else f"rung {rungs[point.name]}" if point.name in rungs else ""
        latencies = f"{point.p50_us / 1000:>9.2f} {point.p99_us / 1000:>9.2f}"
        sizes = f"{human(point.size_bytes):>9} {human(point.peak_bytes):>9}"
        text = rung or verdict.why_not.get(point.name, "")
        lines.append(f"{mark} {point.name:<{width}} {point.quality:>8.4f} {latencies} {sizes}  {text}".rstrip())
    others = [row for row in explored.rows if row.point is None]
    if others:
        lines += ["", "not measured:"]
        lines += [f"  {row.candidate.name:<{width}} {row.outcome}: {row.reason}" for row in others]
    lines += ["", f"* on the Pareto front; winner: {verdict.winner.name}, {verdict.reason}"]
    lines += list(explored.notes)
    if explored.out_of_time:
        untried = sum(row.outcome == "not tried" for row in explored.rows)
        lines.append(f"the time was up: {untried} candidates were not tried; run it again to go on from here")
    if sentence := shortfall(verdict, out_of_time=explored.out_of_time):
        lines.append(sentence)
    return "\n".join(lines) + "\n"


def as_json(explored: Explored, verdict: Verdict, budget: Budget, *, where: str, estimate_model: str) -> dict[str, Any]:
    """Return the same, and everything measured, fit for JSON."""
    return {
        "schema": SCHEMA,
        "budget": {
            "peak_bytes": budget.peak_bytes,
            "p99_us": budget.p99_us,
            "threads": budget.threads,
            "size_bytes": budget.size_bytes,
            "drop": budget.drop,
        },
        "met": not verdict.misses,
        "misses": [
            {"bound": miss.bound, "value": miss.value, "limit": miss.limit, "text": str(miss)}
            for miss in verdict.misses
        ],
        "winner": verdict.winner.name,
        "reason": verdict.reason,
        "front": [point.name for point in verdict.front],
        "ladder": [point.name for point in verdict.ladder],
        "where": where,
        "estimated": bool(estimate_model),
        "estimate_model": estimate_model,
        "out_of_time": explored.out_of_time,
        "notes": list(explored.notes),
        "candidates": [_row(row, verdict) for row in explored.rows],
    }


def _row(row: Row, verdict: Verdict) -> dict[str, Any]:
    scores = row.facts.full or row.facts.screen
    found: dict[str, Any] = {
        "name": row.candidate.name,
        "scheme": row.candidate.scheme.text(),
        "network": row.candidate.source.origin if row.candidate.source is not None else "",
        "outcome": row.outcome,
        "reason": row.reason or verdict.why_not.get(row.candidate.name, ""),
        "size_bytes": row.facts.size_bytes,
        "quality": scores.quality if scores is not None else None,
        "requests": scores.requests if scores is not None else 0,
        "gates": msgspec.to_builtins(scores.gates) if scores is not None else [],
        "costs": msgspec.to_builtins(list(row.costs)),
        "seconds": row.facts.seconds,
        "from_journal": row.known,
        "notes": row.facts.notes,
    }
    if row.point is not None:
        found |= {"p50_us": row.point.p50_us, "p99_us": row.point.p99_us, "peak_bytes": row.point.peak_bytes}
    return found
