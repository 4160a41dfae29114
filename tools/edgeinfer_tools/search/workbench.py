"""Make, judge and measure candidates for real: the `explore.Workbench` of a build.

Artefacts lie in a scratch folder, under the digest of their candidate. The float model's answers to the evaluation set
are kept in memory while they fit, since every candidate is held against the same ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from edgeinfer.artifact.profile import OperatingCost
from edgeinfer_tools import model_file
from edgeinfer_tools.evaluate import GateResult, evaluate, judge, quality
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.fetch import cache_dir
from edgeinfer_tools.golden import GoldenRequest
from edgeinfer_tools.measure import measure
from edgeinfer_tools.quantize import quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.samples import Array, Media, Stream, decode_inputs
from edgeinfer_tools.search.explore import Artefact
from edgeinfer_tools.search.journal import GateScore, Scores
from edgeinfer_tools.search.space import Candidate
from edgeinfer_tools.sensitivity import OutputError, Sensitivity, rank
from edgeinfer_tools.session import Runner
from edgeinfer_tools.targets import target_of
from edgeinfer_tools.variants import SENSITIVITY_REQUESTS, Job

PART = 4
"""The first look is at every fourth stream of the evaluation."""
LEAST_PART = 6
"""With fewer streams than that in it, there is no first look: it would settle nothing."""
MOST_KEPT_BYTES = 256 << 20
"""Answers of the float model that are kept."""


class Measure(Protocol):
    """Measures artefacts somewhere."""

    @property
    def where(self) -> str:
        """Name of the machine, and what else its figures depend on."""
        ...

    def __call__(self, candidate: Candidate, model: Path) -> list[OperatingCost]:
        """Return the costs at every thread count."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """Measures on this machine."""

    job: Job
    typical: GoldenRequest
    threads: Sequence[int]

    @property
    def where(self) -> str:
        """CPU and cores of this machine, and how long is measured."""
        machine = self.job.machine
        return f"{machine.cpu}, {machine.cores} cores, {self.job.seconds:g} s, threads {list(self.threads)}"

    def __call__(self, candidate: Candidate, model: Path) -> list[OperatingCost]:
        """See `Measure`."""
        return measure(
            model,
            variant=candidate.variant(),
            recipe=self.job.recipe,
            threads=self.threads,
            typical=self.typical.inputs,
            seconds=self.job.seconds,
        )


class Remembered:
    """A model's answers: computed the first time, repeated from memory after, as long as they fit there."""

    def __init__(self, load: Callable[[], Runner], most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._load = load
        self._runner: Runner | None = None
        self._answers: list[dict[str, Array]] = []
        self._left_bytes = most_bytes
        self._complete = False
        self._at = 0

    def begin(self) -> None:
        """Start at the first request of the series, which is the same each time."""
        if not self._complete:
            self._answers = []
        self._at = 0

    def finish(self) -> None:
        """Say that the whole series was asked: from now on it is repeated."""
        self._complete = self._at == len(self._answers)

    def reset(self) -> None:
        """Start a stream with no state."""
        if not self._complete:
            self._loaded().reset()

    def run(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Return the answer to the next request of the series."""
        if self._complete:
            self._at += 1
            return self._answers[self._at - 1]
        answer = self._loaded().run(tensors)
        self._left_bytes -= sum(array.nbytes for array in answer.values())
        self._at += 1
        if self._left_bytes >= 0:
            self._answers.append(answer)
        return answer

    def _loaded(self) -> Runner:
        if self._runner is None:
            self._runner = self._load()
        return self._runner


@dataclass(slots=True)
class JobWorkbench:
    """The workbench of one build."""

    job: Job
    calibrations: Callable[[Candidate], Calibration]
    """The calibration data of the candidate's network; the same object for the same network."""
    scratch: Path
    measure_with: Measure
    _models: dict[str, Path] = field(default_factory=dict)
    _floats: dict[tuple[str, int], Remembered] = field(default_factory=dict)
    _streams: int | None = None

    @property
    def where(self) -> str:
        """See `Workbench`."""
        return self.measure_with.where

    def make(self, candidate: Candidate) -> Artefact:
        """See `Workbench`."""
        out = self.scratch / hashlib.sha256(candidate.key.encode()).hexdigest()[:16] / "model.onnx"
        source = self.job.float_of(candidate.source)
        made = quantize(source, candidate.scheme, target_of(self.job.board), self.calibrations(candidate), out)
        self._models[candidate.key] = out
        digest = hashlib.sha256()
        for path in model_file.files_of(out):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        scheme = candidate.scheme
        in_float = not scheme.quantized or (scheme.method == "weights" and not scheme.int8_compute)
        share = 0.0 if in_float else round(1 - made.coverage.float_macs_share, 6)
        return Artefact(made.size_bytes, digest.hexdigest(), made.notes, share)

    def judge(self, candidate: Candidate, *, part: bool) -> Scores | None:
        """See `Workbench`: on the data that choose."""
        if part and self._count() // PART < LEAST_PART:
            return None
        try:
            return self._scores(candidate, self.job.selection, PART if part else 1)
        except DataRefused:
            if part:
                return None  # a part may lack what a metric needs; all of it must not
            raise

    def confirm(self, candidate: Candidate) -> Scores:
        """Return the scores on all of the evaluation's data, which have chosen nothing."""
        return self._scores(candidate, "evaluation", 1)

    def _scores(self, candidate: Candidate, data: str, every: int) -> Scores:
        floats = self._floats.setdefault((data, every), Remembered(lambda: self.job.runner(self.job.float_model)))
        streams = islice(self.job.streams(data), 0, None, every)
        here = self.job.runner(self.model(candidate), variant=candidate.variant())
        floats.begin()
        evaluation = evaluate(here, floats, streams, self.job.recipe)
        floats.finish()
        verdicts = judge(evaluation, self.job.recipe.file.gates)
        worth = quality(verdicts[0]) if math.isfinite(verdicts[0].value) else 0.0
        return Scores(evaluation.requests, worth, [_score(item) for item in verdicts])

    def measure(self, candidate: Candidate) -> list[OperatingCost]:
        """See `Workbench`."""
        return self.measure_with(candidate, self.model(candidate))

    def rank(self, candidate: Candidate, tick: Callable[[], None]) -> list[Sensitivity]:
        """See `Workbench`."""

        def say(line: str) -> None:
            self.job.say(f"{'':<9} {line}")
            tick()

        requests = (request for stream in self.job.streams(self.job.selection) for request in stream.requests)
        tensors = (decode_inputs(item, self.job.recipe.inputs) for item in islice(requests, SENSITIVITY_REQUESTS))
        network = self.job.float_of(candidate.source)
        error = OutputError(network, tensors, self.job.recipe.state)
        return rank(
            network, candidate.scheme, self.calibrations(candidate), error,
            cache=cache_dir() / "sensitivity", say=say,
        )  # fmt: skip

    def model(self, candidate: Candidate) -> Path:
        """Return the artefact, made again where only its facts were kept."""
        if candidate.key not in self._models:
            self.make(candidate)
        return self._models[candidate.key]

    def _count(self) -> int:
        if self._streams is None:
            self._streams = sum(1 for _ in self.job.streams(self.job.selection))
        return self._streams


def _score(verdict: GateResult) -> GateScore:
    """Return a verdict's figures; what is not finite becomes as bad as JSON can say."""
    value = verdict.value
    if not math.isfinite(value):
        value = -1e300 if verdict.minimum is not None else 1e300
    return GateScore(verdict.metric, verdict.output, value, verdict.minimum, verdict.maximum)


def data_digest(streams: Iterator[Stream]) -> str:
    """Return a digest of everything that evaluation data hold: requests, labels, truths."""
    digest = hashlib.sha256()
    for stream in streams:
        digest.update(repr((stream.name, stream.label, stream.truth)).encode())
        for request in stream.requests:
            for name in sorted(request):
                value = request[name]
                digest.update(name.encode())
                if isinstance(value, Media):
                    digest.update(value.content_type.encode() + value.data)
                else:
                    digest.update(f"{value.dtype}{value.shape}".encode())
                    digest.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
    return digest.hexdigest()
