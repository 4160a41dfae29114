"""The policy against the lab's thermal model of each board, at full demand: an hour takes milliseconds."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from edgeinfer.artifact.board import Board, known_boards, load_board
from edgeinfer.governor.policy import Policy, PolicyState, step
from edgeinfer.limits import ThermalLevel
from edgeinfer.sensors.thermal import ThermalReading
from edgeinfer.sensors.zone import Belief, observe
from edgeinfer_demo.plant import PlantModel, PlantState

BOARDS = {name: load_board(path) for name, path in known_boards().items()}
S = 1_000_000_000


@dataclass
class Run:
    states: list[PlantState]
    duties: list[float]
    levels: list[ThermalLevel]

    @property
    def changes(self) -> int:
        return sum(one is not other for one, other in itertools.pairwise(self.levels))


def simulate(
    board: Board, ambient_c: float, *, seconds: int = 3600, governed: bool = True, step_c: int = 1, noise_c: float = 0.3
) -> Run:
    """Run full demand on all cores for an hour, with a noisy sensor that counts in steps of `step_c` millidegrees."""
    model, policy = PlantModel.of(board), Policy.of(board.thermal)
    noise = random.Random(7)
    plant, state, belief, duty = model.start(ambient_c), PolicyState(), Belief(), 1.0
    run = Run([], [], [])
    for second in range(seconds):
        raw = round((plant.temp_c + noise.uniform(-noise_c, noise_c)) * 1000 / step_c) * step_c
        belief = observe(belief, raw)
        reading = ThermalReading(belief.temp_mc, "cpu-thermal", belief.state, belief.detail)
        if governed:
            state, decision = step(policy, state, reading, second * S)
            duty = decision.duty_cycle
        plant = model.advance(plant, duty * board.cpu.cores, ambient_c, 1.0)
        run.states.append(plant)
        run.duties.append(duty)
        run.levels.append(state.level)
    return run


@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("ambient_c", [22.0, 40.0, 50.0])
@pytest.mark.parametrize("step_c", [1, 487, 1000])
def test_firmware_never_throttles_wherever_the_idle_board_is_below_its_trip(
    name: str, ambient_c: float, step_c: int
) -> None:
    board = BOARDS[name]
    assert PlantModel.of(board).equilibrium_c(0, ambient_c) < board.thermal.firmware_trip_c / 1000
    assert simulate(board, ambient_c, step_c=step_c).states[-1].throttled_s == 0


@pytest.mark.parametrize("name", ["raspberry-pi-5-8gb", "raspberry-pi-4-2gb", "generic-arm64"])
def test_without_governor_the_firmware_does_throttle(name: str) -> None:
    assert simulate(BOARDS[name], 40, governed=False).states[-1].throttled_s > 600


@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("ambient_c", [22.0, 35.0, 50.0])
def test_board_settles_instead_of_cycling(name: str, ambient_c: float) -> None:
    run = simulate(BOARDS[name], ambient_c)
    assert run.changes <= 6  # on the way up and around
    late = run.levels[1200:]
    assert sum(one is not other for one, other in itertools.pairwise(late)) <= 2
    assert max(run.duties[1200:]) - min(run.duties[1200:]) < 0.25


@pytest.mark.parametrize("name", ["raspberry-pi-5-8gb", "raspberry-pi-4-2gb"])
def test_pace_is_close_to_what_the_board_can_sustain(name: str) -> None:
    board = BOARDS[name]
    model = PlantModel.of(board)
    run = simulate(board, 25)
    mean = sum(run.duties[1200:]) / len(run.duties[1200:])
    trip_c = board.thermal.firmware_trip_c / 1000
    lab = model.lab
    best = ((trip_c - 25) / lab.resistance_c_per_w - lab.idle_w) / (lab.watt_per_core * board.cpu.cores)
    assert 0.75 * best < mean < best


def test_demo_board_is_throttled_by_the_demos_heat_and_recovers_within_half_a_minute() -> None:
    board = BOARDS["demo-board"]
    model, policy = PlantModel.of(board), Policy.of(board.thermal)
    plant, state = model.start(22), PolicyState()
    seen = []
    for tick in range(4 * 85):
        ambient_c = 58 if tick < 4 * 35 else 18
        reading = ThermalReading(round(plant.temp_c * 1000), "cpu-thermal", observe(Belief(), 1).state)
        state, decision = step(policy, state, reading, tick * S // 4)
        plant = model.advance(plant, 0.7 * decision.duty_cycle, ambient_c, 0.25)
        seen.append(decision.level)
    assert max(seen[: 4 * 35]) >= ThermalLevel.WARM
    assert set(seen[4 * 60 :]) == {ThermalLevel.NOMINAL}
    assert plant.throttled_s == 0
