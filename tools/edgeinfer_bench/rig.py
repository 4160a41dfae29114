"""Have the runtime's own parts in this process: store, zygote, workers, model cache, local executor, scheduler.

The parts and their order are the daemon's; only the flows (gateway, loops, telemetry, governor) are left out, so that
one step of a request's life can be measured without the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import NS_PER_MS, MonotonicClock
from edgeinfer.config import ModelSection, SchedulerSection
from edgeinfer.daemon.host import ModelHost
from edgeinfer.daemon.lifecycle import hand_over_soon
from edgeinfer.execution.local import LocalExecutor
from edgeinfer.metrics import Accounting
from edgeinfer.request import Deadlines, InferRequest, Outcome, Payload, Timeline
from edgeinfer.scheduling.scheduler import Scheduler
from edgeinfer.store.store import BundleStore

_CEILING_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Rig:
    """A running runtime. Loop thread only."""

    host: ModelHost
    local: LocalExecutor
    scheduler: Scheduler
    clock: MonotonicClock

    async def ask(self, model: str, payload: Payload, *, deadline_ns: int, firm: bool = True) -> Outcome:
        """Return what became of a request; its answer's memory is given back."""
        outcome = await self.scheduler.submit(
            self.request(model, payload, deadline_ns=deadline_ns, firm=firm)
        ).outcome()
        if outcome.result is not None:
            outcome.result.release()
        return outcome

    def request(self, model: str, payload: Payload, *, deadline_ns: int, firm: bool = True) -> InferRequest:
        """Return a request that is received now."""
        return InferRequest(model, payload, Deadlines(deadline_ns), Timeline(self.clock.now_ns()), firm=firm)

    def deadline_in(self, milliseconds: float) -> int:
        """Return the absolute deadline so far from now."""
        return self.clock.now_ns() + round(milliseconds * NS_PER_MS)


@contextlib.asynccontextmanager
async def open_rig(
    state_dir: Path,
    bundles: Sequence[Path],
    sections: Sequence[ModelSection],
    *,
    settings: SchedulerSection | None = None,
    observe: Callable[[Outcome], None] = lambda _: None,
) -> AsyncIterator[Rig]:
    """Install the bundles, start everything, load the models that are to be preloaded; end it all afterwards.

    Raises:
        RuntimeError: a model is not loaded.
    """
    settings = settings or SchedulerSection()
    for bundle in bundles:
        BundleStore(state_dir).add(bundle, lambda *_: None)  # made here a moment ago: nothing to probe
    hand_over_soon()  # as the daemon does
    clock = MonotonicClock()
    host = ModelHost(
        sections,
        settings,
        state_dir=state_dir,
        ceiling_bytes=_CEILING_BYTES,
        reserve_bytes=0,
        on_crash=lambda _: None,
        clock=clock,
    )
    local = LocalExecutor(host.cache, where="bench", clock=clock)
    scheduler = Scheduler(
        local=local,
        nearby=None,
        clock=clock,
        accounting=Accounting(),
        queue_limit=settings.queue_limit,
        cores=host.cores,
        observe=observe,
    )
    async with host.running():
        await host.start()
        await host.preload()
        preloaded = {section.name for section in sections if section.preload}
        missing = [status for status in host.cache.status() if status.name in preloaded and status.state != "loaded"]
        if missing:
            raise RuntimeError(f"{missing[0].name} is {missing[0].state}: {missing[0].detail}")
        # What the benchmark has imported (onnx, numpy) would make collections longer than in a daemon, which has not.
        gc.collect()
        gc.freeze()
        tasks = [
            asyncio.create_task(host.cache.run(), name="model-cache"),
            asyncio.create_task(scheduler.run(), name="scheduler"),
        ]
        try:
            yield Rig(host, local, scheduler, clock)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            gc.unfreeze()


def spare_cpus() -> tuple[frozenset[int], frozenset[int]]:
    """Return a CPU for the runtime's own loop, and those left for workers; the same where there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return frozenset(usable[:1]), frozenset(usable[1:] or usable)
