"""Whatever happens, in any order: the books balance at every instant, and everybody is told once, in time.

Random arrivals, crashes, hangs, executors that break their contract, cancellations, displacements, changing limits and
a nearby service that comes and goes, on virtual time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from edgeinfer.limits import ThermalLevel
from edgeinfer.request import Failure, OutcomeKind, Reason, Refusal
from tests.scheduling.world import MS, ROUNDING_NS, Script, World, check_punctual, limits, world
from tests.virtual_time import run_virtual

_GOOD = ("1ms", "4ms", "10ms", "35ms")
_WILD = {
    "crash": Script(6 * MS, ending=Failure("crashed", "SIGSEGV")),
    "hang": Script(10 * MS, hangs=True),
    "deaf": Script(10 * MS, hangs=True, heeds_deadline=False),
    "deaf and stubborn": Script(80 * MS, heeds_deadline=False, ignores_cancels=9),
    "slower than it says": Script(30 * MS, heeds_deadline=True),
    "refused": Script(3 * MS, ending=Refusal(Reason.MEMORY, "it doesn't fit")),
    "two cores": Script(8 * MS, cores=2),
    "two lanes": Script(8 * MS, lanes=2),
    "nearby crash": Script(5 * MS, ending=Failure("link_lost", "the broker is gone"), lanes=99),
}

_submit = st.fixed_dictionaries(
    {
        "model": st.sampled_from(_GOOD),
        "within_ms": st.integers(0, 150).map(lambda ms: ms + 0.5),
        "firm": st.booleans(),
        "priority": st.integers(0, 2),
        "stream": st.sampled_from([None, None, "camera", "microphone"]),
        "accept_late": st.sampled_from([False, False, False, True]),
        "queue_ms": st.sampled_from([None, None, None, 7.5]),
        "first_ms": st.sampled_from([None, None, None, 20.5]),
    }
)
_wild_submit = st.builds(
    lambda base, model: {**base, "model": model},
    _submit,
    st.sampled_from([*_GOOD, *(name for name in _WILD if not name.startswith("nearby"))]),
)
_pause = st.sampled_from([0, 0, 0, 1, 3, 10, 40])
_limits = st.tuples(
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), st.integers(1, 3), st.sampled_from([None, ThermalLevel.CRITICAL])
)

_anything = st.one_of(
    st.tuples(st.just("submit"), _wild_submit),
    st.tuples(st.just("submit"), _submit),
    st.tuples(st.just("submit"), _submit),
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("limits"), _limits),
    st.tuples(st.just("nearby"), st.booleans()),
    st.tuples(st.just("drain"), st.integers(0, 30)),
)


def _check(w: World) -> None:
    w.accounting.check()
    snapshot = w.scheduler.snapshot()
    assert snapshot.in_flight == w.accounting.total.in_flight == len(w.tickets) - len(w.outcomes)
    assert snapshot.queue_length <= snapshot.queue_limit


async def _play(w: World, steps: list[tuple[int, tuple[str, Any]]]) -> None:
    for pause_ms, (action, argument) in steps:
        if pause_ms:
            await w.sleep(pause_ms)
        else:
            await asyncio.sleep(0)
        _check(w)
        match action:
            case "submit":
                w.submit(**argument)
            case "cancel" if w.tickets:
                list(w.tickets.values())[argument % len(w.tickets)].cancel()
            case "limits":
                duty_cycle, cpus, level = argument
                w.scheduler.set_limits(limits(duty_cycle, cpus=cpus, level=level))
            case "nearby" if w.nearby is not None:
                w.nearby.unavailable = None if argument else Refusal(Reason.MODEL_UNAVAILABLE, "the link is down")
            case "drain" if argument == 0:
                w.scheduler.start_draining()
        _check(w)
    async with asyncio.timeout(60):
        await w.scheduler.drained()
    _check(w)
    for ticket in w.tickets.values():
        await ticket.outcome()


@pytest.mark.slow
@given(
    steps=st.lists(st.tuples(_pause, _anything), max_size=50),
    cores=st.integers(1, 3),
    queue_limit=st.integers(1, 8),
    nearby_ms=st.sampled_from([None, 5, 60]),
    nearby_slots=st.integers(1, 4),
    begins=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_the_books_balance_and_everybody_is_told_once_in_time(
    steps: list[tuple[int, tuple[str, Any]]],
    cores: int,
    queue_limit: int,
    nearby_ms: int | None,
    nearby_slots: int,
    begins: bool,
) -> None:
    async def main() -> None:
        async with world(
            cores=cores, queue_limit=queue_limit, nearby_ms=nearby_ms, nearby_slots=nearby_slots, begins=begins
        ) as w:
            w.scripts.update(_WILD)
            w.scripts["nearby 4ms"] = _WILD["nearby crash"]
            await _play(w, steps)
            seen = [outcome.request.id for outcome in w.outcomes]
            assert sorted(seen) == sorted(w.tickets), "somebody was told twice or never"
            for outcome in w.outcomes:
                check_punctual(outcome)
                event(f"{outcome.kind} {outcome.reason}")
            await asyncio.sleep(10)  # whoever had to be forced has let go by now
            assert not w.scheduler.snapshot().running_local
            assert not w.scheduler.snapshot().running_nearby
            assert w.local.leased == 0, "a result that nobody got was never released"

    run_virtual(main())


_HONEST = {
    "two cores": Script(8 * MS, cores=2),
    "two lanes": Script(9 * MS, lanes=2),
    "all cores": Script(5 * MS, cores=3),
    "tiny": Script(MS // 2),
}
_honest_submit = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["4ms", "10ms", "35ms", *_HONEST, "tiny", "tiny"]),
        "within_ms": st.sampled_from([9, 12, 16, 24, 40, 60, 100]).map(lambda ms: ms + 0.5),
        "firm": st.sampled_from([True, True, True, False]),
        "priority": st.integers(0, 1),
        "stream": st.sampled_from([None, None, None, "camera"]),
        "queue_ms": st.sampled_from([None, None, None, 7.5]),
    }
)
_honest = st.one_of(
    *[st.tuples(st.just("submit"), _honest_submit)] * 5,
    st.tuples(st.just("cancel"), st.integers(0, 50)),
)


@pytest.mark.slow
@given(
    steps=st.lists(st.tuples(st.sampled_from([0, 0, 0, 0, 0, 1, 3, 7, 25]), _honest), min_size=8, max_size=60),
    cores=st.integers(1, 3),
    queue_limit=st.integers(1, 12),
    nearby_ms=st.sampled_from([None, None, 20]),
    duty_cycle=st.sampled_from([1.0, 1.0, 0.7, 0.35]),
    begins=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_no_admitted_firm_request_is_broken_when_estimates_are_true(
    steps: list[tuple[int, tuple[str, Any]]],
    cores: int,
    queue_limit: int,
    nearby_ms: int | None,
    duty_cycle: float,
    begins: bool,
) -> None:
    async def main() -> None:
        async with world(cores=cores, queue_limit=queue_limit, nearby_ms=nearby_ms, begins=begins) as w:
            w.scripts.update(_HONEST)
            w.scheduler.set_limits(limits(duty_cycle))
            await _play(w, steps)
            for outcome in w.outcomes:
                request = outcome.request
                if request.firm and request.timeline.admitted_ns is not None and not request.accept_late:
                    assert outcome.kind in {OutcomeKind.OK, OutcomeKind.CANCELLED}, (
                        f"{request.id} {request.model} was admitted and then {outcome.kind} {outcome.reason}: "
                        f"{outcome.detail}"
                    )
            assert w.local.waited_inside == 0, "a request was sent to a worker that was busy"
            used = max(_cores_at_once(w, cores), default=0)
            assert used <= cores

    run_virtual(main())


def _cores_at_once(w: World, cores: int) -> list[int]:
    runs = w.local.runs
    return [
        sum(
            min(other.cores, cores)
            for other in runs
            if other.started_ns <= run.started_ns + ROUNDING_NS and other.ended_ns > run.started_ns + ROUNDING_NS
        )
        for run in runs
    ]
