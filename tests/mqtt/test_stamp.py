"""A stamp labels a record by three clocks and trusts none of them for another."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from edgeinfer.clock import MonotonicClock
from edgeinfer.mqtt.stamp import Stamper, kernel_clock_synced, read_boot_id


class FixedClock:
    def now_ns(self) -> int:
        return 42


def test_a_board_that_starts_in_1970_says_that_its_clock_is_not_synced() -> None:
    stamp = Stamper(FixedClock(), boot="b", wall_s=lambda: 3.5, synced=lambda: False).now()
    assert (stamp.at, stamp.clock_synced, stamp.boot, stamp.mono_ns) == ("1970-01-01T00:00:03.500Z", False, "b", 42)


def test_the_real_clocks_can_be_read() -> None:
    stamp = Stamper(MonotonicClock(), boot=read_boot_id()).now()
    assert dt.datetime.fromisoformat(stamp.at).tzinfo is not None
    assert stamp.clock_synced is kernel_clock_synced()
    assert len(stamp.boot) == 36


def test_a_kernel_without_a_boot_id_is_unknown(tmp_path: Path) -> None:
    assert read_boot_id(tmp_path) == "unknown"
