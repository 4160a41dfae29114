"""One artefact, made in a process of its own: `python -m edgeinfer_bench.toolchain.make METHOD RECIPE FLOAT OUT`.

So its peak memory and wall time are its maker's alone. Every maker gets the same float model, the recipe's calibration
data, and, where it looks at accuracy itself, the data that choose. `nncf` runs in the peer's virtual environment.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from edgeinfer.artifact.board import Board, load_board, shipped_boards
from edgeinfer_tools import recipe_code
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.evaluate import evaluate, judge
from edgeinfer_tools.fetch import fetch
from edgeinfer_tools.machine import this_machine
from edgeinfer_tools.metrics import LOWER_IS_BETTER
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.recipe import Recipe, load_recipe
from edgeinfer_tools.samples import Stream
from edgeinfer_tools.session import Runner
from edgeinfer_tools.targets import target_of

LEAST_DROP = 1e-6
"""A gate that the float model itself only just passes leaves this much."""
HEAVY = ("Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM")
"""With one of these the network begins; what stands before it is preprocessing."""
REPEATED_SAMPLES = "repeated"
"""First word of the methods that take a number of samples."""


def main(argv: list[str]) -> int:
    """Make one artefact; the last line of stdout is JSON: seconds, peak bytes, or why there is none."""
    method, folder, float_model, out = argv[0], Path(argv[1]), Path(argv[2]), Path(argv[3])
    logging.disable(logging.WARNING)
    recipe = load_recipe(folder)
    source = Data(recipe)
    began = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        if method.startswith(REPEATED_SAMPLES):
            calibrate(source, float_model, out, samples=int(method.rpartition("-")[2]))
        else:
            found = MAKERS[method](source, float_model, out) or {}
    except Exception as error:  # noqa: BLE001 - other people's code raises what it likes; the reason goes into the table
        text = " ".join(str(error).split())
        found = {"reason": f"{type(error).__name__}: {text[:160]}"}
    found |= {
        "seconds": time.perf_counter() - began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(found))
    return 0


class Data:
    """A recipe with its data."""

    def __init__(self, recipe: Recipe) -> None:
        """Fetch the files; they are in the cache already."""
        self.recipe = recipe
        self.files = {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}

    def streams(self, function: str) -> Iterator[Stream]:
        """Return what data.py's function yields.

        Raises:
            NoData: there is no such function.
        """
        hook = self.recipe.hook("data", function)
        if hook is None:
            raise NoData(f"the recipe has no {function} data")
        return recipe_code.streams(self.recipe.code("data"), hook, self.files)

    @property
    def choosing(self) -> str:
        """Whose data choose."""
        return "selection" if self.recipe.hook("data", "selection") is not None else "evaluation"

    def samples(self, float_model: Path, *, count: int | None = None) -> CheckedSamples:
        """Return a reader of the calibration data, which are taken again and again until there are `count`."""
        streams = self.streams("calibration") if count is None else islice(self._endless(), count)
        state = self.recipe.state
        return CheckedSamples(
            streams, self.recipe.inputs, state=state, float_model=lambda: Runner(float_model, state=state)
        )

    def _endless(self) -> Iterator[Stream]:
        while True:
            yield from self.streams("calibration")


class NoData(Exception):
    """A maker needs data that the recipe has not."""


def this_board() -> Board:
    """Return a board with this machine's instruction sets and cores."""
    machine, board = this_machine(), load_board(shipped_boards() / "generic-x86.toml")
    cpu = replace(board.cpu, instruction_sets=list(machine.flags), cores=machine.cores)
    return replace(board, name="this machine", cpu=cpu)


def ours(source: Data, _float_model: Path, out: Path) -> dict[str, Any]:
    """Build the whole bundle, for this machine."""
    from edgeinfer_tools.build import Options, build

    lines: list[str] = []
    result = build(source.recipe, this_board(), out, Options(seconds=0.5, replace=True), lines.append)
    return {"preferred": result.report["preferred"]}


def calibrate(source: Data, float_model: Path, out: Path, *, samples: int) -> None:
    """Quantize by our static scheme with histograms, the one that keeps most, on so many samples."""
    from edgeinfer_tools.quantize import quantize
    from edgeinfer_tools.scheme import recipe_scheme

    target = target_of(this_board())
    scheme = recipe_scheme("static", [], {"calibrator": "percentile"}, target)
    probe = source.samples(float_model).get_next()
    assert probe is not None
    calibration = Calibration(probe, source.recipe.state, lambda: source.samples(float_model, count=samples))
    quantize(float_model, scheme, target, calibration, out)


