"""The policy against the lab's thermal model of each board, at full demand: an hour takes milliseconds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from edgeinfer.artifact.board import Board, known_boards, load_board
from edgeinfer.governor.policy import Policy, PolicyState, step
from edgeinfer.governor.thermal_model import Forecast, ThermalModel, forecast
from edgeinfer.governor.thermal_model import observe as learn
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
    loads: list[float]
    trusted_s: int = 0

    @property
    def work(self) -> float:
        """Share of the full work that was done."""
        return sum(self.loads) / len(self.loads)

    @property
    def peak_c(self) -> float:
        return self.states[-1].peak_c

    @property
    def changes(self) -> int:
        return sum(one is not other for one, other in itertools.pairwise(self.levels))


def learnt(model: ThermalModel) -> Forecast | None:
    return forecast(model)


def simulate(
    board: Board, ambient_c: float | Callable[[int], float], *, seconds: int = 3600, governed: bool = True,
    step_c: int = 1, noise_c: float = 0.3, foresee: Callable[[ThermalModel], Forecast | None] | None = None,
    demand: Callable[[int], float] = lambda _: 1.0, others: float = 0.0,
) -> Run:  # fmt: skip
    """Run a demand on all cores for an hour, with a noisy sensor that counts in steps of `step_c` millidegrees."""
    air = ambient_c if callable(ambient_c) else lambda _: ambient_c
    model, policy = PlantModel.of(board), Policy.of(board.thermal)
    noise = random.Random(7)
    plant, state, belief, duty = model.start(air(0)), PolicyState(), Belief(), 1.0
    run, learning, load = Run([], [], [], []), ThermalModel(), 0.0
    for second in range(seconds):
        raw = round((plant.temp_c + noise.uniform(-noise_c, noise_c)) * 1000 / step_c) * step_c
        belief = observe(belief, raw)
        reading = ThermalReading(belief.temp_mc, "cpu-thermal", belief.state, belief.detail)
        said = None
        if foresee is not None:
            learning = learn(learning, belief.temp_mc, min(1.0, load + others), second * S)
            said = foresee(learning)
            run.trusted_s += said is not None
        if governed:
            state, decision = step(policy, state, reading, second * S, forecast=said, others=others)
            duty = decision.duty_cycle
        load = min(duty, demand(second), 1 - others)
        plant = model.advance(plant, (load + others) * board.cpu.cores, air(second), 1.0)
        run.states.append(plant)
        run.duties.append(duty)
        run.levels.append(state.level)
        run.loads.append(load)
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


# With the model that learns the board while it runs.

WEATHER: dict[str, Callable[[int], float]] = {
    "22 C": lambda _: 22.0,
    "40 C": lambda _: 40.0,
    "sunny noon": lambda second: 20 + 25 * min(1.0, max(0.0, (second - 600) / 900)),
    "a door": lambda second: 22.0 if second < 1200 else 45.0,
    "air conditioning": lambda second: 30 + 6 * math.sin(second / 120),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("weather", WEATHER)
@pytest.mark.parametrize("step_c", [1, 1000])
def test_firmware_never_throttles_a_board_that_is_steered_by_its_model(name: str, weather: str, step_c: int) -> None:
    run = simulate(BOARDS[name], WEATHER[weather], seconds=2400, step_c=step_c, foresee=learnt)
    assert run.states[-1].throttled_s == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("ambient_c", [22.0, 40.0, 50.0])
def test_the_model_gets_more_work_done_and_stays_below_the_critical_trip(name: str, ambient_c: float) -> None:
    board = BOARDS[name]
    alone = simulate(board, ambient_c)
    run = simulate(board, ambient_c, foresee=learnt)
    assert run.work >= 0.97 * alone.work
    if max(alone.peak_c, run.peak_c) < board.thermal.trips[-1].at_c / 1000 - 1.5 and alone.work < 0.9:
        assert run.work > 1.05 * alone.work or run.trusted_s == 0
    assert run.peak_c <= max(alone.peak_c, board.thermal.trips[-1].at_c / 1000 - 1.0)
    assert run.changes <= 6
    late = run.levels[1200:]
    assert sum(one is not other for one, other in itertools.pairwise(late)) <= 2
    assert sum(level is ThermalLevel.CRITICAL for level in run.levels) <= sum(
        level is ThermalLevel.CRITICAL for level in alone.levels
    )


@pytest.mark.parametrize(
    ("name", "least"),
    [("raspberry-pi-4-2gb", 0.88), ("raspberry-pi-5-8gb", 0.88), ("rock-5b", 0.9), ("generic-arm64", 0.85)],
)
def test_pace_with_the_model_is_close_to_the_best_constant_load(name: str, least: float) -> None:
    board = BOARDS[name]
    lab = PlantModel.of(board).lab
    trip_c = board.thermal.firmware_trip_c / 1000
    best = ((trip_c - 22) / lab.resistance_c_per_w - lab.idle_w) / (lab.watt_per_core * board.cpu.cores)
    assert simulate(board, 22, foresee=learnt).work > least * best


WORST = {
    "all is well": Forecast(-40, 3, 440, 0.0),
    "cold and slow": Forecast(-40, 120, 440, 1.0),
    "cold and fast": Forecast(-40, 120, 4, 0.0),
    "hopeless": Forecast(110, 120, 4, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("lie", WORST)
@pytest.mark.parametrize("step_c", [1, 1000])
def test_the_worst_forecast_does_not_make_firmware_throttle(name: str, lie: str, step_c: int) -> None:
    run = simulate(BOARDS[name], 40, seconds=1800, step_c=step_c, foresee=lambda _: WORST[lie])
    assert run.states[-1].throttled_s == 0


@pytest.mark.parametrize("name", ["raspberry-pi-4-2gb", "raspberry-pi-5-8gb"])
def test_load_of_others_leaves_less_for_us_and_is_not_ignored(name: str) -> None:
    board = BOARDS[name]
    run = simulate(board, 25, foresee=learnt, others=0.3)
    assert run.states[-1].throttled_s == 0
    assert run.trusted_s > 1800
    assert run.peak_c <= board.thermal.trips[-1].at_c / 1000 - 0.5


def test_a_burst_uses_the_thermal_mass() -> None:
    def bursts(second: int) -> float:
        return 1.0 if second % 300 < 60 else 0.2

    board = BOARDS["raspberry-pi-4-2gb"]
    alone = simulate(board, 30, demand=bursts)
    run = simulate(board, 30, demand=bursts, foresee=learnt)
    assert run.states[-1].throttled_s == 0
    assert run.work >= alone.work


@pytest.mark.parametrize("name", ["raspberry-pi-4-2gb", "raspberry-pi-5-8gb", "jetson-orin-nano", "rock-5b"])
def test_an_hour_of_air_that_swings_around_a_threshold_is_at_most_two_changes_once_settled(name: str) -> None:
    run = simulate(BOARDS[name], lambda second: 30 + 1.0 * math.sin(second / 60), seconds=4800, foresee=learnt)
    late = run.levels[1200:]
    assert sum(one is not other for one, other in itertools.pairwise(late)) <= 2
