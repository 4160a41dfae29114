"""Each step on answers gives what its definition gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.samples import Array
from tests.tools.steps.joined import after

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return RANDOM.normal(size=shape).astype(np.float32)


def test_softmax_and_sigmoid() -> None:
    x = normal(2, 5) * 10
    shares = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    found = after([{"step": "softmax"}], {"logits": x}, {"shares": ("FP32", [2, 5])})["shares"]
    np.testing.assert_allclose(found, shares, atol=1e-6)
    found = after([{"step": "sigmoid"}], {"logits": x}, {"p": ("FP32", [2, 5])})["p"]
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-x.astype(np.float64))), atol=1e-6)


def test_the_result_may_have_the_name_that_the_models_output_had() -> None:
    x = normal(1, 4)
    found = after([{"step": "softmax"}], {"scores": x}, {"scores": ("FP32", [1, 4])})["scores"]
    assert found.sum() == pytest.approx(1, abs=1e-6)


def test_top_k_gives_the_highest_in_order() -> None:
    x = normal(2, 50)
    steps: list[dict[str, Any]] = [{"step": "softmax"}, {"step": "top_k", "k": 5, "gives": ["scores", "classes"]}]
    found = after(steps, {"logits": x}, {"scores": ("FP32", [2, 5]), "classes": ("INT64", [2, 5])})
    np.testing.assert_array_equal(found["classes"], np.argsort(-x, axis=1)[:, :5])
    assert (np.diff(found["scores"]) <= 0).all()


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"has shape \[1, 4\], fewer than k = 5"):
        after([{"step": "top_k", "k": 5}], {"x": normal(1, 4)}, {"a": ("FP32", [1, 5]), "b": ("INT64", [1, 5])})


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("method", ["mean", "cls", "max"])
def test_pooling_leaves_padding_out(method: str, normalise: bool) -> None:
    hidden, mask = normal(3, 7, 16), np.array([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6])
    wanted = np.stack([
        row[0] if method == "cls" else row[: m.sum()].mean(0) if method == "mean" else row[: m.sum()].max(0)
        for row, m in zip(hidden.astype(np.float64), mask, strict=True)
    ])  # fmt: skip
    if normalise:
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    step = {"step": "pool", "method": method, "normalise": normalise, "takes": ["hidden", "mask"]}
    found = after([step], {"hidden": hidden, "mask": mask}, {"e": ("FP32", [3, 16])}, {"mask": "INT64"})["e"]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_row_without_tokens_and_a_vector_without_length_are_no_nan() -> None:
    hidden, mask = normal(1, 3, 4), np.zeros((1, 3), np.int64)
    step = {"step": "pool", "normalise": True, "takes": ["hidden", "mask"]}
    found = after([step], {"hidden": hidden, "mask": mask}, {"e": ("FP32", [1, 4])}, {"mask": "INT64"})["e"]
    assert np.isfinite(found).all()


def test_a_pool_without_its_mask_is_refused() -> None:
    with pytest.raises(ModelRefused, match="takes tokens' embeddings and their mask"):
        after([{"step": "pool"}], {"hidden": normal(1, 3, 4)}, {"e": ("FP32", [1, 4])})


def test_lengths_shapes_and_datatypes() -> None:
    x = normal(2, 6)
    found = after([{"step": "l2_normalise"}], {"x": x}, {"y": ("FP32", [2, 6])})["y"]
    np.testing.assert_allclose(found, x / np.linalg.norm(x, axis=1, keepdims=True), atol=1e-6)
    found = after([{"step": "reshape", "shape": [0, 2, 3]}], {"x": x}, {"y": ("FP32", [2, 2, 3])})["y"]
    np.testing.assert_array_equal(found, x.reshape(2, 2, 3))
    found = after([{"step": "cast", "datatype": "INT32"}], {"x": x}, {"y": ("INT32", [2, 6])})["y"]
    np.testing.assert_array_equal(found, x.astype(np.int32))
