"""Build a bundle: obtain, prepare, quantize, evaluate, measure, pack, verify, publish. The whole pipeline is here.

Each step is another module's; this one owns their order and what is written into the report. Nothing is published
before the staged bundle was read back and ran.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.bundle import encode_golden
from edgeinfer.artifact.manifest import Golden, Manifest, Provenance, Runtime, Variant
from edgeinfer.artifact.manifest import SCHEMA as MANIFEST_SCHEMA
from edgeinfer.artifact.profile import SCHEMA as PROFILE_SCHEMA
from edgeinfer.artifact.profile import OperatingCost, Profile, encode_profile
from edgeinfer.errors import ConfigError, Problem, mib
from edgeinfer_tools import graph
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.evaluate import Evaluation, GateResult, evaluate, judge, quality
from edgeinfer_tools.faults import GateFailed, ModelRefused
from edgeinfer_tools.fetch import fetch, sha256
from edgeinfer_tools.golden import difference, golden_requests, response_payload, tolerance
from edgeinfer_tools.machine import Machine, this_machine, thread_counts
from edgeinfer_tools.measure import measure, request_payload
from edgeinfer_tools.pack import file_table, staging, write_json, write_manifest
from edgeinfer_tools.quantize import WeightRange, quantize, weight_range
from edgeinfer_tools.recipe import Recipe, VariantRecipe
from edgeinfer_tools.reference import reference
from edgeinfer_tools.samples import Inputs, Stream, decode_inputs
from edgeinfer_tools.session import ORT_VERSION, Runner
from edgeinfer_tools.smoke import smoke
from edgeinfer_tools.verify import prove

Say = Callable[[str], None]
REPORT_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Options:
    """How to build, beyond what recipe and board say."""

    seconds: float = 2.0
    """Time for the latency of one variant at one thread count."""
    replace: bool = False
    costs_from: Profile | None = None
    """Take these costs instead of measuring: the same inputs then give the same bundle digest."""


@dataclass(frozen=True, slots=True)
class Built:
    """One variant that passed."""

    recipe: VariantRecipe
    file: str
    evaluation: Evaluation
    gates: list[GateResult]
    costs: list[OperatingCost]
    tolerance: float
    golden_difference: float
    calibration_samples: int


@dataclass(frozen=True, slots=True)
class Result:
    """What was published."""

    bundle: Path
    digest: str
    manifest: Manifest
    report: dict[str, Any]


def build(recipe: Recipe, board: Board, output: Path, options: Options, say: Say) -> Result:
    """Build the recipe for the board and publish it as the folder `output`.

    Raises:
        EdgeInferError: whatever is wrong, named; nothing was published.
    """
    name, version = recipe.file.name, recipe.file.version
    with staging(output, replace=options.replace) as folder:
        say(f"{name} {version} for {board.name}")
        data = {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}
        source = fetch(recipe.file.source, folder=recipe.folder) if recipe.file.source else None
        if source:
            say(f"source    {recipe.file.source.origin if recipe.file.source else ''}, {mib(source.stat().st_size)}")
        model = prepare(recipe, source)
        (folder / "model").mkdir()
        first = folder / "model" / "float.onnx"
        onnx.save(model, str(first))
        say(f"prepared  {len(model.graph.node)} nodes, opset {graph.opset_of(model)}, {mib(first.stat().st_size)}")
        built, notes = _variants(recipe, board, folder, first, data, options, say)
        first.unlink()
        golden = _write_golden(recipe, folder, data, folder / built[0].file)
        write_json(folder / "reference.json", reference(built[0].evaluation.distributions, variant=built[0].recipe.name))
        machine = this_machine()
        report = _report(recipe, board, machine, folder, built, notes, weight_range(board))
        if source:
            report["source_sha256"] = sha256(source.read_bytes())
        write_json(folder / "report.json", report)
        manifest = _manifest(recipe, board, folder, built, golden, model)
        write_manifest(folder, manifest)
        manifest, digest = prove(folder)
        say(f"verified  {len(manifest.golden)} golden requests on {len(manifest.variants)} variants")
    profile = _profile(manifest, digest, board, machine, built)
    output.with_name(f"{output.name}.profile.json").write_bytes(encode_profile(profile))
    size = sum(item.size_bytes for item in manifest.files.values())
    say(f"published {output}, {mib(size)}, digest {digest[:12]}")
    return Result(output, digest, manifest, report)


def prepare(recipe: Recipe, source: Path | None) -> onnx.ModelProto:
    """Return the float graph that every variant is made from, held against the recipe's contract.

    Raises:
        ModelRefused: the source or the prepared graph is not fit.
        ConfigError: a Python file of the recipe is wrong.
    """
    if source is not None:
        model = graph.load_source(source)
    else:
        make = recipe.hook("graph", "make_graph")
        if make is None:
            raise ConfigError(str(recipe.folder / "graph.py"), (Problem("make_graph", "is missing, and there is no source"),))
        model = make()
        graph.check_source(model, f"{recipe.file.name}'s make_graph()")
    if (surgery := recipe.hook("graph", "prepare")) is not None:
        model = surgery(model)
        graph.check_source(model, f"{recipe.file.name} as prepared by graph.py")
    model = graph.normalise(model, opset=recipe.file.opset)
    graph.check_contract(model, recipe)
    return model


def _variants(recipe: Recipe, board: Board, folder: Path, first: Path, data: dict[str, Path], options: Options,
              say: Say) -> tuple[list[Built], list[str]]:  # fmt: skip
    """Make, prove and measure every variant; the best quality comes first."""
    weights = weight_range(board)
    notes = _warnings(recipe, board, weights)
    evaluation = _streams(recipe, "evaluation", data)
    golden = golden_requests(_golden_streams(recipe, data), recipe, Runner(first, state=recipe.state))
    tensors = golden[0].tensors
    smoke(first, tensors, recipe.state)
    built: list[Built] = []
    for variant in recipe.file.variants:
        target = folder / "model" / f"{variant.name}.onnx"
        count = quantize(first, target, variant, weights=weights,
                         samples=lambda: CheckedSamples(_streams(recipe, "calibration", data)(), recipe.inputs, state=recipe.state,
                                                        float_model=lambda: Runner(first, state=recipe.state)))  # fmt: skip
        how = variant.method + (f", {count} samples" if count else "")
        say(f"{variant.name:<9} {how}, {mib(target.stat().st_size)}")
        smoke(target, tensors, recipe.state)
        runner = Runner(target, state=recipe.state)
        result = evaluate(runner, Runner(first, state=recipe.state), evaluation(), recipe)
        verdicts = judge(result, recipe.file.gates)
        for verdict in verdicts:
            say(f"{'':<9} {'pass' if verdict.passed else 'FAIL'}: {verdict} ({result.requests} requests)")
        if failed := [verdict for verdict in verdicts if not verdict.passed]:
            text = f"variant {variant.name}: " + "; ".join(str(verdict) for verdict in failed)
            if not variant.optional:
                raise GateFailed(f"{recipe.file.name}: {text}; nothing was published")
            target.unlink()
            notes.append(f"left out: {text}")
            continue
        distance = difference(golden, runner)
        costs = _costs(target, variant.name, recipe, board, golden[0].inputs, options)
        for cost in costs:
            say(f"{'':<9} {cost.threads} thread{'s' if cost.threads > 1 else ''}: p50 {cost.latency.p50_us / 1000:.2f} ms, "
                f"p99 {cost.latency.p99_us / 1000:.2f} ms, load {cost.load_ms:.0f} ms, peak {mib(cost.load_peak_bytes)}")  # fmt: skip
        built.append(Built(variant, f"model/{variant.name}.onnx", result, verdicts, costs,
                           tolerance(variant.tolerance, distance), distance, count))  # fmt: skip
    if not built:
        raise GateFailed(f"{recipe.file.name}: no variant passed its gates; nothing was published")
    built.sort(key=lambda item: -quality(item.gates[0]))
    return built, notes


def _warnings(recipe: Recipe, board: Board, weights: WeightRange) -> list[str]:
    notes = []
    if all(variant.method == "keep" for variant in recipe.file.variants):
        return notes
    here = this_machine()
    if missing := sorted(set(weights.instruction_sets) - set(here.flags)):
        notes.append(f"evaluated on a machine without {', '.join(missing)}: 8-bit figures may differ on {board.name}")
    if board.cpu.architecture == "aarch64" and "asimddp" not in board.cpu.instruction_sets:
        notes.append(f"{board.name} lists no asimddp: 8-bit variants may be slower than float there")
    return notes


def _streams(recipe: Recipe, function: str, data: dict[str, Path]) -> Callable[[], Iterator[Stream]]:
    """Return data.py's function, bound to the fetched files; calling it starts from the first stream again."""
    hook = recipe.hook("data", function)
    if hook is None:
        raise ConfigError(str(recipe.folder / "data.py"), (Problem(function, "is missing"),))
    found = hook
    return lambda: iter(found(data))


