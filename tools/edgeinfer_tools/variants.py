"""Make every variant of a recipe, and find out what each is worth: does it run, how good is it, what does it cost.

Owns the order of these steps for one variant and the verdict over it. Nothing is kept of a variant that misses a gate.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.profile import OperatingCost, Profile
from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools import recipe_code
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.evaluate import Evaluation, GateResult, evaluate, judge, quality
from edgeinfer_tools.faults import DataRefused, GateFailed
from edgeinfer_tools.golden import GoldenRequest, Recorded, golden_requests, record, tolerance
from edgeinfer_tools.machine import Machine, thread_counts
from edgeinfer_tools.measure import measure
from edgeinfer_tools.quantize import quantize, sums_exactly, weight_range
from edgeinfer_tools.recipe import Recipe, VariantRecipe
from edgeinfer_tools.samples import Stream
from edgeinfer_tools.session import Level, Runner
from edgeinfer_tools.sizes import human
from edgeinfer_tools.smoke import smoke

POOR_RATIO = 0.6
"""An 8-bit file that is larger than this share of the float one was hardly quantized."""


PROGRESS_SAMPLES = 8
"""So many samples between two lines of progress while calibrating."""


@dataclass(frozen=True, slots=True)
class Job:
    """One build under way: everything that is settled before the first variant is made."""

    recipe: Recipe
    board: Board
    machine: Machine
    files: dict[str, Path]
    """The recipe's data files by their keys."""
    folder: Path
    """Where the bundle is staged."""
    float_model: Path
    """The prepared model that every variant is made from."""
    seconds: float
    """Time for the latency of one variant at one thread count."""
    costs_from: Profile | None
    """Costs to take instead of measuring."""
    say: Callable[[str], None]

    def runner(self, model: Path, level: Level = "all", threads: int = 1) -> Runner:
        """Load a model of this job in this process."""
        return Runner(model, state=self.recipe.state, level=level, threads=threads)

    def streams(self, function: str) -> Iterator[Stream]:
        """Return what data.py's `function` yields for the fetched files.

        Raises:
            ConfigError: there is no such function.
            RecipeCodeFailed: while it is iterated, it raises something.
        """
        hook = self.recipe.hook("data", function)
        if hook is None:
            raise ConfigError(str(self.recipe.code("data")), (Problem(function, "is missing"),))
        return recipe_code.streams(self.recipe.code("data"), hook, self.files)

    def golden(self) -> list[GoldenRequest]:
        """Return the golden requests."""
        function = "golden" if self.recipe.hook("data", "golden") is not None else "evaluation"
        return golden_requests(self.streams(function), self.recipe)


@dataclass(frozen=True, slots=True)
class Built:
    """One variant that passed."""

    recipe: VariantRecipe
    file: str
    """Relative to the bundle."""
    size_bytes: int
    evaluation: Evaluation
    gates: list[GateResult]
    costs: list[OperatingCost]
    golden: Recorded
    tolerance: float
    """Golden tolerance for the manifest."""
    calibration_samples: int

    @property
    def quality(self) -> float:
        """1.0 = as the float model."""
        return quality(self.gates[0])


def make_variants(job: Job, golden: list[GoldenRequest]) -> tuple[list[Built], list[str]]:
    """Return the variants that passed, best quality first, and notes for the report.

    Raises:
        GateFailed: a variant that is not optional misses a gate, or none is left.
        EdgeInferError: the model, the data or the runtime is at fault.
    """
    smoke(job.float_model, golden[0].tensors, job.recipe.state)
    notes, built = _notes_on_board(job), []
    for variant in job.recipe.file.variants:
        found = _make(job, variant, golden)
        if isinstance(found, Built):
            built.append(found)
        else:
            notes.append(f"left out: {found}")
    if not built:
        raise GateFailed(f"{job.recipe.file.name}: no variant passed its gates; nothing was published")
    built.sort(key=lambda item: -item.quality)
    return built, notes + _notes_on_worth(job, built)


