"""The toolchain's figures say the truth: who misses a gate is no peer, and a miss of ours is one whatever the first gate says."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer_bench.record import Figure
from edgeinfer_bench.toolchain.figures import KEYS, Row, figures_of
from edgeinfer_bench.toolchain.judging import Quality
from edgeinfer_bench.toolchain.rivals import Attempt


def row(size_bytes: int, p50_ms: float, value: float = 1.0, *, passed: bool = True) -> Row:
    return Row(
        Attempt("x", Path("x")), size_bytes, Quality(value, passed, "top1 is so much"), {1: p50_ms, 2: p50_ms / 2}
    )


def absent(reason: str) -> Row:
    return Row(Attempt("x", None, reason=reason))


def by_key(rows: dict[str, Row], preferred: str = "ours int8", allowed: float = 0.02) -> dict[str, Figure]:
    return {item.id.rpartition(".")[2]: item for item in figures_of("net", rows, preferred, allowed)}


def rows(**changed: Row) -> dict[str, Row]:
    found = {
        "float": row(1000, 10.0),
        "ours int8": row(300, 5.0, 0.99),
        "ort-static": row(290, 6.0, 0.99),
        "ort-dynamic": row(280, 4.0, 0.5, passed=False),
        "nncf": absent("not done within 120 s"),
    }
    return found | {key.replace("_", "-"): value for key, value in changed.items()}


def test_ratios_are_of_the_preferred_variant_against_float() -> None:
    figures = by_key(rows())
    assert figures["size_ratio"].value == pytest.approx(0.3)
    assert figures["p50_ratio"].value == pytest.approx(0.5)
    assert figures["quality_drop"].value == pytest.approx(0.01)
    assert {item.verdict for item in figures.values()} == {"met", "missed"}


def test_a_peer_that_misses_a_gate_is_no_peer_and_the_note_says_why() -> None:
    figures = by_key(rows())
    faster = figures["vs_best_peer_p50_ratio"]
    assert faster.value == pytest.approx(5 / 6)
    assert faster.peer == "ONNX Runtime static"
    assert "ort-dynamic: top1 is so much" in faster.note
    assert "nncf: not done within 120 s" in faster.note


def test_a_smaller_peer_of_equal_quality_is_a_missed_goal() -> None:
    assert by_key(rows())["vs_best_peer_size_ratio"].verdict == "missed"
    assert by_key(rows(ort_static=row(310, 6.0)))["vs_best_peer_size_ratio"].verdict == "met"


def test_any_missed_gate_of_ours_is_a_missed_quality() -> None:
    spoiled = rows() | {"ours int8": row(300, 5.0, 1.0, passed=False)}
    assert by_key(spoiled)["quality_drop"].verdict == "missed"


def test_the_other_variants_of_the_bundle_stand_against_peers_too() -> None:
    figures = by_key(rows() | {"float": row(1000, 3.0)}, preferred="float")
    assert figures["vs_best_peer_p50_ratio"].value == pytest.approx(3 / 6)
    assert figures["vs_best_peer_p50_ratio"].note.startswith("our float")
    assert figures["vs_best_peer_size_ratio"].note.startswith("our int8")


def test_without_peers_nothing_is_compared_and_without_a_bundle_nothing_at_all() -> None:
    alone = by_key(rows(ort_static=absent("no data")))
    assert alone["vs_best_peer_p50_ratio"].value is None
    assert "no data" in alone["vs_best_peer_p50_ratio"].note
    none = figures_of("net", {"float": absent("there is no torch")}, "float", 0.0)
    assert [item.id for item in none] == [f"tools.net.{key}" for key in KEYS]
    assert all(item.value is None and item.note == "there is no torch" for item in none)
