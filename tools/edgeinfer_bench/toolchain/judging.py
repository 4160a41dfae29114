"""Say how good and how fast artefacts are: the same evaluation for all, and ONNX Runtime on the CPU by turns.

Latency is that of the quietest of several rounds, in each of which every artefact has its turn: whatever else the
machine does only ever makes a run slower, and all see the same machine.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.errors import EdgeInferError
from edgeinfer_bench.toolchain.make import Data
from edgeinfer_tools.evaluate import GateResult, evaluate, judge
from edgeinfer_tools.metrics import LOWER_IS_BETTER
from edgeinfer_tools.samples import decode_inputs
from edgeinfer_tools.session import Runner

ROUNDS = 7
TURN_S = 0.12
"""Of one artefact in one round, and at least `LEAST_RUNS`."""
LEAST_RUNS = 3
THREADS = (1, 2)


@dataclass(frozen=True, slots=True)
class Quality:
    """How good one artefact is on the recipe's evaluation data."""

    value: float
    """Of the first gate, so that more is better."""
    passed: bool
    """All gates."""
    text: str
    """The gates that it misses, or its first gate."""


def quality(source: Data, model: Path, float_model: Path) -> Quality:
    """Judge one artefact; one that cannot be run or evaluated has failed, and the text says why."""
    recipe, state = source.recipe, source.recipe.state
    try:
        here, reference = Runner(model, state=state), Runner(float_model, state=state)
        gates = judge(evaluate(here, reference, source.streams("evaluation"), recipe), recipe.file.gates)
    except EdgeInferError as error:
        return Quality(0.0, passed=False, text=str(error)[:160])
    missed = [gate for gate in gates if not gate.passed]
    return Quality(value_of(gates[0]), passed=not missed, text="; ".join(map(str, missed)) or str(gates[0]))


def value_of(gate: GateResult) -> float:
    """Return the gate's value, its sign turned where less is better."""
    return -gate.value if gate.metric in LOWER_IS_BETTER else gate.value


def latencies(source: Data, models: Mapping[str, Path]) -> dict[str, dict[int, float]]:
    """Return the p50 in milliseconds of each artefact at each thread count; one that does not run is left out."""
    recipe = source.recipe
    function = "golden" if recipe.hook("data", "golden") is not None else "evaluation"
    request = next(iter(next(source.streams(function)).requests))
    tensors = decode_inputs(request, recipe.inputs)
    found: dict[str, dict[int, float]] = {name: {} for name in models}
    turns = random.Random(1)  # noqa: S311 - an order of turns
    for threads in THREADS:
        runners = {}
        for name, path in models.items():
            try:
                runners[name] = Runner(path, threads=threads, state=recipe.state)
                runners[name].run(tensors)
            except EdgeInferError:
                runners.pop(name, None)
        for _ in range(ROUNDS):
            order = list(runners)
            turns.shuffle(order)
            for name in order:
                took: list[float] = []
                end = time.perf_counter() + TURN_S
                while len(took) < LEAST_RUNS or time.perf_counter() < end:
                    began = time.perf_counter()
                    runners[name].run(tensors)
                    took.append(1e3 * (time.perf_counter() - began))
                median = statistics.median(took)
                found[name][threads] = min(median, found[name].get(threads, median))
    return {name: taken for name, taken in found.items() if len(taken) == len(THREADS)}
