"""Decide which models are in memory: reserve before loading, evict to make room, say why one is missing.

Owns the resident models. What memory there is to give is the `ledger`'s; what one model's processes do is `resident`'s;
which bundle a name means is the store's. A load blocks nobody: other requests go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edgeinfer.artifact.manifest import Variant
from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.config import ModelSection
from edgeinfer.errors import ArtifactError, BudgetExceeded, EdgeInferError, RuntimeUnusable, SessionError
from edgeinfer.execution.ledger import MemoryLedger, Reservation
from edgeinfer.execution.resident import CrashNote, Phase, ResidentModel
from edgeinfer.request import Reason, Refusal
from edgeinfer.store.store import BundleStore, Installed
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import limits_for, load_spec
from edgeinfer.worker.worker import Worker

_log = logging.getLogger(__name__)

_LOAD_TIMEOUT_NS = 120 * NS_PER_S
_LOAD_GUESS_NS = 2 * NS_PER_S
"""What an on-demand load is taken to last before the first was seen."""
_MAX_JOBS = 64
"""Restarts that may wait to be taken up: more than there are workers."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """How a configured model stands, for reports."""

    name: str
    version: str
    digest: str
    variant: str
    state: str
    """`loaded`, `loading`, `recovering`, `quarantined`, `unloaded`, `missing` (no such bundle) or `refused`."""
    workers: int
    reserved_bytes: int
    leases: int
    state_resets: int
    load_ms: float
    detail: str


@dataclass(slots=True)
class _Wanted:
    """A model of the configuration, resident or not."""

    section: ModelSection
    resident: ResidentModel | None = None
    refusal: Refusal | None = None
    """Why it is not resident."""
    missing: bool = False
    installed: Installed | None = None
    """The bundle that its name means, known also while it isn't resident: next door the same one may run."""
    load_guess_ns: int = _LOAD_GUESS_NS
    on_demand: bool = False


