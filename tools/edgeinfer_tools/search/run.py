"""Search one build's variants: from a budget to the ladder that the bundle will hold, and the report about it.

Puts the parts together: the candidates of `space`, looked at by `explore` on a `workbench` with a journal in the cache,
costs of the board by `estimate`, its own profile or itself, and `pareto`'s verdict.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import onnx

from edgeinfer.artifact.profile import SCHEMA, OperatingCost, Profile
from edgeinfer.clock import NS_PER_S, Clock, MonotonicClock
from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools import model_file
from edgeinfer_tools.fetch import cache_dir
from edgeinfer_tools.golden import GoldenRequest
from edgeinfer_tools.machine import thread_counts
from edgeinfer_tools.measure import measure
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.search import estimate
from edgeinfer_tools.search.bar import drop, failures
from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.search.explore import Explored, Progress, Row, explore
from edgeinfer_tools.search.journal import Facts, Journal, Scores, search_key
from edgeinfer_tools.search.on_board import OnBoard
from edgeinfer_tools.search.pareto import Verdict, decide
from edgeinfer_tools.search.plot import svg
from edgeinfer_tools.search.progress import PlainProgress
from edgeinfer_tools.search.remote import Address, linked
from edgeinfer_tools.search.report import as_json, as_text, shortfall
from edgeinfer_tools.search.space import Candidate, space
from edgeinfer_tools.search.workbench import Here, JobWorkbench, Measure, data_digest
from edgeinfer_tools.session import ORT_VERSION
from edgeinfer_tools.targets import target_of
from edgeinfer_tools.variants import Job, calibration_of

JOURNAL_SCHEMA = "1"
CHECK_S = 0.1
"""Time to measure here the memory of a form whose costs are the board's."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What to search for, and how."""

    budget: Budget
    time_limit_s: float = 900.0
    keep: int = 3
    """Most variants in the bundle."""
    profile_from: Profile | None = None
    """The board's own measurements of an earlier bundle."""
    on: Address | None = None
    """Measure there."""
    ssh_config: Path | None = None
    fresh: bool = False
    """Forget what earlier searches found."""
    progress: Progress | None = None
    clock: Clock = field(default_factory=MonotonicClock)


@dataclass(frozen=True, slots=True)
class Found:
    """What the search came to."""

    recipe: Recipe
    """With the ladder as its variants."""
    profile: Profile
    """The ladder's costs on the board."""
    verdict: Verdict
    explored: Explored
    text: str
    report: dict[str, Any]
    picture: str
    """SVG."""

    @property
    def shortfall(self) -> str:
        """Which bounds failed by how much, in one sentence; empty when the budget is met."""
        return shortfall(self.verdict, out_of_time=self.explored.out_of_time)

    def write_beside(self, bundle: Path) -> None:
        """Write `BUNDLE.search.txt`, `.json` and `.svg`."""
        bundle.with_name(f"{bundle.name}.search.txt").write_text(self.text, encoding="utf-8")
        report = msgspec.json.format(msgspec.json.encode(self.report, order="sorted"), indent=2) + b"\n"
        bundle.with_name(f"{bundle.name}.search.json").write_bytes(report)
        bundle.with_name(f"{bundle.name}.search.svg").write_text(self.picture, encoding="utf-8")

    def summary(self) -> dict[str, Any]:
        """Return what the bundle's own report says of the search."""
        keys = ("budget", "met", "misses", "winner", "reason", "ladder", "estimated")
        return {key: self.report[key] for key in keys}


