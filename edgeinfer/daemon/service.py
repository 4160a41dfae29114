"""Run the device daemon: start the tasks, wait for the signal, drain, leave.

Any task that fails ends the process; systemd restarts it. `READY=1` is sent when local apps can connect and every
preloaded model has been loaded or has been refused with a reason (docs/systemd.md). Neither before the first confirmed
temperature, for which half a second is waited at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine
from typing import Any

from edgeinfer.artifact.board import Board
from edgeinfer.clock import NS_PER_S, MonotonicClock
from edgeinfer.config import DeviceConfig
from edgeinfer.daemon import allocator, descriptors
from edgeinfer.daemon.device import Device
from edgeinfer.daemon.lifecycle import cancel, drain, run_until_signal, until
from edgeinfer.daemon.systemd import Notifier, Watchdog, extended_start
from edgeinfer.worker.hatch import Hatched

_log = logging.getLogger(__name__)

_FIRST_TEMPERATURE_NS = NS_PER_S // 2
"""How long to put work off for the first confirmed temperature: on a board that is hot already, there is none to do."""
_LAST_WORDS_S = 1.0
"""For callers who are slow to read the end of their request."""


def run_device(config: DeviceConfig, board: Board, *, hatched: Hatched | None = None) -> int:
    """Run until SIGTERM, SIGINT or SIGQUIT and return the exit status.

    Raises:
        EdgeInferError: it could not start.
    """
    descriptors.raise_limit(workers=sum(model.workers for model in config.model), loops=len(config.loop))
    allocator.use_one_arena()
    return run_until_signal(lambda stop: _serve(config, board, hatched, stop))


async def _serve(config: DeviceConfig, board: Board, hatched: Hatched | None, stop: asyncio.Event) -> None:
    clock = MonotonicClock()
    notifier = Notifier.from_environ(os.environ)
    device = Device(config, board, clock=clock, hatched=hatched)
    try:
        async with device.host.running(), asyncio.TaskGroup() as group:
            async with extended_start(notifier, clock=clock):
                await until(stop, device.host.start())
                device.reserve_buffers()
                tasks, loops = _start_tasks(device, group, notifier), list[asyncio.Task[None]]()
                await until(stop, device.gateway.listening.wait())
                await until(stop, device.governor.until_known(timeout_ns=_FIRST_TEMPERATURE_NS))
                await until(stop, device.host.preload())
            if not stop.is_set():
                device.phase = "running"
                loops = [group.create_task(loop.run(), name=f"pipeline[{name}]") for name, loop in device.loops.items()]
                notifier.ready(_status(device))
                _log.info("running device=%s board=%s", device.topics.device, device.board.name)
                device.publisher.wake()
                allocator.settle()
                await stop.wait()
            async with extended_start(notifier, clock=clock):
                drained = await _leave(device, notifier, loops, tasks)
        _log.info("stopped, %d requests drained", drained)
    finally:
        device.close()
        notifier.close()


def _start_tasks(device: Device, group: asyncio.TaskGroup, notifier: Notifier) -> dict[str, asyncio.Task[None]]:
    """Start everything but the loops; returned by name, in the order in which they end."""
    watchdog = Watchdog(notifier, progress=lambda: device.scheduler.progress, clock=device.clock)
    tasks: list[tuple[str, Coroutine[Any, Any, None]]] = [
        ("scheduler", device.scheduler.run()),
        ("gateway", device.gateway.run()),
        ("telemetry", device.publisher.run()),
        ("governor", device.governor.run()),
        ("model-cache", device.cache.run()),
        ("watchdog", watchdog.run()),
    ]
    if device.plane is not None:
        tasks.insert(0, ("control", device.plane.run()))
    tasks += [(f"link[{link.name}]", link.run()) for link in device.links]
    return {name: group.create_task(work, name=name) for name, work in tasks}


async def _leave(
    device: Device, notifier: Notifier, loops: list[asyncio.Task[None]], tasks: dict[str, asyncio.Task[None]]
) -> int:
    """Take nothing new, finish what was admitted, tell everybody who waits, say goodbye; return how many finished."""
    device.phase = "draining"
    notifier.stopping("draining")
    device.scheduler.start_draining()
    await cancel(loops)
    drained = await drain(device.scheduler, timeout_ns=device.config.scheduler.drain_timeout)
    await cancel([tasks["scheduler"]])  # what still ran ends now, so that its callers can be told
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(device.gateway.settled(), _LAST_WORDS_S)
    device.phase = "stopping"
    device.publisher.farewell()
    await cancel(list(tasks.values()))
    return drained


def _status(device: Device) -> str:
    loaded = [status.name for status in device.cache.status() if status.state == "loaded"]
    return f"{len(loaded)} models loaded, {len(device.loops)} loops"