def ort_static(source: Data, float_model: Path, out: Path) -> None:
    """ONNX Runtime's static quantization with its defaults, preprocessed as its documentation asks.

    But for what stands before the network: the defaults quantize the arithmetic of picture sizes too, which breaks it.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    reader = source.samples(float_model)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return reader.get_next()

    prepared = out.with_suffix(".prepared.onnx")
    try:
        quant_pre_process(str(float_model), str(prepared))
    except Exception:  # noqa: BLE001 - its symbolic shapes fail on some graphs, in several ways
        quant_pre_process(str(float_model), str(prepared), skip_symbolic_shape=True)
    quantize_static(str(prepared), str(out), Reader(), nodes_to_exclude=_before_network(onnx.load(str(prepared))))
    prepared.unlink()


def _before_network(model: Any) -> list[str]:
    """Return the names of the nodes to which no heavy operator leads, but for tables of embeddings."""
    behind: set[str] = set()
    for node in model.graph.node:
        if node.op_type in HEAVY or behind & set(node.input):
            behind.update(node.output)
    return [node.name for node in model.graph.node if node.op_type != "Gather" and not behind & set(node.output)]


def ort_dynamic(_source: Data, float_model: Path, out: Path) -> None:
    """ONNX Runtime's dynamic quantization with its defaults."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(float_model), str(out))


def nncf(source: Data, float_model: Path, out: Path) -> None:
    """NNCF's quantization with accuracy control; it may lose what the recipe's first gate allows."""
    import nncf as peer  # type: ignore[import-not-found]  # the peer's own environment has it
    import onnx

    recipe, state = source.recipe, source.recipe.state
    reader = source.samples(float_model)
    calibration = list(iter(reader.get_next, None))
    reference = Runner(float_model, state=state)
    first = recipe.file.gates[0]
    sign = -1.0 if first.metric in LOWER_IS_BETTER else 1.0

    def value(runner: Any, streams: Iterable[Stream]) -> float:
        return sign * judge(evaluate(runner, reference, streams, recipe), [first])[0].value

    validation = [Feed(stream, recipe) for stream in source.streams(source.choosing)]

    def validate(model: Any, items: Iterable[Feed]) -> tuple[float, None]:
        return value(_runner(model, recipe), [item.stream for item in items]), None

    best = value(reference, (item.stream for item in validation))
    bound = first.minimum if first.minimum is not None else first.maximum
    assert bound is not None
    model = onnx.load(str(float_model))
    convolves = any(node.op_type == "Conv" for node in model.graph.node)
    made = peer.quantize_with_accuracy_control(
        model,
        peer.Dataset(calibration),
        peer.Dataset(validation),
        validate,
        max_drop=max(best - sign * bound, LEAST_DROP),
        subset_size=len(calibration),
        model_type=None if convolves else peer.ModelType.TRANSFORMER,  # as its documentation advises
    )
    onnx.save(made, str(out))


class Feed(dict[str, Any]):
    """The first request of a stream as NNCF wants it, which knows its stream."""

    def __init__(self, stream: Stream, recipe: Recipe) -> None:
        """Decode it."""
        from edgeinfer_tools.samples import decode_inputs

        super().__init__(decode_inputs(next(iter(stream.requests)), recipe.inputs))
        self.stream = stream


def _runner(model: Any, recipe: Recipe) -> Any:
    """Return what answers as a `Runner` does, from whatever NNCF gives to a validation."""
    if hasattr(model, "SerializeToString"):
        return Runner(model.SerializeToString(), state=recipe.state)
    return _Session(model)


class _Session:
    """An inference session in the place of a `Runner`."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._names = [item.name for item in session.get_outputs()]

    def reset(self) -> None:
        """Do nothing: it has no state."""

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs by name."""
        return dict(zip(self._names, self._session.run(None, dict(inputs)), strict=True))


MAKERS: dict[str, Callable[[Data, Path, Path], dict[str, Any] | None]] = {
    "ours": ours,
    "ort-static": ort_static,
    "ort-dynamic": ort_dynamic,
    "nncf": nncf,
}

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
