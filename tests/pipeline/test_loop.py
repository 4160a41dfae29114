"""The loop in virtual time: an hour takes a moment, and nothing sleeps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.artifact.manifest import Manifest
from edgeinfer.config import DirectorySource, LoopSection
from edgeinfer.pipeline.frame import Source
from edgeinfer.pipeline.loop import InferenceLoop, LoopSnapshot
from edgeinfer.quantity import Nanoseconds
from edgeinfer.request import DataScope, Ending, Failure, InferRequest, OutcomeKind, Reason, Refusal
from tests.gateway.serving import CAMERA, INTENT, LISTEN
from tests.pipeline.staging import MS, Camera, Lease, Machine, Notebook, OnDemand, answer, loop_clock
from tests.virtual_time import run_virtual


def _section(period_ms: float, deadline_ms: float, **fields: Any) -> LoopSection:
    return LoopSection(
        name="front", model="camera", source=DirectorySource(Path("/unused")),
        period=Nanoseconds(round(period_ms * MS)), deadline=Nanoseconds(round(deadline_ms * MS)), **fields,
    )  # fmt: skip


class Stage:
    """One loop, and everything around it."""

    def __init__(self, loop: InferenceLoop, source: Source, machine: Machine, notebook: Notebook) -> None:
        self.loop, self.source, self.machine, self.notebook = loop, source, machine, notebook


def _play(
    section: LoopSection,
    make_source: Callable[[], Source],
    machine: Machine,
    seconds: float,
    *,
    manifest: Manifest | None = CAMERA,
    act: Callable[[InferenceLoop], Any] | None = None,
) -> tuple[Stage, LoopSnapshot]:
    """Run a loop for that long in virtual time, then stop it gracefully."""

    async def main() -> tuple[Stage, LoopSnapshot]:
        source, notebook = make_source(), Notebook()
        loop = InferenceLoop(
            section, source=source, sinks=[notebook], submit=machine, manifest=lambda: manifest, clock=loop_clock()
        )
        task = asyncio.create_task(loop.run())
        if act is not None:
            await act(loop)
        await asyncio.sleep(seconds)
        loop.stop()
        await asyncio.wait_for(task, 60)
        return Stage(loop, source, machine, notebook), loop.snapshot()

    return run_virtual(main())


def _gaps_ms(times_ns: list[int]) -> list[float]:
    return [round((later - earlier) / MS, 3) for earlier, later in itertools.pairwise(times_ns)]


def test_takes_one_frame_per_period() -> None:
    stage, snapshot = _play(_section(100, 100), OnDemand, Machine(run_s=0.03), 10)
    assert set(_gaps_ms(stage.machine.started_ns)) == {100.0}
    assert (snapshot.submitted, snapshot.missed, snapshot.stale, snapshot.outstanding) == (101, 0, 0, 0)
    assert {outcome.kind for outcome in stage.notebook.outcomes} == {OutcomeKind.OK}


def test_an_overrun_is_counted_and_never_made_up_for() -> None:
    """A period of 20 ms, runs of 50 ms: 2 of 5 points are used, evenly, and the rest are counted as missed."""
    section = _section(20, 1000, firm=True)
    stage, snapshot = _play(section, OnDemand, Machine(run_s=0.05), 200 * 0.02, act=None)
    points = snapshot.submitted + snapshot.missed
    assert points == pytest.approx(200, abs=3)
    assert snapshot.submitted == pytest.approx(80, abs=3)
    assert min(_gaps_ms(stage.machine.started_ns)) >= 50.0, "two runs at once, or a burst"


def test_a_pause_of_the_machine_is_not_followed_by_a_burst() -> None:
    machine = Machine(run_s=0.01)

    async def stall(loop: InferenceLoop) -> None:
        await asyncio.sleep(1)
        machine.run_s = 3.0
        await asyncio.sleep(0.1)
        machine.run_s = 0.01

    stage, snapshot = _play(_section(100, 60_000, firm=True), OnDemand, machine, 10, act=stall)
    assert snapshot.missed == pytest.approx(28, abs=3)
    assert min(_gaps_ms(stage.source.asked_ns)) >= 99.9  # type: ignore[attr-defined]


def test_the_newest_frame_wins_and_its_age_stays_below_a_period_and_a_run() -> None:
    """30 frames a second, 5 of them can be run: for a minute, 99 of 100 answers are about a fresh frame."""
    stage, snapshot = _play(_section(33.3, 1000), lambda: Camera(1 / 30), Machine(run_s=0.2), 60)
    ages = sorted(
        age for age, outcome in zip(stage.notebook.ages_ns, stage.notebook.outcomes, strict=True)
        if outcome.kind is OutcomeKind.OK
    )  # fmt: skip
    assert len(ages) == pytest.approx(300, abs=5)
    assert ages[int(len(ages) * 0.99)] <= (33.4 + 33.4 + 200) * MS
    assert snapshot.source.skipped + snapshot.submitted == pytest.approx(1800, abs=5)
    assert snapshot.stale == 0


def test_a_slow_source_is_waited_for_and_its_frames_are_taken_as_they_come() -> None:
    stage, snapshot = _play(_section(10, 50), lambda: Camera(0.25), Machine(run_s=0.005), 5)
    assert snapshot.submitted == pytest.approx(20, abs=1)
    assert snapshot.missed == 0
    assert max(stage.notebook.ages_ns) <= 15.1 * MS


def test_a_source_of_the_same_rate_loses_nothing() -> None:
    _, snapshot = _play(_section(32, 64), lambda: Camera(0.032), Machine(run_s=0.004), 60)
    assert snapshot.source.skipped <= 1
    assert snapshot.submitted == pytest.approx(1875, abs=2)


def test_the_deadline_counts_from_the_capture() -> None:
    stage, _ = _play(_section(100, 80), lambda: OnDemand(age_ns=30 * MS), Machine(run_s=0.01), 1)
    request = stage.machine.runs[0].request
    assert request.timeline.captured_ns is not None
    assert request.deadlines.total_ns == request.timeline.captured_ns + 80 * MS
    assert request.timeline.received_ns == request.timeline.captured_ns + 30 * MS


def test_a_frame_past_its_deadline_is_dropped_before_it_costs_anything() -> None:
    stage, snapshot = _play(_section(100, 80), lambda: OnDemand(age_ns=80 * MS), Machine(run_s=0.01), 1)
    assert not stage.machine.runs
    assert snapshot.stale == 11


def test_a_request_carries_what_the_section_says() -> None:
    section = _section(100, 80, scope="site", priority=7, firm=True, input="image")
    stage, _ = _play(section, OnDemand, Machine(run_s=0.01), 0.5)
    request = stage.machine.runs[0].request
    assert (request.scope, request.priority, request.firm) == (DataScope.SITE, 7, True)
    assert (request.model, request.stream) == ("camera", "front")


@pytest.mark.parametrize(
    ("firm", "period_ms", "deadline_ms", "bound"),
    [(False, 60, 600, 10), (False, 10, 5000, 16), (False, 500, 100, 2), (True, 10, 5000, 2)],
)
def test_what_is_under_way_at_once_is_bounded(firm: bool, period_ms: int, deadline_ms: int, bound: int) -> None:
    """Displaceable frames: as many as begin before the first one's deadline, for those that run next door."""
    machine = Machine(run_s=30.0, slots=99)
    _, snapshot = _play(_section(period_ms, deadline_ms, firm=firm), OnDemand, machine, 20)
    assert snapshot.submitted == bound