def _golden_streams(recipe: Recipe, data: dict[str, Path]) -> Iterator[Stream]:
    function = "golden" if recipe.hook("data", "golden") is not None else "evaluation"
    return _streams(recipe, function, data)()


def _costs(model: Path, variant: str, recipe: Recipe, board: Board, typical: Inputs,
           options: Options) -> list[OperatingCost]:  # fmt: skip
    if options.costs_from is not None:
        costs = [cost for cost in options.costs_from.costs if cost.variant == variant]
        if not costs:
            raise ModelRefused(f"the profile to take costs from has none for variant {variant!r}")
        return costs
    return measure(model, variant=variant, recipe=recipe, threads=thread_counts(board, this_machine()), typical=typical,
                   seconds=options.seconds)  # fmt: skip


def _write_golden(recipe: Recipe, folder: Path, data: dict[str, Path], model: Path) -> list[Golden]:
    """Write the golden files; the answers are those of the best variant."""
    (folder / "golden").mkdir()
    found = []
    requests = golden_requests(_golden_streams(recipe, data), recipe, Runner(model, state=recipe.state))
    for index, item in enumerate(requests):
        entry = Golden(request=f"golden/{index:03}.request", response=f"golden/{index:03}.response")
        (folder / entry.request).write_bytes(encode_golden(request_payload(item.inputs, recipe.inputs)))
        (folder / entry.response).write_bytes(
            encode_golden(response_payload(item, recipe.outputs, model=recipe.file.name, version=recipe.file.version))
        )
        found.append(entry)
    return found


