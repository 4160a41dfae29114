"""Hold models on this machine: what the device daemon and the nearby service have in common below their flows.

Puts store, zygote, memory budget, ledger and model cache together, and takes them down again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

from edgeinfer.clock import Clock
from edgeinfer.config import ModelSection, SchedulerSection
from edgeinfer.daemon.memory import MemoryBudget
from edgeinfer.errors import BudgetExceeded, ConfigError, EdgeInferError, Problem
from edgeinfer.execution.ledger import MemoryLedger
from edgeinfer.execution.model_cache import ModelCache
from edgeinfer.execution.resident import CrashNote
from edgeinfer.sensors.cpu import quota_cores, thread_budget, usable_cpus
from edgeinfer.sensors.cpuinfo import cpu_flags
from edgeinfer.store.store import BundleStore
from edgeinfer.worker.nursery import Nursery

_log = logging.getLogger(__name__)


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
    ) -> None:
        """Make everything; nothing is loaded yet.

        Raises:
            ConfigError: the CPUs that were asked for may not be used here.
        """
        self._sections = sections
        self.store = BundleStore(state_dir)
        self.nursery = Nursery()
        self.budget = MemoryBudget(
            ceiling_bytes=ceiling_bytes,
            reserve_bytes=reserve_bytes,
            proc_root=Path("/proc"),  # our own processes; a fake root knows nothing of them
            sys_root=sys_root,
            pids=self._child_pids,
            clock=clock,
        )
        self.ledger = MemoryLedger(ceiling_bytes)  # what the machine has left is known once `running` has begun
        self.cpus = _choose_cpus(scheduler, sys_root, proc_root)
        self.cores = thread_budget(self.cpus, quota_cores(proc_root, sys_root))
        self.cache = ModelCache(
            store=self.store,
            nursery=self.nursery,
            ledger=self.ledger,
            clock=clock,
            cpus=self.cpus,
            cpu_flags=cpu_flags(proc_root),
            cancel_grace_ns=scheduler.kill_grace,
            on_crash=on_crash,
        )
        for section in sections:
            self.cache.want(section)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have the zygote and, at the end, no child process left. What we take ourselves is reserved first."""
        runtime = await self.nursery.start()
        if runtime.reason:
            _log.error("runtime unusable, nothing runs here reason=%r", runtime.reason)
        self.ledger.set_ceiling(self.budget.ceiling())
        try:
            self.ledger.reserve("edgeinfer", self.budget.reading().own.held_bytes)
        except BudgetExceeded as error:
            _log.error("memory %s", error)  # the numbers say it all
        try:
            yield
        finally:
            await self.cache.close()
            await self.nursery.close()

    async def preload(self) -> None:
        """Load what shall be in memory from the start; what can't be is told, and the rest goes on."""
        for section in self._sections:
            if not section.preload:
                continue
            try:
                await self.cache.load(section)
            except EdgeInferError as error:
                _log.error("not loaded model=%s error=%s", section.name, error)

    def _child_pids(self) -> Iterable[int]:
        zygote = self.nursery.snapshot().zygote_pid
        if zygote is not None:
            yield zygote
        for resident in self.cache.residents():
            yield from (worker.pid for worker in resident.workers)


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
