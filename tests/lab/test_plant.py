from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.artifact.board import Board, LabModel, known_boards, load_board
from edgeinfer.errors import ConfigError
from edgeinfer.quantity import MilliCelsius
from edgeinfer.sensors.cpu import cpu_clock, usable_cpus
from edgeinfer.sensors.firmware import Slowdown, read_firmware
from edgeinfer.sensors.probe import InlineProbe
from edgeinfer.sensors.thermal import ThermalReader
from edgeinfer_demo.plant import Plant, PlantModel, PlantState
from edgeinfer_demo.plant_quota import CpuQuota, open_quota
from edgeinfer_demo.plant_tree import BoardTree
from tests.sensors.tree import FakeClock

LAB = LabModel(resistance_c_per_w=5.0, capacity_j_per_c=4.0, idle_w=1.0, watt_per_core=2.0, throttled_share=0.5)
MODEL = PlantModel(LAB, 85.0)
BUSY = "import sys, time\nprint('on', flush=True)\nwhile True: sum(range(10000))"


@pytest.fixture
def demo_board() -> Board:
    return load_board(known_boards()["demo-board"])


# The physics, against the solution on paper: T(t) = target + (T0 - target) * exp(-t / (R * C)).


@given(st.floats(-20, 90), st.floats(0, 4), st.floats(-20, 60), st.floats(0.001, 1000), st.integers(1, 50))
def test_any_number_of_steps_gives_the_analytic_solution(
    start_c: float, busy: float, ambient_c: float, seconds: float, steps: int
) -> None:
    model = PlantModel(LAB, math.inf)
    state = PlantState(start_c)
    for _ in range(steps):
        state = model.advance(state, busy, ambient_c, seconds / steps)
    target_c = ambient_c + 5.0 * (1.0 + 2.0 * busy)
    assert state.temp_c == pytest.approx(target_c + (start_c - target_c) * math.exp(-seconds / 20.0), abs=1e-6)
    assert state.energy_j == pytest.approx((1.0 + 2.0 * busy) * seconds)
    assert state.elapsed_s == pytest.approx(seconds)


def test_after_one_time_constant_63_percent_of_the_way_is_done() -> None:
    state = MODEL.advance(MODEL.start(25), 2, 25, MODEL.time_constant_s)
    assert (state.temp_c - 30) / (MODEL.equilibrium_c(2, 25) - 30) == pytest.approx(1 - math.exp(-1))


def test_idle_board_stays_where_it_starts() -> None:
    state = MODEL.start(25)
    assert MODEL.advance(state, 0, 25, 3600).temp_c == pytest.approx(state.temp_c)


def test_firmware_throttles_from_its_trip_until_three_degrees_below() -> None:
    states = [PlantState(84.0)]
    for busy in [4] * 40 + [0] * 12:  # towards 90 C, then towards 50 C
        states.append(MODEL.advance(states[-1], busy, 45, 0.5))
    began = next(state for state in states if state.throttling)
    ended = states[-1]
    assert 85 <= began.temp_c < 85.5
    assert not ended.throttling
    assert max(state.temp_c for state in states if not state.throttling) < 85
    assert min(state.temp_c for state in states if state.throttling) > 82
    assert ended.throttled_s == pytest.approx(0.5 * sum(state.throttling for state in states))
    assert ended.peak_c == max(state.temp_c for state in states)


def test_lower_clock_is_less_power() -> None:
    assert MODEL.power_w(2, clock_share=0.5) == 3.0
    slow = MODEL.advance(PlantState(60), 4, 25, 10, clock_share=0.5)
    assert slow.temp_c < MODEL.advance(PlantState(60), 4, 25, 10).temp_c


def test_board_without_lab_constants_cannot_be_emulated(demo_board: Board) -> None:
    with pytest.raises(ConfigError, match=r"lab: is required"):
        PlantModel.of(replace(demo_board, lab=None))


# The tree that sensors read.


def test_sensors_of_the_product_read_the_tree(demo_board: Board, tmp_path: Path) -> None:
    clock = FakeClock()
    tree = BoardTree(demo_board, tmp_path)
    tree.show(51.234, throttling=False)
    reader = ThermalReader(tmp_path, demo_board.thermal.zones, clock=clock, make_probe=InlineProbe)
    reader.read()
    reading = reader.read()
    assert (reading.temp_mc, reading.zone, reading.unused) == (51234, "cpu-thermal", ("acpitz",))
    assert [(trip.kind, trip.temp_mc) for trip in reading.zones[0].trips] == [("passive", 85000), ("critical", 95000)]
    assert read_firmware(tmp_path).slowdown is Slowdown.NONE
    assert usable_cpus(tmp_path, Path("/proc")) == os.sched_getaffinity(0)
    tree.show(85.5, throttling=True)
    assert read_firmware(tmp_path).slowdown is Slowdown.THERMAL
    assert cpu_clock(tmp_path).now_hz == 1_000_000_000
    tree.close()


def test_raspberry_pi_shows_its_throttle_flags(tmp_path: Path) -> None:
    tree = BoardTree(load_board(known_boards()["raspberry-pi-5-8gb"]), tmp_path)
    seen = []
    for throttling in (False, True, False):
        tree.show(80, throttling=throttling)
        flags = read_firmware(tmp_path).flags
        assert flags is not None
        seen.append(flags.bits)
    assert seen == [0, 0x40004, 0x40000]
    tree.close()


