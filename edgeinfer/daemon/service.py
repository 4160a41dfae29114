"""Run the device daemon: start the tasks, wait for the signal, drain, leave.

Any task that fails ends the process; systemd restarts it. `READY=1` is sent when local apps can connect and every
preloaded model has been loaded or has been refused with a reason (docs/systemd.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from edgeinfer.clock import NS_PER_S, MonotonicClock
from edgeinfer.config import DeviceConfig
from edgeinfer.daemon.device import Device
from edgeinfer.daemon.systemd import Notifier, Watchdog, extended_start
from edgeinfer.errors import BudgetExceeded, EdgeInferError

_log = logging.getLogger(__name__)


def run_device(config: DeviceConfig) -> int:
    """Run until SIGTERM or SIGINT and return the exit status.

    Raises:
        EdgeInferError: it could not start.
    """
    return run_until_signal(lambda stop: _serve(config, stop))


def run_until_signal(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> int:
    """Run `serve` with an event that the first SIGTERM or SIGINT sets; 0 at a clean end.

    Raises:
        EdgeInferError: the first fault of ours that ended it, out of its exception group.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(stop)

    try:
        asyncio.run(main())
    except BaseExceptionGroup as group:
        fault = first_fault(group)
        if fault is None:
            raise
        raise fault from group
    return 0


def first_fault(group: BaseExceptionGroup[BaseException]) -> EdgeInferError | None:
    """Return the first fault of ours in a group, None when something else went wrong too."""
    ours, others = group.split(EdgeInferError)
    if ours is None or others is not None:
        return None
    fault: BaseException = ours
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault if isinstance(fault, EdgeInferError) else None


async def _serve(config: DeviceConfig, stop: asyncio.Event) -> None:
    clock = MonotonicClock()
    notifier = Notifier.from_environ(os.environ)
    device = Device(config, clock=clock)
    try:
        async with _started_nursery(device), asyncio.TaskGroup() as group:
            inner = _start_tasks(device, group, notifier)
            loops = []
            async with extended_start(notifier, clock=clock):
                await _until(stop, device.gateway.listening.wait())
                await _until(stop, _preload(device))
            if not stop.is_set():
                device.phase = "running"
                loops = [
                    group.create_task(loop.run(), name=f"pipeline[{name}]") for name, loop in device.loops.items()
                ]
                notifier.ready(_status(device))
                _log.info("running device=%s board=%s", device.topics.device, device.board.name)
                device.publisher.wake()
                await stop.wait()
            async with extended_start(notifier, clock=clock):
                await _drain(device, notifier, loops)
                await _cancel(inner)
    finally:
        device.close()
        notifier.close()


@contextlib.asynccontextmanager
async def _started_nursery(device: Device) -> AsyncIterator[None]:
    """Have the zygote and, at the end, no child process left."""
    runtime = await device.nursery.start()
    if runtime.reason:
        _log.error("runtime unusable, only offloading is left reason=%r", runtime.reason)
    own_bytes = device.budget.reading().own.pss_bytes
    try:
        device.ledger.reserve("edgeinfer", own_bytes)
    except BudgetExceeded as error:
        _log.error("memory %s", error)  # the numbers say it all
    try:
        yield
    finally:
        await device.cache.close()
        await device.nursery.close()


def _start_tasks(device: Device, group: asyncio.TaskGroup, notifier: Notifier) -> list[asyncio.Task[None]]:
    """Start everything but the loops; returned in the order in which they end."""
    watchdog = Watchdog(notifier, progress=lambda: device.scheduler.progress, clock=device.clock)
    tasks: list[tuple[str, Coroutine[Any, Any, None]]] = [
        ("gateway", device.gateway.run()),
        ("telemetry", device.publisher.run()),
        ("governor", device.governor.run()),
        ("scheduler", device.scheduler.run()),
        ("model-cache", device.cache.run()),
        ("watchdog", watchdog.run()),
    ]
    if device.plane is not None:
        tasks.insert(1, ("control", device.plane.run()))
    tasks += [(f"link[{link.name}]", link.run()) for link in device.links]
    return [group.create_task(work, name=name) for name, work in tasks]


async def _preload(device: Device) -> None:
    """Load what shall be in memory from the start; what can't be is told, and the rest goes on."""
    for section in device.config.model:
        if not section.preload:
            continue
        try:
            await device.cache.load(section)
        except EdgeInferError as error:
            _log.error("not loaded model=%s error=%s", section.name, error)


async def _drain(device: Device, notifier: Notifier, loops: list[asyncio.Task[None]]) -> None:
    """Take nothing new, finish what was admitted, say goodbye."""
    device.phase = "draining"
    notifier.stopping("draining")
    device.scheduler.start_draining()
    await _cancel(loops)
    try:
        async with asyncio.timeout(device.config.scheduler.drain_timeout / NS_PER_S):
            await device.scheduler.drained()
    except TimeoutError:
        _log.warning("drain timeout in_flight=%d", device.accounting.total.in_flight)
    device.phase = "stopping"
    device.publisher.farewell()


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> None:
    """Await `work`, or give it up when `stop` is set."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        await _cancel([task, stopped])


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks one after the other, each having ended before the next."""
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _status(device: Device) -> str:
    loaded = [status.name for status in device.cache.status() if status.state == "loaded"]
    return f"{len(loaded)} models loaded, {len(device.loops)} loops"
