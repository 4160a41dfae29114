"""Real workers that take more than was reserved: they shrink or are replaced, and no request is lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from msgspec import structs

from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.artifact.profile import Latency, OperatingCost, Profile
from edgeinfer.execution.resident import ResidentModel
from edgeinfer.request import Expired, Refusal, Result
from edgeinfer.sensors.process import process_memories
from edgeinfer.worker.worker import Worker
from tests.execution.local_rig import MIB, SUM, SUM_STATE, Place, open_place, request_of
from tests.worker import graphs

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="function")]

PICTURE = (
    [TensorSpec("x", "FP32", [1, 3, -1, -1], max_shape=[1, 3, 512, 512])],
    [TensorSpec("y", "FP32", [1, 32, 1, 1])],
)
PEAK_BYTES = 110 * MIB  # what a small picture takes, and no more


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with open_place(tmp_path, ceiling_bytes=4096 * MIB) as place:
        yield place


async def load(place: Place, **settings: object) -> ResidentModel:
    place.install("eye", graphs.convolutions(32, 4, table_mib=64), PICTURE, peak_bytes=PEAK_BYTES)
    return await place.load("eye", **settings)


async def see(place: Place, side: int, *, within_ms: float = 20_000) -> object:
    payload = request_of(x=np.ones((1, 3, side, side), np.float32))
    ending = await place.executor.execute(place.request("eye", payload, within_ms=within_ms))
    if isinstance(ending, Result):
        ending.release()
    return ending


def own(place: Place) -> dict[int, int]:
    found = process_memories(Path("/proc"), place.workers())
    return {pid: memory.private_bytes for pid, memory in found.items()}


def held(worker: Worker, place: Place) -> int:
    return own(place)[worker.pid] + worker.slot_bytes


async def test_after_one_huge_request_it_is_below_its_reservation_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    model = await load(place)
    worker, reserved = model.workers[0], model.reservation.size_bytes
    assert isinstance(await see(place, 64), Result)
    assert place.cache.look(own(place)) == 0
    assert isinstance(await see(place, 512), Result)
    beyond = held(worker, place) - reserved
    assert beyond > 10 * MIB, "the arena keeps what it once had"
    assert abs(place.cache.look(own(place)) - beyond) < MIB
    await place.until(lambda: worker.shrinks == 1)
    assert held(worker, place) < reserved
    assert place.cache.look(own(place)) == 0
    assert model.workers == [worker], "shrinking was enough"
    assert (place.status("eye").shrunk, place.status("eye").recycled) == (1, 0)
    assert f"outgrown model=eye pid={worker.pid} held_bytes=" in caplog.text
    assert isinstance(await see(place, 64), Result)


async def hog(place: Place, model: ResidentModel) -> Worker:
    """Make the worker take what it can't give back, as far as anybody sees."""
    worker = model.workers[0]
    place.cache.look({worker.pid: 1 << 40})
    await place.until(lambda: worker.shrinks == 1)
    worker.shrunk_bytes = 1 << 40
    place.cache.look({worker.pid: 1 << 40})
    return worker


async def ask_until(place: Place, done: asyncio.Event, side: int = 64) -> list[object]:
    endings = []
    while not done.is_set():
        endings.append(await see(place, side))
    return endings


@pytest.mark.parametrize("room", [True, False], ids=["beside it", "no room for two"])
async def test_one_that_cannot_shrink_is_replaced_between_two_requests(place: Place, *, room: bool) -> None:
    model = await load(place)
    reserved = model.reservation.size_bytes
    if not room:
        place.ledger.set_ceiling(reserved + MIB)
    done = asyncio.Event()
    asking = [asyncio.ensure_future(ask_until(place, done)) for _ in range(3)]
    await asyncio.sleep(0.05)
    worker = await hog(place, model)
    most = 0

    def replaced() -> bool:
        nonlocal most
        most = max(most, len(place.workers()))
        return worker.died.done() and model.workers not in ([], [worker])

    await place.until(replaced, 20)
    await asyncio.sleep(0.1)
    done.set()
    endings = [ending for task in asking for ending in await task]
    assert len(endings) > 10
    assert all(isinstance(ending, Result) for ending in endings), [e for e in endings if not isinstance(e, Result)]
    assert most == (2 if room else 1), "old and new together, only where both fit"
    assert (model.recycled, len(model.workers)) == (1, 1)
    await place.until(lambda: model.reservation.size_bytes == reserved)
    assert place.crashes == []


