"""Measure how right answers are: each metric is a sum that grows by one request at a time, and a figure at the end.

Owns the task metrics beyond plain differences: top-k, F1, mean average precision, character accuracy, cosine,
divergence, perplexity. Which of them must reach what is a recipe's gate; `evaluate` feeds them.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.samples import Array, Detection


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, answered by both models."""

    got: Mapping[str, Array]
    want: Mapping[str, Array]
    """The float model's outputs."""
    label: str
    """The truth about the stream; empty when unknown."""
    truth: Any
    """Other truth: detections, or the tokens that come next. None when unknown."""
    labels: Sequence[str]
    """Of the classes, where the model has them."""
    answer: Callable[[Mapping[str, Array]], Any] | None
    """data.py's `answer`: what outputs say, as text or detections."""


class Score(Protocol):
    """One metric under way."""

    def add(self, seen: Seen) -> None:
        """Count one request."""

    def value(self) -> float:
        """Return the figure.

        Raises:
            DataRefused: the data cannot decide it.
        """


def _scores(array: Array) -> Array:
    """Return the rows of the last axis as float64."""
    flat: Array = array.reshape(-1, array.shape[-1]).astype(np.float64) if array.ndim else array.reshape(1, 1)
    return flat


@dataclass(slots=True)
class TopK:
    """Share of labelled requests whose label is among the `k` highest scores."""

    output: str
    k: int
    right: int = 0
    count: int = 0

    def add(self, seen: Seen) -> None:
        """Count one request."""
        if not seen.label:
            return
        if seen.label not in seen.labels:
            raise DataRefused(f"the label {seen.label!r} is none of the model's {len(seen.labels)} classes")
        best = np.argsort(-seen.got[self.output].reshape(-1), kind="stable")[: self.k]
        self.right += seen.labels.index(seen.label) in best
        self.count += 1

    def value(self) -> float:
        """Return the share."""
        _need(self.count, f"top{self.k}_accuracy", "streams with labels")
        return self.right / self.count


@dataclass(slots=True)
class Top1Agreement:
    """Share of rows (requests, tokens) for which both models' highest score is the same."""

    output: str
    equal: int = 0
    count: int = 0

    def add(self, seen: Seen) -> None:
        """Count one request."""
        got, want = _scores(seen.got[self.output]), _scores(seen.want[self.output])
        self.equal += int(np.count_nonzero(got.argmax(axis=1) == want.argmax(axis=1)))
        self.count += len(got)

    def value(self) -> float:
        """Return the share."""
        _need(self.count, "top1_agreement", "requests")
        return self.equal / self.count


@dataclass(slots=True)
class Cosine:
    """Mean cosine between both models' outputs, request by request."""

    output: str
    total: float = 0.0
    count: int = 0

    def add(self, seen: Seen) -> None:
        """Count one request."""
        got, want = seen.got[self.output].reshape(-1).astype(float), seen.want[self.output].reshape(-1).astype(float)
        size = float(np.linalg.norm(got) * np.linalg.norm(want))
        self.total += float(got @ want) / size if size else float(np.array_equal(got, want))
        self.count += 1

    def value(self) -> float:
        """Return the mean."""
        _need(self.count, "cosine", "requests")
        return self.total / self.count


@dataclass(slots=True)
class Divergence:
    """Mean Kullback-Leibler divergence of the variant's distribution from the float model's, in nats."""

    output: str
    total: float = 0.0
    count: int = 0

    def add(self, seen: Seen) -> None:
        """Count one request."""
        want, got = (_log_shares(_scores(outputs[self.output])) for outputs in (seen.want, seen.got))
        self.total += float((np.exp(want) * (want - got)).sum())
        self.count += len(want)

    def value(self) -> float:
        """Return the mean."""
        _need(self.count, "kl", "requests")
        return max(0.0, self.total / self.count)


def _log_shares(rows: Array) -> Array:
    """Return log probabilities: rows that are probabilities as they are, others through a softmax."""
    if np.all(rows >= 0) and np.allclose(rows.sum(axis=1), 1, atol=1e-3):
        return np.asarray(np.log(np.maximum(rows, 1e-12)))
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


@dataclass(slots=True)
class Perplexity:
    """exp of the mean surprise at the tokens that really come next; `relative`: against the float model's."""

    output: str
    relative: bool = False
    surprise: float = 0.0
    surprise_float: float = 0.0
    count: int = 0

    def add(self, seen: Seen) -> None:
        """Count one request. Its truth is the next token of every position; negative ones are not asked for."""
        if seen.truth is None:
            return
        tokens = np.asarray(seen.truth).reshape(-1)
        asked = np.flatnonzero(tokens >= 0)
        got, want = (_log_shares(_scores(outputs[self.output])) for outputs in (seen.got, seen.want))
        if len(tokens) != len(got):
            raise DataRefused(f"{len(tokens)} next tokens for {len(got)} positions of output {self.output!r}")
        self.surprise -= float(got[asked, tokens[asked]].sum())
        self.surprise_float -= float(want[asked, tokens[asked]].sum())
        self.count += len(asked)

    def value(self) -> float:
        """Return the perplexity, or its ratio."""
        _need(self.count, "perplexity", "streams whose `truth` is the tokens that come next")
        return float(np.exp((self.surprise - (self.surprise_float if self.relative else 0)) / self.count))


