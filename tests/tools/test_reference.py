"""The reference distribution is bounded, repeatable and describes the values."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer_tools.reference import BINS, VALUES_PER_TENSOR, Distribution, reference


def test_it_describes_the_values() -> None:
    found = Distribution()
    for value in range(101):
        found.add(np.array([value], np.float32))
    summary = found.summary()
    assert summary["requests"] == summary["values"] == 101
    assert summary["mean"] == 50
    assert summary["quantiles"]["0.25"] == 25
    assert sum(summary["histogram"]["counts"]) == 101
    assert len(summary["histogram"]["edges"]) == BINS + 1


def test_its_extent_spans_all_requests() -> None:
    found = Distribution()
    assert found.extent == (0.0, 0.0)
    for values in ([], [1.5, 2.0], [-3.0, 0.5]):
        found.add(np.array(values, np.float32))
    assert found.extent == (-3.0, 2.0)


def test_large_tensors_are_thinned_evenly() -> None:
    found = Distribution()
    found.add(np.linspace(0, 1, 1_000_000, dtype=np.float32))
    summary = found.summary()
    assert summary["values"] <= VALUES_PER_TENSOR
    assert summary["mean"] == pytest.approx(0.5, abs=1e-3)


def test_texts_count_by_their_words_and_empty_tensors_by_nothing() -> None:
    words, empty = Distribution(), Distribution()
    words.add(np.array(["a", "b"], dtype=object))
    empty.add(np.zeros((1, 0), np.float32))
    found = reference({"inputs.text": words, "outputs.none": empty}, variant="fp32")
    assert found["inputs"]["text"]["mean"] == 2
    assert found["outputs"]["none"] == {"requests": 1, "values": 0}
