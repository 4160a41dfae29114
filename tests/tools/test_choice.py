"""The faster artefact is chosen, whatever it is called, and both latencies are told."""

from __future__ import annotations

import pytest

from edgeinfer_tools.choice import Candidate, choose

FLOAT = Candidate("fp32", 1.0, 130_000, 16 << 20)


def test_a17_float_is_chosen_where_8_bits_are_slower() -> None:
    """As on a Pi 3: 130 against 795 ms."""
    found = choose([FLOAT, Candidate("int8", 0.99, 795_000, 4 << 20)])
    assert found.name == "fp32"
    assert "130.00 ms" in found.reason
    assert "int8 795.00 ms" in found.reason
    assert found.dominated == ()  # it is smaller: there may be boards that it alone fits


def test_a17_8_bits_are_chosen_where_they_are_faster() -> None:
    assert choose([FLOAT, Candidate("int8", 0.99, 60_000, 4 << 20)]).name == "int8"


def test_of_equally_fast_forms_the_smaller_is_chosen() -> None:
    assert choose([FLOAT, Candidate("int8", 0.99, 131_000, 4 << 20)]).name == "int8"


def test_what_is_better_in_nothing_is_named() -> None:
    assert choose([FLOAT, Candidate("int8", 0.99, 200_000, 17 << 20)]).dominated == ("int8",)


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="nothing to choose"):
        choose([])
