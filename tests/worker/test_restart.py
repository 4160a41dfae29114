"""Zygotes come back at once after a healthy life, ever later after short ones, and a bad import is no chance."""

from __future__ import annotations

import pytest

from edgeinfer.clock import NS_PER_S
from edgeinfer.worker.lineage import ExitStatus
from edgeinfer.worker.restart import Restarts


def test_pauses_grow_to_half_a_minute_and_end_with_a_healthy_life() -> None:
    restarts = Restarts()
    pauses = [restarts.after(NS_PER_S) for _ in range(12)]
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(0.1)
    assert pauses[-1] == 30
    assert restarts.after(11 * NS_PER_S) == 0
    assert restarts.after(NS_PER_S) == pytest.approx(0.1)
    assert restarts.count == 14


def test_not_being_let_start_is_no_restart_but_waits_alike() -> None:
    restarts = Restarts()
    assert [restarts.unstarted() for _ in range(3)] == pytest.approx([0.1, 0.3, 0.7])
    assert restarts.count == 0


@pytest.mark.parametrize(
    ("status", "complaint", "blamed"),
    [
        (ExitStatus(signal=9), "", False),
        (ExitStatus(signal=9), "importing onnxruntime took more than 60 s", True),
        (ExitStatus(signal=4), "", True),
        (ExitStatus(code=3), "ImportError", True),
        (ExitStatus(code=9), "", True),
    ],
)
def test_what_an_import_is_blamed_for(status: ExitStatus, complaint: str, *, blamed: bool) -> None:
    assert Restarts().blames_import(status, complaint) is blamed


def test_being_killed_three_times_in_a_row_is_the_imports_fault() -> None:
    restarts = Restarts()
    killed = ExitStatus(signal=9)
    assert [restarts.blames_import(killed, "") for _ in range(3)] == [False, False, True]
    restarts.ready()
    assert not restarts.blames_import(killed, "")


def test_a_bad_import_is_left_alone_for_a_second_then_for_longer_up_to_a_minute() -> None:
    restarts = Restarts()
    assert [restarts.cool_down() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    restarts.ready()
    assert restarts.cool_down() == 60, "it can be imported, and has proved nothing yet"
    restarts.after(11 * NS_PER_S)
    assert restarts.cool_down() == 1, "it was well in between"
