"""Two answers agree, or it is said by how much they do not."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer_tools.origin import Validation
from edgeinfer_tools.samples import Array
from edgeinfer_tools.validate import compare, problems

ONE = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def wrong(wanted: Array, found: Array, limits: Validation = Validation()) -> list[str]:  # noqa: B008
    return problems(compare([{"y": wanted}], [{"y": found}]), limits)


def test_equal_answers_agree_infinities_and_texts_too() -> None:
    assert wrong(ONE, ONE.copy()) == []
    infinite = np.array([1, np.inf, -np.inf], np.float32)
    assert wrong(infinite, infinite.copy()) == []
    assert wrong(np.array(["a"], object), np.array(["a"], object)) == []
    assert wrong(np.zeros((0, 4)), np.zeros((0, 4))) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ONE + np.float32(0.01), "differs by up to 0.01 (mean 0.01, cosine"),
        (np.where(ONE < -1.9, np.nan, ONE), "is NaN in the new graph (request 0)"),
        (np.where(ONE < -1.9, np.inf, ONE), "is infinite on one side only"),
        (ONE[:, :3], "has shape [3, 3] instead of [3, 4]"),
    ],
)
def test_a_difference_is_told_with_its_numbers(found: Array, words: str) -> None:
    (text,) = wrong(ONE, found)
    assert words in text


def test_a_nan_of_the_source_is_the_sources_fault() -> None:
    (text,) = wrong(np.full(3, np.nan), np.full(3, np.nan))
    assert "is NaN in the source model itself" in text


def test_the_limit_is_a_share_of_the_largest_value() -> None:
    large = ONE * 1000
    assert wrong(large, large + np.float32(1)) == []
    assert wrong(ONE, ONE + np.float32(0.1), Validation(tolerance=0.1, cosine=0.9)) == []
    (text,) = wrong(np.array([1e-8, 1]), np.array([1, 1e-8]), Validation(tolerance=10))
    assert "has cosine 0.0" in text


def test_a_missing_output_is_named() -> None:
    (text,) = problems(compare([{"y": ONE}], [{"z": ONE}]), Validation())
    assert "output 'y' is missing (there are z)" in text
