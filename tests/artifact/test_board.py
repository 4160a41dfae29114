from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer.artifact.board import Board, doubts, find_board, known_boards, load_board
from edgeinfer.artifact.board_bounds import BOUNDS
from edgeinfer.errors import ConfigError
from edgeinfer.limits import ThermalLevel
from edgeinfer.quantity import Bytes, MilliCelsius, Nanoseconds

SHIPPED = known_boards()
WANTED = {
    "container-512mb", "demo-board", "generic-arm64", "generic-x86", "imx8m-plus", "jetson-orin-nano", "n100-8gb",
    "raspberry-pi-4-2gb", "raspberry-pi-5-8gb", "rock-5b",
}  # fmt: skip

GOOD = """
name = "x"
description = "x"
[cpu]
architecture = "aarch64"
cores = 4
max_clock_mhz = 1500
instruction_sets = []
[memory]
total = "2 GiB"
ceiling = "1 GiB"
[thermal]
zones = ["cpu-thermal"]
firmware_trip_c = 85
[[thermal.trips]]
level = "warm"
at_c = 70
hysteresis_c = 3
duty_cycle = 0.7
[[thermal.trips]]
level = "critical"
at_c = 80
hysteresis_c = 3
duty_cycle = 0
"""


def load(tmp_path: Path, text: str) -> Board:
    path = tmp_path / "x.toml"
    path.write_text(text)
    return load_board(path)


def problems(tmp_path: Path, text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_all_wanted_boards_are_shipped() -> None:
    assert set(SHIPPED) >= WANTED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_board_is_complete_and_safe(name: str) -> None:
    board = load_board(SHIPPED[name])
    assert board.name == name
    assert len(board.sources) >= 2, "every number has a source"
    assert board.lab is not None
    assert board.memory.ceiling + board.memory.reserve < board.memory.total
    trips = board.thermal.trips
    assert [trip.thermal_level for trip in trips] == [ThermalLevel.WARM, ThermalLevel.HOT, ThermalLevel.CRITICAL]
    assert board.thermal.firmware_trip_c - trips[-1].at_c >= 2_000, "room for one late sample"
    assert board.thermal.zones


@pytest.mark.parametrize(
    ("compatible", "machine", "expected"),
    [
        (["raspberrypi,5-model-b", "brcm,bcm2712"], "aarch64", "raspberry-pi-5-8gb"),
        (["raspberrypi,4-model-b", "brcm,bcm2711"], "aarch64", "raspberry-pi-4-2gb"),
        (["radxa,rock-5b", "rockchip,rk3588"], "aarch64", "rock-5b"),
        (["radxa,rock-5b-plus", "rockchip,rk3588"], "aarch64", "rock-5b"),
        (["nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"], "aarch64", "jetson-orin-nano"),
        (["toradex,verdin-imx8mp-wifi", "toradex,verdin-imx8mp", "fsl,imx8mp"], "aarch64", "imx8m-plus"),
        (["nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"], "aarch64", "generic-arm64"),
        (["xunlong,orangepi-5-plus", "rockchip,rk3588"], "aarch64", "generic-arm64"),
        ([], "aarch64", "generic-arm64"),
        ([], "x86_64", "generic-x86"),
    ],
)
def test_board_is_found_by_the_device_tree(tmp_path: Path, compatible: list[str], machine: str, expected: str) -> None:
    if compatible:
        (tmp_path / "device-tree").mkdir()
        (tmp_path / "device-tree" / "compatible").write_bytes(b"\0".join(item.encode() for item in compatible) + b"\0")
    assert find_board(proc_root=tmp_path, machine=machine).stem == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Intel(R) N100", "n100-8gb"),
        ("Intel(R) Core(TM) i3-N305", "generic-x86"),
        ("AMD Ryzen 7 5800U with Radeon Graphics", "generic-x86"),
        ("", "generic-x86"),
    ],
)
def test_board_without_device_tree_is_found_by_the_name_of_its_cpu(tmp_path: Path, model: str, expected: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: X\nmodel name\t: {model}\n")
    assert find_board(proc_root=tmp_path, machine="x86_64").stem == expected
    assert find_board(proc_root=tmp_path, machine="aarch64").stem == "generic-arm64"


def test_no_two_boards_claim_one_name() -> None:
    claims = [
        name for path in SHIPPED.values() for name in (*load_board(path).compatible, *load_board(path).cpu.models)
    ]
    assert len(claims) == len(set(claims))


def numbers(kind: type[object], path: str = "") -> Iterator[str]:
    """Yield the path of every number that a board file may hold."""
    for name, hint in typing.get_type_hints(kind).items():
        parts = [hint, *typing.get_args(hint)]
        suffix = "[]" if typing.get_origin(hint) is list else ""
        section = next((part for part in parts if dataclasses.is_dataclass(part)), None)
        if section is not None:
            yield from numbers(typing.cast("type[object]", section), f"{path}.{name}{suffix}")
        elif any(part in {int, float, Bytes, MilliCelsius, Nanoseconds} for part in parts):
            yield f"{path}.{name}{suffix}".lstrip(".")


def test_every_number_has_bounds_and_every_bound_a_number() -> None:
    assert set(numbers(Board)) == set(BOUNDS)


@pytest.mark.parametrize("name", SHIPPED)
def test_zones_that_lie_say_why_and_quirks_are_told(name: str) -> None:
    board = load_board(SHIPPED[name])
    assert board.quirks
    assert all(len(item.why) > 10 for item in board.thermal.unused)
    assert board.lab is not None
    assert board.lab.throttled_share < 1


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_board_leaves_no_doubt(name: str) -> None:
    assert doubts(load_board(SHIPPED[name])) == []


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("at_c = 80", "at_c = 72", "thermal.trips[1].at_c"),
        ("at_c = 80", "at_c = 84", "thermal.trips[1].at_c"),
        ('zones = ["cpu-thermal"]', "zones = []", "thermal.zones"),
        ('ceiling = "1 GiB"', 'ceiling = "2 GiB"', "memory.ceiling"),
        ('description = "x"', 'description = "x"\nsources = []', "sources"),
    ],
)
def test_what_is_hardly_meant_is_a_doubt_and_no_error(tmp_path: Path, old: str, new: str, path: str) -> None:
    text = GOOD if path == "sources" else GOOD.replace('description = "x"', 'description = "x"\nsources = ["y"]')
    assert [problem.path for problem in doubts(load(tmp_path, text.replace(old, new, 1)))] == [path]


