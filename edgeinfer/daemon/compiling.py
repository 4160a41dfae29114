"""Find the form in which this device loads a variant best: make each in a throw-away worker, measure, keep the best.

Puts worker, store and choice together. Nothing that goes wrong here is more than a reason to load the variant as it
came: no error leaves, the time is bounded, and a form counts only with its golden answers right.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from edgeinfer.artifact.external_data import external_locations
from edgeinfer.artifact.manifest import Manifest, Variant
from edgeinfer.artifact.profile import SCHEMA, Latency, OperatingCost, Profile
from edgeinfer.clock import NS_PER_MS, NS_PER_S, MonotonicClock
from edgeinfer.errors import EdgeInferError, SessionError, mib
from edgeinfer.execution.compiled import choose_form
from edgeinfer.store.compiled import (
    MODEL_FILE,
    CompiledForm,
    CompiledStore,
    FormCost,
    FormKey,
    describe_files,
    new_record,
)
from edgeinfer.store.store import Installed
from edgeinfer.worker.largest import has_one_shape, largest_request
from edgeinfer.worker.messages import Form, LoadSpec, MappedFile
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.probe import Timing, Verdict, probe
from edgeinfer.worker.spec import FormFiles, compile_spec, load_spec, with_files
from edgeinfer.worker.worker import Worker

_log = logging.getLogger(__name__)

MIN_WEIGHTS_BYTES: Final = 8 << 20
"""Below, there is nothing to gain that anybody would notice."""
TIME_LIMIT_NS: Final = 120 * NS_PER_S
"""For one variant; what was not measured by then is not chosen."""
_OTHER_FORMS: Final[tuple[Form, ...]] = ("prepacked", "mapped")
_MAX_GROWTH: Final = 6
"""Packed weights have up to this many times the size of those in the bundle [measured: MiniLM int8, 22 to 130 MB]."""
_ROUNDS: Final = 2
"""Each form is measured in so many workers, by turns, plain in one more: a passing disturbance spoils no form alone."""
_EACH_NS: Final = 400 * NS_PER_MS
_REPEAT: Final = 8
_MIN_COPIES: Final = 3
"""Of the weights, while a form is made: the file as it is read, its tensors, and one packed."""
_CPU_PROVIDER: Final = "CPUExecutionProvider"

T = TypeVar("T")


def form_key(digest: str, variant: Variant, *, onnxruntime: str, cpu_flags: frozenset[str]) -> FormKey:
    """Return what a compiled form of the variant holds for on this device now."""
    return FormKey(digest, variant.name, onnxruntime, platform.machine(), cpu_flags, tuple(variant.providers))


def form_files(form: CompiledForm) -> FormFiles | None:
    """Return the load order's part of a form, None when the variant is loaded as it came."""
    if form.record.form == "plain":
        return None
    mapped = tuple(MappedFile(str(path), size_bytes) for path, size_bytes in form.weights)
    return FormFiles(form.record.form, form.model_path, mapped)


class _NoForms(EdgeInferError):
    """This variant is loaded as it came, for the reason given."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all forms of a variant are measured with."""

    installed: Installed
    variant: Variant
    timing: Timing
    deadline_ns: int


@dataclass(slots=True)
class _Candidate:
    """One form while it is being made and measured."""

    form: Form
    spec: LoadSpec
    folder: Path | None = None
    """Its files; None for plain, and for one that could not be made."""
    problem: str = ""
    verdicts: list[Verdict] = field(default_factory=list)

    def cost(self, weights: int, *, covers_largest: bool) -> FormCost:
        """Return what was measured in all rounds: the worst of memory, the best of times."""
        if self.problem or not self.verdicts:
            return FormCost(form=self.form, problem=self.problem or "it was not measured")
        memories = [verdict.memory for verdict in self.verdicts if verdict.memory is not None]
        mapped = sum(file.size_bytes for file in self.spec.mapped)
        touched = max(verdict.hot_bytes for verdict in self.verdicts)
        return FormCost(
            form=self.form,
            load_ms=round(min(verdict.load_ns for verdict in self.verdicts) / NS_PER_MS, 1),
            peak_bytes=max((memory.peak_anon_bytes for memory in memories), default=0),
            steady_bytes=max((memory.anon_bytes for memory in memories), default=0),
            hot_bytes=max(touched, min(mapped, weights)),  # golden requests may miss rows of a table
            disk_bytes=mapped,
            latencies_us=_latencies_us(self.verdicts),
            covers_largest=covers_largest,
        )