class ModelCache:
    """The models of one service. Loop thread only."""

    def __init__(
        self,
        *,
        store: BundleStore,
        nursery: Nursery,
        ledger: MemoryLedger,
        clock: Clock,
        cpus: frozenset[int],
        cpu_flags: frozenset[str],
        cancel_grace_ns: int,
        on_crash: Callable[[CrashNote], None],
    ) -> None:
        self._store = store
        self._nursery = nursery
        self._ledger = ledger
        self._clock = clock
        self._cpus = cpus
        self._cpu_flags = cpu_flags
        self._cancel_grace_ns = cancel_grace_ns
        self._on_crash = on_crash
        self._wanted: dict[str, _Wanted] = {}
        self._loading = asyncio.Lock()
        """One load at a time: two at once would need the peak of both."""
        self._jobs: asyncio.Queue[tuple[int, Callable[[], Awaitable[None]], str]] = asyncio.Queue(_MAX_JOBS)

    def want(self, section: ModelSection) -> None:
        """Make a model known without loading it; what `preload = false` then loads at its first request."""
        wanted = self._wanted.setdefault(section.name, _Wanted(section, on_demand=not section.preload))
        try:
            wanted.installed = self._store.active(section.name, section.version)
        except ArtifactError as error:
            wanted.refusal, wanted.missing = _refusal_for(section.name, error), True

    async def run(self) -> None:
        """Carry out restarts, each after its pause; runs for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                delay_ns, act, name = await self._jobs.get()
                group.create_task(_after(delay_ns, act), name=name)

    async def load(self, section: ModelSection) -> ResidentModel:
        """Load a model, or return it when it is resident as asked; a quarantined one gets another chance.

        Raises:
            ArtifactError: no such bundle, or no variant of it may run here.
            BudgetExceeded: no variant fits, also with everything evicted that may be.
            SessionError: the runtime refused it, or cannot run at all (`RuntimeUnusable`).
        """
        async with self._loading:
            wanted = self._wanted.setdefault(section.name, _Wanted(section))
            resident = wanted.resident
            if resident is not None and resident.phase in {Phase.READY, Phase.RECOVERING}:
                if resident.section == section:
                    return resident
                await self._close(wanted)
            wanted.section, wanted.refusal, wanted.missing = section, None, False
            try:
                wanted.resident = await self._load(section)
            except EdgeInferError as error:
                wanted.resident = None
                wanted.refusal = _refusal_for(section.name, error)
                wanted.missing = isinstance(error, ArtifactError)
                raise
            wanted.load_guess_ns = wanted.resident.load_ns + NS_PER_S // 5
            return wanted.resident

    async def unload(self, name: str) -> bool:
        """End a model's workers and free its memory; later requests for it are refused. False when unknown."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return False
        async with self._loading:
            await self._close(wanted)
            wanted.on_demand = False
            wanted.refusal = Refusal(Reason.MODEL_UNAVAILABLE, f"{name} was unloaded; load it with the load command")
        return True

    async def close(self) -> None:
        """End everything."""
        async with self._loading:
            await asyncio.gather(*(self._close(wanted) for wanted in self._wanted.values()))

    def find(self, name: str, version: str | None = None) -> ResidentModel | Refusal | int:
        """Return the model when it can run now, why it can't, or the nanoseconds that loading it on demand takes."""
        wanted = self._wanted.get(name)
        if wanted is None:
            known = ", ".join(sorted(self._wanted)) or "none"
            return Refusal(Reason.MODEL_UNAVAILABLE, f"no model {name!r} is configured here (there are: {known})")
        resident = wanted.resident
        if resident is None:
            if wanted.refusal is None and wanted.on_demand:
                return wanted.load_guess_ns
            return wanted.refusal or Refusal(Reason.MODEL_UNAVAILABLE, f"{name} is not loaded yet")
        if version and resident.manifest.version != version:
            text = f"{name} {version} is not loaded, {resident.manifest.version} is"
            return Refusal(Reason.MODEL_UNAVAILABLE, text)
        if resident.phase is Phase.QUARANTINED:
            return Refusal(Reason.QUARANTINED, f"{name} {resident.variant.name}: {resident.detail}")
        if resident.phase is not Phase.READY:
            return Refusal(Reason.MODEL_UNAVAILABLE, f"{name} is {resident.phase}: {resident.detail}")
        return resident

    async def find_or_load(self, name: str, version: str | None = None) -> ResidentModel | Refusal:
        """As `find`, but loads what is loaded on demand."""
        found = self.find(name, version)
        if not isinstance(found, int):
            return found
        with contextlib.suppress(EdgeInferError):  # told by `find`
            await self.load(self._wanted[name].section)
        found = self.find(name, version)
        return Refusal(Reason.MODEL_UNAVAILABLE, f"{name} is not loaded") if isinstance(found, int) else found

    def installed(self, name: str) -> Installed | None:
        """Return the bundle that requests for this model are answered from, resident or not; None without one."""
        wanted = self._wanted.get(name)
        return None if wanted is None else wanted.installed

    def section(self, name: str) -> ModelSection | None:
        """Return how a model is configured."""
        wanted = self._wanted.get(name)
        return None if wanted is None else wanted.section

    def residents(self) -> list[ResidentModel]:
        """Return what is in memory."""
        return [wanted.resident for wanted in self._wanted.values() if wanted.resident is not None]

    def set_cpus(self, cpus: frozenset[int]) -> None:
        """Move all workers, and those to come, onto these CPUs."""
        if cpus != self._cpus:
            self._cpus = cpus
            for resident in self.residents():
                resident.set_cpus(cpus)

    def status(self) -> list[ModelStatus]:
        """Return how every configured model stands."""
        return [_status(wanted) for wanted in self._wanted.values()]

    async def _load(self, section: ModelSection) -> ResidentModel:
        installed = self._store.active(section.name, section.version)
        self._wanted[section.name].installed = installed
        failure: EdgeInferError | None = None
        for variant in self._candidates(section, installed):
            try:
                return await self._load_variant(section, installed, variant)
            except (BudgetExceeded, SessionError) as error:
                if isinstance(error, RuntimeUnusable):
                    raise
                _log.warning("cannot load model=%s variant=%s error=%r", section.name, variant.name, str(error))
                failure = error
        assert failure is not None  # there is at least one candidate
        raise failure

    def _candidates(self, section: ModelSection, installed: Installed) -> list[Variant]:
        """Return the variants that may run on this CPU, best first; the configured one only, when one is."""
        manifest = installed.manifest
        asked = [manifest.variant(section.variant)] if section.variant else manifest.variants
        able = [variant for variant in asked if self._cpu_flags.issuperset(variant.instruction_sets)]
        if not able:
            needs = "; ".join(f"{variant.name}: {', '.join(variant.instruction_sets)}" for variant in asked)
            raise ArtifactError(f"{installed.title} needs instructions that this CPU lacks ({needs})")
        return able

    async def _load_variant(self, section: ModelSection, installed: Installed, variant: Variant) -> ResidentModel:
        limits = limits_for(installed.manifest, cancel_grace_ns=self._cancel_grace_ns)
        per_worker = variant.load_peak_bytes + limits.max_slot_bytes
        reservation = await self._reserve(f"{installed.manifest.name}/{variant.name}", per_worker * section.workers)

        async def start_worker() -> Worker:
            spec = load_spec(
                installed.manifest,
                installed.path,
                variant.name,
                threads=section.threads,
                reservation_bytes=variant.load_peak_bytes,
                cpus=self._cpus,
            )
            deadline_ns = self._clock.now_ns() + _LOAD_TIMEOUT_NS
            return await Worker.start(self._nursery, spec, deadline_ns=deadline_ns, limits=limits)

        resident = ResidentModel(
            section=section,
            installed=installed,
            variant=variant,
            reservation=reservation,
            start_worker=start_worker,
            later=self._later,
            on_crash=self._on_crash,
            clock=self._clock,
        )
        await resident.open()
        _log.info(
            "loaded model=%s version=%s variant=%s threads=%d load_ms=%.0f reserved_bytes=%d",
            section.name, installed.manifest.version, variant.name, section.threads,
            resident.load_ns / 1e6, reservation.size_bytes,
        )  # fmt: skip
        return resident

    async def _reserve(self, owner: str, size_bytes: int) -> Reservation:
        """Reserve, evicting idle models until it fits or there are none left.

        Raises:
            BudgetExceeded: it doesn't fit; nothing that could have helped was evicted in vain.
        """
        victims = sorted(
            (
                wanted
                for wanted in self._wanted.values()
                if (resident := wanted.resident) and not wanted.section.pinned and not resident.leases
            ),
            key=lambda wanted: (wanted.section.priority, wanted.resident.last_used_ns if wanted.resident else 0),
        )
        evictable = sum(wanted.resident.reservation.size_bytes for wanted in victims if wanted.resident)
        if size_bytes > self._ledger.free_bytes + evictable:
            return self._ledger.reserve(owner, size_bytes)  # raises, with the numbers
        for wanted in victims:
            if size_bytes <= self._ledger.free_bytes:
                break
            name = wanted.section.name
            _log.warning("evicted model=%s to make room for=%s needed_bytes=%d", name, owner, size_bytes)
            await self._close(wanted)
            wanted.refusal = Refusal(Reason.MEMORY, f"{name} was evicted to make room for {owner}")
        return self._ledger.reserve(owner, size_bytes)

    async def _close(self, wanted: _Wanted) -> None:
        resident, wanted.resident = wanted.resident, None
        if resident is not None:
            await resident.close()

    def _later(self, delay_ns: int, act: Callable[[], Awaitable[None]], name: str) -> None:
        self._jobs.put_nowait((delay_ns, act, name))


