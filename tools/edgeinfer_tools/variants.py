"""Make every variant of a recipe, and find out what each is worth: does it run, how good is it, what does it cost.

Owns the order of these steps for one variant and the verdict over it. Nothing is kept of a variant that misses a gate.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.profile import OperatingCost, Profile
from edgeinfer.artifact.provider import CPU_PROVIDER
from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools import model_file, recipe_code
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.choice import Candidate, Choice, choose
from edgeinfer_tools.evaluate import Evaluation, GateResult, evaluate, judge, quality
from edgeinfer_tools.faults import DataRefused, GateFailed
from edgeinfer_tools.fetch import cache_dir
from edgeinfer_tools.golden import GoldenRequest, Recorded, golden_requests, record, tolerance
from edgeinfer_tools.machine import Machine, thread_counts
from edgeinfer_tools.measure import measure
from edgeinfer_tools.origin import Source
from edgeinfer_tools.quantize import Quantized, quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.recipe import Recipe, VariantRecipe
from edgeinfer_tools.samples import Stream, decode_inputs
from edgeinfer_tools.scheme import Scheme, recipe_scheme
from edgeinfer_tools.sensitivity import OutputError, rank, rescue
from edgeinfer_tools.session import Level, Runner
from edgeinfer_tools.sizes import human
from edgeinfer_tools.smoke import smoke
from edgeinfer_tools.targets import sums_exactly, target_of, weight_range

SENSITIVITY_REQUESTS = 8
"""So many requests of the selection decide which nodes are sensitive; all of it judges."""
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
    networks: dict[str, Path] = field(default_factory=dict)
    """Prepared models of variants that have a source of their own, by `network_key`."""

    def float_of(self, source: Source | None) -> Path:
        """Return the prepared model that a variant with this source is made from."""
        return self.float_model if source is None else self.networks[network_key(source)]

    def runner(
        self, model: Path, level: Level = "all", threads: int = 1, *, variant: VariantRecipe | None = None
    ) -> Runner:
        """Load a model of this job in this process, on the providers of its variant where one is given."""
        providers = [CPU_PROVIDER] if variant is None else variant.providers
        options = {} if variant is None else variant.provider_options
        return Runner(
            model,
            state=self.recipe.state,
            level=level,
            threads=threads,
            providers=providers,
            provider_options=options,
        )

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

    @property
    def selection(self) -> str:
        """The function of data.py whose data choose among candidates; the evaluation's, where there is no other.

        What chose must not judge too: the verdict that counts is always the evaluation's.
        """
        return "selection" if self.recipe.hook("data", "selection") is not None else "evaluation"

    def golden(self) -> list[GoldenRequest]:
        """Return the golden requests."""
        function = "golden" if self.recipe.hook("data", "golden") is not None else "evaluation"
        return golden_requests(self.streams(function), self.recipe)


def network_key(source: Source) -> str:
    """Return a text that is equal for equal sources."""
    return repr(source)


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
    quantized: Quantized
    """How it was made, what stayed float, what it needs."""

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
    calibrations: dict[Path, Calibration] = {}
    for variant in job.recipe.file.variants:
        network = job.float_of(variant.source)
        calibration = calibrations.setdefault(network, calibration_of(job, golden[0], network))
        found = _make(job, variant, golden, calibration)
        if isinstance(found, Built):
            built.append(found)
        else:
            notes.append(f"left out: {found}")
    if not built:
        raise GateFailed(f"{job.recipe.file.name}: no variant passed its gates; nothing was published")
    built.sort(key=lambda item: -item.quality)
    return built, notes + _notes_on_worth(job, built)


def _make(job: Job, variant: VariantRecipe, golden: list[GoldenRequest], calibration: Calibration) -> Built | str:
    """Return the variant, or why an optional one is left out."""
    target = job.folder / "model" / f"{variant.name}.onnx"
    wanted = recipe_scheme(variant.method, variant.operators, variant.scheme, target_of(job.board))
    made, evaluation, verdicts = _judged(job, variant, wanted, target, calibration)
    if _failed(verdicts) and variant.keep_sensitive and wanted.quantized:
        found = _rescued(job, variant, wanted, target, calibration)
        if found is not None:
            made, evaluation, verdicts = found
    if failed := _failed(verdicts):
        text = f"variant {variant.name}: " + "; ".join(str(verdict) for verdict in failed)
        if not variant.optional:
            raise GateFailed(f"{job.recipe.file.name}: {text}; nothing was published")
        for path in model_file.files_of(target):
            path.unlink()
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
        lambda level, threads: job.runner(target, level, threads, variant=variant),
        exact=not variant.quantized or sums_exactly(weights, job.machine.flags, platform.machine()),
    )
    return Built(
        recipe=variant,
        file=str(target.relative_to(job.folder)),
        size_bytes=made.size_bytes,
        evaluation=evaluation,
        gates=verdicts,
        costs=costs,
        golden=recorded,
        tolerance=tolerance(variant.tolerance, recorded.spread, _extents(job, evaluation), quantized=variant.quantized),
        quantized=made,
    )


_Judged = tuple[Quantized, Evaluation, list[GateResult]]


def _judged(
    job: Job,
    variant: VariantRecipe,
    scheme: Scheme,
    target: Path,
    calibration: Calibration,
    *,
    data: str = "evaluation",
) -> _Judged:
    """Quantize, prove, evaluate on what data.py's function `data` yields."""
    if scheme.calibrated:
        job.say(f"{variant.name:<9} calibrating on real data")
    made = quantize(job.float_of(variant.source), scheme, target_of(job.board), calibration, target)
    samples = f", {made.calibration_samples} samples" if made.calibration_samples else ""
    job.say(f"{variant.name:<9} {scheme.title}{samples}, {human(made.size_bytes)}")
    job.say(f"{'':<9} evaluating, beside the float model")
    here = job.runner(target, variant=variant)
    evaluation = evaluate(here, job.runner(job.float_model), job.streams(data), job.recipe)
    verdicts = judge(evaluation, job.recipe.file.gates)
    for verdict in verdicts:
        job.say(f"{'':<9} {'pass' if verdict.passed else 'FAIL'}: {verdict} ({evaluation.requests} requests)")
    return made, evaluation, verdicts


