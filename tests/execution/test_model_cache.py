"""The model cache over real workers: every refusal, who gives way, what crashes and damage lead to, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from edgeinfer.clock import NS_PER_S
from edgeinfer.errors import ArtifactError, BudgetExceeded, SessionError, mib
from edgeinfer.execution.resident import ResidentModel
from edgeinfer.execution.wanted import RETRY_NS
from edgeinfer.request import Expired, Failure, Reason, Refusal
from edgeinfer.worker.nursery import Nursery
from tests.execution.local_rig import LOOP, MIB, Place, open_place, variant
from tests.worker import graphs
from tests.worker.conftest import process_is_gone

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OpenPlace = Callable[..., contextlib.AbstractAsyncContextManager[Place]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nursery() -> AsyncIterator[Nursery]:
    nursery = Nursery()
    await nursery.start()
    yield nursery
    await nursery.close()


@pytest.fixture
def place_of(nursery: Nursery, tmp_path: Path) -> OpenPlace:
    return lambda **options: open_place(tmp_path, nursery, **options)


async def refused(work: Awaitable[object]) -> BudgetExceeded:
    with pytest.raises(BudgetExceeded) as caught:
        await work
    return caught.value


# Memory


async def test_every_ceiling_from_zero_up_refuses_cleanly_until_it_fits(place_of: OpenPlace) -> None:
    async with place_of() as place:
        variants = [variant("fp32", 24 * MIB), variant("int8", 8 * MIB)]
        installed = place.install("echo", variants=variants)
        section = place.want("echo", workers=2)
        large, small = place.cost(installed, 0, workers=2), place.cost(installed, 1, workers=2)
        ceilings = sorted({*range(0, large, large // 12), small - 1, small, large - 1, large})
        for ceiling in ceilings:
            place.ledger.set_ceiling(ceiling)
            if ceiling < small:
                error = await refused(place.cache.load(section))
                assert (error.needed_bytes, error.ceiling_bytes) == (small, ceiling)
                assert "echo" in str(error)
                assert str(error).endswith(f"raise memory.ceiling by {mib(small - ceiling)}, or use a smaller variant")
                assert place.workers() == set(), "nothing may start before it is reserved"
                assert place.ledger.snapshot().reserved_bytes == 0
                assert place.ledger.snapshot().peak_reserved_bytes == 0
                answer = await place.ask("echo")
                assert isinstance(answer, Refusal)
                assert answer.reason is Reason.MEMORY
                assert place.status("echo").state == "refused"
                continue
            resident = await place.cache.load(section)
            assert resident.variant.name == ("fp32" if ceiling == large else "int8")
            assert place.ledger.snapshot().reserved_bytes <= ceiling
            assert len(place.workers()) == 2
            assert await place.ask("echo", 3.0) == 3.0
            await place.cache.unload("echo")
            assert place.workers() == set()


async def test_a_model_tells_the_processes_that_serve_it(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("echo")
        await place.load("echo", workers=2)
        assert set(place.status("echo").pids) == place.workers()
        assert len(place.workers()) == 2
        await place.cache.unload("echo")
        assert place.status("echo").pids == ()


async def test_who_gives_way(place_of: OpenPlace) -> None:
    async with place_of() as place:
        for name in ("pinned", "high", "old", "used", "new"):
            installed = place.install(name)
        cost = place.cost(installed)
        place.ledger.set_ceiling(4 * cost)
        await place.load("pinned", pinned=True, priority=-5)
        await place.load("high", priority=5)
        await place.load("old")
        await place.load("used")
        assert await place.ask("old") == await place.ask("used") == 1.0
        await place.load("new")
        assert place.loaded() == {"pinned", "high", "used", "new"}, "the longest unused of the lowest priority"
        assert place.status("old").state == "unloaded", "nobody has refused it"
        gone = place.cache.find("old")
        assert isinstance(gone, Refusal)
        assert (gone.reason, gone.detail) == (Reason.MEMORY, "old was evicted to make room for new/fp32")

        place.ledger.set_ceiling(cost)  # nobody can make room for two
        before = place.loaded()
        error = await refused(place.load("old", workers=2))
        assert error.needed_bytes == 2 * cost
        assert place.loaded() == before, "nobody goes in vain"


async def test_what_starts_by_itself_spares_its_equals_and_nobody_displaces_the_more_important(
    place_of: OpenPlace,
) -> None:
    async with place_of() as place:
        cost = place.cost(place.install("a"))
        place.install("b")
        place.ledger.set_ceiling(cost)
        await place.load("a", priority=1)
        await refused(place.cache.load(place.want("b"), spare_equals=True))
        await refused(place.cache.load(place.want("b")))
        place.install("c")
        await refused(place.cache.load(place.want("c", priority=1), spare_equals=True))
        assert place.loaded() == {"a"}
        await place.cache.load(place.want("c", priority=1))
        assert place.loaded() == {"c"}


async def test_a_model_with_a_request_running_stays(place_of: OpenPlace) -> None:
    async with place_of() as place:
        installed = place.install("loop", graphs.slow_loop(), LOOP)
        place.install("echo")
        place.ledger.set_ceiling(place.cost(installed) + MIB)
        model = await place.load("loop")
        asking = asyncio.create_task(place.ask("loop", inputs={"n": np.array([1 << 40])}, within_ms=400))
        await place.until(lambda: model.leases == 1)
        await refused(place.load("echo"))
        assert isinstance(await asking, Expired)
        await place.load("echo")
        assert place.loaded() == {"echo"}


async def test_a_lowered_ceiling_is_obeyed_when_it_lasts_and_what_went_comes_back(place_of: OpenPlace) -> None:
    async with place_of() as place:
        cost = place.cost(place.install("low"))
        place.install("high")
        await place.load("low")
        await place.load("high", priority=1)
        place.ledger.set_ceiling(cost)
        for _ in range(2):
            await place.cache._obey_ceiling()
        assert place.loaded() == {"low", "high"}, "a short dip costs nobody"
        await place.cache._obey_ceiling()
        assert place.loaded() == {"high"}
        refusal = place.cache.find("low")
        assert isinstance(refusal, Refusal)
        assert "the budget fell to" in refusal.detail
        place.clock.ahead_ns += RETRY_NS
        await place.until(lambda: place.status("low").detail.startswith("low/fp32 needs"))
        assert place.loaded() == {"high"}, "coming back costs nobody else"
        assert place.status("low").state == "unloaded"
        place.ledger.set_ceiling(2 * cost)
        place.clock.ahead_ns += RETRY_NS
        await place.until(lambda: place.loaded() == {"low", "high"})


async def test_a_load_that_hangs_keeps_nobody_from_giving_memory_back(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("idle")
        place.install("heavy", graphs.linear(1024, layers=8), peak_bytes=128 * MIB)
        await place.load("idle")
        before = place.workers()
        loading = asyncio.create_task(place.load("heavy"))
        await place.until(lambda: place.workers() - before)
        [hung] = place.workers() - before
        os.kill(hung, signal.SIGSTOP)
        place.ledger.set_ceiling(100 * MIB)
        await place.until(lambda: place.status("idle").detail.startswith("idle was evicted because the budget fell"))
        assert not loading.done()
        os.kill(hung, signal.SIGKILL)
        with pytest.raises(SessionError, match="SIGKILL"):
            await loading


async def test_unloading_frees_the_memory_for_real(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("heavy", graphs.linear(2048, layers=4), peak_bytes=256 * MIB)
        before = _anonymous_bytes(place)
        model = await place.load("heavy")
        [worker] = model.workers
        assert _anonymous_bytes(place) - before > 60 * MIB, "it has weights of 64 MiB"
        assert await place.cache.unload("heavy")
        assert process_is_gone(worker.pid)
        assert _anonymous_bytes(place) - before < MIB
        assert place.ledger.snapshot().reserved_bytes == 0
        assert not await place.cache.unload("nobody")


async def test_a_load_that_is_given_up_leaves_nothing_half_done(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("heavy", graphs.linear(2048, layers=4), peak_bytes=256 * MIB)
        section = place.want("heavy", preload=True)
        for moment in ("at once", "while it is looked for", "while its worker loads"):
            loading = asyncio.create_task(place.cache.load(section))
            if moment == "while its worker loads":
                await place.until(place.workers)
            elif moment == "while it is looked for":
                await asyncio.sleep(0.005)
            loading.cancel()
            await asyncio.wait([loading])
            assert loading.cancelled(), moment
            assert place.ledger.snapshot().reserved_bytes == 0
            assert place.cache.residents() == []
        await place.cache.unload("heavy")
        await place.until(lambda: not place.workers(), 1)


async def test_an_eviction_that_is_given_up_is_carried_through(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.ledger.set_ceiling(place.cost(place.install("old")))
        place.install("new")
        victim = (await place.load("old")).workers[0].pid
        os.kill(victim, signal.SIGSTOP)  # it takes its time to end
        loading = asyncio.create_task(place.load("new"))
        await place.until(lambda: place.status("old").detail.startswith("old was evicted"))
        loading.cancel()
        await asyncio.wait([loading])
        assert place.ledger.free_bytes == 0, "its memory is not free yet"
        await place.until(lambda: place.ledger.snapshot().reserved_bytes == 0)
        assert process_is_gone(victim)
        await place.load("new")


# Which bundle, which variant


async def test_a_variant_whose_instructions_are_missing_is_passed_over(place_of: OpenPlace) -> None:
    async with place_of(cpu_flags={"avx2"}) as place:
        variants = [variant("vnni", instruction_sets=["avx2", "avx512_vnni"]), variant("plain")]
        place.install("echo", variants=variants)
        assert (await place.load("echo")).variant.name == "plain"
        with pytest.raises(ArtifactError, match=r"vnni: .*avx512_vnni.*rebuild it for this board"):
            await place.cache.load(place.want("echo", variant="vnni"))
        assert await place.ask("echo", 2.0) == 2.0, "what was loaded stays when what was asked for cannot be"
        with pytest.raises(ArtifactError, match="has no variant 'fp64'; it has vnni, plain"):
            await place.cache.load(place.want("echo", variant="fp64"))


async def test_a_missing_bundle_says_what_there_is_and_how_to_add_it(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("echo")
        with pytest.raises(ArtifactError, match=r"no bundle 'ghost'.*installed: echo.*edgeinfer bundle add"):
            await place.load("ghost")
        assert place.status("ghost").state == "missing"
        answer = await place.ask("ghost")
        assert isinstance(answer, Refusal)
        assert answer.reason is Reason.MODEL_UNAVAILABLE
        place.install("ghost")
        place.clock.ahead_ns += RETRY_NS
        await place.until(lambda: place.loaded() == {"ghost"})


async def test_a_flipped_byte_is_found_before_it_is_loaded_and_healed_by_adding_again(place_of: OpenPlace) -> None:
    async with place_of() as place:
        installed = place.install("heavy", graphs.linear(64))
        weights = installed.path / "model/fp32.onnx"
        raw = bytearray(weights.read_bytes())
        raw[len(raw) // 2] ^= 1
        weights.chmod(0o644)
        weights.write_bytes(raw)
        with pytest.raises(ArtifactError, match=r"model/fp32.onnx.*edgeinfer bundle add PATH"):
            await place.load("heavy")
        assert place.workers() == set()
        assert place.status("heavy").state == "refused"
        place.install("heavy", graphs.linear(64))
        place.clock.ahead_ns += RETRY_NS
        await place.until(lambda: place.loaded() == {"heavy"})


async def test_damage_that_the_runtime_stumbles_over_is_told_as_damage(place_of: OpenPlace) -> None:
    async with place_of() as place:
        installed = place.install("heavy", graphs.linear(64))
        weights = installed.path / "model/fp32.onnx"
        weights.chmod(0o644)
        weights.write_bytes(bytes(weights.stat().st_size))
        with pytest.raises(ArtifactError, match=r"model/fp32.onnx has sha256.*edgeinfer bundle add PATH"):
            await place.load("heavy")
        assert place.workers() == set()


async def test_damage_is_found_before_the_version_that_serves_gives_way(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("echo")
        first = await place.load("echo")
        installed = place.install("echo", graphs.identity(), version="1.1.0")
        weights = installed.path / "model/fp32.onnx"
        weights.chmod(0o644)
        weights.write_bytes(bytes(weights.stat().st_size))
        with pytest.raises(ArtifactError, match="sha256"):
            await place.cache.load(place.want("echo", version="1.1.0"))
        assert place.cache.residents() == [first]


async def test_every_thread_of_every_worker_stays_inside_the_mask_after_load_after_a_move_and_after_a_swap(
    place_of: OpenPlace, caplog: pytest.LogCaptureFixture
) -> None:
    def masks() -> set[frozenset[int]]:
        tasks = [task for pid in place.workers() for task in Path(f"/proc/{pid}/task").iterdir()]
        assert len(tasks) >= 2 * 2
        return {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks}

    usable = sorted(os.sched_getaffinity(0))
    first, last = frozenset(usable[:1]), frozenset(usable[-1:])
    async with place_of() as place:
        place.install("echo")
        place.cache.set_cpus(first)
        await place.load("echo", workers=2, threads=2)
        assert masks() == {first}
        place.cache.set_cpus(last)
        assert masks() == {last}
        place.install("echo", version="1.1.0")
        await place.load("echo", workers=2, threads=2, version="1.1.0")
        assert masks() == {last}
        place.cache.set_cpus(first)
        assert masks() == {first}
    assert "affinity" not in caplog.text


async def test_a_mask_that_changes_during_a_load_holds_for_what_is_loaded(place_of: OpenPlace) -> None:
    usable = sorted(os.sched_getaffinity(0))
    first, last = frozenset(usable[:1]), frozenset(usable[-1:])
    async with place_of() as place:
        place.install("heavy", graphs.linear(1024, layers=8), peak_bytes=128 * MIB)
        place.cache.set_cpus(first)
        loading = asyncio.create_task(place.load("heavy", threads=2))
        await place.until(place.workers)
        assert not loading.done()
        place.cache.set_cpus(last)
        [worker] = (await loading).workers
        tasks = [task.name for task in Path(f"/proc/{worker.pid}/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(int(task))) for task in tasks} == {last}


async def test_a_new_version_takes_over_and_a_bad_one_does_not(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("echo")
        section = place.want("echo")
        first = await place.cache.load(section)
        assert await place.cache.load(section) is first, "it is there as asked"
        for version, graph in (("1.1.0", graphs.slow_loop()), ("1.2.0", graphs.identity())):
            place.install("echo", graph, version=version)
            if version == "1.1.0":  # its graph isn't what its manifest says
                with pytest.raises(SessionError, match="contract_mismatch"):
                    await place.cache.load(section)
                assert place.status("echo").version == "1.0.0", "the version before came back"
            else:
                await place.cache.load(section)
                assert place.status("echo").version == "1.2.0"
            assert await place.ask("echo", 4.0) == 4.0
            assert len(place.workers()) == 1
        with pytest.raises(ArtifactError, match=r"no version 9\.9\.9; installed: 1\.0\.0, 1\.1\.0, 1\.2\.0 \(active\)"):
            await place.load("echo", version="9.9.9")
        assert await place.ask("echo", 5.0) == 5.0
        pinned = place.cache.find("echo", "1.0.0")
        assert isinstance(pinned, Refusal)
        assert pinned.detail == "echo 1.0.0 is not loaded, 1.2.0 is"
        await place.cache.load(replace(section, version="1.0.0"))
        assert place.status("echo").version == "1.0.0"
        configured = place.cache.section("echo")
        assert configured == section, "what a command asks for does not change what is configured"
        await place.cache.load(configured)
        assert place.status("echo").version == "1.2.0"


# Crashes


async def test_a_model_that_keeps_crashing_is_quarantined_and_others_are_served(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("bad", variants=[variant("fp32"), variant("int8")])
        place.install("good")
        bad, good = await place.load("bad"), await place.load("good")
        served = 0

        async def keep_asking() -> None:
            nonlocal served
            while True:
                assert await place.ask("good", 2.0, within_ms=2000) == 2.0
                served += 1
                await asyncio.sleep(0.01)

        asking = asyncio.create_task(keep_asking())
        await _crash_until(place, lambda: place.status("bad").variant == "int8")
        assert [(note.variant, note.quarantined) for note in place.crashes] == [
            ("fp32", False), ("fp32", False), ("fp32", True),
        ]  # fmt: skip
        assert "SIGSEGV" in place.crashes[0].detail
        assert await place.ask("bad", 6.0) == 6.0, "the next variant has taken over"
        await _crash_until(place, lambda: place.status("bad").state == "quarantined")
        refusal = await place.ask("bad")
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.QUARANTINED
        assert "load command" in refusal.detail
        assert bad.reservation.size_bytes == 0
        assert place.workers() == {worker.pid for worker in good.workers}
        place.clock.ahead_ns += 10 * RETRY_NS
        await asyncio.sleep(1.2)  # the next upkeep
        assert place.status("bad").state == "quarantined", "it does not come back by itself"
        await place.cache.load(place.want("bad"))
        assert await place.ask("bad", 8.0) == 8.0
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert served > 20


async def test_a_model_is_given_up_while_its_worker_is_being_replaced(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("heavy", graphs.linear(2048, layers=4), peak_bytes=256 * MIB)
        model = await place.load("heavy")
        os.kill(model.workers[0].pid, signal.SIGSEGV)
        await place.until(lambda: place.status("heavy").state == "recovering")
        assert "SIGSEGV" in place.status("heavy").detail
        assert isinstance(await place.ask("heavy", within_ms=5), Expired), "it waits for the next worker, in vain"
        await place.until(place.workers)
        assert not model.workers, "it is still loading"
        await place.cache.unload("heavy")
        assert place.ledger.snapshot().reserved_bytes == 0
        await place.until(lambda: not place.workers(), 1)  # one that was just being forked has loaded nothing yet
        await asyncio.sleep(0.3)
        assert place.workers() == set()


async def test_a_worker_that_does_not_stop_is_replaced_and_is_no_crash(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("loop", graphs.slow_loop(), LOOP)
        model = await place.load("loop")
        for _ in range(4):
            pid = model.workers[0].pid
            os.kill(pid, signal.SIGSTOP)  # it cannot hear that it is to stop
            assert isinstance(await place.ask("loop", inputs={"n": np.array([1 << 40])}, within_ms=50), Expired)
            await place.until(partial(_another_worker, model, pid))
        assert place.crashes == []
        assert await place.ask("loop", 1.0, inputs={"n": np.array([2])}) == 3.0


async def test_a_zygote_that_dies_costs_no_request_and_no_restart_of_a_model(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("echo")
        model = await place.load("echo")
        zygote = place.nursery.snapshot().zygote_pid
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        victim = model.workers[0].pid
        os.kill(victim, signal.SIGKILL)
        lost = await place.ask("echo", 8.0)
        assert isinstance(lost, Failure)
        # what really happened, or, when its end is not known yet, what was seen of it
        assert "SIGKILL" in lost.detail or "Broken pipe" in lost.detail
        await place.until(lambda: model.workers)
        assert await place.ask("echo", 9.0) == 9.0
        assert [note.quarantined for note in place.crashes] == [False]


# On demand


async def test_a_request_that_comes_too_soon_is_not_the_last(place_of: OpenPlace) -> None:
    async with place_of() as place:
        place.install("echo")
        place.want("echo", preload=False)
        assert isinstance(place.cache.find("echo"), int)
        assert place.status("echo").state == "unloaded"
        asking = asyncio.create_task(place.ask("echo", within_ms=5000))
        await asyncio.sleep(0)
        asking.cancel()
        assert isinstance(await place.ask("echo", within_ms=1), Expired)
        await place.until(place.loaded)
        assert await place.ask("echo", 3.0, within_ms=500) == 3.0
        await place.cache.unload("echo")
        place.clock.ahead_ns += 10 * RETRY_NS
        place.cache.demand("echo")
        assert isinstance(await place.ask("echo"), Refusal), "what was unloaded by command stays out"
        await place.cache.load(place.want("echo", preload=False))
        assert await place.ask("echo", 4.0) == 4.0


async def test_on_demand_models_take_turns_where_only_one_fits(place_of: OpenPlace) -> None:
    async with place_of() as place:
        cost = place.cost(place.install("a"))
        place.install("b")
        place.ledger.set_ceiling(cost)
        for name in ("a", "b"):
            place.want(name, preload=False)
        for turn, name in enumerate(("a", "b", "a", "b")):
            assert await place.ask(name, float(turn)) == float(turn)
            assert place.loaded() == {name}


async def test_an_on_demand_model_that_cannot_be_loaded_is_refused_and_tried_again_later(place_of: OpenPlace) -> None:
    async with place_of(ceiling_bytes=MIB) as place:
        place.install("echo")
        place.want("echo", preload=False)
        for _ in range(2):
            answer = await place.ask("echo")
            assert isinstance(answer, Refusal)
            assert answer.reason is Reason.MEMORY
            assert place.ledger.snapshot().refusals == 1, "the second is answered from what is known"
        place.ledger.set_ceiling(64 * MIB)
        place.clock.ahead_ns += RETRY_NS
        assert await place.ask("echo", 3.0) == 3.0


async def test_a_runtime_that_cannot_be_imported_is_a_reason_and_not_the_end(tmp_path: Path) -> None:
    package = tmp_path / "python" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    nursery = Nursery(environment={"PYTHONPATH": str(package.parent)})
    snapshot = await nursery.start()
    assert "SIGILL" in snapshot.reason
    async with open_place(tmp_path, nursery) as place:
        place.install("echo")
        with pytest.raises(SessionError, match="runtime_unusable"):
            await place.load("echo")
        answer = await place.ask("echo")
        assert isinstance(answer, Refusal)
        assert answer.reason is Reason.RUNTIME_UNUSABLE
        assert "SIGILL" in answer.detail
        assert re.search(r"; tried again in [0-2] s, or now by the load command$", answer.detail), answer.detail
        assert place.cache.installed("echo") is not None, "next door it may run"
    await nursery.close()


async def test_a_runtime_that_was_mended_is_found_by_the_load_command_at_once_and_else_within_its_pause(
    tmp_path: Path,
) -> None:
    package = tmp_path / "python" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('half installed')\n")
    nursery = Nursery(environment={"PYTHONPATH": str(package.parent)}, cool_down_ns=20 * NS_PER_S)
    await nursery.start()
    async with open_place(tmp_path, nursery) as place:
        for name in ("commanded", "waiting"):
            place.install(name)
        commanded, waiting = place.want("commanded"), place.want("waiting")
        for section in (commanded, waiting):
            with pytest.raises(SessionError, match="half installed"):
                await place.cache.load(section, lift=False)
        assert place.status("waiting").state == "refused"
        (package / "__init__.py").unlink()
        package.rmdir()
        with pytest.raises(SessionError, match="half installed"):
            await place.cache.load(commanded, lift=False)
        await place.cache.load(commanded)
        assert place.loaded() == {"commanded"}
        place.clock.ahead_ns += 21 * NS_PER_S
        await place.until(lambda: place.loaded() == {"commanded", "waiting"})
    await nursery.close()


def _another_worker(model: ResidentModel, pid: int) -> bool:
    return any(worker.pid != pid for worker in model.workers)


async def _crash_until(place: Place, happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happened():
            resident = next((r for r in place.cache.residents() if r.section.name == "bad"), None)
            if resident is not None and resident.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(resident.workers[0].pid, signal.SIGSEGV)
            await asyncio.sleep(0.02)


def _anonymous_bytes(place: Place) -> int:
    """Return the anonymous memory of all children, zombies excepted."""
    total = 0
    for pid in place.nursery.pids():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Anonymous:"):
                    total += int(line.split()[1]) * 1024
    return total