async def test_a_request_that_cannot_wait_for_the_next_worker_expires(place: Place) -> None:
    model = await load(place)
    place.ledger.set_ceiling(model.reservation.size_bytes)
    worker = await hog(place, model)
    await place.until(lambda: not worker.is_alive)
    assert model.is_replacing
    estimate = place.executor.estimate(place.request("eye", request_of(x=np.ones((1, 3, 8, 8), np.float32))))
    assert not isinstance(estimate, Refusal)
    assert isinstance(await see(place, 64, within_ms=1), Expired)
    assert isinstance(await see(place, 64), Result)


async def test_a_model_that_is_unloaded_meanwhile_leaves_nothing(place: Place) -> None:
    model = await load(place)
    await hog(place, model)
    await asyncio.sleep(0.01)
    await place.cache.unload("eye")
    await place.until(lambda: not place.workers())
    assert place.ledger.snapshot().reserved_bytes == 0


async def test_streams_of_a_stateful_model_go_on_and_are_told_that_their_state_is_lost(place: Place) -> None:
    place.install("sum", graphs.accumulator(), SUM, state=SUM_STATE)
    model = await place.load("sum")
    assert await place.ask("sum", 2.0, stream="a", sequence_start=True) == 2.0
    assert await place.ask("sum", 3.0, stream="a") == 5.0
    worker = await hog(place, model)
    await place.until(lambda: worker.died.done() and model.workers)
    assert await place.ask("sum", 4.0, stream="a") == 4.0
    assert model.state_resets == 1


async def test_only_the_one_that_has_outgrown_is_replaced(place: Place) -> None:
    model = await load(place, workers=2)
    first, second = model.workers
    await hog(place, model)
    await place.until(first.died.done)
    assert second in model.workers
    assert len(model.workers) == 2


async def test_the_devices_own_profile_beats_the_bundles_figure_for_this_runtime_only(place: Place) -> None:
    installed = place.install("eye", graphs.convolutions(), PICTURE, peak_bytes=PEAK_BYTES)
    declared = (await place.load("eye")).reservation.size_bytes
    latency = Latency(p50_us=1, p90_us=1, p99_us=1, mean_us=1, runs=1)
    here = OperatingCost(
        variant="fp32", provider="CPUExecutionProvider", threads=1, latency=latency, load_ms=1.0,
        load_peak_bytes=40 * MIB, steady_bytes=30 * MIB, covers_largest=True,
    )  # fmt: skip
    runtime = place.nursery.snapshot().onnxruntime
    profile = Profile(
        schema=1, model="eye", version="1.0.0", bundle_digest=installed.digest, board="", machine="", cpu_flags=[],
        onnxruntime=runtime, origin="measured", costs=[here],
    )  # fmt: skip
    for written, charged in (
        (profile, declared - PEAK_BYTES + 50 * MIB),
        (structs.replace(profile, onnxruntime="1.0.0"), declared),
        (structs.replace(profile, cpu_flags=["avx512f"]), declared),
        (structs.replace(profile, origin="estimated"), declared),
    ):
        place.store.write_profile(written)
        await place.cache.unload("eye")
        model = await place.load("eye")
        assert model.reservation.size_bytes == charged
        assert model.workers[0].spec.arena_max_bytes == charged - declared + PEAK_BYTES
    place.store.profile_path(installed.digest).write_text("garbage")
    await place.cache.unload("eye")
    assert (await place.load("eye")).reservation.size_bytes == declared