def search(job: Job, golden: list[GoldenRequest], options: SearchOptions, scratch: Path) -> Found:
    """Return the best ladder of variants for the job's board within the budget.

    When nothing meets the budget, it is the ladder below the candidate that misses it least; the verdict says so.

    Raises:
        ConfigError: the budget asks for what the board does not have.
        GateFailed: the float model itself misses the recipe's gates.
        LinkError: the board cannot be reached or cannot measure.
        EdgeInferError: the data, the recipe's code or the runtime is at fault. What was found is kept.
    """
    budget = _fit_to_board(job, options)
    deadline_ns = options.clock.now_ns() + int(options.time_limit_s * NS_PER_S)
    candidates = _candidates(job, budget)
    journal = Journal(_journal_path(job, fresh=options.fresh))
    with ExitStack() as stack:
        measure_with: Measure
        if options.on is not None:
            board = stack.enter_context(linked(options.on, config=options.ssh_config))
            job.say(f"board     {options.on}, edgeinfer {board.version}")
            measure_with = OnBoard(job, golden[0], sorted({1, budget.threads}), board)
            reckon: _Reckon = _Measured()
        else:
            threads = {*thread_counts(job.board, job.machine), min(budget.threads, job.machine.cores)}
            measure_with = Here(job, golden[0], sorted(threads))
            reckon = _Estimated(job, budget, options.profile_from)
            candidates = _known_first(candidates, options.profile_from)
        calibrations: dict[Path, Calibration] = {}

        def calibration(candidate: Candidate) -> Calibration:
            network = job.float_of(candidate.source)
            if network not in calibrations:
                calibrations[network] = calibration_of(job, golden[0], network)
            return calibrations[network]

        bench = JobWorkbench(job, calibration, scratch, measure_with)
        job.say(f"search    {len(candidates)} candidates for {budget}; {journal.count} known from before")
        explored = explore(
            bench,
            candidates,
            budget,
            journal=journal,
            clock=options.clock,
            deadline_ns=deadline_ns,
            progress=options.progress or PlainProgress(job.say),
            reckon=reckon,
        )
        explored, verdict = _confirmed(job, bench, explored, budget, options.keep)
    estimate_model = reckon.words()
    profile = _profile(job, explored, verdict, estimate_model)
    if options.on is not None or options.profile_from is not None:
        forms = [explored.row(point.name).candidate for point in verdict.ladder]
        profile = _with_room_here(job, bench, forms, profile, golden[0])
    ladder = [explored.row(point.name).candidate.variant() for point in verdict.ladder]
    title = f"{job.recipe.file.name} {job.recipe.file.version} on {job.board.name}"
    where = bench.where
    return Found(
        recipe=replace(job.recipe, file=replace(job.recipe.file, variants=ladder)),
        profile=profile,
        verdict=verdict,
        explored=explored,
        text=f"{title}\n" + as_text(explored, verdict, budget, where=where, estimated=bool(estimate_model)),
        report={
            "model": job.recipe.file.name,
            "board": job.board.name,
            **as_json(explored, verdict, budget, where=where, estimate_model=estimate_model),
        },
        picture=svg(explored.points, verdict, budget, title=title, estimated=bool(estimate_model)),
    )


def _fit_to_board(job: Job, options: SearchOptions) -> Budget:
    """Return the budget; without a bound on memory, the board's ceiling is one."""
    budget, problems = options.budget, []
    if budget.threads > job.board.cpu.cores:
        text = f"{budget.threads} threads, {job.board.name} has {job.board.cpu.cores} cores"
        problems.append(Problem("budget.p99", text))
    if options.profile_from is not None and options.profile_from.model != job.recipe.file.name:
        text = f"is of {options.profile_from.model}, this is {job.recipe.file.name}"
        problems.append(Problem("--profile-from", text))
    if options.on is not None and options.profile_from is not None:
        problems.append(Problem("--profile-from", "says nothing that --on does not measure; name one of them"))
    if options.keep < 1:
        problems.append(Problem("--keep-variants", f"{options.keep} is not at least 1"))
    if problems:
        raise ConfigError("search", tuple(problems))
    return budget if budget.peak_bytes is not None else replace(budget, peak_bytes=int(job.board.memory.ceiling))