async def _after(delay_ns: int, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(delay_ns / NS_PER_S)
    await act()


def _refusal_for(name: str, error: EdgeInferError) -> Refusal:
    match error:
        case BudgetExceeded():
            return Refusal(Reason.MEMORY, str(error))
        case RuntimeUnusable():
            return Refusal(Reason.RUNTIME_UNUSABLE, str(error))
        case _:
            return Refusal(Reason.MODEL_UNAVAILABLE, f"{name}: {error}")


def _status(wanted: _Wanted) -> ModelStatus:
    resident = wanted.resident
    if resident is None:
        state = "missing" if wanted.missing else "unloaded" if wanted.refusal is None else "refused"
        detail = wanted.refusal.detail if wanted.refusal else ""
        return ModelStatus(wanted.section.name, wanted.section.version, "", "", state, 0, 0, 0, 0, 0.0, detail)
    return ModelStatus(
        name=wanted.section.name,
        version=resident.manifest.version,
        digest=resident.installed.digest,
        variant=resident.variant.name,
        state=resident.phase.value,
        workers=len(resident.workers),
        reserved_bytes=resident.reservation.size_bytes,
        leases=resident.leases,
        state_resets=resident.state_resets,
        load_ms=resident.load_ns / 1e6,
        detail=resident.detail,
    )