def _manifest(recipe: Recipe, board: Board, folder: Path, built: list[Built], golden: list[Golden],
              model: onnx.ModelProto) -> Manifest:  # fmt: skip
    file, weights = recipe.file, weight_range(board)
    variants = [
        Variant(
            name=item.recipe.name,
            file=item.file,
            quality=quality(item.gates[0]),
            load_peak_bytes=max(cost.load_peak_bytes for cost in item.costs),
            steady_bytes=max(cost.steady_bytes for cost in item.costs),
            latency_us={str(cost.threads): cost.latency.p99_us for cost in item.costs},
            instruction_sets=[] if item.recipe.method == "keep" else list(weights.instruction_sets),
            tolerance=item.tolerance,
        )
        for item in built
    ]
    source = file.source
    return Manifest(
        schema=MANIFEST_SCHEMA,
        name=file.name,
        version=file.version,
        task=file.task,
        inputs=recipe.inputs,
        outputs=recipe.outputs,
        state=recipe.state,
        classes=recipe.classes,
        variants=variants,
        runtime=Runtime(onnxruntime=ORT_VERSION, opset=graph.opset_of(model), ir_version=int(model.ir_version)),
        files=file_table(folder),
        golden=golden,
        deadline_ms=file.deadline_ms,
        description=file.description,
        provenance=Provenance(
            source=source.origin if source else f"made by models/{recipe.folder.name}/graph.py",
            license=(source.license if source else "") or file.license,
            revision=file.revision,
            data=", ".join(item.origin for item in file.data),
        ),
        metadata={"board": board.name},
    )


def _report(recipe: Recipe, board: Board, machine: Machine, folder: Path, built: list[Built], notes: list[str],
            weights: WeightRange) -> dict[str, Any]:  # fmt: skip
    """Return report.json: what was done and what was measured, for people and for `inspect`."""
    return {
        "schema": REPORT_SCHEMA,
        "model": recipe.file.name,
        "version": recipe.file.version,
        "board": board.name,
        "machine": {"cpu": machine.cpu, "architecture": platform.machine()},
        "versions": {"onnxruntime": ORT_VERSION, "onnx": onnx.__version__, "numpy": np.__version__},
        "weights": {"reduced_range": weights.reduced, "reason": weights.reason},
        "notes": notes,
        "variants": [
            {
                "name": item.recipe.name,
                "method": item.recipe.method,
                "size_bytes": (folder / item.file).stat().st_size,
                "calibration_samples": item.calibration_samples,
                "evaluation": {"streams": item.evaluation.streams, "requests": item.evaluation.requests,
                               "confusion": dict(item.evaluation.confusion)},
                "gates": [{"metric": gate.metric, "output": gate.output, "value": round(gate.value, 6),
                           "minimum": gate.minimum, "maximum": gate.maximum} for gate in item.gates],
                "errors": {name: {"max_abs": float(f"{error.max_abs:.6g}"),
                                  "mean_abs": float(f"{error.sum_abs / max(error.elements, 1):.6g}")}
                           for name, error in item.evaluation.errors.items()},
                "golden_difference": float(f"{item.golden_difference:.6g}"),
                "tolerance": item.tolerance,
                "costs": item.costs,
            }
            for item in built
        ],
    }  # fmt: skip


def _profile(manifest: Manifest, digest: str, board: Board, machine: Machine, built: list[Built]) -> Profile:
    return Profile(
        schema=PROFILE_SCHEMA,
        model=manifest.name,
        version=manifest.version,
        bundle_digest=digest,
        board=board.name,
        machine=machine.cpu,
        cpu_flags=machine.flags,
        onnxruntime=ORT_VERSION,
        origin="estimated",
        costs=[cost for item in built for cost in item.costs],
        estimate_model="as measured on the build machine, not scaled to the board",
    )
