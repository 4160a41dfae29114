"""Find out by measuring which nodes quantizing hurts, and keep no more of them in float than the quality bar asks.

Each group of nodes is quantized *alone*, and the error that this makes in the outputs is measured against the float
model on real requests. Then the worst groups stay float, one more at a time, until the bar holds. The ranking is kept
in a file, since it depends on nothing but model, scheme and requests.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.errors import SessionError
from edgeinfer_tools import model_file
from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.quantize import convert
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.samples import Array
from edgeinfer_tools.scheme import CLIPPING, Scheme
from edgeinfer_tools.session import Runner

GROUPS = 24
"""At most so many measurements: neighbours share one in longer graphs."""
REFINE = 4
"""Of the worst groups, so many are measured again node by node."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What quantizing one group of nodes alone does to the outputs."""

    nodes: tuple[str, ...]
    error: float
    """Squared error over squared size of the float outputs, the mean of all outputs; infinite when it does not run."""


class OutputError:
    """Distance of a model's outputs from the float model's on some requests; the float answers are kept.

    Each request is asked from zero state.
    """

    def __init__(
        self, float_model: Path, requests: Iterable[Mapping[str, Array]], state: Sequence[StateSpec] = ()
    ) -> None:
        self._requests = [dict(request) for request in requests]
        if not self._requests:
            raise ModelRefused("sensitivity needs at least one request to measure on")
        self._state = list(state)
        self._wanted = self._answers(Runner(float_model, state=self._state, threads=0))

    def _answers(self, runner: Runner) -> list[dict[str, Array]]:
        answers = []
        for request in self._requests:
            runner.reset()
            answers.append(runner.run(request))
        return answers

    def key(self) -> str:
        """Return a digest of the requests."""
        digest = hashlib.sha256()
        for request in self._requests:
            for name in sorted(request):
                digest.update(name.encode())
                digest.update(
                    repr(request[name].tolist()).encode() if request[name].dtype == object else request[name].tobytes()
                )
        return digest.hexdigest()

    def of(self, model: Path | bytes) -> float:
        """Return the relative squared error of a model; infinite when it fails or answers NaN."""
        try:
            got = self._answers(Runner(model, state=self._state, threads=0))
        except SessionError:
            return float("inf")
        total, count = 0.0, 0
        for mine, theirs in zip(got, self._wanted, strict=True):
            for name, want in theirs.items():
                if want.dtype == np.object_ or want.size == 0:
                    continue
                if mine[name].shape != want.shape:
                    return float("inf")
                reference = want.astype(np.float64)
                difference = mine[name].astype(np.float64) - reference
                total += float((difference**2).sum()) / max(float((reference**2).sum()), 1e-12)
                count += 1
        return total / max(count, 1) if np.isfinite(total) else float("inf")


def rank(
    model_path: Path,
    scheme: Scheme,
    calibration: Calibration,
    error: OutputError,
    *,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Sensitivity]:
    """Return the groups of nodes that `scheme` would quantize, the most sensitive first.

    `cache` is a folder for rankings. `say` gets a line per measurement.

    Raises:
        ModelRefused, DataRefused, SessionError: as `quantize`.
    """
    source = model_file.load(model_path)
    nodes = [
        node.name
        for graph in model_file.graphs(source.graph)
        for node in graph.node
        if node.op_type in scheme.op_types and node.op_type not in CLIPPING and node.name not in scheme.exclude
    ]
    if not nodes:
        raise ModelRefused(f"{scheme.title}: there is nothing left to quantize")
    kept = None
    if cache is not None:
        digest = hashlib.sha256()
        for path in model_file.files_of(model_path):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        digest.update(scheme.text().encode())
        digest.update(error.key().encode())
        kept = cache / f"sensitivity-{digest.hexdigest()[:32]}.json"
        if kept.is_file():
            return [Sensitivity(tuple(item["nodes"]), float(item["error"])) for item in json.loads(kept.read_text())]

    def measured(group: tuple[str, ...]) -> Sensitivity:
        others = set(nodes) - set(group)
        made = convert(model_path, source, scheme.without(*others), calibration).model
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "alone.onnx"
            model_file.save(made, path)
            found = Sensitivity(group, error.of(path))
        say(f"sensitivity {found.error:.3g} of {group[0]}{f' and {len(group) - 1} more' if len(group) > 1 else ''}")
        return found

    size = -(-len(nodes) // GROUPS)
    ranked = _sorted(measured(tuple(nodes[at : at + size])) for at in range(0, len(nodes), size))
    if size > 1:
        fine = [measured((node,)) for item in ranked[:REFINE] for node in item.nodes]
        ranked = _sorted([*fine, *ranked[REFINE:]])
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([{"nodes": item.nodes, "error": item.error} for item in ranked])
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(kept)
    return ranked


def _sorted(found: Iterable[Sensitivity]) -> list[Sensitivity]:
    return sorted(found, key=lambda item: (-item.error, item.nodes))


def rescue(scheme: Scheme, ranking: Sequence[Sensitivity], holds: Callable[[Scheme], bool]) -> Scheme | None:
    """Return the scheme with the fewest groups in float, worst first, for which `holds`; None when none does.

    `holds` makes and judges a candidate: it is asked about log2 of the groups' number twice, not once for each. Never
    everything is kept float: that is the float model. Quality does not strictly rise with the number of float groups
    (kernels are fused otherwise): what is returned was judged good, a smaller choice may have been missed.
    """

    def floats(count: int) -> Scheme:
        return scheme.without(*(node for item in ranking[:count] for node in item.nodes))

    most = len(ranking) - 1
    good, bad = 1, 0
    while good <= most and not holds(floats(good)):
        bad, good = good, good * 2
    if good > most:
        if bad >= most or not holds(floats(most)):
            return None
        good = most
    while good - bad > 1:
        middle = (good + bad) // 2
        if holds(floats(middle)):
            good = middle
        else:
            bad = middle
    return floats(good)
