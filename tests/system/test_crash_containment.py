"""A model that goes wrong hurts only itself: real graphs, real signals, and a second model that must not notice.

Every case runs beside a model that is asked forty times a second; its on-time rate is compared with that just before and after.
The scheduler, the model cache and the workers are the daemon's own; only the clock of a load that hangs is set shorter.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from onnx import ModelProto, helper, numpy_helper

from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.errors import ArtifactError, SessionError
from edgeinfer.execution import loader
from edgeinfer.metrics import Accounting
from edgeinfer.request import Outcome, OutcomeKind, Payload, Reason
from edgeinfer.scheduling.scheduler import Scheduler
from edgeinfer.worker.nursery import Nursery
from tests.execution.local_rig import ECHO, FILLED, LOOP, MIB, Place, open_place, request_of
from tests.worker import graphs

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PERIOD_S, DEADLINE_MS, LOOK_S = 0.025, 300.0, 0.4
SIGNALS = [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGKILL]
FOR_EVER = 1 << 40
WIDE = ([TensorSpec("x", "FP32", [1, 1024])], [TensorSpec("y", "FP32", [1, 1024])])


@dataclass
class Site:
    """A place with a scheduler, the good model `good`, and whatever a test adds."""

    place: Place
    scheduler: Scheduler
    accounting: Accounting

    def submit(self, model: str, payload: Payload, *, within_ms: float) -> Awaitable[Outcome]:
        ticket = self.scheduler.submit(self.place.request(model, payload, within_ms=within_ms))
        return ticket.outcome()

    async def ask(self, model: str, *, within_ms: float = 5000, **inputs: object) -> Outcome:
        """Return the outcome, which must come in bounded time; a result is given back."""
        began = time.monotonic()
        outcome = await self.submit(model, request_of(**inputs), within_ms=within_ms)
        assert time.monotonic() - began < within_ms / 1000 + 0.25, f"{model}: answered long after its deadline"
        if outcome.result is not None:
            outcome.result.release()
        return outcome

    async def worker_of(self, model: str) -> int:
        """Return the process id of the model's worker, once it has one."""
        await self.place.until(lambda: any(r.section.name == model and r.workers for r in self.place.cache.residents()))
        return next(r.workers[0].pid for r in self.place.cache.residents() if r.section.name == model)

    async def good_rate(self, until: Awaitable[object] | None = None) -> float:
        """Ask the good model all the time, for as long as `until` takes (a while without); the share that was on time."""
        outcomes: list[asyncio.Task[Outcome]] = []
        meanwhile = asyncio.ensure_future(until or asyncio.sleep(LOOK_S))
        at = time.monotonic()
        while not meanwhile.done() or len(outcomes) < LOOK_S / PERIOD_S:
            outcomes.append(asyncio.create_task(self.ask("good", within_ms=DEADLINE_MS, x=np.ones(4, np.float32))))
            at += PERIOD_S
            await asyncio.sleep(max(0.0, at - time.monotonic()))
        kinds = [outcome.kind for outcome in await asyncio.gather(*outcomes)]
        await meanwhile
        return kinds.count(OutcomeKind.OK) / len(kinds)

    @contextlib.asynccontextmanager
    async def unnoticed(self) -> AsyncIterator[None]:
        """Hold the body to this: beside it the good model is as much on time as before or after it."""
        before = await self.good_rate()
        done = asyncio.Event()
        watching = asyncio.create_task(self.good_rate(done.wait()))
        try:
            yield
        finally:
            done.set()
            beside = await watching
        control = min(before, await self.good_rate())
        assert beside >= control - 0.1, f"on time: {beside:.0%} beside it, {control:.0%} before or after"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nursery() -> AsyncIterator[Nursery]:
    nursery = Nursery()
    await nursery.start()
    yield nursery
    await nursery.close()


@pytest_asyncio.fixture(loop_scope="module")
async def site(nursery: Nursery, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_place(tmp_path, nursery, ceiling_bytes=2048 * MIB) as place:
        accounting = Accounting()
        scheduler = Scheduler(
            local=place.executor, nearby=None, clock=place.clock.real, accounting=accounting, queue_limit=64, cores=2
        )
        running = asyncio.create_task(scheduler.run())
        place.install("good")
        await place.load("good", priority=5)
        yield Site(place, scheduler, accounting)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])
        counts = accounting.total
        assert counts.received == counts.in_flight + sum(counts.ended.values())
        assert counts.in_flight == 0


@pytest.fixture
def short_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_LOAD_TIMEOUT_NS", 1_000_000_000)


