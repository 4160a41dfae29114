"""Turn a configured model into worker processes: which bundle, sound or not, which variants may run here, and start.

Owns no model and decides nothing about memory: it says what a variant costs, and its caller has reserved that before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from typing import TypeVar

from edgeinfer.artifact.fitness import unfit
from edgeinfer.artifact.manifest import Variant
from edgeinfer.artifact.profile import Latency, Profile, read_profile
from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.config import ModelSection
from edgeinfer.errors import ArtifactError, SessionError
from edgeinfer.execution.compiled import form_files, form_key, peak_bytes
from edgeinfer.execution.ledger import Reservation, SharedReservation
from edgeinfer.execution.resident import CrashNote, ResidentModel
from edgeinfer.execution.seed import load_guess_ns, seed_of
from edgeinfer.store.compiled import CompiledForm, CompiledStore, FormKey
from edgeinfer.store.store import BundleStore, Installed
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import limits_for, load_spec
from edgeinfer.worker.worker import Worker

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LOAD_TIMEOUT_NS = 120 * NS_PER_S


class Loader:
    """Starts the workers of models. Loop thread only; `storage` does what reads disks."""

    def __init__(
        self,
        *,
        store: BundleStore,
        nursery: Nursery,
        clock: Clock,
        cpus: frozenset[int],
        cpu_flags: frozenset[str],
        cancel_grace_ns: int,
        storage: Executor,
    ) -> None:
        self.cpus = cpus
        """Where workers that are started from now on may run."""
        self._store = store
        self._compiled = CompiledStore(store.state_dir)
        self._nursery = nursery
        self._clock = clock
        self._cpu_flags = cpu_flags
        self._cancel_grace_ns = cancel_grace_ns
        self._storage = storage
        self._profiles: dict[str, Profile | None] = {}
        """What this device has measured of the bundles that were to be loaded, by digest."""
        self._told: set[tuple[str, str]] = set()
        """Variants (by bundle digest) that cannot run here, which the log has said."""

    @property
    def runtime(self) -> str:
        """Version of ONNX Runtime that workers run, empty while it is unknown."""
        return self._nursery.snapshot().onnxruntime

    def retry_runtime(self) -> None:
        """Try a runtime that was unusable again with the next load, however short ago it failed."""
        self._nursery.retry_now()

    async def earlier(self, installed: Installed) -> list[Installed]:
        """Return the other installed versions of a bundle that may stand in for it, the best first."""
        return await self._read(functools.partial(self._store.earlier, installed))

    def known(self, section: ModelSection) -> Installed:
        """Return the bundle that is meant, at once and unchecked: for the start, before anything else runs.

        Raises:
            ArtifactError: there is none.
        """
        return self._store.active(section.name, section.version)

    def load_guess_ns(self, section: ModelSection, installed: Installed) -> int:
        """Return what loading it is taken to last before it was seen: for the start, as `known`.

        By what this device has measured, with whatever runtime that was, else by the bundle's size.
        """
        measured_ms: list[float] = []
        with contextlib.suppress(ArtifactError):  # `form` says so in the log
            if (path := self._store.profile_path(installed.digest)).exists():
                costs = read_profile(path).costs
                measured_ms = [cost.load_ms for cost in costs if section.variant in {"", cost.variant}]
        return load_guess_ns(installed.manifest, section.variant, measured_ms)

    async def find(self, section: ModelSection) -> Installed:
        """Return the bundle that is meant.

        Raises:
            ArtifactError: there is none.
        """
        return await self._read(functools.partial(self._store.active, section.name, section.version))

    async def check(self, installed: Installed) -> None:
        """Check every byte of a bundle: one flipped bit in its weights would load silently.

        Raises:
            ArtifactError: it is damaged.
        """
        manifest = installed.manifest
        try:
            await self._read(functools.partial(self._store.verify, manifest.name, manifest.version))
        except ArtifactError as error:
            text = f"{error}; heal it by adding the bundle again: edgeinfer bundle add PATH"
            raise ArtifactError(text) from error

    async def _check_soon(self, installed: Installed) -> None:
        """As `check`, but lets the worker that loads meanwhile be asked for first: two threads share an interpreter."""
        await asyncio.sleep(0)
        await self.check(installed)

    def candidates(
        self, section: ModelSection, installed: Installed, *, without: AbstractSet[tuple[str, str]] = frozenset()
    ) -> list[Variant]:
        """Return the variants that may run on this CPU and runtime, best first; the configured one only, when one is.

        `without` leaves out some, by (digest, variant); the list is empty when nothing else is left.

        Raises:
            ArtifactError: this device can run none of them, or the configured one isn't there.
        """
        manifest = installed.manifest
        asked = [manifest.variant(section.variant)] if section.variant else manifest.variants
        providers = self._nursery.snapshot().providers
        reasons = {variant.name: unfit(variant, cpu_flags=self._cpu_flags, providers=providers) for variant in asked}
        able = [variant for variant in asked if not reasons[variant.name]]
        if not able:
            every = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ArtifactError(f"{installed.title} cannot run here ({every})")
        for name, reason in reasons.items():
            if reason and (installed.digest, name) not in self._told:
                self._told.add((installed.digest, name))
                _log.warning("variant left out model=%r variant=%s why=%r", installed.title, name, reason)
        return [variant for variant in able if (installed.digest, variant.name) not in without]

    async def form(self, installed: Installed, variant: Variant) -> CompiledForm | None:
        """Return the form that this device has compiled for the variant, None when it is loaded as it came.

        Only one for this very CPU and runtime, with every byte as it was written. Reads the device's profile of the
        bundle as well, which `cost_bytes` and `open` then go by.
        """
        runtime = self._nursery.snapshot().onnxruntime
        key = form_key(installed.digest, variant, onnxruntime=runtime, cpu_flags=self._cpu_flags)
        self._profiles[installed.digest] = await self._read(functools.partial(self._profile, installed.digest))
        return await self._read(functools.partial(self._sound_form, key))

    async def forget_form(self, form: CompiledForm) -> None:
        """Give a form up: its variant is loaded as it came until one is made again."""
        await self._read(functools.partial(self._compiled.discard, form))

    def cost_bytes(
        self, section: ModelSection, installed: Installed, variant: Variant, form: CompiledForm | None = None
    ) -> int:
        """Return what all its workers may ever take: their peaks, and all the slots that they may make.

        Without the weights that they map: those are charged once.
        """
        limits = limits_for(installed.manifest, cancel_grace_ns=self._cancel_grace_ns)
        return section.workers * (self._peak_bytes(section, installed, variant, form) + limits.max_slot_bytes)

    async def open(
        self,
        section: ModelSection,
        installed: Installed,
        variant: Variant,
        reservation: Reservation,
        *,
        later: Callable[[int, Callable[[], Awaitable[None]], str], None],
        on_crash: Callable[[CrashNote], None],
        form: CompiledForm | None = None,
        mapped: SharedReservation | None = None,
        check: bool = False,
    ) -> ResidentModel:
        """Start every worker of a variant. The reservations go to the model, or are released when it fails.

        `check` has every byte of the bundle checked meanwhile, as `check` does; no model leaves here before that.

        Raises:
            ArtifactError: the bundle is damaged; whatever else went wrong is of no interest then.
            SessionError: the runtime refused it, or cannot run at all.
        """
        limits = limits_for(installed.manifest, cancel_grace_ns=self._cancel_grace_ns)

        worker_bytes = self._peak_bytes(section, installed, variant, form)

        async def start_worker() -> Worker:
            cpus = self.cpus
            spec = load_spec(
                installed.manifest,
                installed.path,
                variant.name,
                threads=section.threads,
                reservation_bytes=worker_bytes,
                cpus=cpus,
                files=form_files(form),
            )
            deadline_ns = self._clock.now_ns() + _LOAD_TIMEOUT_NS
            worker = await Worker.start(self._nursery, spec, deadline_ns=deadline_ns, limits=limits)
            if self.cpus != cpus:  # they have changed meanwhile, and nobody knew of this worker yet
                try:
                    worker.set_affinity(self.cpus)
                except SessionError as error:
                    _log.warning("affinity model=%s error=%r", section.name, str(error))
            return worker

        resident = ResidentModel(
            section=section,
            installed=installed,
            variant=variant,
            reservation=reservation,
            start_worker=start_worker,
            later=later,
            on_crash=on_crash,
            clock=self._clock,
            form=form,
            mapped=mapped,
            seed=seed_of(variant, section.threads, self._measured(section, installed, variant, form)),
        )
        opening = asyncio.ensure_future(resident.open())
        checking = asyncio.create_task(self._check_soon(installed), name=f"check[{section.name}]") if check else None
        try:
            await opening
            if checking is not None:
                await checking
        except BaseException as error:
            await resident.close()
            if checking is not None:
                if isinstance(error, SessionError):
                    await checking
                checking.cancel()
            raise
        _log.info(
            "loaded model=%s version=%s variant=%s form=%s threads=%d load_ms=%.0f reserved_bytes=%d",
            section.name, installed.manifest.version, variant.name, form.record.form if form else "plain",
            section.threads, resident.load_ns / 1e6, resident.reserved_bytes,
        )  # fmt: skip
        return resident

    def _peak_bytes(
        self, section: ModelSection, installed: Installed, variant: Variant, form: CompiledForm | None
    ) -> int:
        profile = self._profiles.get(installed.digest)
        provider = variant.providers[0]
        if profile is None:
            return peak_bytes(form, variant)
        measured = profile.peak_bytes(variant.name, provider=provider, threads=section.threads)
        return peak_bytes(form, variant, measured)

    def _measured(
        self, section: ModelSection, installed: Installed, variant: Variant, form: CompiledForm | None
    ) -> Latency | None:
        """Return how long a run takes here in just this way, where that was measured."""
        profile = self._profiles.get(installed.digest)
        wanted = variant.name, variant.providers[0], section.threads, form.record.form if form else "plain"
        for cost in profile.costs if profile else ():
            if (cost.variant, cost.provider, cost.threads, cost.form) == wanted:
                return cost.latency
        return None

    def _profile(self, digest: str) -> Profile | None:
        """Return this device's profile of a bundle, None without one that was measured with this CPU and runtime."""
        path = self._store.profile_path(digest)
        if not path.exists():
            return None
        try:
            profile = read_profile(path)
        except ArtifactError as error:
            _log.warning("profile given up, charging what the bundle says: %s", error)
            return None
        runtime = self._nursery.snapshot().onnxruntime
        fits = profile.onnxruntime == runtime and self._cpu_flags == frozenset(profile.cpu_flags)
        return profile if fits and profile.origin == "measured" and profile.bundle_digest == digest else None

    def _sound_form(self, key: FormKey) -> CompiledForm | None:
        form = self._compiled.find(key)
        if form is None or form.record.form == "plain":
            return None
        try:
            self._compiled.check(form)
        except ArtifactError as error:
            _log.warning("compiled form given up, loading as it came: %s", error)
            self._compiled.discard(form)
            return None
        return form

    async def _read(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._storage, work)
