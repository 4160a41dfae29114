"""Decide which version and variant of a model serves next, and hand its requests over to it.

A new version is loaded beside the one that serves where the budget has room for both: requests move over the moment
it is ready, and the old one finishes what it has begun. Without that room the old one goes first. It is untouched, or
comes back, when the new one cannot be loaded. With nothing to serve what is wanted, the next variant does, then the
version before (never when the configuration names a version): `docs/operations.md` has the whole order.

Owns no state: models are `wanted`'s, memory is `room`'s, crash counts are `crash_book`'s. Whoever calls holds the
cache's lock.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

from edgeinfer.artifact.manifest import Variant
from edgeinfer.clock import Clock
from edgeinfer.config import ModelSection
from edgeinfer.errors import ArtifactError, BudgetExceeded, EdgeInferError, RuntimeUnusable, SessionError
from edgeinfer.execution.compiled import mapped_weights
from edgeinfer.execution.crash_book import CrashBook
from edgeinfer.execution.ledger import Reservation, SharedReservation
from edgeinfer.execution.loader import Loader
from edgeinfer.execution.resident import CrashNote, Phase, ResidentModel
from edgeinfer.execution.room import Mapped, Room
from edgeinfer.execution.wanted import Quarantined, WantedModel
from edgeinfer.request import Reason, Refusal
from edgeinfer.store.compiled import CompiledForm
from edgeinfer.store.crashes import VariantKey
from edgeinfer.store.store import Installed

_log = logging.getLogger(__name__)

_CRASHES = frozenset({"load_crashed", "load_timeout"})
"""What a load can fail with that would have ended, or stopped, a process without workers."""


class Succession:
    """Loads models, one at a time. Loop thread only.

    `later` runs a coroutine after a delay in the cache's task group; `on_crash` hears of each worker that died by
    itself, after it was counted, with what it was a worker of.
    """

    def __init__(
        self,
        loader: Loader,
        room: Room,
        book: CrashBook,
        *,
        clock: Clock,
        later: Callable[[int, Callable[[], Awaitable[None]], str], None],
        on_crash: Callable[[CrashNote], None],
    ) -> None:
        self._loader = loader
        self._room = room
        self._book = book
        self._clock = clock
        self._later = later
        self._on_crash = on_crash

    def key(self, installed: Installed, variant: Variant) -> VariantKey:
        """Return what crashes of a variant are counted under."""
        return VariantKey(installed.digest, variant.name, self._loader.runtime)

    async def load(
        self, wanted: WantedModel, section: ModelSection, *, spare_equals: bool, lift: bool = False
    ) -> ResidentModel:
        """Load what `section` means, or return it when it is there already. See `ModelCache.load`.

        `lift` gives quarantined variants of that bundle, and an unusable runtime, another chance. When it fails and
        nothing serves afterwards, an earlier version does where there is one: `wanted` says so, and the failure is
        raised all the same.

        Raises:
            ArtifactError: as `ModelCache.load`; `Quarantined` when no variant may be used.
            BudgetExceeded: as `ModelCache.load`.
            SessionError: as `ModelCache.load`.
        """
        before = wanted.resident if wanted.resident and wanted.resident.phase is Phase.READY else None
        installed: Installed | None = None
        wanted.loading = True
        try:
            installed = await self._find(wanted, section)
            if lift:
                self._book.lift(installed.digest)
                self._loader.retry_runtime()
            if before is not None and before.section == section and before.installed.digest == installed.digest:
                return before
            candidates = await self._candidates(section, installed, serves=before is not None)
            if before is None:
                await self._room.close(wanted)  # what recovers: a load begins anew
                wanted.installed = installed
            resident = await self._load_best(wanted, section, installed, candidates, spare_equals=spare_equals)
            await self._hand_over(wanted, resident)
        except EdgeInferError as error:
            if wanted.resident is None:
                wanted.fail(error, now_ns=self._clock.now_ns())
                await self._restore(wanted, section, installed, before, error)
            raise
        except asyncio.CancelledError:
            if wanted.resident is None:
                refusal = Refusal(Reason.MODEL_UNAVAILABLE, f"loading {section.name} was given up")
                wanted.refuse(refusal, retry_ns=self._clock.now_ns())
            raise
        finally:
            wanted.loading = False
        return resident

    async def replace(self, wanted: WantedModel) -> None:
        """Give a quarantined variant's memory back, and load what comes after it."""
        resident = wanted.resident
        if resident is None or resident.phase is not Phase.QUARANTINED:
            return  # somebody was faster
        if resident.form is not None:  # what the device made of it is given up first
            await self._loader.forget_form(resident.form)
            self._book.forgive(self.key(resident.installed, resident.variant))
        await self._room.close(wanted)
        try:
            await self.load(wanted, resident.section, spare_equals=True)
        except EdgeInferError as error:
            serves = wanted.resident.installed.title if wanted.resident else "nothing"
            _log.error("not replaced model=%s serves=%r why=%r", wanted.section.name, serves, str(error))

    # Which bundle, which variant

    async def _find(self, wanted: WantedModel, section: ModelSection) -> Installed:
        try:
            installed = await self._loader.find(section)
        except ArtifactError:
            wanted.missing = wanted.resident is None
            raise
        wanted.missing = False
        return installed

    async def _candidates(self, section: ModelSection, installed: Installed, *, serves: bool) -> list[Variant]:
        """Return the variants of a bundle that may run here, best first.

        While another version `serves`, it must be sound before anything is done; else it is checked while it loads.

        Raises:
            ArtifactError: it is damaged, or this CPU can run none of them.
            Quarantined: those that it could run are.
        """
        quarantined = {record.key: record for record in self._book.quarantined(self._loader.runtime)}
        without = {(key.digest, key.variant) for key in quarantined}
        candidates = self._loader.candidates(section, installed, without=without)
        if not candidates:
            why = "; ".join(
                f"{record.key.variant}: {record.detail}"
                for key, record in quarantined.items()
                if key.digest == installed.digest
            )
            raise Quarantined(
                f"{installed.title} is quarantined, its workers died too often ({why}); a new version, "
                "or the load command, gives it another chance"
            )
        if serves:
            await self._loader.check(installed)
        return candidates

    async def _load_best(
        self,
        wanted: WantedModel,
        section: ModelSection,
        installed: Installed,
        candidates: list[Variant],
        *,
        spare_equals: bool,
    ) -> ResidentModel:
        """Load the first candidate that fits and that the runtime takes.

        Raises:
            BudgetExceeded: the last one does not fit.
            SessionError: the runtime refused the last one, or cannot run at all.
        """
        for variant in candidates[:-1]:
            try:
                return await self._load_variant(wanted, section, installed, variant, spare_equals=spare_equals)
            except RuntimeUnusable:
                raise
            except (BudgetExceeded, SessionError) as error:
                _log.warning(
                    "trying another variant model=%s variant=%s why=%r", section.name, variant.name, str(error)
                )
        return await self._load_variant(wanted, section, installed, candidates[-1], spare_equals=spare_equals)

    async def _load_variant(
        self,
        wanted: WantedModel,
        section: ModelSection,
        installed: Installed,
        variant: Variant,
        *,
        spare_equals: bool,
    ) -> ResidentModel:
        """Load a variant in the form that is best here; as it came when that form is refused."""
        up_to = section.priority - 1 if spare_equals else section.priority
        key = self.key(installed, variant)
        form = await self._loader.form(installed, variant)
        if key.runtime:  # without one nothing is loaded, and no model is to blame
            self._book.begin(key, installed)  # after what is read: it is written while the worker loads
        if form is not None:
            try:
                return await self._load_form(wanted, section, installed, variant, form, up_to_priority=up_to)
            except RuntimeUnusable:
                raise
            except (BudgetExceeded, SessionError) as error:
                _log.warning(
                    "loading as it came model=%s variant=%s form=%s why=%r",
                    section.name, variant.name, form.record.form, str(error),
                )  # fmt: skip
                if isinstance(error, SessionError):
                    await self._loader.forget_form(form)
        try:
            return await self._load_form(wanted, section, installed, variant, None, up_to_priority=up_to)
        except SessionError as error:
            if error.reason in _CRASHES:
                crashes = self._book.crashes(key) + 1
                quarantine = crashes >= self._book.policy.max_crashes
                note = CrashNote(section.name, variant.name, str(error), quarantine, crashes)
                self._note_crash(key, installed, note)
            raise

    async def _load_form(
        self,
        wanted: WantedModel,
        section: ModelSection,
        installed: Installed,
        variant: Variant,
        form: CompiledForm | None,
        *,
        up_to_priority: int,
    ) -> ResidentModel:
        size_bytes = self._loader.cost_bytes(section, installed, variant, form)
        reservation, mapped = await self._make_room(
            wanted, f"{section.name}/{variant.name}", size_bytes, mapped_weights(form), up_to_priority=up_to_priority
        )
        key = self.key(installed, variant)
        resident = await self._loader.open(
            section,
            installed,
            variant,
            reservation,
            later=self._later,
            on_crash=functools.partial(self._note_crash, key, installed),
            form=form,
            mapped=mapped,
            check=wanted.resident is None,
        )
        resident.recall(self._book.crashes(key))
        return resident

    async def _make_room(
        self, wanted: WantedModel, owner: str, size_bytes: int, mapped: Mapped | None, *, up_to_priority: int
    ) -> tuple[Reservation, SharedReservation | None]:
        """Reserve beside the version that serves where there is room for both; else that one goes first.

        Raises:
            BudgetExceeded: it wouldn't fit without that one either: it stays.
        """
        is_beside = wanted.resident is None or self._room.is_free(size_bytes, mapped)
        if not is_beside and self._room.could_fit(wanted, size_bytes, mapped, up_to_priority=up_to_priority):
            await self._hand_over(wanted, None)
        return await self._room.reserve(owner, size_bytes, mapped, up_to_priority=up_to_priority)

    # Who serves

    async def _hand_over(self, wanted: WantedModel, resident: ResidentModel | None) -> None:
        """Let requests go to `resident` from now on, or to nobody; the one before finishes what it has and ends."""
        before = wanted.resident
        if resident is None:
            wanted.resident = None
        else:
            wanted.admit(resident)
        if before is not None:
            await self._room.retire(before)

    async def _restore(
        self,
        wanted: WantedModel,
        section: ModelSection,
        installed: Installed | None,
        before: ResidentModel | None,
        error: EdgeInferError,
    ) -> None:
        """Bring back what a failed load has replaced; else fall back to an earlier version, where that may help."""
        if before is not None:
            try:
                back = await self._load_variant(
                    wanted, before.section, before.installed, before.variant, spare_equals=True
                )
            except EdgeInferError as again:
                _log.error(
                    "not brought back model=%s version=%s error=%s",
                    section.name, before.manifest.version, again,
                )  # fmt: skip
            else:
                wanted.admit(back)
                return
        hopeless = isinstance(error, RuntimeUnusable | BudgetExceeded) or installed is None
        if installed is None or hopeless or wanted.section.version:
            return
        for earlier in await self._loader.earlier(installed):
            try:
                candidates = await self._candidates(section, earlier, serves=False)
                resident = await self._load_best(wanted, section, earlier, candidates, spare_equals=True)
            except EdgeInferError as again:
                _log.warning(
                    "no fallback model=%s version=%s why=%r", section.name, earlier.manifest.version, str(again)
                )
                continue
            refusal = wanted.refusal
            wanted.admit(resident)
            wanted.serve_instead_of(installed, refusal)
            _log.error(
                "fallback model=%s wanted=%s serves=%s why=%r",
                section.name, installed.manifest.version, earlier.manifest.version, str(error),
            )  # fmt: skip
            return

    def _note_crash(self, key: VariantKey, installed: Installed, note: CrashNote) -> None:
        self._book.crashed(key, installed, note.detail, crashes=note.crashes, quarantine=note.quarantined)
        self._on_crash(note)
