"""Hold models on this machine: what the device daemon and the nearby service have in common below their flows.

Puts store, zygote, memory budget, ledger and model cache together, and takes them down again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from edgeinfer.artifact.manifest import Variant
from edgeinfer.clock import Clock
from edgeinfer.config import ModelSection, SchedulerSection
from edgeinfer.daemon.compiling import COMPILE_COPIES, Compiler, available_memory
from edgeinfer.daemon.memory import MemoryBudget, MemoryWatch
from edgeinfer.daemon.one_thread import OneThread
from edgeinfer.errors import BudgetExceeded, ConfigError, EdgeInferError, Problem, mib
from edgeinfer.execution.compiled import form_key
from edgeinfer.execution.crash_book import CrashBook
from edgeinfer.execution.ledger import MemoryLedger, Reservation
from edgeinfer.execution.loader import Loader
from edgeinfer.execution.model_cache import ModelCache
from edgeinfer.execution.resident import CrashNote
from edgeinfer.mqtt.stamp import read_boot_id
from edgeinfer.sensors.cpu import quota_cores, thread_budget, usable_cpus
from edgeinfer.sensors.cpuinfo import cpu_flags
from edgeinfer.store.compiled import CompiledStore
from edgeinfer.store.crashes import CrashFile
from edgeinfer.store.store import BundleStore, Installed
from edgeinfer.worker.hatch import Hatched
from edgeinfer.worker.nursery import Nursery

_log = logging.getLogger(__name__)

_LAST_WRITES_S = 2.0
"""At the end, for what was still to be written; a disk that does not answer does not keep the service from ending."""


class ModelHost:
    """The models of one service and what they need. Loop thread only; made inside the running loop."""

    def __init__(
        self,
        sections: Sequence[ModelSection],
        scheduler: SchedulerSection,
        *,
        state_dir: Path,
        ceiling_bytes: int,
        reserve_bytes: int,
        on_crash: Callable[[CrashNote], None],
        clock: Clock,
        sys_root: Path = Path("/sys"),
        proc_root: Path = Path("/proc"),
        hatched: Hatched | None = None,
    ) -> None:
        """Make everything; nothing is loaded yet. `hatched` is a zygote that runs already.

        Raises:
            ConfigError: the CPUs that were asked for may not be used here.
        """
        self.storage = OneThread("storage", clock=clock)
        """The one thread that reads and writes bundles and the service's own state."""
        self.media = OneThread("media", clock=clock)
        """The one thread that reads and writes what loops are fed from and write to: somebody else's files."""
        self.store = BundleStore(state_dir)
        self.nursery = Nursery(hatched=hatched)
        self.budget = MemoryBudget(
            ceiling_bytes=ceiling_bytes,
            reserve_bytes=reserve_bytes,
            proc_root=Path("/proc"),  # our own processes; a fake root knows nothing of them
            sys_root=sys_root,
            pids=self.nursery.pids,
            clock=clock,
        )
        self.ledger = MemoryLedger(ceiling_bytes)  # what the machine has left is known once `start` was there
        self.cpus = _choose_cpus(scheduler, sys_root, proc_root)
        self.cores = thread_budget(self.cpus, quota_cores(proc_root, sys_root))
        self._cpu_flags = cpu_flags(proc_root)
        self._compiled = CompiledStore(state_dir)
        loader = Loader(
            store=self.store,
            nursery=self.nursery,
            clock=clock,
            cpus=self.cpus,
            cpu_flags=self._cpu_flags,
            cancel_grace_ns=scheduler.kill_grace,
            storage=self.storage,
        )
        book = CrashBook(CrashFile(state_dir), self.storage, boot=read_boot_id(proc_root))
        self.cache = ModelCache(loader, self.ledger, book, clock=clock, on_crash=on_crash)
        self.memory = MemoryWatch(
            self.budget,
            self.ledger,
            zygote=lambda: self.nursery.snapshot().zygote_pid,
            outgrown=self.cache.look,
            clock=clock,
        )
        self._sections = [_within(section, self.cores) for section in sections]
        for section in self._sections:
            self.cache.want(section)
        for problem in self.store.problems():
            _log.error("store %s", problem)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leave no child process and no thread behind at the end of the body."""
        try:
            yield
        finally:
            await self.cache.close()
            await self.nursery.close()
            for thread in (self.media, self.storage):
                if not await thread.rest(_LAST_WRITES_S):
                    _log.warning("the %s thread is stuck: what it had to write is lost", thread.name)

    async def start(self) -> None:
        """Start the zygote, and reserve what daemon and zygote take themselves.

        Neither an unusable runtime nor a budget that is too small ends the service: other devices can still be asked.
        """
        runtime = await self.nursery.start()
        if runtime.reason:
            _log.error("runtime unusable, nothing runs here reason=%r", runtime.reason)
        self.memory.step()

    def memory_ceiling(self) -> int:
        """Bring the ledger up to date with what is in use, and return its ceiling in bytes. Call it once a second."""
        return self.memory.step()

    def reserve_for(self, owner: str, size_bytes: int, *, in_use: Callable[[], int] = lambda: 0) -> Reservation:
        """Set aside memory of the daemon's that `owner` may take at worst: buffers of the gateway, say.

        For as long as the service runs, or until the reservation is released. After `start`, when the ledger knows
        what there is. `in_use` tells how much of it is taken now, which is then not charged to the daemon as well.

        Raises:
            BudgetExceeded: it does not fit. Nothing was reserved.
        """
        reservation = self.ledger.reserve(owner, size_bytes, standing=True)
        self.memory.charged_elsewhere(reservation, in_use)
        return reservation

    async def preload(self) -> None:
        """Load what shall be in memory from the start, the most important first; what can't be is told.

        Nobody gives way here to one that is not more important. Compiled forms that an update of ONNX Runtime or
        another CPU has made stale are made anew before: now the memory is free, and nobody's deadline suffers.
        """
        self._tell_hopeless()
        await self._rebuild_stale_forms()
        for section in sorted(self._sections, key=lambda section: -section.priority):
            if not section.preload:
                continue
            try:
                await self.cache.load(section, spare_equals=True, lift=False)
            except EdgeInferError as error:
                _log.error("not loaded model=%s error=%s", section.name, error)

    def _tell_hopeless(self) -> None:
        """Say when not one model can ever fit, and how much it takes at least: everything else will look well."""
        ledger = self.ledger.snapshot()
        standing = [f"{owner} takes {mib(size)}" for owner, size in ledger.by_owner.items()]
        least_bytes = max(self.ledger.standing_bytes, self.memory.own_bytes)
        if costs := {section.name: cost for section in self._sections if (cost := self.cache.least_bytes(section))}:
            cheapest = min(costs, key=costs.__getitem__)
            standing.append(f"the smallest model ({cheapest}) {mib(costs[cheapest])}")
            least_bytes += costs[cheapest]
        if least_bytes > ledger.ceiling_bytes or (not costs and least_bytes == ledger.ceiling_bytes):
            why = ledger.why_lowered or "raise memory.ceiling"
            _log.error(
                "no memory for models: at least %s is needed of %s (%s); %s",
                mib(least_bytes), mib(ledger.ceiling_bytes), ", ".join(standing), why,
            )  # fmt: skip

    async def _rebuild_stale_forms(self) -> None:
        runtime = self.nursery.snapshot().onnxruntime
        if not runtime:
            return
        for section in self._sections:
            installed = self.cache.installed(section.name)
            if installed is None or not section.preload:
                continue
            had = {form.record.variant for form in self._compiled.forms(installed.digest)}
            for variant in installed.manifest.variants:
                if variant.name not in had or not self._cpu_flags.issuperset(variant.instruction_sets):
                    continue
                key = form_key(installed.digest, variant, onnxruntime=runtime, cpu_flags=self._cpu_flags)
                if self._compiled.find(key) is None:
                    await self._rebuild_form(section, installed, variant)

    async def _rebuild_form(self, section: ModelSection, installed: Installed, variant: Variant) -> None:
        """Make a form anew, with memory that is reserved meanwhile."""
        needed_bytes = variant.load_peak_bytes + COMPILE_COPIES * installed.manifest.files[variant.file].size_bytes
        try:
            reservation = self.ledger.reserve(f"compiling {section.name}/{variant.name}", needed_bytes)
        except BudgetExceeded as error:
            _log.info("not compiled model=%s variant=%s why=%r", section.name, variant.name, str(error))
            return
        compiler = Compiler(
            nursery=self.nursery,
            store=self._compiled,
            cpu_flags=self._cpu_flags,
            storage=self.storage,
            memory_bytes=lambda: min(needed_bytes, available_memory()),
            threads=section.threads,
        )
        try:
            await compiler.compile(installed, variant)
        finally:
            reservation.release()


def _within(section: ModelSection, cores: int) -> ModelSection:
    """Return the section with no more threads than there are cores: more only get into each other's way."""
    if section.threads <= cores:
        return section
    _log.warning(
        "threads model=%s configured=%d used=%d: so many cores may be used", section.name, section.threads, cores
    )
    return dataclasses.replace(section, threads=cores)


def _choose_cpus(scheduler: SchedulerSection, sys_root: Path, proc_root: Path) -> frozenset[int]:
    """Return the CPUs that workers may use.

    Raises:
        ConfigError: none of those asked for may be used.
    """
    usable = usable_cpus(sys_root, proc_root) or frozenset(os.sched_getaffinity(0))
    if scheduler.cpus is None:
        return usable
    wanted = usable & frozenset(scheduler.cpus)
    if not wanted:
        text = f"none of {scheduler.cpus} may be used here; usable are {sorted(usable)}"
        raise ConfigError("configuration", (Problem("scheduler.cpus", text),))
    return wanted
