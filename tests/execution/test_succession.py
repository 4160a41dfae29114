"""Which version serves next, over real workers: beside or in place, brought back, fallen back, across restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from onnx import ModelProto, numpy_helper

from edgeinfer.errors import ArtifactError, BudgetExceeded, SessionError
from edgeinfer.execution.crashes import CrashPolicy
from edgeinfer.execution.wanted import RETRY_NS
from edgeinfer.request import Reason, Refusal, Result
from edgeinfer.worker.nursery import Nursery
from tests.execution.local_rig import (
    ECHO,
    LOOP,
    MIB,
    SUM,
    SUM_STATE,
    Place,
    open_place,
    request_of,
    variant,
    y_of,
)
from tests.worker import graphs
from tests.worker.conftest import process_is_gone

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OpenPlace = Callable[..., contextlib.AbstractAsyncContextManager[Place]]
QUIET_NS = CrashPolicy().window_ns + 1


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nursery() -> AsyncIterator[Nursery]:
    nursery = Nursery()
    await nursery.start()
    yield nursery
    await nursery.close()


@pytest.fixture
def place_of(nursery: Nursery, tmp_path: Path) -> OpenPlace:
    return lambda **options: open_place(tmp_path, nursery, **options)


def times(factor: float) -> ModelProto:
    """x[n] -> y = factor * x: an answer that tells its version."""
    value = numpy_helper.from_array(np.array([factor], np.float32), "factor")
    return graphs.model(
        [graphs.node("Mul", ["x", "factor"], ["y"])],
        [graphs.value("x", graphs.FLOAT, ["n"])],
        [graphs.value("y", graphs.FLOAT, ["n"])],
        [value],
    )


def install(place: Place, version: int, **options: object) -> None:
    """Install version `version`.0.0, which answers with that number."""
    place.install("echo", times(version), version=f"{version}.0.0", **options)


async def crash(place: Place, name: str = "echo", kind: signal.Signals = signal.SIGKILL) -> None:
    """Kill the model's worker, and return when that was seen."""
    seen = len(place.crashes)
    resident = next(resident for resident in place.cache.residents() if resident.section.name == name)
    await place.until(lambda: resident.workers)
    os.kill(resident.workers[0].pid, kind)
    await place.until(lambda: len(place.crashes) > seen)


async def serves(place: Place, version: int) -> None:
    await place.until(lambda: place.status("echo").state == "loaded" and place.status("echo").workers)
    assert place.status("echo").version == f"{version}.0.0"
    assert await place.ask("echo") == version


# Hot swap


async def test_with_room_for_both_the_old_version_serves_until_the_new_one_does(place_of: OpenPlace) -> None:
    async with place_of() as place:
        install(place, 1)
        section = place.want("echo")
        old = await place.cache.load(section)
        pid = old.workers[0].pid
        install(place, 2)
        answers: list[object] = []

        async def keep_asking() -> None:
            while True:
                answers.append(await place.ask("echo", within_ms=3000))

        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        await place.until(lambda: len(answers) > 10)
        together = 0
        loading = asyncio.create_task(place.cache.load(section))
        while not loading.done():
            together = max(together, len(place.workers()))
            assert place.ledger.snapshot().reserved_bytes <= place.ledger.ceiling_bytes
            await asyncio.sleep(0.001)
        assert together == 2
        assert process_is_gone(pid)
        count = len(answers)
        await place.until(lambda: len(answers) > count + 10)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert set(answers) == {1.0, 2.0}, "not one was refused or lost"
        assert answers[-6:] == [2.0] * 6
        first = answers.index(2.0)
        assert answers[first + len(asking) :].count(1.0) == 0, "and nobody is sent back"


