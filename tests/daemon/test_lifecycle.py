"""Starting and ending: which fault ends the process, and that nothing is left half ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from edgeinfer.clock import NS_PER_S
from edgeinfer.daemon.lifecycle import cancel, drain, first_fault, run_until_signal, until
from edgeinfer.errors import ConfigError, LinkError, Problem
from tests.scheduling.world import World, on_virtual_time


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_is_a_clean_end(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5)
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.INFO, logger="edgeinfer"):
        assert run_until_signal(serve) == 0
    assert caplog.messages == [f"stopping on {number.name}"], "the log says why it ended, once"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_means_nothing_here_ends_nothing(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)
        assert not stop.is_set()

    with caplog.at_level(logging.INFO, logger="edgeinfer"):
        assert run_until_signal(serve) == 0
    assert caplog.messages == [f"ignored {number.name}: restart the service to read a new configuration"]


def test_a_fault_of_ours_comes_out_of_its_groups() -> None:
    async def fails(error: Exception) -> None:
        raise error

    async def serve(_: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as outer:
            async with asyncio.TaskGroup() as inner:
                inner.create_task(fails(LinkError("the socket is taken")))
            outer.create_task(asyncio.sleep(0))

    with pytest.raises(LinkError, match="the socket is taken"):
        run_until_signal(serve)


def test_a_bug_is_never_hidden_behind_a_fault() -> None:
    config = ConfigError("f", (Problem("a", "b"),))
    assert first_fault(ExceptionGroup("", [LinkError("x"), config])) is not None
    assert first_fault(ExceptionGroup("", [ExceptionGroup("", [config])])) is config
    assert first_fault(ExceptionGroup("", [config, KeyError("bug")])) is None
    assert first_fault(ExceptionGroup("", [KeyError("bug")])) is None

    async def serve(_: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            raise KeyError("bug")

    with pytest.raises(ExceptionGroup):
        run_until_signal(serve)


async def test_waiting_ends_with_the_work_or_the_stop() -> None:
    stop = asyncio.Event()
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    waiting = asyncio.create_task(until(stop, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stop.set()
    await waiting
    assert cleaned.is_set(), "what was given up has ended when it returns"

    async def fails() -> None:
        raise LinkError("x")

    with pytest.raises(LinkError):
        await until(asyncio.Event(), fails())
    await until(asyncio.Event(), asyncio.sleep(0))


async def test_cancelling_the_waiter_ends_the_work_too() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(until(asyncio.Event(), work()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert ended.is_set()


async def test_tasks_end_one_after_the_other() -> None:
    order: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            order.append(name)

    tasks = [asyncio.create_task(work(name)) for name in ("server", "scheduler", "link")]
    await asyncio.sleep(0)
    await cancel(tasks)
    assert order == ["server", "scheduler", "link"]
    await cancel(tasks)  # again: nothing to do


async def test_being_cancelled_while_cancelling_is_not_swallowed() -> None:
    stubborn_may_end = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await stubborn_may_end.wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    leaving = asyncio.create_task(cancel([task]))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.sleep(0.01)
    stubborn_may_end.set()
    await asyncio.wait([leaving])
    assert leaving.cancelled()


@on_virtual_time()
async def test_a_drain_waits_for_answers_too_within_its_time_and_counts(w: World) -> None:
    """An outcome that is not on its way yet would be cancelled with the server that sends it."""
    await w.sleep(10)
    w.submit("100ms", 2000)
    answered: list[int] = []

    async def answers() -> None:
        await asyncio.sleep(0.2)
        answered.append(1)

    assert await drain(w.scheduler, timeout_ns=NS_PER_S, answered=answers) == 1
    assert answered == [1]
    began_ns = w.clock.now_ns()
    assert await drain(w.scheduler, timeout_ns=NS_PER_S, answered=asyncio.Event().wait) == 0
    assert w.clock.now_ns() - began_ns == NS_PER_S
