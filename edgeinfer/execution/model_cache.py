"""Decide which models are in memory: reserve before loading, evict to make room, say why one is missing.

Owns the resident models. What memory there is to give is the `ledger`'s; who gives way, `eviction`'s; which bundle and
variant a name means, `loader`'s; what one model's processes do, `resident`'s. A load blocks nobody: requests go on.

A model is charged its peak and all the slots that its workers may ever make, for as long as it is in memory. That is
more than it uses most of the time; in return no request of a loaded model is ever refused for memory, and a worker
that crashed can be replaced at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping

from edgeinfer.artifact.manifest import Variant
from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.config import ModelSection
from edgeinfer.errors import ArtifactError, BudgetExceeded, EdgeInferError, RuntimeUnusable, SessionError, mib
from edgeinfer.execution.compiled import mapped_weights
from edgeinfer.execution.eviction import Tenant, choose_victims
from edgeinfer.execution.ledger import MemoryLedger, Reservation, SharedReservation
from edgeinfer.execution.loader import Loader
from edgeinfer.execution.resident import CrashNote, Phase, ResidentModel
from edgeinfer.execution.wanted import RETRY_NS, ModelStatus, WantedModel
from edgeinfer.request import Reason, Refusal
from edgeinfer.store.compiled import CompiledForm
from edgeinfer.store.store import Installed

__all__ = ["ModelCache", "ModelStatus"]

_log = logging.getLogger(__name__)

_UPKEEP_NS = NS_PER_S
_PRESSURE_ROUNDS = 3
"""Upkeep rounds in a row with more reserved than there is, before somebody is evicted: a short dip costs nobody."""
_MAX_JOBS = 1024
"""Restarts and loads that may wait to be taken up: one for each worker and model of sixty models."""


class ModelCache:
    """The models of one service. Loop thread only."""

    def __init__(
        self, loader: Loader, ledger: MemoryLedger, *, clock: Clock, on_crash: Callable[[CrashNote], None]
    ) -> None:
        self._loader = loader
        self._ledger = ledger
        self._clock = clock
        self._on_crash = on_crash
        self._wanted: dict[str, WantedModel] = {}
        self._loading = asyncio.Lock()
        """Who is in memory is decided and changed by one at a time."""
        self._jobs: asyncio.Queue[tuple[int, Callable[[], Awaitable[None]], str]] = asyncio.Queue(_MAX_JOBS)
        self._closing: set[asyncio.Task[None]] = set()
        self._pressed_rounds = 0

    def want(self, section: ModelSection) -> None:
        """Make a model known without loading it; what `preload = false` then loads at its first request."""
        wanted = self._wanted.setdefault(section.name, WantedModel(section))
        try:
            wanted.installed = self._loader.known(section)
        except ArtifactError as error:
            wanted.missing = True
            now_ns = self._clock.now_ns()
            refusal = Refusal(Reason.MODEL_UNAVAILABLE, f"{section.name}: {error}")
            wanted.refuse(refusal, retry_ns=None if section.preload else now_ns + RETRY_NS)

    async def run(self) -> None:
        """Restart workers after their pauses, load what is asked for, obey a lowered ceiling; runs for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._upkeep(), name="upkeep")
            while True:
                delay_ns, act, name = await self._jobs.get()
                group.create_task(_after(delay_ns, act), name=name)

    async def load(self, section: ModelSection, *, spare_equals: bool = False) -> ResidentModel:
        """Load a model, or return it when it is in memory as asked; quarantined variants get another chance.

        Evicts idle models up to its own priority, or only those below it with `spare_equals`. A version that was
        loaded before gives way to the new one, and comes back when that can't be loaded.

        Raises:
            ArtifactError: no such bundle, a damaged one, or no variant of it may run here.
            BudgetExceeded: no variant fits, also with everything evicted that may be.
            SessionError: the runtime refused it, or cannot run at all (`RuntimeUnusable`).
        """
        async with self._loading:
            wanted = self._wanted.setdefault(section.name, WantedModel(section))
            wanted.quarantined.clear()
            return await self._load(wanted, section, spare_equals=spare_equals)

    async def unload(self, name: str) -> bool:
        """End a model's workers and free its memory; later requests for it are refused. False when unknown."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return False
        async with self._loading:
            wanted.unloaded = True
            text = f"{name} was unloaded; load it with the load command"
            wanted.refuse(Refusal(Reason.MODEL_UNAVAILABLE, text), retry_ns=None)
            await self._close(wanted)
        return True

    async def close(self) -> None:
        """End everything."""
        async with self._loading:
            await asyncio.gather(*(self._close(wanted) for wanted in self._wanted.values()))
            if self._closing:
                await asyncio.wait(self._closing)

    def demand(self, name: str) -> None:
        """Somebody asks for the model: when that is what it is loaded on, have it loaded in the background."""
        wanted = self._wanted.get(name)
        if wanted is not None and not wanted.section.preload:
            self._load_soon(wanted, spare_equals=False)

    def find(self, name: str, version: str | None = None) -> ResidentModel | Refusal | int:
        """Return the model when it can run now, why it can't, or the nanoseconds that loading it on demand takes."""
        wanted = self._wanted.get(name)
        if wanted is None:
            known = ", ".join(sorted(self._wanted)) or "none"
            return Refusal(Reason.MODEL_UNAVAILABLE, f"no model {name!r} is configured here (there are: {known})")
        resident = wanted.resident
        if resident is None:
            if not wanted.section.preload and wanted.may_load(self._clock.now_ns()):
                return wanted.load_guess_ns
            busy = "is being loaded" if wanted.loading else "is not loaded yet"
            return wanted.refusal or Refusal(Reason.MODEL_UNAVAILABLE, f"{name} {busy}")
        if version and resident.manifest.version != version:
            text = f"{name} {version} is not loaded, {resident.manifest.version} is"
            return Refusal(Reason.MODEL_UNAVAILABLE, text)
        if resident.phase is Phase.QUARANTINED:
            return _quarantined(resident)
        if resident.phase is not Phase.READY:
            return Refusal(Reason.MODEL_UNAVAILABLE, f"{name} is {resident.phase}: {resident.detail}")
        return resident

    async def find_or_load(self, name: str, version: str | None = None) -> ResidentModel | Refusal:
        """As `find`, but waits for what is loaded on demand. Cancelling the caller leaves the load to others."""
        found = self.find(name, version)
        if isinstance(found, int):
            self.demand(name)
            await self._wanted[name].settled.wait()
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

    def look(self, own_bytes: Mapping[int, int]) -> int:
        """Do something about workers that take more than was reserved; return by how much they do, all together.

        `own_bytes` tells the anonymous memory that each process has for itself, by its id.
        """
        return sum(resident.look(own_bytes) for resident in self.residents())

    def set_cpus(self, cpus: frozenset[int]) -> None:
        """Move all workers, and those to come, onto these CPUs."""
        if cpus != self._loader.cpus:
            self._loader.cpus = cpus
            for resident in self.residents():
                resident.set_cpus(cpus)

    def status(self) -> list[ModelStatus]:
        """Return how every configured model stands."""
        return [wanted.status() for wanted in self._wanted.values()]

    # Loading; the caller holds the lock

    async def _load(self, wanted: WantedModel, section: ModelSection, *, spare_equals: bool) -> ResidentModel:
        before = wanted.resident if wanted.resident and wanted.resident.phase is Phase.READY else None
        wanted.loading = True
        try:
            installed = await self._find(wanted, section)
            if before is not None and before.section == section and before.installed.digest == installed.digest:
                return before
            await self._loader.check(installed)
            candidates = self._loader.candidates(section, installed, without=wanted.quarantined)
            await self._close(wanted)  # also what recovers or is quarantined: a load begins anew
            wanted.installed = installed
            resident = await self._load_best(section, installed, candidates, spare_equals=spare_equals)
            wanted.admit(resident)
        except EdgeInferError as error:
            if wanted.resident is None:
                wanted.fail(error, now_ns=self._clock.now_ns())
                if before is not None:
                    await self._bring_back(wanted, before)
            raise
        except asyncio.CancelledError:
            if wanted.resident is None:
                refusal = Refusal(Reason.MODEL_UNAVAILABLE, f"loading {section.name} was given up")
                wanted.refuse(refusal, retry_ns=self._clock.now_ns())
            raise
        finally:
            wanted.loading = False
        return resident

    async def _find(self, wanted: WantedModel, section: ModelSection) -> Installed:
        try:
            installed = await self._loader.find(section)
        except ArtifactError:
            wanted.missing = wanted.resident is None
            raise
        wanted.missing = False
        return installed

    async def _load_best(
        self, section: ModelSection, installed: Installed, candidates: list[Variant], *, spare_equals: bool
    ) -> ResidentModel:
        """Load the first candidate that fits and that the runtime takes.

        Raises:
            BudgetExceeded: the last one does not fit.
            SessionError: the runtime refused the last one, or cannot run at all.
        """
        last = candidates[-1]
        for variant in candidates:
            try:
                return await self._load_variant(section, installed, variant, spare_equals=spare_equals)
            except (BudgetExceeded, SessionError) as error:
                if variant is last or isinstance(error, RuntimeUnusable):
                    raise
                _log.warning(
                    "trying another variant model=%s variant=%s why=%r", section.name, variant.name, str(error)
                )
        raise ArtifactError(f"{installed.title}: every variant is quarantined; bring it back with the load command")

    async def _load_variant(
        self, section: ModelSection, installed: Installed, variant: Variant, *, spare_equals: bool
    ) -> ResidentModel:
        """Load a variant in the form that is best here; as it came when that form is refused."""
        form = await self._loader.form(installed, variant)
        if form is not None:
            try:
                return await self._load_form(section, installed, variant, form, spare_equals=spare_equals)
            except RuntimeUnusable:
                raise
            except (BudgetExceeded, SessionError) as error:
                _log.warning(
                    "loading as it came model=%s variant=%s form=%s why=%r",
                    section.name, variant.name, form.record.form, str(error),
                )  # fmt: skip
                if isinstance(error, SessionError):
                    await self._loader.forget_form(form)
        return await self._load_form(section, installed, variant, None, spare_equals=spare_equals)

    async def _load_form(
        self,
        section: ModelSection,
        installed: Installed,
        variant: Variant,
        form: CompiledForm | None,
        *,
        spare_equals: bool,
    ) -> ResidentModel:
        size_bytes = self._loader.cost_bytes(section, installed, variant, form)
        up_to = section.priority - 1 if spare_equals else section.priority
        reservation, mapped = await self._reserve(
            f"{section.name}/{variant.name}", size_bytes, mapped_weights(form), up_to_priority=up_to
        )
        return await self._loader.open(
            section,
            installed,
            variant,
            reservation,
            later=self._later,
            on_crash=self._note_crash,
            form=form,
            mapped=mapped,
        )

    async def _bring_back(self, wanted: WantedModel, before: ResidentModel) -> None:
        """Load what a failed load has replaced; where that fails too, the first failure stays the reason."""
        try:
            back = await self._load_variant(before.section, before.installed, before.variant, spare_equals=True)
        except EdgeInferError as error:
            _log.error(
                "not brought back model=%s version=%s error=%s", wanted.section.name, before.manifest.version, error
            )
        else:
            wanted.admit(back)

    # Room

    async def _reserve(
        self, owner: str, size_bytes: int, mapped: tuple[str, int] | None, *, up_to_priority: int
    ) -> tuple[Reservation, SharedReservation | None]:
        """Reserve, evicting idle models of at most that priority when it takes that.

        `mapped` names the weights that it maps, with their bytes, where it does.

        Raises:
            BudgetExceeded: it doesn't fit; nobody was evicted in vain.
        """
        needed_bytes = size_bytes + (mapped[1] if mapped else 0)
        missing_bytes = needed_bytes + self._ledger.overdrawn_bytes - self._ledger.free_bytes
        if missing_bytes > 0:
            victims = choose_victims(self._tenants(), needed_bytes=missing_bytes, up_to_priority=up_to_priority)
            await self._evict(victims, f"to make room for {owner}")
        reservation = self._ledger.reserve(owner, size_bytes)
        try:
            return reservation, self._ledger.share(*mapped) if mapped else None
        except BudgetExceeded:
            reservation.release()
            raise

    def _tenants(self) -> list[Tenant]:
        return [
            Tenant(
                resident.section.name,
                resident.reserved_bytes,
                resident.section.priority,
                resident.last_used_ns,
                movable=not resident.section.pinned and not resident.leases,
            )
            for resident in self.residents()
        ]

    async def _evict(self, victims: list[Tenant], why: str) -> None:
        for victim in victims:
            wanted = self._wanted[victim.name]
            _log.warning("evicted model=%s freed_bytes=%d why=%r", victim.name, victim.size_bytes, why)
            retry_ns = self._clock.now_ns() + (RETRY_NS if wanted.section.preload else 0)
            wanted.refuse(Refusal(Reason.MEMORY, f"{victim.name} was evicted {why}"), retry_ns=retry_ns)
            await self._close(wanted)

    async def _close(self, wanted: WantedModel) -> None:
        """End a model. Once begun it is carried through, whatever becomes of the caller: memory depends on it."""
        resident, wanted.resident = wanted.resident, None
        if resident is not None:
            task = asyncio.create_task(resident.close(), name=f"close[{wanted.section.name}]")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            await asyncio.shield(task)

    # What happens by itself

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_NS / NS_PER_S)
            await self._obey_ceiling()
            now_ns = self._clock.now_ns()
            for wanted in self._wanted.values():
                if wanted.is_due(now_ns):
                    self._load_soon(wanted, spare_equals=True)

    async def _obey_ceiling(self) -> None:
        """Evict what no longer fits below a ceiling that was lowered, once it has stayed there."""
        self._pressed_rounds = self._pressed_rounds + 1 if self._ledger.overdrawn_bytes else 0
        if self._pressed_rounds < _PRESSURE_ROUNDS:
            return
        async with self._loading:
            over_bytes = self._ledger.overdrawn_bytes
            if over_bytes:
                victims = choose_victims(self._tenants(), needed_bytes=over_bytes, partial=True)
                await self._evict(victims, f"because the budget fell to {mib(self._ledger.ceiling_bytes)}")

    def _load_soon(self, wanted: WantedModel, *, spare_equals: bool) -> None:
        if wanted.settled.is_set() and wanted.may_load(self._clock.now_ns()):
            wanted.settled.clear()
            load = functools.partial(self._load_unasked, wanted, spare_equals=spare_equals)
            self._later(0, load, f"load[{wanted.section.name}]")

    async def _load_unasked(self, wanted: WantedModel, *, spare_equals: bool) -> None:
        told = wanted.refusal
        try:
            async with self._loading:
                if wanted.may_load(self._clock.now_ns()):
                    await self._load(wanted, wanted.latest or wanted.section, spare_equals=spare_equals)
        except EdgeInferError as error:
            if told is None or wanted.refusal is None or told.reason is not wanted.refusal.reason:
                _log.error("not loaded model=%s error=%s", wanted.section.name, error)
        finally:
            wanted.settled.set()

    def _note_crash(self, note: CrashNote) -> None:
        self._on_crash(note)
        if note.quarantined:
            self._later(0, functools.partial(self._replace, note.model), f"replace[{note.model}]")

    async def _replace(self, name: str) -> None:
        """Give a quarantined variant's memory back, and load the next best one where there is one."""
        async with self._loading:
            wanted = self._wanted[name]
            resident = wanted.resident
            if resident is None or resident.phase is not Phase.QUARANTINED:
                return  # somebody was faster
            if resident.form is not None:  # what the device made of it is given up first
                await self._loader.forget_form(resident.form)
            else:
                wanted.quarantined.add((resident.installed.digest, resident.variant.name))
            if not self._loader.candidates(resident.section, resident.installed, without=wanted.quarantined):
                refusal = _quarantined(resident)
                await self._close(wanted)
                wanted.refuse(refusal, retry_ns=None)
                return
            try:
                await self._load(wanted, resident.section, spare_equals=True)
            except EdgeInferError as error:
                _log.error("not replaced model=%s variant=%s error=%s", name, resident.variant.name, error)

    def _later(self, delay_ns: int, act: Callable[[], Awaitable[None]], name: str) -> None:
        self._jobs.put_nowait((delay_ns, act, name))


async def _after(delay_ns: int, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(delay_ns / NS_PER_S)
    await act()


def _quarantined(resident: ResidentModel) -> Refusal:
    text = f"{resident.section.name} {resident.variant.name} is quarantined, its workers died too often"
    return Refusal(Reason.QUARANTINED, f"{text} ({resident.detail}); the load command gives it another chance")