# Runs


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
async def test_a_run_that_dies_of_a_signal(site: Site, number: signal.Signals) -> None:
    place = site.place
    place.install("bad", graphs.slow_loop(), LOOP)
    await place.load("bad")
    async with site.unnoticed():
        for crash in range(3):
            worker = await site.worker_of("bad")
            asking = asyncio.create_task(_ask_loop(site, FOR_EVER, within_ms=20_000))
            await place.until(lambda: any(r.leases for r in place.cache.residents() if r.section.name == "bad"))
            await asyncio.sleep(0.02)
            os.kill(worker, number)
            killed = time.monotonic()
            outcome = await asking
            assert time.monotonic() - killed < 1, "its caller is told at once"
            assert (outcome.kind, outcome.reason) == (OutcomeKind.FAILED, "crashed")
            assert number.name in outcome.detail
            if crash == 0:  # it comes back, and works
                await site.worker_of("bad")
                assert (await _ask_loop(site, 2)).kind is OutcomeKind.OK
        await place.until(lambda: place.status("bad").state == "quarantined" and place.status("bad").workers == 0)
        assert [note.quarantined for note in place.crashes] == [False, False, True]
        outcome = await _ask_loop(site, 2)
        assert (outcome.kind, outcome.reason) == (OutcomeKind.REJECTED, Reason.QUARANTINED.value)
        assert number.name in outcome.detail
    assert len(place.workers()) == 1, "only the good one's is left"


async def test_a_run_that_raises(site: Site) -> None:
    site.place.install("bad", graphs.filled(), FILLED)
    await site.place.load("bad")
    worker = await site.worker_of("bad")
    async with site.unnoticed():
        for _ in range(20):
            outcome = await site.ask("bad", shape=np.array([-5]))
            assert outcome.kind is OutcomeKind.FAILED
            assert outcome.reason == "run_failed"
            assert ".cc" not in outcome.detail, "no trace of somebody's source code"
    assert (await site.ask("bad", shape=np.array([5]))).kind is OutcomeKind.OK
    assert await site.worker_of("bad") == worker, "it has hurt nobody, not even itself"


async def test_a_run_that_asks_for_more_memory_than_there_is(site: Site) -> None:
    site.place.install("bad", graphs.filled(), FILLED, peak_bytes=32 * MIB)
    await site.place.load("bad")
    async with site.unnoticed():
        for size in (1 << 24, 1 << 31, 1 << 40):
            outcome = await site.ask("bad", shape=np.array([size]))
            assert outcome.kind is OutcomeKind.FAILED
            assert outcome.reason in {"out_of_memory", "run_failed"}, outcome
    assert (await site.ask("bad", shape=np.array([5]))).kind is OutcomeKind.OK
    assert site.place.crashes == []


@pytest.mark.parametrize("how", ["stopped process", "one long operator"])
async def test_a_run_that_hangs_is_told_at_its_deadline_and_its_worker_replaced(site: Site, how: str) -> None:
    place = site.place
    graph, contract = (graphs.slow_loop(), LOOP) if how == "stopped process" else (_long_operator(), LOOP)
    place.install("bad", graph, contract, peak_bytes=512 * MIB)
    await place.load("bad")
    async with site.unnoticed():
        for _ in range(2):
            worker = await site.worker_of("bad")
            if how == "stopped process":
                os.kill(worker, signal.SIGSTOP)
            outcome = await _ask_loop(site, FOR_EVER if how == "stopped process" else 6000, within_ms=300)
            assert outcome.kind is OutcomeKind.EXPIRED
            await place.until(partial(_is_gone, place, worker))
            await site.worker_of("bad")
            assert (await _ask_loop(site, 2)).kind is OutcomeKind.OK, "it is back at work"
    assert place.crashes == [], "being too slow is no crash"


async def test_a_run_without_file_descriptors(site: Site) -> None:
    place = site.place
    place.install("bad")
    await place.load("bad")
    worker = await site.worker_of("bad")
    async with site.unnoticed():
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (0, 0))  # what is open stays open
        outcome = await site.ask("bad", x=np.ones(4, np.float32))
        assert outcome.kind is OutcomeKind.FAILED, outcome
        await place.until(partial(_is_gone, place, worker))
        await site.worker_of("bad")
        assert (await site.ask("bad", x=np.ones(4, np.float32))).kind is OutcomeKind.OK


# Loads


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
async def test_a_load_that_dies_of_a_signal(site: Site, number: signal.Signals) -> None:
    place = site.place
    place.install("bad", _heavy(), WIDE, peak_bytes=256 * MIB)
    section = place.want("bad")
    async with site.unnoticed():
        for _ in range(3):
            with pytest.raises(SessionError, match=number.name) as caught:
                await _load_and(site, section.name, lambda pid: os.kill(pid, number))
            assert caught.value.reason == "load_crashed"
            outcome = await site.ask("bad", x=np.ones((1, 1024), np.float32))
            assert outcome.kind is OutcomeKind.REJECTED
    assert place.status("bad").quarantined == ("1.0.0 fp32",)
    with pytest.raises(ArtifactError, match=f"is quarantined.*{number.name}"):
        await place.cache.load(section, lift=False)
    await place.cache.load(section)
    assert (await site.ask("bad", x=np.ones((1, 1024), np.float32))).kind is OutcomeKind.OK


async def test_a_load_that_hangs(site: Site, short_loads: None) -> None:
    place = site.place
    place.install("bad", _heavy(), WIDE, peak_bytes=256 * MIB)
    place.want("bad")
    async with site.unnoticed():
        began = time.monotonic()
        with pytest.raises(SessionError, match="load_timeout"):
            await _load_and(site, "bad", lambda pid: os.kill(pid, signal.SIGSTOP))
        assert time.monotonic() - began < 3
        await place.until(lambda: len(place.workers()) == 1)
    assert place.ledger.snapshot().by_owner.keys() == {"good/fp32"}, "what it was to take is free again"


