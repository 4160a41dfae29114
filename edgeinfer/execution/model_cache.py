"""Know which models are wanted and which are in memory, have them loaded, and say why one is missing.

Owns the wanted models and the one lock under which somebody comes and goes. Memory is `room`'s; which version and
variant serves next, and how it takes over, `succession`'s; crash counts and quarantines, `crash_book`'s; what one
model's processes do, `resident`'s. A load blocks nobody: requests go on.

A model is charged its peak and all the slots that its workers may ever make, for as long as it is in memory. That is
more than it uses most of the time; in return no request of a loaded model is ever refused for memory, and a worker
that crashed can be replaced at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.config import ModelSection
from edgeinfer.errors import ArtifactError, EdgeInferError
from edgeinfer.execution.crash_book import CrashBook
from edgeinfer.execution.ledger import MemoryLedger
from edgeinfer.execution.loader import Loader
from edgeinfer.execution.resident import CrashNote, Phase, ResidentModel
from edgeinfer.execution.room import Room
from edgeinfer.execution.succession import Succession
from edgeinfer.execution.wanted import RETRY_NS, ModelStatus, WantedModel
from edgeinfer.request import Reason, Refusal
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
        self,
        loader: Loader,
        ledger: MemoryLedger,
        book: CrashBook,
        *,
        clock: Clock,
        on_crash: Callable[[CrashNote], None],
    ) -> None:
        self._loader = loader
        self._ledger = ledger
        self._book = book
        self._clock = clock
        self._on_crash = on_crash
        self._wanted: dict[str, WantedModel] = {}
        self._loading = asyncio.Lock()
        """Who is in memory is decided and changed by one at a time."""
        self._jobs: asyncio.Queue[tuple[int, Callable[[], Awaitable[None]], str]] = asyncio.Queue(_MAX_JOBS)
        self._room = Room(ledger, self._wanted, clock=clock)
        self._succession = Succession(
            loader, self._room, book, clock=clock, later=self._later, on_crash=self._note_crash
        )
        self._pressed_rounds = 0

    def want(self, section: ModelSection) -> None:
        """Make a model known without loading it; what `preload = false` then loads at its first request."""
        wanted = self._wanted.setdefault(section.name, WantedModel(section))
        try:
            wanted.installed = self._loader.known(section)
            if not section.preload and wanted.is_load_guessed:
                wanted.load_guess_ns = self._loader.load_guess_ns(section, wanted.installed)
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

    async def load(self, section: ModelSection, *, spare_equals: bool = False, lift: bool = True) -> ResidentModel:
        """Load a model, or return it when it is in memory as asked; with `lift`, quarantined variants may try again.

        Evicts idle models up to its own priority, or only those below it with `spare_equals`. The version that serves
        goes on until the new one is ready, where the budget has room for both; it stays, or comes back, when the new
        one can't be loaded. When nothing serves afterwards, an earlier version does where there is one.

        Raises:
            ArtifactError: no such bundle, a damaged one, or no variant of it may run here.
            BudgetExceeded: no variant fits, also with everything evicted that may be.
            SessionError: the runtime refused it, or cannot run at all (`RuntimeUnusable`).
        """
        async with self._loading:
            wanted = self._wanted.setdefault(section.name, WantedModel(section))
            return await self._succession.load(wanted, section, spare_equals=spare_equals, lift=lift)

    async def unload(self, name: str) -> bool:
        """End a model's workers and free its memory; later requests for it are refused. False when unknown."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return False
        async with self._loading:
            wanted.unloaded = True
            text = f"{name} was unloaded; load it with the load command"
            wanted.refuse(Refusal(Reason.MODEL_UNAVAILABLE, text), retry_ns=None)
            await self._room.close(wanted)
        return True

    async def close(self) -> None:
        """End everything."""
        async with self._loading:
            await asyncio.gather(*(self._room.close(wanted) for wanted in self._wanted.values()))
            await self._room.closed()
            self._book.keep_on_trial(())

    def demand(self, name: str) -> None:
        """Somebody asks for the model: when that is what it is loaded on, have it loaded in the background."""
        wanted = self._wanted.get(name)
        if wanted is not None and not wanted.section.preload:
            self._load_soon(wanted, spare_equals=False)

    def find(self, name: str, version: str | None = None) -> ResidentModel | Refusal | int:
        """Return the model when it can run now, why it can't, or the nanoseconds that loading it on demand takes.

        A model that recovers from a crash can: its requests wait for the next worker (`ResidentModel.pick_soon`).
        """
        wanted = self._wanted.get(name)
        if wanted is None:
            known = ", ".join(sorted(self._wanted)) or "none"
            return Refusal(Reason.MODEL_UNAVAILABLE, f"no model {name!r} is configured here (there are: {known})")
        resident = wanted.resident
        if resident is None:
            if not wanted.section.preload and wanted.may_load(self._clock.now_ns()):
                return wanted.load_guess_ns
            busy = "is being loaded" if wanted.loading else "is not loaded yet"
            refusal = wanted.refusal_at(self._clock.now_ns())
            return refusal or Refusal(Reason.MODEL_UNAVAILABLE, f"{name} {busy}")
        if version and resident.manifest.version != version:
            instead = wanted.instead_of
            if instead is not None and instead.manifest.version == version and wanted.instead is not None:
                return wanted.instead
            text = f"{name} {version} is not loaded, {resident.manifest.version} is"
            return Refusal(Reason.MODEL_UNAVAILABLE, text)
        if resident.phase is Phase.QUARANTINED:
            return _quarantined(resident)
        if resident.phase is not Phase.READY and resident.phase is not Phase.RECOVERING:
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

    def least_bytes(self, section: ModelSection) -> int:
        """Return what the smallest variant that may run for this model takes, 0 when none may: the bundle's figures."""
        installed = self.installed(section.name)
        if installed is None:
            return 0
        try:
            candidates = self._loader.candidates(section, installed)
        except ArtifactError:
            return 0
        return min(self._loader.cost_bytes(section, installed, variant) for variant in candidates)

    def section(self, name: str) -> ModelSection | None:
        """Return how a model is configured."""
        wanted = self._wanted.get(name)
        return None if wanted is None else wanted.section

    def is_load_guessed(self, name: str) -> bool:
        """Return whether what `find` says of a load is a guess: none was seen yet."""
        wanted = self._wanted.get(name)
        return wanted is None or wanted.is_load_guessed

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
        quarantined = self._book.quarantined(self._loader.runtime)
        return [wanted.status(quarantined) for wanted in self._wanted.values()]

    @property
    def is_forgetful(self) -> bool:
        """Whether crash counts cannot be written: a restart will not know them."""
        return self._book.degraded

    # What happens by itself

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_NS / NS_PER_S)
            await self._obey_ceiling()
            self._keep_book()
            now_ns = self._clock.now_ns()
            for wanted in self._wanted.values():
                if wanted.is_due(now_ns):
                    self._load_soon(wanted, spare_equals=True)

    async def _obey_ceiling(self) -> None:
        """Evict what no longer fits below a ceiling that was lowered, once it has stayed there."""
        self._pressed_rounds = self._pressed_rounds + 1 if self._ledger.overdrawn_bytes else 0
        if self._pressed_rounds < _PRESSURE_ROUNDS:
            return
        await self._room.obey_ceiling()  # without the lock: a load that hangs must not keep memory from coming back

    def _keep_book(self) -> None:
        """Note who has served for a quiet time, and who is on trial no more because it has left."""
        if self._loading.locked():
            return  # who is being loaded is on trial too
        residents = {self._succession.key(r.installed, r.variant): r for r in self.residents()}
        for key, resident in residents.items():
            if resident.is_quiet:
                self._book.prove(key, resident.installed)
        self._book.keep_on_trial(residents)

    def _load_soon(self, wanted: WantedModel, *, spare_equals: bool) -> None:
        if wanted.settled.is_set() and wanted.may_load(self._clock.now_ns()):
            wanted.settled.clear()
            load = functools.partial(self._load_unasked, wanted, spare_equals=spare_equals)
            self._later(0, load, f"load[{wanted.section.name}]")

    async def _load_unasked(self, wanted: WantedModel, *, spare_equals: bool) -> None:
        told = wanted.refusal
        try:
            async with self._loading:
                if wanted.may_load(began_ns := self._clock.now_ns()):
                    await self._succession.load(wanted, wanted.latest or wanted.section, spare_equals=spare_equals)
                    wanted.loads_in(self._clock.now_ns() - began_ns)
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
            await self._succession.replace(self._wanted[name])

    def _later(self, delay_ns: int, act: Callable[[], Awaitable[None]], name: str) -> None:
        self._jobs.put_nowait((delay_ns, act, name))


async def _after(delay_ns: int, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(delay_ns / NS_PER_S)
    await act()


def _quarantined(resident: ResidentModel) -> Refusal:
    text = f"{resident.section.name} {resident.variant.name} is quarantined, its workers died too often"
    return Refusal(Reason.QUARANTINED, f"{text} ({resident.detail}); the load command gives it another chance")
