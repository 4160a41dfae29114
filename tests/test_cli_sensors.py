"""`edgeinfer sensors` on trees of real boards, and on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.cli import main
from tests.sensors.boards import jetson_orin_nano, raspberry_pi_4
from tests.sensors.tree import FakeTree


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path)


def config(tree: FakeTree, extra: str = "") -> str:
    path = tree.sys.parent / "device.toml"
    path.write_text(f'{extra}\n[paths]\nsys_root = "{tree.sys}"\nproc_root = "{tree.proc}"\n')
    return str(path)


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["sensors", "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_report_says_what_is_used_and_why(tree: FakeTree, capsys: pytest.CaptureFixture[str]) -> None:
    jetson_orin_nano(tree)
    found = report(capsys, "--config", config(tree, 'board = "jetson-orin-nano"'))
    assert found["board"] == "jetson-orin-nano"
    assert found["temperature"] == {"zone": "tj-thermal", "temp_mc": 52343, "state": "ok", "detail": ""}
    assert (found["power"]["source"], found["power"]["power_mw"]) == ("VDD_IN", 7008)
    used = {(item["kind"], item["name"]) for item in found["sensors"] if item["used"]}
    assert used >= {("temperature", "tj-thermal"), ("temperature", "cpu-thermal"), ("power", "VDD_IN")}
    assert ("temperature", "gpu-thermal") not in used
    assert all(item["why"] for item in found["sensors"])
    (zone,) = (item for item in found["sensors"] if item["name"] == "tj-thermal")
    assert {"kind": "hot", "temp_mc": 99000, "hysteresis_mc": 2000} in zone["trips"]


def test_text_marks_what_is_used_and_tells_the_kernels_trips(
    tree: FakeTree, capsys: pytest.CaptureFixture[str]
) -> None:
    raspberry_pi_4(tree)
    assert main(["sensors", "--config", config(tree, 'board = "raspberry-pi-4-2gb"')]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("* thermal_zone0 cpu-thermal") and "61.3 C" in line for line in lines)
    assert any(line.startswith("  hwmon0/temp1 hwmon:cpu_thermal/temp1") for line in lines)
    assert any("kernel trips: critical 110.0 C" in line for line in lines)


def test_board_and_zones_of_the_operator_hold(tree: FakeTree, capsys: pytest.CaptureFixture[str]) -> None:
    jetson_orin_nano(tree)
    found = report(
        capsys, "--config", config(tree, '[thermal]\nzones = ["gpu-thermal"]'), "--board", "raspberry-pi-5-8gb"
    )
    assert (found["board"], found["temperature"]["zone"]) == ("raspberry-pi-5-8gb", "gpu-thermal")


def test_no_temperature_is_remarked_with_what_holds_then(tree: FakeTree, capsys: pytest.CaptureFixture[str]) -> None:
    tree.cpus("0", "0")
    found = report(capsys, "--config", config(tree), "--board", "raspberry-pi-4-2gb")
    assert "duty cycle 0.30 holds" in found["remarks"][0]


def test_unknown_board_is_a_config_error(tree: FakeTree, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sensors", "--config", config(tree), "--board", "nosuch"]) == 78
    assert "known are" in capsys.readouterr().err


def test_this_machine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sensors", "--board", "generic-x86"]) == 0
    assert "board generic-x86" in capsys.readouterr().out
