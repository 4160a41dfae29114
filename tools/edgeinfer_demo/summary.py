"""Compose build/demo/report.json from the evidence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from edgeinfer_demo.verdict import Check, Evidence, identity_holds

FRAMES = ("taken", "skipped", "submitted", "missed", "stale", "invalid", "sequences_lost", "results_dropped")
KINDS = ("ok", "late", "rejected", "cancelled", "expired", "failed")


def compose(
    evidence: Evidence, peak_pss_bytes: int, checks: Sequence[Check], *, board: str, seconds: float
) -> dict[str, Any]:
    """Return the report: per loop and placement what became of every request, heat, memory, and the checks."""
    report = evidence.report
    total = report["total"]
    answered = sum(total["ok_by_placement"].values())
    return {
        "board": board,
        "seconds": round(seconds, 1),
        "others_cores": round(evidence.others_cores, 2),
        "loops": {counts["origin"]: _loop(counts) for counts in report["origins"]},
        "frames": {loop["name"]: {key: loop[key] for key in FRAMES} for loop in report["loops"]},
        "thermal": {
            "seconds_by_level": report["thermal"]["seconds_by_level"],
            "peak_c": round(evidence.peak_c, 2),
            "throttle_episodes": report["thermal"]["throttle_episodes"],
            "firmware_throttled_s": round(evidence.firmware_throttled_s, 2),
        },
        "memory": {
            "budget_bytes": report["memory"]["ceiling_bytes"],
            "peak_reserved_bytes": report["memory"]["peak_reserved_bytes"],
            "peak_pss_bytes": peak_pss_bytes,
        },
        "offloaded_share": total["ok_by_placement"].get("nearby", 0) / answered if answered else 0.0,
        "identity": {
            "received": total["received"],
            "in_flight": total["in_flight"],
            "ended": {kind: total[kind] for kind in KINDS},
            "holds": identity_holds(total),
        },
        "phases": [asdict(phase) for phase in evidence.phases],
        "events": [asdict(event) for event in evidence.events],
        "checks": [asdict(check) for check in checks],
    }


def _loop(counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "received": counts["received"],
        "deadline_hit_rate": counts["deadline_hit_rate"],
        "reasons": counts["reasons"],
        "placements": {
            placement: {
                "outcomes": outcomes,
                "p50_ms": counts["p50_ms"].get(placement),
                "p99_ms": counts["p99_ms"].get(placement),
            }
            for placement, outcomes in counts["by_placement"].items()
        },
    }
