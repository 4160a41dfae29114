"""Find the form in which this device loads a variant best: make each in a throw-away worker, measure, keep the best.

Puts worker, store and choice together. Nothing that goes wrong here is more than a reason to load the variant as it
came: no error leaves, the time is bounded, and a form counts only with its golden answers right.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from edgeinfer.artifact.external_data import external_locations
from edgeinfer.artifact.manifest import Manifest, Variant
from edgeinfer.artifact.profile import SCHEMA, Latency, OperatingCost, Profile
from edgeinfer.clock import NS_PER_MS, NS_PER_S, MonotonicClock
from edgeinfer.errors import ArtifactError, EdgeInferError, SessionError, mib
from edgeinfer.execution.compiled import choose_form, form_key
from edgeinfer.execution.ledger import budget_bytes
from edgeinfer.request import Payload
from edgeinfer.sensors.memory import read_memory
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
from edgeinfer.worker.probe import Verdict, probe, read_goldens
from edgeinfer.worker.side_by_side import Pair, time_side_by_side
from edgeinfer.worker.spec import FormFiles, compile_spec, limits_for, load_spec, with_files
from edgeinfer.worker.worker import Worker

_log = logging.getLogger(__name__)

MIN_WEIGHTS_BYTES: Final = 8 << 20
"""Below, there is nothing to gain that anybody would notice."""
TIME_LIMIT_NS: Final = 120 * NS_PER_S
"""For one variant; what was not measured by then is not chosen."""
_OTHER_FORMS: Final[tuple[Form, ...]] = ("prepacked", "mapped")
_MAX_GROWTH: Final = 6
"""Packed weights have up to this many times the size of those in the bundle [measured: MiniLM int8, 22 to 130 MB]."""
_EACH_NS: Final = 500 * NS_PER_MS
"""For one request in two forms by turns."""
_REPEAT: Final = 10
"""Runs for the profile."""
COMPILE_COPIES: Final = 3
"""Of the weights, while a form is made: the file as it is read, its tensors, and one packed."""
_MEMORY_RESERVE_BYTES: Final = 64 << 20
"""Left to everybody else while a form is made."""
_CPU_PROVIDER: Final = "CPUExecutionProvider"

T = TypeVar("T")


class _NoForms(EdgeInferError):
    """This variant is loaded as it came, for the reason given."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all forms of a variant are measured with."""

    installed: Installed
    variant: Variant
    further: Sequence[Payload]
    """The request of the largest shapes, where there is one."""
    deadline_ns: int


