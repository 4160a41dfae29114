from __future__ import annotations

import pytest

from edgeinfer.sensors.firmware import Slowdown, ThrottleFlags, judge_flags, parse_throttled, read_firmware
from tests.sensors.tree import FakeTree

VECTORS = [
    # text, under-voltage now, capped now, throttled now, soft limit now; the same since the bits were cleared; verdict
    ("0x0", (0, 0, 0, 0), (0, 0, 0, 0), Slowdown.NONE),
    ("0x50000", (0, 0, 0, 0), (1, 0, 1, 0), Slowdown.NONE),
    ("0x50005", (1, 0, 1, 0), (1, 0, 1, 0), Slowdown.POWER),
    ("0x2", (0, 1, 0, 0), (0, 0, 0, 0), Slowdown.THERMAL),
    ("0x4", (0, 0, 1, 0), (0, 0, 0, 0), Slowdown.THERMAL),
    ("0x80008", (0, 0, 0, 1), (0, 0, 0, 1), Slowdown.THERMAL),
    ("throttled=0xe0000\n", (0, 0, 0, 0), (0, 1, 1, 1), Slowdown.NONE),
    ("50005\n", (1, 0, 1, 0), (1, 0, 1, 0), Slowdown.POWER),  # sysfs: hexadecimal without prefix
]


@pytest.mark.parametrize(("text", "now", "seen", "slowdown"), VECTORS)
def test_throttle_flags(text: str, now: tuple[int, ...], seen: tuple[int, ...], slowdown: Slowdown) -> None:
    flags = parse_throttled(text)
    assert flags is not None
    assert (flags.under_voltage, flags.frequency_capped, flags.throttled, flags.soft_limit) == now
    found = (flags.under_voltage_seen, flags.frequency_capped_seen, flags.throttled_seen, flags.soft_limit_seen)
    assert found == seen
    assert judge_flags(flags).slowdown is slowdown


@pytest.mark.parametrize("text", ["", "garbage", "VCHI initialization failed", "0x", "error=1", "0xffffffff", "-1"])
def test_garbage_is_unknown_and_never_fine(text: str) -> None:
    assert parse_throttled(text) is None


@pytest.mark.parametrize("folder", ["soc/soc:firmware", "soc@107c000000/soc@107c000000:firmware"])
def test_flags_are_found_on_both_boards(tree: FakeTree, folder: str) -> None:
    tree.write(tree.sys / "devices" / "platform" / folder / "get_throttled", "40004\n")
    reading = read_firmware(tree.sys)
    assert (reading.slowdown, reading.source, reading.flags) == (
        Slowdown.THERMAL, "get_throttled", ThrottleFlags(0x40004),
    )  # fmt: skip


def test_garbage_flags_are_unknown(tree: FakeTree) -> None:
    tree.write(tree.sys / "devices/platform/soc/soc:firmware/get_throttled", "huh\n")
    assert read_firmware(tree.sys).slowdown is Slowdown.UNKNOWN


def test_board_that_does_not_tell_is_unknown(tree: FakeTree) -> None:
    assert read_firmware(tree.sys).slowdown is Slowdown.UNKNOWN
    tree.cooler(0, "pwm-fan", 3)
    assert read_firmware(tree.sys).slowdown is Slowdown.UNKNOWN


@pytest.mark.parametrize("kind", ["cpufreq-cpu0", "thermal-cpufreq-0", "Processor", "intel_powerclamp"])
def test_cooling_device_that_slows_the_cpu_tells(tree: FakeTree, kind: str) -> None:
    tree.cooler(0, "Fan", 1)
    tree.cooler(1, kind, 0)
    assert read_firmware(tree.sys).slowdown is Slowdown.NONE
    tree.cooler(1, kind, 2)
    reading = read_firmware(tree.sys)
    assert (reading.slowdown, reading.source) == (Slowdown.THERMAL, kind)
