"""Say how good a variant is, in numbers, against the float model and against the truth, on held-out data.

Owns the metrics and the gates. Runs both models in lockstep over the same streams and keeps sums, not outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from edgeinfer.artifact.manifest import Classes
from edgeinfer_tools import recipe_code
from edgeinfer_tools.faults import DataRefused, GateFailed
from edgeinfer_tools.metrics import LOWER_IS_BETTER, SCORES, Score, Seen, macro_f1
from edgeinfer_tools.recipe import Gate, Recipe
from edgeinfer_tools.reference import Distribution
from edgeinfer_tools.samples import Array, Stream, decode_inputs
from edgeinfer_tools.session import Runner


@dataclass(slots=True)
class OutputError:
    """Sums over one output's differences from the float model."""

    max_abs: float = 0.0
    sum_abs: float = 0.0
    elements: int = 0

    @property
    def mean_abs(self) -> float:
        """Mean absolute difference."""
        return self.sum_abs / max(self.elements, 1)

    def add(self, got: Array, want: Array) -> None:
        """Count one pair of outputs."""
        difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
        if difference.size:
            self.max_abs = max(self.max_abs, float(difference.max()))
            self.sum_abs += float(difference.sum())
            self.elements += int(difference.size)


@dataclass(slots=True)
class Overlap:
    """Sums for intersection over union of a binarised output."""

    intersection: int = 0
    union: int = 0

    def add(self, got: Array, want: Array) -> None:
        """Count one pair of masks."""
        self.intersection += int(np.count_nonzero(got & want))
        self.union += int(np.count_nonzero(got | want))


@dataclass(slots=True)
class Evaluation:
    """Everything that was counted for one variant."""

    requests: int = 0
    streams: int = 0
    errors: dict[str, OutputError] = field(default_factory=dict)
    overlaps: dict[int, Overlap] = field(default_factory=dict)
    """By index of the gate."""
    scores: dict[int, Score] = field(default_factory=dict)
    """By index of the gate: the metrics of `metrics`."""
    labels_equal: int = 0
    labelled: int = 0
    labelled_right: int = 0
    confusion: Counter[str] = field(default_factory=Counter)
    """`truth -> predicted`, per labelled stream."""
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same as (truth, predicted)."""
    distributions: dict[str, Distribution] = field(default_factory=dict)
    """Of inputs and outputs, by `inputs.NAME` and `outputs.NAME`."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate's verdict."""

    metric: str
    output: str
    value: float
    minimum: float | None
    maximum: float | None

    @property
    def passed(self) -> bool:
        """Whether the value lies within the gate."""
        return (self.minimum is None or self.value >= self.minimum) and (
            self.maximum is None or self.value <= self.maximum
        )

    def __str__(self) -> str:
        name = f"{self.metric}({self.output})" if self.output else self.metric
        bound = f">= {self.minimum:g}" if self.minimum is not None else f"<= {self.maximum:g}"
        return f"{name} is {self.value:.4f}, the gate is {bound}"


class Answering(Protocol):
    """What answers as a `Runner` does."""

    def reset(self) -> None:
        """Start a stream with no state."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name."""
        ...


def evaluate(variant: Runner, reference: Answering, streams: Iterable[Stream], recipe: Recipe) -> Evaluation:
    """Run both models over all streams.

    Raises:
        DataRefused: there are no requests, or one breaks the contract.
        GateFailed: an output is NaN or infinite where that isn't allowed or the float model's is not, or has another
            shape than the float model's.
        SessionError: a run failed.
    """
    result = Evaluation()
    result.scores = {
        index: SCORES[gate.metric](gate.output or (recipe.classes.output if recipe.classes else ""))
        for index, gate in enumerate(recipe.file.gates)
        if gate.metric in SCORES
    }
    answer = _answer(recipe)
    labels = recipe.classes.labels if recipe.classes is not None else []
    for stream in streams:
        variant.reset()
        reference.reset()
        result.streams += 1
        predicted: list[str] = []
        for request in stream.requests:
            tensors = decode_inputs(request, recipe.inputs)
            got, want = variant.run(tensors), reference.run(tensors)
            result.requests += 1
            _compare(result, got, want, recipe, f"{stream.name}[{result.requests - 1}]")
            seen = Seen(got, want, stream.label, stream.truth, labels, answer)
            for score in result.scores.values():
                score.add(seen)
            for key, array in [
                *((f"inputs.{k}", v) for k, v in tensors.items()),
                *((f"outputs.{k}", v) for k, v in got.items()),
            ]:
                result.distributions.setdefault(key, Distribution()).add(array)
            if recipe.classes is not None:
                predicted.append(label_of(got, recipe.classes))
                result.labels_equal += predicted[-1] == label_of(want, recipe.classes)
        if recipe.classes is not None and stream.label:
            _count_label(result, stream, predicted, recipe.classes)
    if result.requests == 0:
        raise DataRefused("the recipe's evaluation() yields no request; a variant cannot be judged without data")
    return result