def _failed(verdicts: list[GateResult]) -> list[GateResult]:
    return [verdict for verdict in verdicts if not verdict.passed]


def _rescued(
    job: Job, variant: VariantRecipe, scheme: Scheme, target: Path, calibration: Calibration
) -> _Judged | None:
    """Keep the most sensitive nodes float until the gates hold; None when they never do."""
    requests = (request for stream in job.streams(job.selection) for request in stream.requests)
    tensors = (decode_inputs(item, job.recipe.inputs) for item in islice(requests, SENSITIVITY_REQUESTS))
    network = job.float_of(variant.source)
    error = OutputError(network, tensors, job.recipe.state)
    ranking = rank(
        network, scheme, calibration, error,
        cache=cache_dir() / "sensitivity", say=lambda line: job.say(f"{'':<9} {line}"),
    )  # fmt: skip

    def holds(candidate: Scheme) -> bool:
        return not _failed(_judged(job, variant, candidate, target, calibration, data=job.selection)[2])

    found = rescue(scheme, ranking, holds)
    return None if found is None else _judged(job, variant, found, target, calibration)


def _extents(job: Job, evaluation: Evaluation) -> list[tuple[float, float]]:
    """Return the smallest and the largest value of each float output on the evaluation data."""
    floats = [spec.name for spec in job.recipe.outputs if spec.datatype.startswith(("FP", "BF"))]
    return [evaluation.distributions[f"outputs.{name}"].extent for name in floats]


def calibration_of(job: Job, typical: GoldenRequest, network: Path) -> Calibration:
    """Return the recipe's calibration data for a prepared model."""

    def samples() -> CheckedSamples:
        return CheckedSamples(
            job.streams("calibration"),
            job.recipe.inputs,
            state=job.recipe.state,
            float_model=lambda: job.runner(network),
            on_sample=progress,
        )

    def progress(count: int) -> None:
        if count % PROGRESS_SAMPLES == 0:
            job.say(f"{'':<9} {count} samples")

    return Calibration(typical.tensors, job.recipe.state, samples)


def _costs(job: Job, variant: VariantRecipe, model: Path, typical: GoldenRequest) -> list[OperatingCost]:
    if job.costs_from is None:
        threads = thread_counts(job.board, job.machine)
        return measure(
            model, variant=variant, recipe=job.recipe, threads=threads, typical=typical.inputs, seconds=job.seconds
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


def preferred(built: list[Built]) -> Choice:
    """Return which variant to prefer by what was measured at one thread."""
    return choose(
        [Candidate(item.recipe.name, item.quality, item.costs[0].latency.p50_us, item.size_bytes) for item in built]
    )


def _where(job: Job) -> str:
    """Return where the costs hold, in words."""
    given = job.costs_from
    if given is not None and given.origin == "measured":
        return f"on {job.board.name}"
    if given is not None and given.estimate_model.startswith("estimated"):
        return f"on {job.board.name}, as estimated"
    return "on this machine"


def _notes_on_worth(job: Job, built: list[Built]) -> list[str]:
    """Say so when quantizing did not pay."""
    notes = []
    for item in built:
        notes += [f"{item.recipe.name}: {note}" for note in item.quantized.notes]
    kept = next((item for item in built if item.recipe.method == "keep"), None)
    if kept is None:
        return notes
    for item in built:
        if item is not kept and item.costs[0].latency.p50_us > kept.costs[0].latency.p50_us:
            both = f"p50 {item.costs[0].latency.p50_us} us against {kept.costs[0].latency.p50_us} us"
            notes.append(f"{item.recipe.name} is slower than {kept.recipe.name} {_where(job)} ({both})")
    notes += [
        f"{name} is slower than another variant, and neither smaller nor better" for name in preferred(built).dominated
    ]
    return notes
