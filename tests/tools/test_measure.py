"""Costs are measured as a device will meet them: in its own worker, with its own arena, and not in somebody's way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeinfer.artifact.profile import Latency
from edgeinfer.worker.costing import MIN_RUNS, Round, quietest
from edgeinfer_tools.measure import measure
from edgeinfer_tools.recipe import VariantRecipe, load_recipe
from tests.tools.conftest import RecipeMaker, conv_net


def round_of(p50_us: int, p99_us: int) -> Round:
    return Round(Latency(p50_us=p50_us, p90_us=p99_us, p99_us=p99_us, mean_us=p50_us, runs=9), cpu_us=p50_us)


def test_the_round_with_the_lowest_median_is_reported_with_its_own_tail() -> None:
    rounds = [round_of(120, 125), round_of(100, 400), round_of(110, 112)]
    assert quietest(rounds) == rounds[1]


@pytest.mark.system
@pytest.mark.slow
def test_a_worker_per_thread_count_is_measured(conv_recipe: RecipeMaker, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(conv_net(), model)
    typical = {"x": np.zeros((1, 3, 16, 16), np.float32)}
    recipe = load_recipe(conv_recipe())
    costs = measure(
        model, variant=VariantRecipe("fp32", "keep"), recipe=recipe, threads=[1, 2], typical=typical, seconds=0.01
    )
    assert [cost.threads for cost in costs] == [1, 2]
    for cost in costs:
        assert cost.latency.runs >= MIN_RUNS
        assert 0 < cost.latency.p50_us <= cost.latency.p90_us <= cost.latency.p99_us
        assert 0 < cost.steady_bytes <= cost.load_peak_bytes < 64 << 20