def test_unknown_machine_names_the_known_boards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"riscv64.*generic-x86"):
        find_board(proc_root=tmp_path, machine="riscv64")


def test_good_file_loads(tmp_path: Path) -> None:
    board = load(tmp_path, GOOD)
    assert board.thermal.trips[0].at_c == 70_000
    assert board.thermal.dwell == 5_000_000_000
    assert board.lab is None


def test_all_problems_are_told_at_once_with_their_paths(tmp_path: Path) -> None:
    text = GOOD.replace("cores = 4", 'cores = "four"').replace('total = "2 GiB"', 'total = "lots"')
    text = text.replace("firmware_trip_c = 85", "firmware_trip_c = 8500").replace('zones = ["cpu-thermal"]', "zone = 1")
    assert set(problems(tmp_path, text)) >= {
        "cpu.cores", "memory.total", "thermal.firmware_trip_c", "thermal.zones", "thermal.zone",
    }  # fmt: skip


def test_wrong_types_hide_no_contradiction(tmp_path: Path) -> None:
    text = GOOD.replace('ceiling = "1 GiB"', 'ceiling = "3 GiB"').replace('level = "critical"', "level = 3")
    text = text.replace("hysteresis_c = 3", "hysteresis_c = 0", 1) + "\n[colour]\n"
    assert set(problems(tmp_path, text)) == {
        "colour", "memory.ceiling", "thermal.trips[1].level", "thermal.trips[0].hysteresis_c",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "path", "message"),
    [
        ("at_c = 80", "at_c = 85", "thermal.trips[1].at_c", "not below thermal.firmware_trip_c"),
        ("at_c = 80", "at_c = 70", "thermal.trips[1]", "must rise"),
        ('level = "critical"', 'level = "boiling"', "thermal.trips[1].level", "'boiling'"),
        ('level = "critical"', 'level = "warm"', "thermal.trips[1]", "must rise"),
        ("duty_cycle = 0\n", "duty_cycle = 0.1\n", "thermal.trips[1].duty_cycle", "critical means no local work"),
        ("duty_cycle = 0.7", "duty_cycle = 1.7", "thermal.trips[0].duty_cycle", "not between 0 and 1"),
        ("hysteresis_c = 3", "hysteresis_c = 0", "thermal.trips[0].hysteresis_c", "0 C is not between 0.5 C and 30 C"),
        ('ceiling = "1 GiB"', 'ceiling = "3 GiB"', "memory.ceiling", "more than memory.total"),
        ("cores = 4", "cores = 4000", "cpu.cores", "4000 is not between 1 and 1024"),
        ("at_c = 70", "at_c = 20", "thermal.trips[0].at_c", "20 C is not between 30 C and 124 C"),
        ('ceiling = "1 GiB"', 'ceiling = "1 kB"', "memory.ceiling", "is not between 1 MiB and 1048576 MiB"),
        (
            "firmware_trip_c = 85",
            'firmware_trip_c = 85\ndwell = "2 h"',
            "thermal.dwell",
            "7200 s is not between 0 s and",
        ),
        ('"aarch64"', '"armv7l"', "cpu.architecture", "'armv7l' is not aarch64 or x86_64"),
        ('["cpu-thermal"]', '["cpu-thermal", "cpu_thermal"]', "thermal.zones[1]", "comes twice"),
        ('["cpu-thermal"]', '["hwmon:"]', "thermal.zones[0]", "no chip of hwmon"),
        (
            "[[thermal.trips]]",
            "[[thermal.unused]]\nzone = 'cpu_thermal'\nwhy = 'x'\n[[thermal.trips]]",
            "thermal.unused[0].zone",
            "is in thermal.zones, too",
        ),
        ("cores = 4", "cores = 0", "cpu.cores", "0 is not between 1 and 1024"),
        ("firmware_trip_c = 85", "firmware_trip_c = 85\nfault_duty_cycle = -1", "thermal.fault_duty_cycle", "between"),
    ],
)
def test_contradiction_is_refused(tmp_path: Path, old: str, new: str, path: str, message: str) -> None:
    found = problems(tmp_path, GOOD.replace(old, new, 1))
    assert message in found[path]