def test_values_are_written_in_place_and_are_never_torn(demo_board: Board, tmp_path: Path) -> None:
    tree = BoardTree(demo_board, tmp_path)
    path = tmp_path / "class/thermal/thermal_zone1/temp"
    tree.show(99.9, throttling=False)
    inode = path.stat().st_ino
    for temp_c in (101.5, 9.5, -3.25, 100.0):
        tree.show(temp_c, throttling=False)
        assert int(path.read_text()) == round(temp_c * 1000)
    assert path.stat().st_ino == inode
    tree.close()


# The process around it, on real processes.


@contextlib.contextmanager
def busy_child() -> Iterator[subprocess.Popen[str]]:
    """A shell whose child computes without end: the load is a grandchild's, as with a daemon and its workers."""
    script = f'"{sys.executable}" -c "{BUSY}" & wait'
    child = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "on\n"
        yield child
    finally:
        os.killpg(child.pid, 9)
        child.communicate()


def follow(plant: Plant, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.1)
        plant.step()


@pytest.mark.slow
@pytest.mark.system
def test_board_heats_with_the_time_that_a_process_tree_really_used_and_cools_without(
    demo_board: Board, tmp_path: Path
) -> None:
    with Plant(demo_board, tmp_path, ambient_c=22, enforce=False) as plant:
        follow(plant, 0.5)
        assert plant.state.temp_c == pytest.approx(28, abs=0.01)  # nobody is attached: idle
        with busy_child() as child:
            plant.attach(child.pid)
            time.sleep(0.1)
            plant.step()
            trace_from = len(plant.trace)
            follow(plant, 3.0)
            samples = list(plant.trace)[trace_from:]
            used = sum(item.busy_cores for item in samples) / len(samples)
            ticks = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            assert ticks, "the grandchild is alive"
            assert 0.3 < used < 1.3  # other work on this machine may take its share
            hot_c = plant.state.temp_c
            expected_c = 28 + 24 * used * (1 - math.exp(-3.0 / 12))
            assert hot_c == pytest.approx(expected_c, abs=1.0)
        follow(plant, 2.0)
        assert plant.state.temp_c < hot_c
        plant.ambient_c = 70
        follow(plant, 1.0)
        assert plant.state.temp_c > hot_c


@pytest.mark.slow
@pytest.mark.system
def test_firmware_throttling_cuts_the_real_quota(demo_board: Board, tmp_path: Path) -> None:
    quota = open_quota(f"edgeinfer-test-{os.getpid()}")
    if not isinstance(quota, CpuQuota):
        pytest.skip(f"no cpu quota here: {quota}")
    quota.close()
    assert demo_board.lab is not None
    board = replace(
        demo_board,
        cpu=replace(demo_board.cpu, cores=1),
        thermal=replace(demo_board.thermal, firmware_trip_c=MilliCelsius(30_000)),
        lab=replace(demo_board.lab, throttled_share=0.2),
    )
    with busy_child() as child, Plant(board, tmp_path, ambient_c=22) as plant:
        assert plant.enforcement == "cpu quota"
        plant.attach(child.pid)
        while not plant.state.throttling:
            follow(plant, 0.2)
        follow(plant, 0.5)
        from_here = len(plant.trace)
        follow(plant, 1.5)
        throttled = list(plant.trace)[from_here:]
        assert all(item.throttling for item in throttled)
        assert sum(item.busy_cores for item in throttled) / len(throttled) < 0.35
        assert plant.state.throttled_s > 1.5
        groups = Path(f"/proc/{child.pid}/cgroup").read_text()
        assert "edgeinfer-plant-" in groups
    assert not list(Path("/sys/fs/cgroup").glob(f"**/edgeinfer-plant-{os.getpid()}-*"))


@pytest.mark.slow
@pytest.mark.system
async def test_plant_as_a_process_obeys_its_standard_input(tmp_path: Path) -> None:
    tools = Path(__file__).parents[2] / "tools"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgeinfer_demo.plant",
        "--board", str(known_boards()["demo-board"]), "--root", str(tmp_path), "--ambient", "20",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{tools}:{tools.parent}"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        first = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        assert first["temp_c"] == pytest.approx(26, abs=0.01)
        process.stdin.write(b"nonsense\nambient x\nambient 60\nattach 1x\n")
        second = json.loads(await asyncio.wait_for(process.stdout.readline(), 5))
        third = json.loads(await asyncio.wait_for(process.stdout.readline(), 5))
        assert third["ambient_c"] == 60
        assert third["temp_c"] > second["temp_c"] > first["temp_c"]
        assert int((tmp_path / "class/thermal/thermal_zone1/temp").read_text()) > 26_500
        process.stdin.write(b"quit\n")
        assert await asyncio.wait_for(process.wait(), 5) == 0
        complaints = (await process.stderr.read()).decode()
        assert "'nonsense' is not: attach PID" in complaints
        assert "'attach 1x' is not" in complaints
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_noise_of_the_shown_value_is_small_and_the_same_in_every_run(demo_board: Board, tmp_path: Path) -> None:
    def shown(root: Path) -> list[int]:
        with Plant(demo_board, root, ambient_c=22, clock=FakeClock(), enforce=False) as plant:
            values = []
            for _ in range(20):
                plant.step()
                values.append(int((root / "class/thermal/thermal_zone1/temp").read_text()))
            return values

    first, second = shown(tmp_path / "a"), shown(tmp_path / "b")
    assert first == second
    assert len(set(first)) > 10
    assert all(abs(value - 28_000) <= 150 for value in first)
