"""Data that would make a garbage model are refused, and none is held longer than needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgeinfer.artifact.manifest import StateSpec, TensorSpec
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.samples import Array, Stream
from edgeinfer_tools.session import Runner

SPEC = TensorSpec(name="x", datatype="FP32", shape=[1, -1], max_shape=[1, 8])


def reader(*arrays: Array, name: str = "x") -> CheckedSamples:
    streams = (Stream(f"s{index}", [{name: array}]) for index, array in enumerate(arrays))
    return CheckedSamples(streams, [SPEC], state=[], float_model=no_model)


def no_model() -> Runner:
    raise AssertionError("a model without state is not run")


def drain(samples: CheckedSamples) -> int:
    while samples.get_next() is not None:
        pass
    return samples.count


def row(*values: float) -> Array:
    return np.array([values], np.float32)


def test_good_data_pass_even_when_their_lengths_vary() -> None:
    assert drain(reader(row(1, 2, 3), row(4), row(5, 6))) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_sample_and_input(bad: float) -> None:
    with pytest.raises(DataRefused, match=r"sample s1\[0\]: input 'x' holds NaN or infinity"):
        drain(reader(row(1, 2), row(3, bad)))


@pytest.mark.parametrize("constant", [0.0, 0.5])
def test_constant_data_are_refused(constant: float) -> None:
    with pytest.raises(DataRefused, match=f"all 3 calibration samples are the constant {constant:g} in input 'x'"):
        drain(reader(*[row(constant, constant)] * 3))


def test_no_data_are_refused() -> None:
    with pytest.raises(DataRefused, match="yields no sample"):
        drain(reader())


def test_a_wrong_name_type_or_shape_is_refused() -> None:
    with pytest.raises(DataRefused, match="inputs z; the contract has x"):
        drain(reader(row(1), name="z"))
    with pytest.raises(DataRefused, match="'x' is FP32, a sample has float64"):
        drain(reader(row(1).astype(np.float64)))
    with pytest.raises(DataRefused, match=r"shape \[1, -1\] up to \[1, 8\], a sample has \[1, 9\]"):
        drain(reader(row(*range(9))))


def test_one_sample_is_taken_at_a_time() -> None:
    made = 0

    def streams() -> Iterator[Stream]:
        nonlocal made
        for index in range(1000):
            made += 1
            yield Stream(f"s{index}", [{"x": row(index, 1)}])

    samples = CheckedSamples(streams(), [SPEC], state=[], float_model=no_model)
    for wanted in (1, 2, 3):
        samples.get_next()
        assert made == wanted


def test_a_stateful_model_is_calibrated_with_the_states_that_occur() -> None:
    class Summing(Runner):
        """A model whose state is the sum of its inputs."""

        def __init__(self) -> None:
            self.total = 0.0

        def reset(self) -> None:
            self.total = 0.0

        def state(self) -> dict[str, Array]:
            return {"sum": np.array([self.total], np.float32)}

        def run(self, inputs: Any) -> dict[str, Array]:
            self.total += float(inputs["x"].sum())
            return {}

    streams = iter([Stream("a", [{"x": row(1)}, {"x": row(2)}, {"x": row(3)}]), Stream("b", [{"x": row(4)}])])
    state = [StateSpec(input="sum", output="next", datatype="FP32", shape=[1])]
    samples = CheckedSamples(streams, [SPEC], state=state, float_model=Summing)
    seen = []
    while (found := samples.get_next()) is not None:
        seen.append(float(found["sum"][0]))
    assert seen == [0, 1, 3, 0]