def _candidates(job: Job, budget: Budget) -> list[Candidate]:
    """Return what there is to try, without what the graph or the data rule out from the start."""
    model = model_file.load(job.float_model)
    calibrated = job.recipe.hook("data", "calibration") is not None
    if not calibrated:
        job.say("search    data.py has no calibration(): schemes that need it are left out, static ones among them")
    return space(
        job.recipe.file.variants,
        target_of(job.board),
        budget,
        model_file.size_bytes(job.float_model),
        operators={node.op_type for graph in model_file.graphs(model.graph) for node in graph.node},
        calibrated=calibrated,
    )


def _journal_path(job: Job, *, fresh: bool) -> Path:
    """Return the journal for exactly this model, these data, gates, kernels and versions."""
    recipe = job.recipe
    networks = [job.float_model, *job.networks.values()]
    files = [path for network in networks for path in model_file.files_of(network)]
    data = [data_digest(job.streams(name)) for name in (job.selection, "calibration") if recipe.hook("data", name)]
    contract = msgspec.json.encode([recipe.inputs, recipe.outputs, recipe.state, recipe.classes])
    target = target_of(job.board)
    key = search_key(
        [
            JOURNAL_SCHEMA,
            *(path.read_bytes() for path in files),
            *data,
            contract,
            repr(recipe.file.gates),
            f"{target.architecture} {target.kernels.name} {target.weights.reduced}",
            f"{ORT_VERSION} {onnx.__version__} {' '.join(job.machine.flags)}",
        ]
    )
    path = cache_dir() / "search" / f"{recipe.file.name}-{key}.jsonl"
    if fresh:
        path.unlink(missing_ok=True)
    return path


class _Measured:
    """The costs are the board's own."""

    def __call__(self, candidate: Candidate, facts: Facts, costs: list[OperatingCost]) -> list[OperatingCost]:
        del facts
        return _named(costs, candidate.name)

    def words(self) -> str:
        """Return how the costs were estimated: they were not."""
        return ""


class _Estimated:
    """The costs here, scaled to the board; those that the board has measured itself take their place."""

    def __init__(self, job: Job, budget: Budget, profile: Profile | None) -> None:
        self._job = job
        self._budget = budget
        self._profile = profile
        here_mb_s = estimate.bandwidth_here()
        self._here = estimate.machine_speed(job.machine, platform.machine(), mb_s=here_mb_s)
        self._there = estimate.board_speed(job.board)
        self._floats: dict[str, list[OperatingCost]] = {}
        """Estimates of the float models, by network."""
        self._corrections: dict[bool, float] = {}
        """By whether it is quantized: the board's own latency over the estimate, of the first form that it knows."""
        self._all_own = profile is not None and profile.origin == "measured"

    def __call__(self, candidate: Candidate, facts: Facts, costs: list[OperatingCost]) -> list[OperatingCost]:
        quantized = candidate.scheme.quantized
        scaled = estimate.on_board(
            costs,
            self._here,
            self._there,
            integer_share=facts.integer_share,
            weights_bytes=facts.size_bytes or 0,
            threads=[self._budget.threads],
            correction=self._corrections.get(quantized, self._corrections.get(False, 1.0)),
        )
        if candidate.scheme.method == "keep":
            self._floats[candidate.network] = scaled
        elif candidate.scheme.method == "fp16" and not estimate.has_half(self._job.board.cpu.instruction_sets):
            scaled = estimate.no_faster(scaled, self._floats.get(candidate.network, []))
        own = {cost.threads: cost for cost in (self._profile.costs if self._profile else ()) if cost.form == "plain"
               and cost.variant == candidate.name}  # fmt: skip
        if own and quantized not in self._corrections:
            common = next((cost for cost in scaled if cost.threads in own), None)
            if common is not None:
                before = self._corrections.get(quantized, self._corrections.get(False, 1.0))
                ratio = own[common.threads].latency.p50_us / common.latency.p50_us
                self._corrections[quantized] = before * ratio
                return self(candidate, facts, costs)
        if not own.keys() >= {cost.threads for cost in scaled}:
            self._all_own = False
        return _named([own.get(cost.threads, cost) for cost in scaled], candidate.name)

    def words(self) -> str:
        """Return how the costs were estimated; empty when the board has measured all of them."""
        if self._all_own:
            return ""
        corrected = ", corrected by the board's own profile" if self._corrections else ""
        return estimate.WORDS + corrected


