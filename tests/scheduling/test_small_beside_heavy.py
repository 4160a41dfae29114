"""A loop of next to no work keeps its deadlines beside a heavy one, also while heat holds both to a third of the time."""

from __future__ import annotations

from collections import Counter

import pytest

from edgeinfer.request import Outcome
from edgeinfer.scheduling.pacing import WINDOW_NS
from tests.scheduling.world import MS, Script, World, busy_ns, limits, on_virtual_time

SECONDS = 20
CHUNK_MS = 32
HEAVY_MS = 160


async def _both_loops(w: World, duty_cycle: float) -> tuple[list[Outcome], list[Outcome]]:
    """Offer a chunk every 32 ms and a newer frame every 50; return the outcomes of the chunks and of the frames."""
    w.scripts["voice"] = Script(3 * MS // 10)
    w.scheduler.set_limits(limits(duty_cycle))
    for ms in range(0, SECONDS * 1_000, 2):
        if ms % CHUNK_MS == 0:
            w.submit("voice", CHUNK_MS, firm=False, priority=10, stream="microphone")
        if ms % 50 == 0:
            w.submit(f"{HEAVY_MS}ms", 1_000, firm=False, stream="camera")
        await w.sleep(2)
    await w.scheduler.drained()
    voice = [outcome for outcome in w.outcomes if outcome.request.model == "voice"]
    return voice, [outcome for outcome in w.outcomes if outcome.request.model != "voice"]


def _lost(outcomes: list[Outcome]) -> float:
    return sum(not outcome.in_time for outcome in outcomes) / len(outcomes)


def _check_promise(w: World, duty_cycle: float, cores: int) -> None:
    begin_ns = w.local.runs[0].started_ns
    windows = range(begin_ns, begin_ns + (SECONDS - 2) * WINDOW_NS, 37 * MS)
    used = max(busy_ns(w.local, start_ns, start_ns + WINDOW_NS) for start_ns in windows)
    assert used <= duty_cycle * cores * WINDOW_NS + HEAVY_MS * MS, "one heavy run is more than the budget holds"
    all_ns = busy_ns(w.local, begin_ns, begin_ns + (SECONDS - 2) * WINDOW_NS)
    share = all_ns / ((SECONDS - 2) * WINDOW_NS * cores)
    demand = 0.5 if cores == 2 else 1.0  # heavy runs of one model come one after the other
    assert 0.93 * min(duty_cycle, demand) <= share <= duty_cycle + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("duty_cycle", [0.2, 0.35, 0.7])
def test_with_a_second_core_it_loses_next_to_nothing(duty_cycle: float) -> None:
    @on_virtual_time(cores=2)
    async def scenario(w: World) -> None:
        voice, heavy = await _both_loops(w, duty_cycle)
        assert _lost(voice) < 0.01, Counter((o.kind, o.reason) for o in voice)
        assert any(outcome.in_time for outcome in heavy)
        _check_promise(w, duty_cycle, 2)

    scenario()


@pytest.mark.slow
@pytest.mark.parametrize("duty_cycle", [0.2, 0.35, 0.7])
def test_on_one_core_it_loses_what_comes_while_a_heavy_run_has_the_core(duty_cycle: float) -> None:
    @on_virtual_time(cores=1)
    async def scenario(w: World) -> None:
        voice, heavy = await _both_loops(w, duty_cycle)
        heavy_runs = sum(run.request.model != "voice" for run in w.local.runs)
        blocked = heavy_runs * HEAVY_MS / CHUNK_MS / len(voice)
        assert _lost(voice) <= blocked + 0.01, Counter((o.kind, o.reason) for o in voice)
        assert any(outcome.in_time for outcome in heavy)
        _check_promise(w, duty_cycle, 1)

    scenario()