@dataclass(slots=True)
class _Candidate:
    """One form while it is being made and measured."""

    form: Form
    spec: LoadSpec
    folder: Path | None = None
    """Its files; None for plain, and for one that could not be made now."""
    problem: str = ""
    verdict: Verdict | None = None
    load_ns: int = 0
    pairs: Sequence[Pair | None] = ()
    """Times beside the plain form's."""

    def cost(self, weights: int, *, covers_largest: bool) -> FormCost:
        """Return what was measured."""
        verdict = self.verdict
        if self.problem or verdict is None or verdict.memory is None:
            return FormCost(form=self.form, problem=self.problem or "it was not measured")
        mapped = sum(file.size_bytes for file in self.spec.mapped)
        return FormCost(
            form=self.form,
            load_ms=round(self.load_ns / NS_PER_MS, 1),
            peak_bytes=max(verdict.memory.peak_anon_bytes, verdict.load_peak_bytes),
            steady_bytes=verdict.memory.anon_bytes,
            hot_bytes=max(verdict.hot_bytes, min(mapped, weights)),  # golden requests may miss rows of a table
            disk_bytes=mapped,
            latencies_us=[pair.second_ns // 1000 if pair else 0 for pair in self.pairs],
            plain_latencies_us=[pair.first_ns // 1000 if pair else 0 for pair in self.pairs],
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

        One that is there for this CPU and runtime is left as it is; one for others is replaced.
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
        if found := await self._off_loop(partial(self._found, key)):
            return found
        with self._store.writing() as work:
            return await self._measure(installed, variant, key, work, weights)

    def _found(self, key: FormKey) -> CompiledForm | None:
        """Return the form that is there already, when it is sound."""
        form = self._store.find(key)
        if form is not None:
            try:
                self._store.check(form)
            except ArtifactError as error:
                _log.warning("compiled form is damaged and made again: %s", error)
                return None
        return form

    async def _measure(
        self, installed: Installed, variant: Variant, key: FormKey, work: Path, weights: int
    ) -> CompiledForm:
        manifest, deadline_ns = installed.manifest, self._clock.now_ns() + self._time_limit_ns
        spec = load_spec(manifest, installed.path, variant.name, threads=self._threads)
        largest = largest_request(manifest)
        further = () if largest is None else (largest,)
        bench = _Bench(installed, variant, further, deadline_ns)
        plain = _Candidate("plain", spec)
        await self._probe(bench, plain)
        if plain.problem:
            raise _NoForms(f"as it came it does not pass its probe: {plain.problem}")
        others = [await self._make(form, spec, work / form, weights, deadline_ns) for form in _OTHER_FORMS]
        for candidate in others:
            await self._probe(bench, candidate)
        goldens = [request for request, _ in read_goldens(manifest, installed.path, variant.name)]
        for candidate in others:
            await self._race(bench, plain, candidate, [goldens[0], *further])
        everything = (plain, *others)
        costs = [candidate.cost(weights, covers_largest=_covers_largest(bench, candidate)) for candidate in everything]
        choice = choose_form(costs[0], costs[1:])
        if choice.cost is costs[0] and not all(candidate.folder for candidate in others):
            raise _NoForms(choice.why)  # for want of memory, room or time: not kept, so that it is tried again
        chosen = next(candidate for candidate in everything if candidate.form == choice.cost.form)
        record = new_record(
            key,
            form=choice.cost,
            why=choice.why,
            operating=_operating_cost(choice.cost, chosen.verdict, variant, self._threads),
            costs=costs,
            files={} if chosen.folder is None else await self._off_loop(partial(describe_files, chosen.folder)),
        )
        kept = await self._off_loop(partial(self._store.commit, work, chosen.folder, key, record))
        _log.info("compiled variant=%r form=%s why=%r", spec.title, record.form, record.why)
        return kept

    async def _make(self, form: Form, plain: LoadSpec, folder: Path, weights: int, deadline_ns: int) -> _Candidate:
        """Have a throw-away worker write a form into the new `folder`."""
        memory, room = self._memory_bytes(), self._store.room_bytes()
        if memory < COMPILE_COPIES * weights:
            needed = mib(COMPILE_COPIES * weights)
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
        """Load a candidate once and hold it against the golden answers."""
        if candidate.problem:
            return
        verdict = await probe(
            self._nursery,
            bench.installed.manifest,
            bench.installed.path,
            bench.variant.name,
            load_timeout_ns=max(0, bench.deadline_ns - self._clock.now_ns()),
            repeat=_REPEAT,
            spec=candidate.spec,
            further=bench.further,
        )
        candidate.verdict, candidate.load_ns = verdict, verdict.load_ns
        candidate.problem = "" if verdict.accepted else f"{verdict.reason}: {verdict.detail}"

    async def _race(self, bench: _Bench, plain: _Candidate, candidate: _Candidate, requests: list[Payload]) -> None:
        """Time a candidate against plain."""
        if candidate.problem:
            return
        limits = limits_for(bench.installed.manifest)
        try:
            race = await time_side_by_side(
                self._nursery,
                plain.spec,
                candidate.spec,
                requests,
                limits=limits,
                each_ns=_EACH_NS,
                deadline_ns=bench.deadline_ns,
            )
        except SessionError as error:
            candidate.problem = str(error)
        else:
            candidate.pairs = race.pairs
            candidate.load_ns = min(candidate.load_ns, race.load_ns.second_ns)
            plain.load_ns = min(plain.load_ns, race.load_ns.first_ns)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._storage, work)


def available_memory() -> int:
    """Return the memory that a throw-away worker may take: what machine and groups have left, less a reserve."""
    reading = read_memory(Path("/proc"), Path("/sys"))
    return budget_bytes(
        configured_ceiling=None,
        own_bytes=0,
        available_bytes=reading.available_bytes or 0,
        cgroup_headrooms=reading.headrooms,
        reserve=_MEMORY_RESERVE_BYTES,
    )


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


def _covers_largest(bench: _Bench, candidate: _Candidate) -> bool:
    """Whether the largest shape was among what was timed: it is the last, and what fails has no time."""
    if has_one_shape(bench.installed.manifest):
        return True
    if candidate.form == "plain":
        return bool(bench.further) and candidate.verdict is not None and not candidate.verdict.further_failed
    return bool(bench.further) and bool(candidate.pairs) and candidate.pairs[-1] is not None


def _operating_cost(cost: FormCost, verdict: Verdict | None, variant: Variant, threads: int) -> OperatingCost:
    assert verdict is not None, "what is chosen was measured"
    runs = sorted(verdict.durations_ns)

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
        cpu_us_per_run=verdict.cpu_ns // len(runs) // 1000,
        form=cost.form,
        covers_largest=cost.covers_largest,
    )
