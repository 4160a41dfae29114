"""Start on an event loop and end on a signal: what the device daemon and the nearby service have in common."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from edgeinfer.clock import NS_PER_S
from edgeinfer.errors import EdgeInferError
from edgeinfer.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_HANDOVER_S = 0.0005
_IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_until_signal(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> int:
    """Run `serve` with an event that the first SIGTERM, SIGINT or SIGQUIT sets; 0 at a clean end.

    SIGHUP, SIGUSR1 and SIGUSR2 are ignored, with a log line: a terminal that closes or a script that means another
    daemon must not end this one without a drain. A configuration is read at the start only.

    Raises:
        EdgeInferError: the first fault of ours that ended it, out of its exception group.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            loop.add_signal_handler(number, _stop_on, number, stop)
        for number in _IGNORED:
            loop.add_signal_handler(
                number, _log.info, "ignored %s: restart the service to read a new configuration", number.name
            )
        await serve(stop)

    hand_over_soon()
    try:
        asyncio.run(main())
    except BaseExceptionGroup as group:
        fault = first_fault(group)
        if fault is None:
            raise
        raise fault from group
    return 0


def hand_over_soon() -> None:
    """Have a thread that computes in Python let the event loop in after half a millisecond, not after five.

    Reading manifests and walking models takes the storage thread some milliseconds, in which requests go on.
    """
    sys.setswitchinterval(_HANDOVER_S)


def _stop_on(number: signal.Signals, stop: asyncio.Event) -> None:
    """Begin the end, and say why; a second signal changes nothing."""
    if not stop.is_set():
        _log.info("stopping on %s", number.name)
        stop.set()


def first_fault(group: BaseExceptionGroup[BaseException]) -> EdgeInferError | None:
    """Return the first fault of ours in a group, None when something else went wrong too."""
    ours, others = group.split(EdgeInferError)
    if ours is None or others is not None:
        return None
    fault: BaseException = ours
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault if isinstance(fault, EdgeInferError) else None


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> None:
    """Await `work`, or give it up when `stop` is set."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        await cancel([task, stopped])


async def drain(
    scheduler: Scheduler, *, timeout_ns: int, answered: Callable[[], Awaitable[object]] | None = None
) -> int:
    """Wait until what was admitted has ended, for so long at most, and return how many requests did.

    What then still runs is told when it is stopped. `answered` is awaited within the same time: an outcome is no
    answer until it is on its way.
    """
    waiting = scheduler.snapshot().in_flight
    try:
        async with asyncio.timeout(timeout_ns / NS_PER_S):
            await scheduler.drained()
            if answered is not None:
                await answered()
    except TimeoutError:
        in_flight = scheduler.snapshot().in_flight
        _log.warning("drain timeout in_flight=%d waited_s=%.1f", in_flight, timeout_ns / NS_PER_S)
    return waiting - scheduler.snapshot().in_flight


async def cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks one after the other, each having ended before the next; raises what one of them failed with."""
    for task in tasks:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
