"""Each metric is what its name says, worked out by hand, and refuses to be decided by nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edgeinfer_tools.evaluate import GateResult, quality
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.metrics import SCORES, Score, Seen, macro_f1
from edgeinfer_tools.samples import Array, Detection


def feed(metric: str, *requests: Seen) -> Score:
    score = SCORES[metric]("y")
    for request in requests:
        score.add(request)
    return score


def seen(
    got: Any, want: Any = None, *, label: str = "", truth: Any = None, labels: tuple[str, ...] = (), answer: Any = None
) -> Seen:
    arrays = (np.asarray(value, np.float32) for value in (got, got if want is None else want))
    mine, theirs = arrays
    return Seen({"y": mine}, {"y": theirs}, label, truth, labels, answer)


def test_top_k() -> None:
    labels = tuple("abcdefg")
    requests = [
        seen([[9, 8, 7, 6, 5, 4, 3]], label="a", labels=labels),
        seen([[9, 8, 7, 6, 5, 4, 3]], label="e", labels=labels),
        seen([[9, 8, 7, 6, 5, 4, 3]], label="f", labels=labels),
        seen([[9, 8, 7, 6, 5, 4, 3]], labels=labels),
    ]
    assert feed("top1_accuracy", *requests).value() == pytest.approx(1 / 3)
    assert feed("top5_accuracy", *requests).value() == pytest.approx(2 / 3)
    with pytest.raises(DataRefused, match="the label 'z' is none of the model's 7 classes"):
        feed("top1_accuracy", seen([[1] * 7], label="z", labels=labels))


def test_agreement_counts_rows() -> None:
    assert feed("top1_agreement", seen([[[1, 2], [2, 1]]], [[[1, 2], [1, 2]]])).value() == 0.5


def test_cosine() -> None:
    assert feed("cosine", seen([1, 0], [0, 1]), seen([2, 0], [1, 0])).value() == pytest.approx(0.5)
    assert feed("cosine", seen([0, 0], [0, 0])).value() == 1


def test_divergence_of_probabilities_and_of_logits_is_the_same() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])
    expected = float((p * np.log(p / q)).sum())
    assert feed("kl", seen(q, p)).value() == pytest.approx(expected, abs=1e-6)
    assert feed("kl", seen(np.log(q) + 5, np.log(p) - 3)).value() == pytest.approx(expected, abs=1e-6)
    assert feed("kl", seen(p, p)).value() == 0


def test_perplexity_is_that_of_the_tokens_that_come_next() -> None:
    logits, sure = np.log([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]), np.log([[0.999, 0.001], [0.001, 0.999], [0.5, 0.5]])
    request = seen(logits, sure, truth=[0, 1, -100])
    expected = float(np.exp(-(np.log(0.5) + np.log(0.75)) / 2))
    assert feed("perplexity", request).value() == pytest.approx(expected, rel=1e-5)
    assert feed("perplexity_ratio", request).value() == pytest.approx(expected / (1 / 0.999), rel=1e-4)
    with pytest.raises(DataRefused, match="2 next tokens for 3 positions"):
        feed("perplexity", seen(logits, truth=[0, 1]))


def reads(text: str) -> Any:
    return lambda outputs: text if outputs["y"].reshape(-1)[0] else "hello edge"


def test_character_accuracy_is_one_minus_edits_over_characters() -> None:
    request = seen([1], [0], label="hello edge 2026", answer=reads("hallo edge 206"))
    assert feed("character_accuracy", request).value() == pytest.approx(1 - 2 / 15)
    assert feed("character_agreement", request).value() == pytest.approx(1 - 5 / 10)
    assert feed("character_accuracy", seen([1], label="a", answer=reads("something else"))).value() == 0


def boxes(*found: Detection) -> Any:
    return lambda _: list(found)


CAT, DOG = Detection("cat", 0, 0, 10, 10), Detection("dog", 20, 20, 40, 40)


def test_mean_average_precision_is_cocos() -> None:
    right = seen([1], truth=[CAT, DOG], answer=boxes(CAT, DOG))
    assert feed("map", right).value() == pytest.approx(1)
    missed = seen([1], truth=[CAT, DOG], answer=boxes(CAT))
    assert feed("map", missed).value() == pytest.approx(0.5)
    # Half of the box: IoU 0.5 counts at the first of the ten thresholds only.
    half = seen([1], truth=[CAT], answer=boxes(Detection("cat", 0, 0, 10, 5)))
    assert feed("map50", half).value() == pytest.approx(1)
    assert feed("map", half).value() == pytest.approx(0.1)
    assert feed("map", seen([1], truth=[CAT], answer=boxes())).value() == 0


def test_a_false_detection_above_the_right_one_costs_precision() -> None:
    wrong = Detection("cat", 50, 50, 60, 60, score=0.9)
    right = Detection("cat", 0, 0, 10, 10, score=0.8)
    assert feed("map50", seen([1], truth=[CAT], answer=boxes(wrong, right))).value() == pytest.approx(0.5, abs=0.01)
    # In another picture the same boxes are no match.
    apart = [seen([1], truth=[CAT], answer=boxes()), seen([1], truth=[DOG], answer=boxes(CAT))]
    assert feed("map", *apart).value() == 0


def test_agreement_of_detections_needs_no_truth() -> None:
    def answer(outputs: Mapping[str, Array]) -> list[Detection]:
        return [CAT, DOG] if outputs["y"][0] else [CAT]

    assert feed("map_agreement", seen([0], [1], answer=answer)).value() == pytest.approx(0.5)
    assert feed("map_agreement", seen([1], [1], answer=answer)).value() == pytest.approx(1)


def test_macro_f1_weighs_classes_alike() -> None:
    confusion = Counter({("a", "a"): 98, ("b", "a"): 1, ("b", "b"): 1})
    assert macro_f1(confusion) == pytest.approx((2 * 98 / (98 + 99) + 2 * 1 / (1 + 2)) / 2)


@pytest.mark.parametrize("metric", SCORES)
def test_nothing_decides_nothing(metric: str) -> None:
    with pytest.raises(DataRefused, match=r"needs evaluation .*; there are none"):
        SCORES[metric]("y").value()


@pytest.mark.parametrize("metric", ["character_accuracy", "map"])
def test_what_must_be_read_out_of_outputs_needs_a_function_that_does(metric: str) -> None:
    with pytest.raises(DataRefused, match=r"needs answer\(outputs\) in data\.py"):
        feed(metric, seen([1], label="x", truth=[CAT]))
    with pytest.raises(DataRefused, match=r"answer\(outputs\) gives int, not"):
        feed(metric, seen([1], label="x", truth=[CAT], answer=lambda _: 3))


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [("cosine", 0.98, 0.98), ("kl", 0.1, 0.9), ("perplexity_ratio", 1.25, 0.8), ("map", 1.0000001, 1.0), ("kl", 3, 0)],
)
def test_quality_is_one_where_nothing_was_lost(metric: str, value: float, expected: float) -> None:
    lower = metric in {"kl", "perplexity_ratio"}
    gate = GateResult(metric, "y", value, None if lower else 0.5, 2.0 if lower else None)
    assert quality(gate) == pytest.approx(expected)