class Compiler:
    """Makes and measures forms, one variant after the other. `storage` does what touches the disk."""

    def __init__(
        self,
        *,
        nursery: Nursery,
        store: CompiledStore,
        cpu_flags: frozenset[str],
        storage: Executor,
        memory_bytes: Callable[[], int],
        threads: int = 1,
        time_limit_ns: int = TIME_LIMIT_NS,
    ) -> None:
        """`memory_bytes` tells how much anonymous memory a throw-away worker may take now."""
        self._nursery = nursery
        self._store = store
        self._cpu_flags = cpu_flags
        self._storage = storage
        self._memory_bytes = memory_bytes
        self._threads = threads
        self._time_limit_ns = time_limit_ns
        self._clock = MonotonicClock()

    async def compile(self, installed: Installed, variant: Variant) -> CompiledForm | None:
        """Keep the best form of an installed variant; return it, None when nothing could be measured or kept.

        What was kept before for another key is replaced.
        """
        title = f"{installed.manifest.name} {installed.manifest.version} {variant.name}"
        try:
            return await self._compile(installed, variant)
        except EdgeInferError as error:
            _log.info("loads as it came variant=%r why=%r", title, str(error))
            return None

    async def _compile(self, installed: Installed, variant: Variant) -> CompiledForm:
        manifest = installed.manifest
        weights = await self._off_loop(lambda: weights_bytes(installed.path, manifest, variant))
        if weights < MIN_WEIGHTS_BYTES:
            raise _NoForms(f"it has only {mib(weights)} of weights")
        if variant.providers != [_CPU_PROVIDER]:
            raise _NoForms(f"its provider is {variant.providers[0]}")
        if not manifest.golden_for(variant.name):
            raise _NoForms("it has no golden request to hold other forms against")
        key = form_key(
            installed.digest,
            variant,
            onnxruntime=self._nursery.snapshot().onnxruntime,
            cpu_flags=self._cpu_flags,
        )
        with self._store.writing() as work:
            return await self._measure(installed, variant, key, work, weights)

    async def _measure(
        self, installed: Installed, variant: Variant, key: FormKey, work: Path, weights: int
    ) -> CompiledForm:
        manifest, deadline_ns = installed.manifest, self._clock.now_ns() + self._time_limit_ns
        spec = load_spec(manifest, installed.path, variant.name, threads=self._threads)
        largest = largest_request(manifest)
        bench = _Bench(installed, variant, Timing(_EACH_NS, () if largest is None else (largest,)), deadline_ns)
        plain = _Candidate("plain", spec)
        await self._probe(bench, plain)
        if plain.problem:
            raise _NoForms(f"as it came it does not pass its probe: {plain.problem}")
        others = [await self._make(form, spec, work / form, weights, deadline_ns) for form in _OTHER_FORMS]
        for candidate in (*others, plain) * _ROUNDS:
            await self._probe(bench, candidate)
        everything = (plain, *others)
        covered = _covers_largest(manifest, plain.verdicts, has_largest=largest is not None)
        costs = [candidate.cost(weights, covers_largest=covered) for candidate in everything]
        choice = choose_form(costs[0], costs[1:])
        chosen = next(candidate for candidate in everything if candidate.form == choice.cost.form)
        record = new_record(
            key,
            form=choice.cost,
            why=choice.why,
            operating=_operating_cost(choice.cost, chosen.verdicts, variant, self._threads),
            costs=costs,
            files={} if chosen.folder is None else await self._off_loop(partial(describe_files, chosen.folder)),
        )
        kept = await self._off_loop(partial(self._store.commit, work, chosen.folder, key, record))
        _log.info("compiled variant=%r form=%s why=%r", spec.title, record.form, record.why)
        return kept

    async def _make(self, form: Form, plain: LoadSpec, folder: Path, weights: int, deadline_ns: int) -> _Candidate:
        """Have a throw-away worker write a form into the new `folder`."""
        memory, room = self._memory_bytes(), self._store.room_bytes()
        if memory < _MIN_COPIES * weights:
            needed = mib(_MIN_COPIES * weights)
            return _Candidate(form, plain, problem=f"making it needs about {needed} of memory, {mib(memory)} are free")
        if room < weights:
            return _Candidate(
                form, plain, problem=f"its weights have {mib(weights)}, the disk has room for {mib(room)}"
            )
        try:
            await self._off_loop(folder.mkdir)
            order = compile_spec(
                plain,
                form,
                folder / MODEL_FILE,
                memory_bytes=min(memory, (plain.arena_max_bytes or 0) + _MAX_GROWTH * weights),
                max_file_bytes=min(room, _MAX_GROWTH * weights + (1 << 20)),
            )
            worker = await Worker.start(self._nursery, order, deadline_ns=deadline_ns)
            await worker.stop(grace_ns=0)
            files = FormFiles(form, folder / MODEL_FILE, await self._off_loop(partial(_mapped_files, folder)))
        except (SessionError, OSError) as error:
            return _Candidate(form, plain, problem=str(error))
        return _Candidate(form, with_files(plain, files), folder)

    async def _probe(self, bench: _Bench, candidate: _Candidate) -> None:
        """Measure a candidate in one more worker; one that was measured before stays so when the time is up."""
        left_ns = bench.deadline_ns - self._clock.now_ns()
        if candidate.problem or (left_ns <= 0 and candidate.verdicts):
            return
        if left_ns <= 0:
            candidate.problem = "there was no time to measure it"
            return
        verdict = await probe(
            self._nursery,
            bench.installed.manifest,
            bench.installed.path,
            bench.variant.name,
            load_timeout_ns=left_ns,
            repeat=_REPEAT,
            spec=candidate.spec,
            timing=bench.timing,
        )
        if verdict.accepted:
            candidate.verdicts.append(verdict)
        else:
            candidate.problem = f"{verdict.reason}: {verdict.detail}"

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._storage, work)


