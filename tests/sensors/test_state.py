from __future__ import annotations

import logging

import pytest

from edgeinfer.sensors.state import ChangeLog, SensorState

S = 1_000_000_000


def test_every_state_but_ok_and_unconfirmed_is_a_fault() -> None:
    assert {state for state in SensorState if not state.fault} == {SensorState.OK, SensorState.UNCONFIRMED}


def test_state_that_a_flapping_sensor_ends_up_in_is_logged_with_what_was_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = ChangeLog()
    log.note("a", SensorState.OK, "", 0)
    for second in range(1, 20):
        log.note("a", SensorState.MISSING if second % 2 else SensorState.OK, "gone", second * S)
    assert len(caplog.records) == 1
    log.note("a", SensorState.MISSING, "gone", 61 * S)
    assert "state=missing was=ok changes=19" in caplog.messages[-1]


def test_sensors_are_logged_apart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = ChangeLog()
    log.note("a", SensorState.OK, "", 0)
    log.note("b", SensorState.BLOCKED, "no answer", 0)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