def _answer(recipe: Recipe) -> Callable[[Mapping[str, Array]], Any] | None:
    """Return data.py's `answer`, guarded: what it raises is told by its line."""
    hook = recipe.hook("data", "answer")
    if hook is None:
        return None
    return lambda outputs: recipe_code.call(recipe.code("data"), hook, dict(outputs))


def _compare(result: Evaluation, got: dict[str, Array], want: dict[str, Array], recipe: Recipe, where: str) -> None:
    for spec in recipe.outputs:
        mine, theirs = got[spec.name], want[spec.name]
        if mine.shape != theirs.shape:
            raise GateFailed(
                f"{where}: output {spec.name!r} has shape {mine.shape}, the float model gives {theirs.shape}"
            )
        if mine.dtype == np.object_:
            continue
        if not spec.allow_non_finite and not np.isfinite(mine).all():
            raise GateFailed(f"{where}: output {spec.name!r} holds NaN or infinity")
        if lost := int(np.count_nonzero(np.isfinite(theirs) & ~np.isfinite(mine))):
            text = (
                f"{lost} of {mine.size} values of output {spec.name!r} are NaN or infinite, the float model's are not"
            )
            raise GateFailed(f"{where}: {text}")
        result.errors.setdefault(spec.name, OutputError()).add(mine, theirs)
    for index, gate in enumerate(recipe.file.gates):
        if gate.metric == "iou":
            overlap = result.overlaps.setdefault(index, Overlap())
            overlap.add(got[gate.output] >= gate.threshold, want[gate.output] >= gate.threshold)


def label_of(outputs: dict[str, Array], classes: Classes) -> str:
    """Return the label of one response, by the manifest's rule."""
    scores = outputs[classes.output].reshape(-1)
    if classes.threshold is None:
        return classes.labels[int(scores.argmax())]
    return classes.labels[int(float(scores[0]) >= classes.threshold)]


def _count_label(result: Evaluation, stream: Stream, predicted: list[str], classes: Classes) -> None:
    """Judge a stream as a whole: with a threshold one positive request makes it positive, else the majority rules."""
    if classes.threshold is not None:
        verdict = classes.labels[1] if classes.labels[1] in predicted else classes.labels[0]
    else:
        verdict = Counter(predicted).most_common(1)[0][0]
    result.labelled += 1
    result.labelled_right += verdict == stream.label
    result.confusion[f"{stream.label} -> {verdict}"] += 1
    result.pairs[stream.label, verdict] += 1


def judge(result: Evaluation, gates: list[Gate]) -> list[GateResult]:
    """Return the verdict of every gate.

    Raises:
        DataRefused: the data cannot decide a gate (no labels, nothing above the threshold).
    """
    verdicts = []
    for index, gate in enumerate(gates):
        match gate.metric:
            case "iou":
                overlap = result.overlaps[index]
                if overlap.union == 0:
                    raise DataRefused(
                        f"no evaluation output {gate.output!r} reaches {gate.threshold:g}: iou means nothing"
                    )
                value = overlap.intersection / overlap.union
            case "label_agreement":
                value = result.labels_equal / result.requests
            case "label_accuracy":
                if result.labelled == 0:
                    raise DataRefused("label_accuracy needs evaluation streams with labels; there are none")
                value = result.labelled_right / result.labelled
            case "macro_f1":
                value = macro_f1(result.pairs)
            case "max_abs_error":
                value = result.errors[gate.output].max_abs
            case metric if metric in SCORES:
                value = result.scores[index].value()
            case _:
                value = result.errors[gate.output].mean_abs
        verdicts.append(GateResult(gate.metric, gate.output, value, gate.minimum, gate.maximum))
    return verdicts


def quality(first: GateResult) -> float:
    """Return a variant's quality, 1.0 = as the float model, from its first gate.

    Shares count as they are; errors as what they leave of 1; of a perplexity ratio, its inverse.
    """
    if first.metric == "perplexity_ratio":
        return round(min(1.0, 1.0 / first.value), 6)
    if first.metric not in LOWER_IS_BETTER:
        return round(max(0.0, min(first.value, 1.0)), 6)
    return round(max(0.0, 1.0 - first.value), 6)