async def test_a_load_that_raises(site: Site) -> None:
    async with site.unnoticed():
        for number, graph in enumerate((graphs.slow_loop(), _newer_than_the_runtime())):
            site.place.install("bad", graph, ECHO, version=f"{number}.0.0")
            with pytest.raises(SessionError, match=r"contract_mismatch|model_unsupported"):
                await site.place.load("bad")
            outcome = await site.ask("bad", x=np.ones(4, np.float32))
            assert (outcome.kind, outcome.reason) == (OutcomeKind.REJECTED, Reason.MODEL_UNAVAILABLE.value)
    assert len(site.place.workers()) == 1
    assert site.place.status("bad").quarantined == (), "that is a wrong model, not one that crashes"


async def test_a_load_that_asks_for_more_memory_than_there_is(site: Site) -> None:
    site.place.install("bad", _sparse(1 << 28))  # 150 bytes in the file, 1 GiB when it is spread out
    async with site.unnoticed():
        with pytest.raises(SessionError) as caught:
            await site.place.load("bad")
    assert caught.value.reason in {"out_of_memory", "load_crashed"}
    assert len(site.place.workers()) == 1


async def test_a_load_without_file_descriptors(site: Site) -> None:
    site.place.install("bad", _heavy(), WIDE, peak_bytes=256 * MIB)
    site.place.want("bad")
    async with site.unnoticed():
        with pytest.raises(SessionError):
            await _load_and(site, "bad", lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)))
        await site.place.until(lambda: len(site.place.workers()) == 1)
        section = site.place.cache.section("bad")
        assert section is not None
        await site.place.cache.load(section)
    assert (await site.ask("bad", x=np.ones((1, 1024), np.float32))).kind is OutcomeKind.OK


def _is_gone(place: Place, worker: int) -> bool:
    return worker not in place.workers()


def _sparse(size: int) -> ModelProto:
    """x[n] -> y = x + 1: the largest of `size` weights, which the file says with one number."""
    weight = helper.make_tensor("w", graphs.FLOAT, [1], [1.0])
    where = helper.make_tensor("where", graphs.INT64, [1], [5])
    graph = graphs.model(
        [graphs.node("ReduceMax", ["w"], ["top"], keepdims=0), graphs.node("Add", ["x", "top"], ["y"])],
        [graphs.value("x", graphs.FLOAT, ["n"])],
        [graphs.value("y", graphs.FLOAT, ["n"])],
    )
    graph.graph.sparse_initializer.append(helper.make_sparse_tensor(weight, where, [size]))
    return graph


@functools.cache
def _heavy(layers: int = 12) -> ModelProto:
    """x[1,1024] -> y: 4 MiB of weights a layer; twelve are long enough to load to be caught at it."""
    zeros = np.zeros((1024, 1024), np.float32)
    weights = [numpy_helper.from_array(zeros, f"w{layer}") for layer in range(layers)]
    names = ["x", *(f"h{layer}" for layer in range(1, layers)), "y"]
    return graphs.model(
        [graphs.node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)],
        [graphs.value("x", graphs.FLOAT, [1, 1024])],
        [graphs.value("y", graphs.FLOAT, [1, 1024])],
        weights,
    )


async def _ask_loop(site: Site, count: int, *, within_ms: float = 5000) -> Outcome:
    return await site.ask("bad", within_ms=within_ms, n=np.array([count]), x=np.ones(1, np.float32))


async def _load_and(site: Site, name: str, harm: Callable[[int], object]) -> None:
    """Load a model, and harm its worker as soon as it is born."""
    place = site.place
    section = place.cache.section(name)
    assert section is not None
    before = place.workers()
    loading = asyncio.create_task(place.cache.load(section, lift=False))
    while not (born := place.workers() - before) and not loading.done():
        await asyncio.sleep(0.001)
    assert not loading.done(), "it must be caught while it loads"
    harm(born.pop())
    await loading


def _long_operator() -> ModelProto:
    """n[1], x[1] -> y[1]: a product of two n by n matrices, in one operator that does not listen meanwhile."""
    twice = numpy_helper.from_array(np.zeros(2, np.int64), "twice")
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    return graphs.model(
        [
            graphs.node("Concat", ["n", "n"], ["shape"], axis=0),
            graphs.node("Expand", ["x", "shape"], ["m"]),
            graphs.node("MatMul", ["m", "m"], ["p"]),
            graphs.node("ReduceMax", ["p"], ["top"], keepdims=0),
            graphs.node("Reshape", ["top", "one"], ["y"]),
        ],
        [graphs.value("n", graphs.INT64, [1]), graphs.value("x", graphs.FLOAT, [1])],
        [graphs.value("y", graphs.FLOAT, [1])],
        [twice, one],
    )


def _newer_than_the_runtime() -> ModelProto:
    graph = graphs.identity()
    graph.ir_version = 99
    return graph
