"""What a board could sustain follows from its heat, its cores and its memory, and says so when it cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.artifact.board import Board, LabModel, known_boards, load_board
from edgeinfer.artifact.manifest import Variant
from edgeinfer.artifact.profile import Latency, OperatingCost
from edgeinfer.quantity import Bytes, MilliCelsius
from edgeinfer_tools.cli import main
from edgeinfer_tools.fit import fit_variant, sustained_cores
from tests.tools.conftest import RecipeMaker

MIB = 1 << 20
VARIANT = Variant(name="int8", file="model/int8.onnx", quality=0.99, load_peak_bytes=50 * MIB, steady_bytes=20 * MIB)


def cost(mean_ms: float, *, threads: int = 1, peak_mib: int = 50) -> OperatingCost:
    us = int(mean_ms * 1000)
    return OperatingCost(
        variant="int8", provider="CPUExecutionProvider", threads=threads, latency=Latency(us, us, us * 2, us, 20),
        load_ms=10.0, load_peak_bytes=peak_mib * MIB, steady_bytes=20 * MIB, cpu_us_per_run=us * threads,
    )  # fmt: skip


@pytest.fixture
def hot_board(board: Board) -> Board:
    """4 cores; 10 C per watt, 1 W idle, 1 W per core; trips at 70 C, firmware at 90 C."""
    trip = replace(board.thermal.trips[0], at_c=MilliCelsius(70_000))
    return replace(
        board,
        cpu=replace(board.cpu, cores=4),
        memory=replace(board.memory, ceiling=Bytes(1 << 30)),
        thermal=replace(board.thermal, trips=[trip], firmware_trip_c=MilliCelsius(90_000)),
        lab=LabModel(resistance_c_per_w=10, capacity_j_per_c=10, idle_w=1, watt_per_core=1),
    )


def test_busy_cores_keep_the_temperature_at_the_limit(hot_board: Board) -> None:
    assert sustained_cores(hot_board, 70, 40) == pytest.approx(2)  # 3 W in all, 1 W of them idle
    assert sustained_cores(hot_board, 70, 65) == 0  # idle alone is too hot
    assert sustained_cores(hot_board, 170, 25) == 4  # heat is not the limit, cores are
    assert sustained_cores(replace(hot_board, lab=None), 70, 40) is None


def test_the_rate_is_what_heat_or_cores_allow_whichever_is_less(hot_board: Board) -> None:
    (found,) = fit_variant(hot_board, VARIANT, [cost(10)], ambient_c=40, deadline_ms=None, estimated=True)
    assert found.copies == 4
    assert found.unthrottled_hz == pytest.approx(400)
    assert found.cool_hz == pytest.approx(200)  # two of four cores
    assert found.firmware_hz == pytest.approx(400)  # 90 C allows all four
    assert found.duty_cycle == pytest.approx(0.5)
    assert (found.problem, found.estimated) == ("", True)


def test_memory_limits_the_copies_and_rules_out_what_does_not_fit(hot_board: Board) -> None:
    two, none = fit_variant(
        hot_board, VARIANT, [cost(10, peak_mib=400), cost(10, threads=4, peak_mib=1025)],
        ambient_c=0, deadline_ms=None, estimated=True,
    )  # fmt: skip
    assert two.copies == 2
    assert two.unthrottled_hz == pytest.approx(200)
    assert (none.copies, none.unthrottled_hz) == (0, 0)
    assert none.problem == "needs 1025 MiB, the ceiling is 1024 MiB"


def test_missing_instructions_and_missed_deadlines_are_told(hot_board: Board) -> None:
    vnni = Variant(name="v", file="f", quality=1.0, load_peak_bytes=2, steady_bytes=1, instruction_sets=["avx512_vnni"])
    (found,) = fit_variant(hot_board, vnni, [cost(10)], ambient_c=20, deadline_ms=5, estimated=True)
    assert found.problem == "needs avx512_vnni, which its file does not list"
    (found,) = fit_variant(hot_board, VARIANT, [cost(10)], ambient_c=20, deadline_ms=5, estimated=True)
    assert found.problem == "p99 is over the deadline of 5 ms that it was built for"


@pytest.mark.parametrize("name", sorted(known_boards()))
def test_hotter_air_never_lets_a_board_do_more(name: str) -> None:
    board = load_board(known_boards()[name])
    rates = [
        fit_variant(board, VARIANT, [cost(10)], ambient_c=air, deadline_ms=None, estimated=True)[0].cool_hz or 0.0
        for air in range(0, 90, 10)
    ]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.system
@pytest.mark.slow
def test_every_known_board_is_told_from_one_bundle(
    conv_recipe: RecipeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["build", str(conv_recipe()), "--board", "generic-x86", "-o", str(tmp_path / "b"), "--seconds", "0.02"]
    assert main(build) == 0
    capsys.readouterr()
    assert main(["fit", str(tmp_path / "b"), "--boards", "all", "--ambient", "45", "--seconds", "0.02"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ESTIMATES at 45 C ambient")
    assert main(["fit", str(tmp_path / "b"), "--boards", "raspberry-pi-5-8gb", "--seconds", "0.02", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimated"]
    assert {(item["board"], item["threads"]) for item in found["fits"]} == {
        ("raspberry-pi-5-8gb", 1), ("raspberry-pi-5-8gb", 4),
    }  # fmt: skip
    assert all(name in text for name in known_boards())
    assert main(["fit", str(tmp_path / "b"), "--ambient", "400"]) == 78
    assert "400 C is not between" in capsys.readouterr().err
