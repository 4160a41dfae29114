"""A worker that one large request has made large gives the memory back when asked, without another request."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.artifact.manifest import StateSpec, TensorSpec
from edgeinfer.request import Failure
from edgeinfer.worker.flight import RunEnding
from edgeinfer.worker.worker import Worker
from tests.worker import graphs
from tests.worker.conftest import StartWorker, in_ms, output, request_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MIB = 1 << 20
SPEC: dict[str, Any] = {
    "arena_max_bytes": 34 * MIB,
    "inputs": [TensorSpec("shape", "INT64", [2])],
    "outputs": [TensorSpec("y", "FP32", [1])],
    "state": [StateSpec("total", "total_out", "FP32", [1])],
}


def anonymous(worker: Worker) -> int:
    memory = worker.memory()
    assert memory is not None
    return memory.anon_bytes


async def ask(worker: Worker, side: int) -> NDArray[np.float32]:
    picture = np.ones((1, 3, side, side), np.float32)
    return output(await worker.run(request_of(x=picture), deadline_ns=in_ms(20_000)))


async def shrink(worker: Worker) -> None:
    before = worker.shrinks
    worker.shrink()
    async with asyncio.timeout(10):
        while worker.shrinks == before:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("arena", [512 * MIB, None], ids=["one capped arena", "no arena of ours"])
async def test_activations_of_a_huge_request_are_given_back_when_asked(
    start_worker: StartWorker, arena: int | None
) -> None:
    worker = await start_worker(graphs.convolutions(), arena_max_bytes=arena)
    small = await ask(worker, 32)
    lean = anonymous(worker)
    await ask(worker, 1024)
    grown = anonymous(worker)
    await shrink(worker)
    if arena is None:
        assert (await ask(worker, 32)).shape == small.shape, "it can still be asked"
        return
    assert grown - lean > 60 * MIB, "the arena keeps what it had"
    assert anonymous(worker) - lean < 4 * MIB
    assert np.array_equal(await ask(worker, 32), small)
    await ask(worker, 1024)  # and it may grow again
    assert anonymous(worker) - lean > 60 * MIB


async def test_it_waits_for_the_runs_that_were_sent_before(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.slow_loop())
    run = asyncio.ensure_future(
        worker.run(request_of(n=np.array([300_000], np.int64), x=np.zeros(1, np.float32)), deadline_ns=in_ms(20_000))
    )
    await asyncio.sleep(0.01)
    await shrink(worker)
    assert run.done() or worker.in_flight == 0
    assert output(await run)[0] == 300_000


async def test_one_that_is_gone_is_not_asked(start_worker: StartWorker) -> None:
    worker = await start_worker(graphs.identity())
    await worker.stop()
    worker.shrink()
    assert worker.shrinks == 0


async def explode(worker: Worker, rows: int) -> RunEnding:
    shape = request_of(shape=np.array([rows, 1000], np.int64))
    return await worker.run(shape, deadline_ns=in_ms(10_000), stream="only")


async def test_a_request_that_fits_a_fresh_worker_fits_whatever_others_asked_for_before(
    start_worker: StartWorker,
) -> None:
    """The arena holds on to two extents of 8 MB, and beside them there is no room for two of 16 MB."""
    fresh = await start_worker(graphs.exploding(), **SPEC)
    assert output(await explode(fresh, 4050)) == pytest.approx(np.e), "it fits"

    used = await start_worker(graphs.exploding(), **SPEC)
    total = 0.0
    for rows in (2050, 4050, 2050, 3000, 4050):
        total += np.e
        assert output(await explode(used, rows)) == pytest.approx(total, rel=1e-6), "each counted once"
    assert used.is_alive


async def test_what_a_lean_arena_has_no_room_for_fails_alone_and_leaves_the_state_as_it_was(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(graphs.exploding(), **SPEC)
    assert output(await explode(worker, 2050)) == pytest.approx(np.e)
    for rows in (1 << 20, 5000):
        ending = await explode(worker, rows)
        assert isinstance(ending, Failure)
        assert ending.reason == "out_of_memory"
    assert output(await explode(worker, 4050)) == pytest.approx(2 * np.e)