def weights_bytes(bundle: Path, manifest: Manifest, variant: Variant) -> int:
    """Return the size of a variant's ONNX file and of its external data. Reads the file's structure.

    Raises:
        ArtifactError: it is no ONNX file.
    """
    folder = PurePosixPath(variant.file).parent
    names = {str(folder / location) for location in external_locations(bundle / variant.file)}
    return sum(manifest.files[name].size_bytes for name in {variant.file, *names} if name in manifest.files)


def _mapped_files(folder: Path) -> tuple[MappedFile, ...]:
    paths = sorted(path for path in folder.iterdir() if path.name != MODEL_FILE)
    return tuple(MappedFile(str(path), path.stat().st_size) for path in paths)


def profile_of(installed: Installed, forms: Sequence[CompiledForm], cpu_flags: frozenset[str]) -> Profile:
    """Return what was measured of a bundle's variants as this device's profile of it."""
    return Profile(
        schema=SCHEMA,
        model=installed.manifest.name,
        version=installed.manifest.version,
        bundle_digest=installed.digest,
        board="",
        machine=platform.machine(),
        cpu_flags=sorted(cpu_flags),
        onnxruntime=forms[0].record.onnxruntime if forms else "",
        origin="measured",
        costs=[form.record.operating for form in forms],
    )


def _covers_largest(manifest: Manifest, verdicts: Sequence[Verdict], *, has_largest: bool) -> bool:
    """Whether the largest shape was among the timed requests: it is the last, and one that fails has no times."""
    return has_one_shape(manifest) or (has_largest and all(verdict.timings_ns[-1] for verdict in verdicts))


def _latencies_us(verdicts: Sequence[Verdict]) -> list[int]:
    """Return the time of each timed request: of all its runs the fastest quarter's slowest, 0 where one failed.

    What else the board does only ever adds to a run's time; the fast ones say what the form costs.
    """
    latencies = []
    for rounds in zip(*(verdict.timings_ns for verdict in verdicts), strict=True):
        runs = sorted(itertools.chain.from_iterable(rounds))
        latencies.append(runs[len(runs) // 4] // 1000 if all(rounds) else 0)
    return latencies


def _operating_cost(cost: FormCost, verdicts: Sequence[Verdict], variant: Variant, threads: int) -> OperatingCost:
    runs = sorted(itertools.chain.from_iterable(verdict.durations_ns for verdict in verdicts))

    def percentile_us(percent: int) -> int:
        return runs[min(len(runs) - 1, len(runs) * percent // 100)] // 1000

    return OperatingCost(
        variant=variant.name,
        provider=variant.providers[0],
        threads=threads,
        latency=Latency(
            p50_us=percentile_us(50),
            p90_us=percentile_us(90),
            p99_us=percentile_us(99),
            mean_us=sum(runs) // len(runs) // 1000,
            runs=len(runs),
        ),
        load_ms=cost.load_ms,
        load_peak_bytes=cost.peak_bytes,
        steady_bytes=cost.steady_bytes,
        mapped_bytes=cost.hot_bytes,
        cpu_us_per_run=sum(verdict.cpu_ns for verdict in verdicts) // len(runs) // 1000,
        form=cost.form,
    )
