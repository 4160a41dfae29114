"""A clock that falls is foreseen: promises are made with what runs will take, before one was seen."""

from __future__ import annotations

import pytest

from edgeinfer.execution.executor import Estimate
from edgeinfer.limits import Limits
from edgeinfer.request import OutcomeKind, Reason
from edgeinfer.scheduling.estimator import MIN_RUNS
from tests.scheduling.world import MS, Script, World, limits, on_virtual_time

_SEED = Estimate(10 * MS, 10 * MS)


def _clocked(w: World, clock_share: float, slope: float) -> Limits:
    """Let a model that takes 10 ms at full clock run at another one."""
    w.scripts["model"] = Script(round(10 * MS * clock_share**-slope), estimate=_SEED)
    return limits(clock_share=clock_share)


async def _see(w: World, runs: int = 3 * MIN_RUNS) -> None:
    for _ in range(runs):
        assert (await w.submit("model", 900).outcome()).in_time


@pytest.mark.parametrize(("slope", "admitted"), [(1.0, False), (0.0, True)], ids=["compute-bound", "memory-bound"])
def test_what_was_learnt_at_one_clock_is_foreseen_at_another(slope: float, admitted: bool) -> None:
    @on_virtual_time()
    async def scenario(w: World) -> None:
        for clock_share in (1.0, 0.8):
            w.scheduler.set_limits(_clocked(w, clock_share, slope))
            await _see(w)
        w.scheduler.set_limits(_clocked(w, 0.5, slope))
        before = w.submit("model", 60, firm=True)  # keeps the core for 10 or 20 ms
        await w.sleep(1)
        outcome = await w.submit("model", 25, firm=True).outcome()
        assert outcome.in_time is admitted
        assert admitted or outcome.reason == Reason.DEADLINE_UNREACHABLE
        assert (await before.outcome()).in_time

    scenario()


def test_a_promise_that_waits_when_the_clock_falls_is_rated_anew_and_frames_pay_for_it() -> None:
    @on_virtual_time()
    async def scenario(w: World) -> None:
        w.scheduler.set_limits(_clocked(w, 1.0, 1.0))
        await _see(w)
        w.submit("model", 900, firm=True)
        await w.sleep(1)
        frame = w.submit("model", 40, firm=False)
        promise = w.submit("model", 45, firm=True)
        await w.sleep(1)
        w.scheduler.set_limits(_clocked(w, 0.5, 1.0))
        await w.sleep(1)
        assert w.kinds()[-1] == ("rejected", Reason.DISPLACED), "8 ms + 20 + 20 are too late for the promise"
        assert (await frame.outcome()).kind is OutcomeKind.REJECTED
        assert (await promise.outcome()).in_time

    scenario()