@dataclass(slots=True)
class CharacterAccuracy:
    """1 - edits / characters, against the label, or (`agreement`) against what the float model reads."""

    agreement: bool
    edits: int = 0
    characters: int = 0

    def add(self, seen: Seen) -> None:
        """Count one request."""
        from rapidfuzz.distance import Levenshtein

        read = _answer(seen, seen.got, str, "character_accuracy")
        want = _answer(seen, seen.want, str, "character_agreement") if self.agreement else seen.label
        if want or self.agreement:
            self.edits += Levenshtein.distance(read, want)
            self.characters += len(want)

    def value(self) -> float:
        """Return the share, never below 0."""
        _need(self.characters, "character accuracy", "texts to compare with")
        return max(0.0, 1 - self.edits / self.characters)


@dataclass(slots=True)
class MeanPrecision:
    """COCO's mean average precision over IoU 0.50 to 0.95, by its reference implementation (pycocotools)."""

    agreement: bool
    iou: float | None = None
    """One threshold instead of the ten."""
    truths: list[dict[str, Any]] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    images: int = 0

    def add(self, seen: Seen) -> None:
        """Count one request."""
        truth = _answer(seen, seen.want, list, "map_agreement") if self.agreement else seen.truth
        if truth is None:
            return
        self.images += 1
        self.truths += [
            {**item, "id": len(self.truths) + offset + 1, "iscrowd": 0, "area": item["bbox"][2] * item["bbox"][3]}
            for offset, item in enumerate(self._boxes(truth))
        ]
        self.found += [
            {**item, "score": box.score} for box in _answer(seen, seen.got, list, "map") for item in self._boxes([box])
        ]

    def _boxes(self, boxes: Sequence[Detection]) -> list[dict[str, Any]]:
        return [
            {
                "image_id": self.images,
                "category_id": self.classes.setdefault(box.label, len(self.classes) + 1),
                "bbox": [box.left, box.top, box.right - box.left, box.bottom - box.top],
            }
            for box in boxes
        ]

    def value(self) -> float:
        """Return the mean average precision."""
        _need(len(self.truths), "map", "streams whose `truth` is a list of detections")
        if not self.found:
            return 0.0
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO()
            truth.dataset = {
                "images": [{"id": number + 1} for number in range(self.images)],
                "annotations": self.truths,
                "categories": [{"id": number, "name": name} for name, number in self.classes.items()],
            }
            truth.createIndex()
            judge = COCOeval(truth, truth.loadRes(self.found), "bbox")
            if self.iou is not None:
                judge.params.iouThrs = np.array([self.iou])
            judge.evaluate()
            judge.accumulate()
        # [threshold, recall, class, area, detections]: all areas, 100 detections; -1 where a class has no truth
        precision = judge.eval["precision"][:, :, :, 0, -1]
        precision = precision[precision > -1]
        return float(precision.mean()) if precision.size else 0.0


def macro_f1(confusion: Counter[tuple[str, str]]) -> float:
    """Return the mean F1 of the classes that occur, from counts of (truth, predicted).

    Raises:
        DataRefused: nothing was labelled.
    """
    _need(sum(confusion.values()), "macro_f1", "streams with labels")
    scores = []
    for label in sorted({name for pair in confusion for name in pair}):
        right = confusion[label, label]
        told = sum(count for (_, predicted), count in confusion.items() if predicted == label)
        true = sum(count for (truth, _), count in confusion.items() if truth == label)
        scores.append(2 * right / (told + true))
    return sum(scores) / len(scores)


def _answer(seen: Seen, outputs: Mapping[str, Array], kind: type, metric: str) -> Any:
    if seen.answer is None:
        raise DataRefused(f"{metric} needs answer(outputs) in data.py: what outputs say, as {kind.__name__}")
    found = seen.answer(outputs)
    if not isinstance(found, kind):
        raise DataRefused(f"{metric}: answer(outputs) gives {type(found).__name__}, not {kind.__name__}")
    return found


def _need(count: int, metric: str, what: str) -> None:
    if count == 0:
        raise DataRefused(f"{metric} needs evaluation {what}; there are none")


SCORES: dict[str, Callable[[str], Score]] = {
    "top1_accuracy": lambda output: TopK(output, 1),
    "top5_accuracy": lambda output: TopK(output, 5),
    "top1_agreement": Top1Agreement,
    "cosine": Cosine,
    "kl": Divergence,
    "perplexity": Perplexity,
    "perplexity_ratio": lambda output: Perplexity(output, relative=True),
    "character_accuracy": lambda _: CharacterAccuracy(agreement=False),
    "character_agreement": lambda _: CharacterAccuracy(agreement=True),
    "map": lambda _: MeanPrecision(agreement=False),
    "map50": lambda _: MeanPrecision(agreement=False, iou=0.5),
    "map_agreement": lambda _: MeanPrecision(agreement=True),
}
"""The metrics of this module by the names that gates use; each is made with the gate's output."""
WITHOUT_OUTPUT = ("character_accuracy", "character_agreement", "map", "map50", "map_agreement", "macro_f1")
"""Metrics that name no output."""
LOWER_IS_BETTER = ("kl", "perplexity", "perplexity_ratio", "max_abs_error", "mean_abs_error")
