from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.artifact.board import Board, known_boards, load_board
from edgeinfer.governor.thermal_model import Forecast, ThermalModel, forecast, observe
from edgeinfer_demo.plant import PlantModel

BOARDS = {name: load_board(path) for name, path in known_boards().items()}
S = 1_000_000_000
STEPS = (0.2, 0.9, 0.4, 0.7, 0.1, 0.5)


@dataclass
class Lesson:
    model: ThermalModel
    temp_c: float
    trusted_s: int


def teach(board: Board, *, ambient_c: float = 30.0, ramp_c_per_min: float = 0.0, step_c: int = 1, seconds: int = 1800,
          hold_s: int = 120, noise_c: float = 0.3) -> Lesson:  # fmt: skip
    """Show a model the board under a load that changes every `hold_s`, through a noisy, coarse sensor."""
    plant_model, noise = PlantModel.of(board), random.Random(3)
    plant, model, trusted_s, load = plant_model.start(ambient_c), ThermalModel(), 0, 0.0
    for second in range(seconds):
        raw = round((plant.temp_c + noise.uniform(-noise_c, noise_c)) * 1000 / step_c) * step_c
        model = observe(model, raw, load, second * S)
        trusted_s += model.trusted
        load = STEPS[second // hold_s % len(STEPS)]
        air_c = ambient_c + ramp_c_per_min * second / 60
        plant = plant_model.advance(plant, load * board.cpu.cores, air_c, 1.0)
    return Lesson(model, plant.temp_c, trusted_s)


@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("step_c", [1, 487, 1000])
def test_board_is_learnt_from_its_load_and_a_noisy_sensor(name: str, step_c: int) -> None:
    board = BOARDS[name]
    assert board.lab is not None
    lesson = teach(board, step_c=step_c)
    found = forecast(lesson.model)
    assert found is not None
    plant = PlantModel.of(board)
    rise_c = board.lab.resistance_c_per_w * board.lab.watt_per_core * board.cpu.cores
    assert found.rise_c == pytest.approx(rise_c, rel=0.25)
    assert found.idle_c == pytest.approx(plant.equilibrium_c(0, 30), abs=0.1 * rise_c)
    assert 0.6 < found.tau_s / plant.time_constant_s < 1.7
    assert lesson.model.confidence > 0.5
    # What it is for: where the board settles, and when it gets somewhere.
    for load in (0.3, 0.6, 1.0):
        assert found.settles_c(load) == pytest.approx(
            plant.equilibrium_c(load * board.cpu.cores, 30), abs=0.15 * rise_c
        )


@pytest.mark.parametrize("name", ["raspberry-pi-4-2gb", "raspberry-pi-5-8gb", "n100-8gb"])
def test_time_to_a_temperature_is_foretold_within_a_quarter(name: str) -> None:
    board = BOARDS[name]
    lesson = teach(board, ambient_c=20)
    found = forecast(lesson.model)
    assert found is not None
    plant_model = PlantModel.of(board)
    target_c = lesson.temp_c + 0.6 * (plant_model.equilibrium_c(board.cpu.cores, 20) - lesson.temp_c)
    foretold_s = found.time_to_s(lesson.temp_c, target_c, 1.0)
    plant, seconds = plant_model.start(20), 0
    plant = plant.__class__(lesson.temp_c)
    while plant.temp_c < target_c:
        plant, seconds = plant_model.advance(plant, board.cpu.cores, 20, 1.0), seconds + 1
    assert foretold_s == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize("ramp", [-1.0, 1.0])
def test_slow_change_of_the_air_is_followed_and_not_taken_for_load(ramp: float) -> None:
    board = BOARDS["raspberry-pi-4-2gb"]
    lesson = teach(board, ambient_c=30, ramp_c_per_min=ramp, seconds=900)
    found = forecast(lesson.model)
    assert found is not None
    assert found.rise_c == pytest.approx(40, rel=0.3)
    assert found.settles_c(found.load) == pytest.approx(lesson.temp_c, abs=2.0)


def test_nothing_is_foretold_before_the_load_has_moved() -> None:
    model = ThermalModel()
    for second in range(3600):
        model = observe(model, 55_000 + second % 3 * 100, 0.5, second * S)
    assert forecast(model) is None


@pytest.mark.parametrize("wild", ["jumping", "unrelated"])
def test_a_board_that_first_order_does_not_describe_is_left_to_the_trips(wild: str) -> None:
    rnd, model, trusted = random.Random(5), ThermalModel(), 0
    for second in range(3600):
        swing = 15 * math.sin(second / 9) if wild == "jumping" else (20 if second // 90 % 2 else 0)
        model = observe(model, round((50 + swing) * 1000), rnd.random(), second * S)
        trusted += model.trusted
    assert trusted < 360


def test_trust_is_lost_at_once_when_the_air_jumps_and_won_back_more_slowly_each_time() -> None:
    model = teach(BOARDS["raspberry-pi-4-2gb"]).model
    assert model.trusted
    first_s = model.prove_s
    at_ns = model.at_ns or 0
    for second in range(1, 6):
        model = observe(model, 95_000, 0.5, at_ns + second * S)
    assert not model.trusted
    assert model.prove_s == 3 * first_s


def test_an_unknown_load_or_a_sensor_fault_breaks_nothing() -> None:
    model = teach(BOARDS["raspberry-pi-4-2gb"]).model
    at_ns = model.at_ns or 0
    assert forecast(observe(model, 60_000, None, at_ns + S)) is None
    kept = observe(model, None, 0.5, at_ns + S)
    assert forecast(kept) is not None
    assert kept.candidates[kept.best].rise_c == model.candidates[model.best].rise_c
    assert observe(ThermalModel(), None, 0.5, 0) == ThermalModel()


@given(st.lists(st.tuples(st.none() | st.integers(-40_000, 125_000), st.none() | st.floats(0, 1), st.integers(0, 40)),
                max_size=80))  # fmt: skip
@settings(max_examples=60)
def test_whatever_it_sees_it_stays_finite_and_within_its_bounds(
    seen: list[tuple[int | None, float | None, int]],
) -> None:
    model, now_ns = ThermalModel(), 0
    for temp_mc, load, pause_s in seen:
        now_ns += pause_s * S
        model = observe(model, temp_mc, load, now_ns)
        assert 0 <= model.confidence <= 1
        for item in model.candidates:
            assert 3 <= item.rise_c <= 120
            assert -40 <= item.idle_c <= 110
            assert all(map(math.isfinite, (*item.spreads, item.rest_c, item.score_c2)))


def test_forecasts_of_a_known_board() -> None:
    said = Forecast(idle_c=40, rise_c=50, tau_s=100, load=0.2)
    assert said.settles_c(0.5) == 65
    assert (said.sustainable(65), said.sustainable(30), said.sustainable(95)) == (0.5, 0, 1)
    assert said.time_to_s(50, 65, 0.5) is None
    assert said.time_to_s(66, 65, 0.0) == 0
    assert said.time_to_s(40, 65, 1.0) == pytest.approx(100 * math.log(2))
    load = said.steering(60, 65, 20)
    assert pytest.approx(said.settles_c(load) + (60 - said.settles_c(load)) * math.exp(-0.2)) == 65
    assert said.steering(65, 65, 20) == pytest.approx(said.sustainable(65))


def test_a_step_costs_less_than_a_thousandth_of_a_core() -> None:
    model, began = ThermalModel(), time.thread_time_ns()
    for second in range(200):
        model = observe(model, 50_000 + second, second % 7 / 7, second * S)
    assert (time.thread_time_ns() - began) / 200 < 1_000_000