def test_frames_of_a_stateful_model_never_overlap() -> None:
    machine = Machine(run_s=0.05, slots=5)
    stage, _ = _play(_section(10, 5000), OnDemand, machine, 2, manifest=_stateful())
    assert min(_gaps_ms(stage.machine.started_ns)) >= 50.0


def _stateful() -> Manifest:
    from tests.gateway.serving import manifest

    return manifest("camera", CAMERA.inputs, CAMERA.outputs, state=LISTEN.state)


LOSSES: dict[str, Ending] = {
    "failed": Failure("crashed"),
    "cancelled": None,
    "refused": Refusal(Reason.THERMAL),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_broken_sequence_of_a_stateful_model_starts_again_and_is_counted(what: str) -> None:
    count = iter(range(10**6))
    machine = Machine(run_s=0.01, script=lambda _: LOSSES[what] if next(count) == 3 else answer())
    stage, snapshot = _play(_section(100, 100), OnDemand, machine, 1, manifest=_stateful())
    starts = [run.request.sequence_start for run in stage.machine.runs]
    assert starts == [True, False, False, False, True, *[False] * (len(starts) - 5)]
    assert snapshot.sequences_lost == 1


def test_an_expired_run_breaks_the_sequence_too() -> None:
    stage, snapshot = _play(_section(100, 50), OnDemand, Machine(run_s=0.06), 1, manifest=_stateful())
    assert {outcome.kind for outcome in stage.notebook.outcomes} == {OutcomeKind.EXPIRED}
    assert all(run.request.sequence_start for run in stage.machine.runs)
    assert snapshot.sequences_lost == snapshot.submitted


def test_frames_lost_in_the_source_start_a_sequence_again() -> None:
    machine = Machine(run_s=0.05)
    stage, _ = _play(_section(10, 5000), lambda: Camera(0.02), machine, 1, manifest=_stateful())
    assert all(run.request.sequence_start for run in stage.machine.runs)


def test_what_does_not_fit_the_model_is_counted_and_told_and_never_submitted() -> None:
    stage, snapshot = _play(_section(100, 80), lambda: Camera(0.1, content_type="audio/wav"), Machine(run_s=0.01), 1)
    assert not stage.machine.runs
    assert snapshot.invalid == len(stage.notebook.outcomes) > 5
    outcome = stage.notebook.outcomes[0]
    assert (outcome.kind, outcome.reason) == (OutcomeKind.REJECTED, "input_invalid")
    assert "takes image/jpeg or image/png; audio/wav came" in outcome.detail


def test_a_model_that_is_not_installed_is_the_schedulers_to_refuse() -> None:
    machine = Machine(run_s=0.0, script=lambda _: Refusal(Reason.MODEL_UNAVAILABLE))
    stage, snapshot = _play(_section(100, 80), OnDemand, machine, 1, manifest=None)
    assert snapshot.submitted == len(stage.notebook.outcomes) == 11


def test_a_loop_can_be_switched_and_paced_while_it_runs() -> None:
    async def act(loop: InferenceLoop) -> None:
        await asyncio.sleep(0.95)
        loop.configure(enabled=False)
        await asyncio.sleep(10)
        assert loop.snapshot().enabled is False
        loop.configure(enabled=True, period_ns=10 * MS, deadline_ns=20 * MS)

    stage, snapshot = _play(_section(100, 80), OnDemand, Machine(run_s=0.001), 0.5, act=act)
    gaps = _gaps_ms(stage.machine.started_ns)
    assert set(gaps[:9]) == {100.0}
    assert set(gaps[10:]) == {10.0}
    assert gaps[9] == pytest.approx(10_000, abs=101)
    assert (snapshot.period_ns, snapshot.deadline_ns) == (10 * MS, 20 * MS)
    assert snapshot.missed == 0


def test_a_long_period_can_be_shortened_without_waiting_for_its_end() -> None:
    async def act(loop: InferenceLoop) -> None:
        await asyncio.sleep(5)
        loop.configure(period_ns=100 * MS)

    stage, _ = _play(_section(3_600_000, 80), OnDemand, Machine(run_s=0.001), 1, act=act)
    assert len(stage.machine.runs) == 12


def test_refuses_a_pace_that_is_none() -> None:
    async def act(loop: InferenceLoop) -> None:
        with pytest.raises(ValueError, match=r"loop front: a period of 0\.5 ms is below 1 ms"):
            loop.configure(enabled=False, period_ns=MS // 2)
        assert loop.snapshot().enabled

    _play(_section(100, 80), OnDemand, Machine(run_s=0.001), 1, act=act)


def test_a_source_that_fails_is_asked_again_less_and_less_often() -> None:
    source = OnDemand(failures=["no such directory"] * 8)
    _, snapshot = _play(_section(100, 80), lambda: source, Machine(run_s=0.001), 200)
    assert _gaps_ms(source.asked_ns)[:8] == [1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]
    assert snapshot.submitted > 100


def test_ends_with_its_source_and_delivers_what_is_outstanding() -> None:
    async def main() -> None:
        notebook = Notebook()
        loop = InferenceLoop(
            _section(10, 5000), source=OnDemand(3), sinks=[notebook], submit=Machine(run_s=1), manifest=lambda: CAMERA,
            clock=loop_clock(),
        )  # fmt: skip
        await asyncio.wait_for(loop.run(), 60)
        assert loop.snapshot().finished
        assert len(notebook.outcomes) == loop.snapshot().submitted

    run_virtual(main())


def test_stopping_waits_for_what_is_outstanding_and_cancelling_cancels_it() -> None:
    async def main() -> None:
        for graceful in (True, False):
            machine, notebook = Machine(run_s=5), Notebook()
            loop = InferenceLoop(
                _section(10, 60_000), source=OnDemand(), sinks=[notebook], submit=machine, manifest=lambda: CAMERA,
                clock=loop_clock(),
            )  # fmt: skip
            task = asyncio.create_task(loop.run())
            await asyncio.sleep(1)
            if graceful:
                loop.stop()
                await task
                assert len(notebook.outcomes) == loop.snapshot().submitted > 0
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert machine.runs[0].cancelled
            assert loop.snapshot().outstanding == 0

    run_virtual(main())


def test_every_lease_is_given_back_exactly_once() -> None:
    leases: list[Lease] = []

    def script(_: InferRequest) -> Ending:
        leases.append(Lease())
        return answer(leases[-1])

    _play(_section(10, 50), OnDemand, Machine(run_s=0.02, script=script), 1)
    assert leases
    assert {lease.released for lease in leases} == {1}


def test_a_text_loop_asks_for_its_text() -> None:
    stage, _ = _play(
        _section(100, 80), lambda: Camera(0.1, content_type="text/plain"), Machine(run_s=0.01), 1, manifest=INTENT
    )
    assert b'"text"' in stage.machine.runs[0].request.payload.header


def test_an_hour_of_frames_leaves_no_tasks_behind() -> None:
    async def main() -> None:
        loop = InferenceLoop(
            _section(100, 90), source=OnDemand(), sinks=[Notebook()], submit=Machine(run_s=0.03), manifest=lambda: CAMERA,
            clock=loop_clock(),
        )  # fmt: skip
        task = asyncio.create_task(loop.run())
        await asyncio.sleep(10)
        early = len(asyncio.all_tasks())
        await asyncio.sleep(600)
        assert len(asyncio.all_tasks()) <= early + 1
        assert loop.snapshot().submitted == pytest.approx(6100, abs=1)
        loop.stop()
        await task

    run_virtual(main())