async def test_a_run_that_has_begun_finishes_on_the_old_version(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("loop", graphs.slow_loop(), LOOP)
        section = place.want("loop")
        model = await place.cache.load(section)
        await place.until(lambda: model.workers[0].can_accept)
        asking = asyncio.create_task(place.ask("loop", inputs={"n": np.array([300_000])}, within_ms=20_000))
        await place.until(lambda: model.leases)
        place.install("loop", graphs.slow_loop(), LOOP, version="2.0.0")
        loading = asyncio.create_task(place.cache.load(section))
        await place.until(lambda: place.status("loop").version == "2.0.0")
        assert not asking.done(), "the new one serves while the old one still works"
        assert await place.ask("loop", 1.0, inputs={"n": np.array([2])}) == 3.0
        assert await asking == 300_001.0
        await loading
        assert len(place.workers()) == 1


async def test_without_room_for_both_the_old_version_goes_first_and_comes_back(place_of: OpenPlace) -> None:
    async with place_of() as place:
        install(place, 1)
        section = place.want("echo")
        old = await place.cache.load(section)
        place.ledger.set_ceiling(old.reserved_bytes + MIB)
        place.install("other")
        install(place, 2)
        together = 0
        loading = asyncio.create_task(place.cache.load(section))
        while not loading.done():
            together = max(together, len(place.workers()))
            assert place.ledger.snapshot().reserved_bytes <= place.ledger.ceiling_bytes
            await asyncio.sleep(0.001)
        assert together == 1
        await serves(place, 2)
        place.install("echo", graphs.slow_loop(), version="3.0.0")  # isn't what its manifest says
        with pytest.raises(SessionError, match="contract_mismatch"):
            await place.cache.load(section)
        await serves(place, 2)


async def test_nobody_else_is_evicted_for_a_smooth_change(place_of: OpenPlace) -> None:
    async with place_of() as place:
        install(place, 1)
        place.install("other")
        section = place.want("echo")
        old = await place.cache.load(section)
        await place.load("other")
        place.ledger.set_ceiling(place.ledger.snapshot().reserved_bytes + old.reserved_bytes // 2)
        install(place, 2)
        await place.cache.load(section)
        assert place.loaded() == {"echo", "other"}
        await serves(place, 2)


@pytest.mark.parametrize("room", ["for both", "for one"])
async def test_a_reload_that_cannot_work_leaves_the_very_process_that_serves(place_of: OpenPlace, room: str) -> None:
    async with place_of() as place:
        install(place, 1)
        section = place.want("echo")
        old = await place.cache.load(section)
        pid = old.workers[0].pid
        if room == "for one":
            place.ledger.set_ceiling(old.reserved_bytes)
        install(place, 2, peak_bytes=1 << 40)
        with pytest.raises(BudgetExceeded, match="needs"):
            await place.cache.load(section)
        if room == "for both":
            place.install("echo", graphs.slow_loop(), version="3.0.0")
            with pytest.raises(SessionError, match="contract_mismatch"):
                await place.cache.load(section)
        place.install("echo", version="4.0.0", variants=[variant("fp32", instruction_sets=["none_has_this"])])
        with pytest.raises(ArtifactError, match="none_has_this"):
            await place.cache.load(section)
        assert [worker.pid for worker in old.workers] == [pid]
        await serves(place, 1)


async def test_a_stateful_stream_begins_anew_with_the_new_version_and_is_told(place_of: OpenPlace) -> None:
    async with place_of() as place:
        for version in ("1.0.0", "2.0.0"):
            place.install("sum", graphs.accumulator(), SUM, state=SUM_STATE, version=version)
        section = place.want("sum")
        await place.load("sum", version="1.0.0")

        async def add(x: float) -> tuple[float, bool]:
            payload = request_of(x=np.array([x], np.float32))
            result = await place.executor.execute(place.request("sum", payload, stream="s"))
            assert isinstance(result, Result)
            told = b"state_reset" in bytes(result.payload.header)
            return y_of(result), told

        await add(1.0)
        assert await add(2.0) == (3.0, False)
        await place.cache.load(section)
        assert await add(4.0) == (4.0, True)
        assert await add(8.0) == (12.0, False)


# What comes after a quarantine


async def test_good_then_one_that_does_not_load_then_one_that_crashes(place_of: OpenPlace) -> None:
    """B14: v1 serves each time, also after a restart, and the service says why."""
    async with place_of() as place:
        install(place, 1)
        section = place.want("echo")
        await place.cache.load(section)
        place.install("echo", graphs.slow_loop(), version="2.0.0")
        with pytest.raises(SessionError):
            await place.cache.load(section)
        await serves(place, 1)
        install(place, 3)
        await place.cache.load(section)
        await serves(place, 3)
        for _ in range(3):
            await crash(place)
        await place.until(lambda: place.status("echo").version == "1.0.0")
        await serves(place, 1)
        status = place.status("echo")
        assert (status.wanted_version, status.quarantined) == ("3.0.0", ("3.0.0 fp32",))
        assert "instead of 3.0.0" in status.detail
        assert "SIGKILL" in status.detail
        pinned = place.cache.find("echo", "3.0.0")
        assert isinstance(pinned, Refusal)
        assert pinned.reason is Reason.QUARANTINED
        with pytest.raises(SessionError):
            await place.cache.load(replace(section, version="2.0.0"))
        await serves(place, 1)

    async with place_of() as place:  # the service was restarted
        section = place.want("echo")
        with pytest.raises(ArtifactError, match=r"echo 3\.0\.0 .* is quarantined.*SIGKILL"):
            await place.cache.load(section, lift=False)
        await serves(place, 1)
        assert place.status("echo").wanted_version == "3.0.0"
        install(place, 4)  # a new version ends it
        await place.cache.load(section)
        await serves(place, 4)
        assert place.status("echo").wanted_version == ""
        await place.cache.load(replace(section, version="3.0.0"))  # and the command does
        await serves(place, 3)
        assert place.status("echo").quarantined == ()


async def test_crashes_add_up_across_restarts_unless_the_model_was_quiet_in_between(place_of: OpenPlace) -> None:
    async def run_and_crash(times: int, *, quiet: bool = False) -> str:
        async with place_of() as place:
            section = place.want("echo")
            with contextlib.suppress(ArtifactError):
                await place.cache.load(section, lift=False)
            for _ in range(times):
                await crash(place)
            if quiet:
                await place.until(lambda: place.status("echo").state == "loaded")
                place.clock.ahead_ns += QUIET_NS
                await asyncio.sleep(1.2)  # the next upkeep
            return str(place.status("echo").state)

    async with place_of() as place:
        install(place, 1)
    await run_and_crash(2)
    await run_and_crash(0, quiet=True)
    await run_and_crash(1)
    assert await run_and_crash(1) != "quarantined"
    async with place_of() as place:
        section = place.want("echo")
        await place.cache.load(section, lift=False)
        await crash(place)
        await place.until(lambda: place.status("echo").state == "quarantined")
        answer = await place.ask("echo")
        assert isinstance(answer, Refusal)
        assert answer.reason is Reason.QUARANTINED
        await place.until(lambda: not place.workers())
    async with place_of() as place:
        section = place.want("echo")
        with pytest.raises(ArtifactError, match="quarantined"):
            await place.cache.load(section, lift=False)
        assert place.status("echo").state == "quarantined"
        assert place.workers() == set(), "nothing is started"
        place.clock.ahead_ns += 10 * RETRY_NS
        await asyncio.sleep(1.2)
        assert place.status("echo").state == "quarantined"
        await place.cache.load(section)
        await serves(place, 1)


async def test_a_configured_version_is_never_replaced_by_another(place_of: OpenPlace) -> None:
    async with place_of() as place:
        install(place, 1)
        install(place, 2)
        section = place.want("echo", version="2.0.0")
        await place.cache.load(section)
        for _ in range(3):
            await crash(place)
        await place.until(lambda: place.status("echo").state == "quarantined")
        assert place.status("echo").version == "2.0.0", "what next door is asked for"
        assert place.workers() == set()


async def test_variants_then_versions_then_nobody(place_of: OpenPlace) -> None:
    async with place_of() as place:
        install(place, 1)
        install(place, 2, variants=[variant("fp32"), variant("int8")])
        await place.load("echo")
        for version, name in (("2.0.0", "fp32"), ("2.0.0", "int8"), ("1.0.0", "fp32")):
            await place.until(partial(_serves_now, place, version, name))
            for _ in range(3):
                await crash(place)
        await place.until(lambda: place.status("echo").state == "quarantined" and not place.cache.residents())
        await place.until(lambda: not place.workers())
        assert place.ledger.snapshot().reserved_bytes == 0
        assert place.status("echo").quarantined == ("1.0.0 fp32", "2.0.0 fp32", "2.0.0 int8")


async def test_a_damaged_version_gives_way_to_the_one_before(place_of: OpenPlace) -> None:
    async with place_of() as place:
        install(place, 1)
        install(place, 2)
        weights = place.store.active("echo").path / "model/fp32.onnx"
        weights.chmod(0o644)
        weights.write_bytes(weights.read_bytes()[:-1])
        section = place.want("echo")
        with pytest.raises(ArtifactError, match="edgeinfer bundle add PATH"):
            await place.cache.load(section, lift=False)
        await serves(place, 1)
        assert "model/fp32.onnx" in place.status("echo").detail


async def test_want_of_memory_brings_no_other_version(place_of: OpenPlace) -> None:
    async with place_of() as place:
        install(place, 1)
        install(place, 2, peak_bytes=1 << 40)
        with pytest.raises(BudgetExceeded):
            await place.load("echo")
        assert place.status("echo").state == "refused"
        assert place.workers() == set()


async def test_on_demand_too_an_earlier_version_stands_in(place_of: OpenPlace) -> None:
    async with place_of() as place:
        install(place, 1)
        place.install("echo", graphs.slow_loop(), ECHO, version="2.0.0")
        place.want("echo", preload=False)
        assert await place.ask("echo") == 1.0
        assert place.status("echo").wanted_version == "2.0.0"


def _serves_now(place: Place, version: str, name: str) -> bool:
    status = place.status("echo")
    return (status.version, status.variant, status.workers) == (version, name, 1)
