"""A model that a few slow runs made look slow is tried again at once, and one that is slow is not tried for ever."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from edgeinfer.execution.executor import Estimate
from edgeinfer.request import InferRequest, Outcome
from tests.scheduling.world import MS, OutcomeKind, Reason, Script, World, world
from tests.virtual_time import run_virtual

RUN_NS = MS // 10
PAUSE_NS = 60 * MS
_SEED = Estimate(2 * RUN_NS, 4 * RUN_NS)


class Stage:
    """Callers of one small model, whose worker is held up at times."""

    def __init__(self, w: World, *pauses_ms: float, run_ns: int = RUN_NS, seed: Estimate = _SEED) -> None:
        self.w = w
        self.began_ns = w.clock.now_ns()
        self.pauses_ns = [self.began_ns + round(at_ms * MS) for at_ms in pauses_ms]
        self.run_ns = run_ns
        self.seed = seed
        self.seen: list[tuple[float, Outcome]] = []
        """When each was asked, in milliseconds, and how it ended."""
        w.local.script = self.script

    def script(self, request: InferRequest) -> Script:
        if request.model != "small":
            return self.w.script(request)
        now_ns = self.w.clock.now_ns()
        held_ns = max((at_ns + PAUSE_NS - now_ns for at_ns in self.pauses_ns if at_ns <= now_ns), default=0)
        return Script(self.run_ns + max(0, held_ns), estimate=self.seed)

    @property
    def now_ms(self) -> float:
        return (self.w.clock.now_ns() - self.began_ns) / MS

    async def call(self, every_ms: float, until_ms: float, *, within_ms: float = 20, **more: object) -> None:
        while (at_ms := self.now_ms) < until_ms:
            self.seen.append((at_ms, await self.w.submit("small", within_ms, **more).outcome()))
            await self.w.sleep(max(0.01, at_ms + every_ms - self.now_ms))

    def share(self, from_ms: float, until_ms: float) -> float:
        kinds = [outcome.kind for at_ms, outcome in self.seen if from_ms <= at_ms < until_ms]
        assert len(kinds) >= 5, "nobody asked"
        return kinds.count(OutcomeKind.OK) / len(kinds)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("firm", [True, False])
@pytest.mark.parametrize(("within_ms", "runs_before"), [(20, 2), (20, 300), (70, 300)])
@pytest.mark.parametrize(("cores", "callers", "every_ms"), [(2, 1, 10), (1, 4, 20), (1, 4, 2)])
def test_two_hiccups_cost_a_small_model_next_to_nothing_of_the_second_after_them(
    begins: bool, cores: int, firm: bool, within_ms: int, runs_before: int, callers: int, every_ms: float
) -> None:
    async def main() -> None:
        async with world(begins=begins, cores=cores) as w:
            stage = Stage(w, 1_000, 1_100)
            await stage.call(1, runs_before, firm=firm)
            await w.sleep(999.5 - stage.now_ms)
            calls = [stage.call(every_ms, 2_160, within_ms=within_ms, firm=firm) for _ in range(callers)]
            await asyncio.gather(*calls)
            assert stage.share(1_160, 2_160) >= 0.95, Counter(o.reason or o.kind for _, o in stage.seen)

    run_virtual(main())


def test_one_caller_a_second_is_served_again_with_the_first_request_after_the_hiccups() -> None:
    async def main() -> None:
        async with world(begins=True, cores=2) as w:
            stage = Stage(w, 0, 1_000)
            await stage.call(1_000, 9_000, firm=True)
            assert [outcome.kind is OutcomeKind.OK for _, outcome in stage.seen] == [False, False] + [True] * 7

    run_virtual(main())


def test_the_first_run_of_all_may_be_the_slow_one() -> None:
    async def main() -> None:
        async with world(begins=True, cores=2) as w:
            stage = Stage(w, 0)
            assert (await w.submit("small", 5_000, firm=True).outcome()).kind is OutcomeKind.OK
            await stage.call(1_000, 5_000, firm=True)
            assert [outcome.kind for _, outcome in stage.seen] == [OutcomeKind.OK] * 5

    run_virtual(main())


def test_a_long_run_of_another_model_is_not_in_the_way_of_trying() -> None:
    async def main() -> None:
        async with world(begins=True) as w:
            stage = Stage(w, 1_000, 1_100)

            async def heavy() -> None:
                while stage.now_ms < 2_200:
                    await w.submit("10ms", 60).outcome()

            other = asyncio.create_task(heavy())
            await stage.call(1, 300, within_ms=40, firm=True)
            await w.sleep(999.5 - stage.now_ms)
            await stage.call(15, 2_160, within_ms=40, firm=True)
            await other
            assert stage.share(1_160, 2_160) >= 0.95

    run_virtual(main())


@pytest.mark.parametrize("firm", [True, False])
def test_a_model_that_has_become_too_slow_is_refused_but_for_a_try_now_and_then(firm: bool) -> None:
    async def main() -> None:
        async with world(begins=True, cores=2) as w:
            stage = Stage(w)
            await stage.call(1, 300, firm=firm)
            stage.run_ns = PAUSE_NS
            await stage.call(5, 20_000, firm=firm)
            late = [outcome for at_ms, outcome in stage.seen if at_ms >= 5_000]
            tried = [outcome for outcome in late if outcome.kind is OutcomeKind.EXPIRED]
            assert 10 <= len(tried) <= 20, "about one a second"
            assert all(o in tried or o.reason == Reason.DEADLINE_UNREACHABLE for o in late)
            stage.run_ns = RUN_NS
            await stage.call(5, 23_000, firm=firm)
            assert stage.share(21_100, 23_000) == 1.0, "and so it was noticed that it is quick again"

    run_virtual(main())


def test_nothing_is_tried_of_a_model_that_never_was_so_fast() -> None:
    async def main() -> None:
        async with world(begins=True, cores=2) as w:
            stage = Stage(w, run_ns=40 * MS, seed=Estimate(40 * MS, 40 * MS))
            await stage.call(1, 1_000, within_ms=100, firm=True)
            done = len(stage.seen)
            await stage.call(5, 5_000, within_ms=20, firm=True)
            assert {outcome.reason for _, outcome in stage.seen[done:]} == {Reason.DEADLINE_UNREACHABLE}

    run_virtual(main())


def test_a_tail_of_many_runs_is_the_models_own_and_refuses_on_a_busy_machine() -> None:
    async def main() -> None:
        dice = random.Random(3)
        async with world(begins=True) as w:
            stage = Stage(w)
            for _ in range(200):
                stage.run_ns = PAUSE_NS if dice.random() < 0.1 else RUN_NS
                assert (await w.submit("small", 500, firm=True).outcome()).kind is OutcomeKind.OK
            w.submit("10ms", 100)
            await w.sleep(1)
            outcome = await w.submit("small", 20, firm=True).outcome()
            assert outcome.reason == Reason.DEADLINE_UNREACHABLE

    run_virtual(main())


@pytest.mark.parametrize("busy", [True, False])
def test_who_would_be_late_by_a_guess_is_tried_all_the_same(busy: bool) -> None:
    async def main() -> None:
        async with world(begins=True) as w:
            guess = Estimate(MS, MS, wait_ns=2_000 * MS, is_guess=True)
            w.scripts["never loaded"] = Script(22 * MS, estimate=guess)
            if busy:
                w.submit("10ms", 100)
                await w.sleep(1)
            first, second = w.submit("never loaded", 100, firm=True), w.submit("never loaded", 100, firm=True)
            assert (await first.outcome()).kind is OutcomeKind.OK
            assert (await second.outcome()).reason == Reason.DEADLINE_UNREACHABLE, "one at a time"
            w.scripts["never loaded"] = Script(22 * MS, estimate=replace(guess, is_guess=False))
            known = w.submit("never loaded", 100, firm=True)
            assert (await known.outcome()).reason == Reason.DEADLINE_UNREACHABLE, "it is known to fail"

    run_virtual(main())