_Reckon = _Measured | _Estimated


def _named(costs: Iterable[OperatingCost], name: str) -> list[OperatingCost]:
    return [msgspec.structs.replace(cost, variant=name) for cost in costs]


def _known_first(candidates: list[Candidate], profile: Profile | None) -> list[Candidate]:
    """Try what the board has measured before the others, whose estimates it corrects; the float model stays first."""
    known = {cost.variant for cost in profile.costs} if profile is not None else set()
    return [candidates[0], *sorted(candidates[1:], key=lambda item: item.name not in known)]


def _confirmed(
    job: Job, bench: JobWorkbench, explored: Explored, budget: Budget, keep: int
) -> tuple[Explored, Verdict]:
    """Return the verdict once its ladder has passed the evaluation's data, where other data have chosen it."""
    base: Scores | None = None
    passed: set[str] = set()
    while True:
        verdict = decide(explored.points, budget, keep=keep)
        open_ = [point.name for point in verdict.ladder if point.name not in passed]
        if job.selection == "evaluation" or not open_:
            return explored, verdict
        rows = list(explored.rows)
        if base is None:
            base = bench.confirm(rows[0].candidate)
        for name in open_:
            row = explored.row(name)
            scores = bench.confirm(row.candidate)
            wrong = [] if row is rows[0] else failures(scores, base, budget)
            if wrong and len(explored.points) > 1:
                text = f"{'; '.join(wrong)} (on the evaluation's data)"
                rows[rows.index(row)] = Row(row.candidate, "misses quality", text, row.facts)
                job.say(f"{'':<9} {name}: {text}")
            else:
                passed.add(name)
                assert row.point is not None
                point = replace(row.point, quality=scores.quality, drop=drop(scores, base))
                rows[rows.index(row)] = replace(row, point=point)
        explored = replace(explored, rows=tuple(rows))


def _profile(job: Job, explored: Explored, verdict: Verdict, estimate_model: str) -> Profile:
    return Profile(
        schema=SCHEMA,
        model=job.recipe.file.name,
        version=job.recipe.file.version,
        bundle_digest="",
        board=job.board.name,
        machine=job.machine.cpu,
        cpu_flags=job.machine.flags,
        onnxruntime=ORT_VERSION,
        origin="estimated" if estimate_model else "measured",
        costs=[cost for point in verdict.ladder for cost in explored.row(point.name).costs],
        estimate_model=estimate_model,
    )


def _with_room_here(
    job: Job, bench: JobWorkbench, forms: Sequence[Candidate], profile: Profile, typical: GoldenRequest
) -> Profile:
    """Raise memory to what this machine needs too: the bundle is proved here, within what it says it needs."""
    least: dict[str, OperatingCost] = {}
    for form in forms:
        least[form.name] = measure(
            bench.model(form), variant=form.variant(), recipe=job.recipe, threads=[1],
            typical=typical.inputs, seconds=CHECK_S,
        )[0]  # fmt: skip

    def roomy(cost: OperatingCost) -> OperatingCost:
        here = least[cost.variant]
        peak = max(cost.load_peak_bytes, here.load_peak_bytes)
        return msgspec.structs.replace(cost, load_peak_bytes=peak, steady_bytes=min(cost.steady_bytes, peak))

    return msgspec.structs.replace(profile, costs=[roomy(cost) for cost in profile.costs])