def _make(job: Job, variant: VariantRecipe, golden: list[GoldenRequest]) -> Built | str:
    """Return the variant, or why an optional one is left out."""
    target = job.folder / "model" / f"{variant.name}.onnx"
    if variant.method == "static":
        job.say(f"{variant.name:<9} calibrating on real data")
    samples = _quantize(job, variant, target)
    job.say(f"{variant.name:<9} {variant.method}{f', {samples} samples' if samples else ''}, {human(target)}")
    smoke(target, golden[0].tensors, job.recipe.state)
    job.say(f"{'':<9} evaluating, beside the float model")
    runner = job.runner(target)
    evaluation = evaluate(runner, job.runner(job.float_model), job.streams("evaluation"), job.recipe)
    verdicts = judge(evaluation, job.recipe.file.gates)
    for verdict in verdicts:
        job.say(f"{'':<9} {'pass' if verdict.passed else 'FAIL'}: {verdict} ({evaluation.requests} requests)")
    if failed := [verdict for verdict in verdicts if not verdict.passed]:
        text = f"variant {variant.name}: " + "; ".join(str(verdict) for verdict in failed)
        if not variant.optional:
            raise GateFailed(f"{job.recipe.file.name}: {text}; nothing was published")
        target.unlink()
        return text
    if job.costs_from is None:
        job.say(f"{'':<9} measuring")
    costs = _costs(job, variant, target, golden[0])
    for cost in costs:
        threads = "1 thread" if cost.threads == 1 else f"{cost.threads} threads"
        latency = f"p50 {cost.latency.p50_us / 1000:.2f} ms, p99 {cost.latency.p99_us / 1000:.2f} ms"
        job.say(f"{'':<9} {threads}: {latency}, load {cost.load_ms:.0f} ms, peak {human(cost.load_peak_bytes)}")
    weights = weight_range(job.board)
    recorded = record(
        golden,
        lambda level, threads: job.runner(target, level, threads),
        exact=not variant.quantized or sums_exactly(weights, job.machine.flags, platform.machine()),
    )
    return Built(
        recipe=variant,
        file=str(target.relative_to(job.folder)),
        size_bytes=target.stat().st_size,
        evaluation=evaluation,
        gates=verdicts,
        costs=costs,
        golden=recorded,
        tolerance=tolerance(variant.tolerance, recorded.spread, _extents(job, evaluation), quantized=variant.quantized),
        calibration_samples=samples,
    )


def _extents(job: Job, evaluation: Evaluation) -> list[tuple[float, float]]:
    """Return the smallest and the largest value of each float output on the evaluation data."""
    floats = [spec.name for spec in job.recipe.outputs if spec.datatype.startswith(("FP", "BF"))]
    return [evaluation.distributions[f"outputs.{name}"].extent for name in floats]


def _quantize(job: Job, variant: VariantRecipe, target: Path) -> int:
    def calibration() -> CheckedSamples:
        return CheckedSamples(
            job.streams("calibration"),
            job.recipe.inputs,
            state=job.recipe.state,
            float_model=lambda: job.runner(job.float_model),
            on_sample=progress,
        )

    def progress(count: int) -> None:
        if count % PROGRESS_SAMPLES == 0:
            job.say(f"{'':<9} {count} samples")

    return quantize(job.float_model, target, variant, weights=weight_range(job.board), samples=calibration)


def _costs(job: Job, variant: VariantRecipe, model: Path, typical: GoldenRequest) -> list[OperatingCost]:
    if job.costs_from is None:
        threads = thread_counts(job.board, job.machine)
        return measure(
            model, variant=variant.name, recipe=job.recipe, threads=threads, typical=typical.inputs, seconds=job.seconds
        )
    costs = [cost for cost in job.costs_from.costs if cost.variant == variant.name]
    if not costs:
        raise DataRefused(f"the profile that costs are taken from has none for variant {variant.name!r}")
    return costs


def _notes_on_board(job: Job) -> list[str]:
    """Warn where figures of this machine may not hold on the board."""
    notes, cpu = [], job.board.cpu
    if cpu.architecture != (here := platform.machine()):
        notes.append(f"latency and memory are those of a {here} machine; {job.board.name} is {cpu.architecture}")
    if not any(variant.quantized for variant in job.recipe.file.variants):
        return notes
    if missing := sorted(set(weight_range(job.board).instruction_sets) - set(job.machine.flags)):
        notes.append(f"evaluated without {', '.join(missing)}: 8-bit figures may differ on {job.board.name}")
    if cpu.architecture == "aarch64" and "asimddp" not in cpu.instruction_sets:
        notes.append(f"{job.board.name} lists no asimddp: 8-bit variants may be slower than float there")
    return notes


def _notes_on_worth(job: Job, built: list[Built]) -> list[str]:
    """Say so when quantizing did not pay."""
    notes = []
    float_bytes = job.float_model.stat().st_size
    kept = next((item for item in built if not item.recipe.quantized), None)
    for item in built:
        if not item.recipe.quantized:
            continue
        if (ratio := item.size_bytes / float_bytes) > POOR_RATIO:
            notes.append(f"{item.recipe.name} has {ratio:.0%} of the float model's size: little of it is in 8 bits")
        if kept is not None and item.costs[0].latency.p50_us > kept.costs[0].latency.p50_us:
            notes.append(f"{item.recipe.name} is slower than {kept.recipe.name} on this machine")
    return notes
