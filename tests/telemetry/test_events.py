"""Events: told once when they matter, and never a flood."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.clock import NS_PER_S
from edgeinfer.execution.pressure import CALM, Pressure, PressureState
from edgeinfer.limits import ThermalLevel
from edgeinfer.mqtt.backoff import LinkState
from edgeinfer.mqtt.topics import Topics
from edgeinfer.request import Placement, Reason
from edgeinfer.sensors.state import SensorState
from edgeinfer.telemetry.events import KINDS, Detection, Finding, detect
from tests.telemetry.world import MODEL, World


class Watch:
    """Feeds a world's snapshots to the detection, a second apart."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = Detection()
        self.previous = world.snapshot()
        self.seen: list[Finding] = self.look()

    def look(self) -> list[Finding]:
        current = self.world.snapshot()
        self.state, findings = detect(self.previous, current, self.state)
        self.previous = current
        return findings

    def seconds(self, count: int, each: Callable[[], object] = lambda: None) -> list[str]:
        """Let time pass; `each` runs once a second. Return the kinds of the events."""
        found: list[Finding] = []
        for _ in range(count):
            self.world.now_ns += NS_PER_S
            each()
            found += self.look()
        self.seen += found
        return [finding.kind for finding in found]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def watch(world: World) -> Watch:
    return Watch(world)


def test_a_quiet_device_has_nothing_to_tell(watch: Watch) -> None:
    assert watch.seen == []
    assert watch.seconds(3600, watch.world.answer) == []


# Heat


def test_throttling_is_told_at_its_start_at_each_level_and_at_its_end(world: World, watch: Watch) -> None:
    world.level, world.duty_cycle = ThermalLevel.WARM, 0.7
    assert watch.seconds(5) == ["throttle-start"]
    world.duty_cycle = 0.6  # the pace moves all the time and is no event
    assert watch.seconds(5) == []
    world.level = ThermalLevel.HOT
    assert watch.seconds(5) == ["throttle-level"]
    world.level, world.duty_cycle = ThermalLevel.NOMINAL, 1.0
    assert watch.seconds(5) == ["throttle-end"]
    start, _, end = watch.seen
    assert (start.fields["level"], start.fields["temp_c"], start.fields["zone"]) == ("warm", 55.0, "cpu-thermal")
    assert (end.fields["seconds"], end.fields["peak_c"]) == (15.0, 81.25)


def test_a_start_on_a_hot_board_is_told(world: World) -> None:
    world.level, world.duty_cycle = ThermalLevel.HOT, 0.3
    assert [finding.kind for finding in Watch(world).seen] == ["throttle-start"]


def test_throttling_that_came_and_went_between_two_looks_is_told(world: World, watch: Watch) -> None:
    world.episodes = 1
    assert watch.seconds(3) == ["throttle-start", "throttle-end"]


def test_an_episode_that_was_told_is_not_told_again_by_its_counter(world: World, watch: Watch) -> None:
    world.level, world.episodes = ThermalLevel.WARM, 1
    assert watch.seconds(3) == ["throttle-start"]
    world.level = ThermalLevel.NOMINAL
    assert watch.seconds(3) == ["throttle-end"]


def test_a_sensor_fault_is_told_and_its_end_too(world: World, watch: Watch) -> None:
    world.sensor = SensorState.BLOCKED
    assert watch.seconds(60) == ["sensor-fault"]
    assert watch.seen[0].fields["state"] == "blocked"
    world.sensor = SensorState.OK
    assert watch.seconds(60) == ["sensor-ok"]


def test_a_sensor_that_nothing_depends_on_is_no_event(world: World) -> None:
    """A virtual machine has none: nothing is held back because of it, so nobody has to do anything."""
    world.sensor, world.sensor_matters = SensorState.MISSING, False
    watch = Watch(world)
    assert watch.seen == []
    assert watch.seconds(60) == []


def test_a_doubtful_sample_is_no_fault(world: World, watch: Watch) -> None:
    world.sensor = SensorState.UNCONFIRMED
    assert watch.seconds(60) == []


def test_a_flapping_sensor_is_some_dozens_of_events_an_hour(world: World, watch: Watch) -> None:
    def flap() -> None:
        world.sensor = SensorState.OK if world.sensor.fault else SensorState.MISSING

    assert 60 <= len(watch.seconds(3600, flap)) <= 120
    world.sensor = SensorState.MISSING
    watch.seconds(60)
    assert watch.seen[-1].kind == "sensor-fault"  # the state it ends up in is always told


# Offload


def test_offload_opens_with_the_second_request_next_door_and_closes_when_none_goes(world: World, watch: Watch) -> None:
    assert watch.seconds(1, lambda: world.answer(Placement.NEARBY)) == []
    assert watch.seconds(1, lambda: world.answer(Placement.NEARBY)) == ["offload-open"]
    opened = watch.state.offload_open
    assert watch.seconds(60, lambda: (world.answer(Placement.NEARBY), world.answer())) == []
    assert watch.seconds(9) == []
    assert watch.seconds(60) == ["offload-close"]
    assert (opened, watch.state.offload_open) == (True, False)
    close = watch.seen[-1]
    assert close.fields["nearby"] == 62
    assert close.fields["share"] == pytest.approx(62 / 122)


def test_a_request_that_failed_next_door_was_offloaded_too(world: World, watch: Watch) -> None:
    assert watch.seconds(5, lambda: world.expire(Placement.NEARBY)) == ["offload-open"]


@pytest.mark.slow
@pytest.mark.parametrize("every_s", [1, 3, 5, 9, 11, 30])
def test_steady_offloading_at_any_rate_opens_at_most_once(every_s: int, world: World, watch: Watch) -> None:
    def sometimes() -> None:
        if world.now_ns // NS_PER_S % every_s == 0:
            world.answer(Placement.NEARBY)

    kinds = watch.seconds(3600, sometimes)
    assert kinds == (["offload-open"] if every_s <= 9 else [])


# Refusals


def test_a_burst_of_refusals_is_one_event_and_one_at_its_end(world: World, watch: Watch) -> None:
    def overload() -> None:
        for _ in range(5):
            world.refuse(Reason.QUEUE_FULL)
            world.answer()

    assert watch.seconds(60, overload) == ["refusal-burst"]
    assert watch.seconds(10, world.answer) == ["refusal-burst-end"]
    begin, end = watch.seen
    assert begin.fields["reasons"] == {"queue_full": 10}
    assert "queue_full 10" in begin.detail
    assert end.fields["refused"] == 300


@pytest.mark.parametrize("reason", [Reason.SUPERSEDED, Reason.DRAINING])
def test_newer_frames_taking_the_place_of_older_ones_is_no_burst(reason: Reason, world: World, watch: Watch) -> None:
    assert watch.seconds(60, lambda: [world.refuse(reason) for _ in range(20)]) == []


def test_a_few_refusals_among_many_answers_are_no_burst(world: World, watch: Watch) -> None:
    def mostly_fine() -> None:
        world.refuse()
        for _ in range(20):
            world.answer()

    assert watch.seconds(600, mostly_fine) == []


def test_a_burst_ends_when_requests_stop_coming(world: World, watch: Watch) -> None:
    watch.seconds(3, lambda: [world.refuse() for _ in range(20)])
    assert watch.seconds(10) == ["refusal-burst-end"]


# Links, models, disk


def test_a_broker_that_is_down_from_the_start_is_told(world: World) -> None:
    world.link_states["site"] = LinkState.CONNECTING
    watch = Watch(world)
    assert watch.seen == []
    world.link_states["site"] = LinkState.UNREACHABLE
    assert watch.seconds(100) == ["link-down"]
    world.link_states["site"] = LinkState.CONNECTED
    assert watch.seconds(100) == ["link-up"]
    assert [finding.fields["link"] for finding in watch.seen] == ["site", "site"]


def test_a_state_that_is_told_late_says_since_when_it_is_so(world: World, watch: Watch) -> None:
    world.link_states["fleet"] = LinkState.UNREACHABLE
    assert watch.seconds(5) == ["link-down"]
    world.link_states["fleet"] = LinkState.CONNECTED
    back_ns = world.now_ns + NS_PER_S
    assert watch.seconds(40) == ["link-up"]
    down, up = watch.seen
    assert down.fields["held_s"] == 0.0
    assert (up.fields["held_s"], up.since_ns) == (25.0, back_ns)


def test_a_source_that_fails_is_told_and_its_return_too(world: World, watch: Watch) -> None:
    [camera] = world.loops
    world.loops = (replace(camera, problem="/srv/frames is no folder"),)
    assert watch.seconds(60) == ["source-fault"]
    assert "/srv/frames is no folder" in watch.seen[-1].detail
    assert watch.seen[-1].fields["loop"] == "camera"
    world.loops = (camera,)
    assert watch.seconds(60) == ["source-ok"]


def test_a_change_of_why_a_link_is_down_is_told(world: World, watch: Watch) -> None:
    world.link_states["fleet"] = LinkState.UNREACHABLE
    watch.seconds(40)
    world.link_states["fleet"] = LinkState.AUTH_FAILED
    assert watch.seconds(40) == ["link-down"]
    assert "auth_failed" in watch.seen[-1].detail


def test_a_clean_stop_is_no_link_event(world: World, watch: Watch) -> None:
    world.link_states["fleet"] = LinkState.CLOSED
    assert watch.seconds(100) == []


def test_each_crash_of_a_worker_is_told_with_its_cause(world: World, watch: Watch) -> None:
    world.crashes["det"] = 1
    assert watch.seconds(5) == ["worker-crash"]
    world.crashes["det"] = 3
    assert watch.seconds(5) == ["worker-crash"]
    assert watch.seen[-1].fields == {"model": "det", "crashes": 2, "since_start": 3}
    assert "signal 11" in watch.seen[-1].detail


def test_memory_pressure_is_told_with_its_sensor_and_its_end_too(world: World, watch: Watch) -> None:
    world.pressure = PressureState(level=Pressure.HIGH, why="refaults of 9.0 MB/s")
    assert watch.seconds(1) == ["memory-pressure"]
    assert watch.seen[-1].detail == "high: refaults of 9.0 MB/s"
    world.pressure = replace(world.pressure, level=Pressure.SEVERE)
    assert watch.seconds(40) == [], "one state, however bad"
    world.pressure = CALM
    assert watch.seconds(40) == ["memory-ok"]


def test_a_worker_that_had_to_be_replaced_is_told(world: World, watch: Watch) -> None:
    world.models = (replace(MODEL, recycled=2),)
    assert watch.seconds(1) == ["worker-recycled"]
    assert watch.seen[-1].fields["recycled"] == 2
    world.models = (MODEL,)  # loaded anew
    assert watch.seconds(1) == []


def test_quarantine_is_told_when_it_begins_and_when_it_ends(world: World, watch: Watch) -> None:
    world.models = (replace(MODEL, state="quarantined", detail="3 crashes in 60 s"),)
    assert watch.seconds(60) == ["model-quarantined"]
    world.models = (MODEL,)
    assert watch.seconds(60) == ["model-released"]


def test_another_variant_after_quarantine_is_told_with_what_serves_now(world: World, watch: Watch) -> None:
    world.models = (replace(MODEL, variant="fp32", quarantined=("1.0 int8",)),)
    assert watch.seconds(60) == ["model-quarantined"]
    assert watch.seen[-1].fields["quarantined"] == ["1.0 int8"]
    assert watch.seen[-1].fields["variant"] == "fp32"
    assert "1.0 int8 quarantined" in watch.seen[-1].detail
    world.models = (replace(MODEL, variant="", state="quarantined", quarantined=("1.0 fp32", "1.0 int8")),)
    assert watch.seconds(60) == ["model-quarantined"], "the second one too"
    world.models = (MODEL,)
    assert watch.seconds(60) == ["model-released"]


def test_an_earlier_version_that_serves_is_told_with_the_reason(world: World, watch: Watch) -> None:
    why = "instead of 1.1: killed by SIGSEGV"
    world.models = (replace(MODEL, wanted_version="1.1", quarantined=("1.1 int8",), detail=why),)
    assert sorted(watch.seconds(60)) == ["model-fallback", "model-quarantined"]
    told = next(finding for finding in watch.seen if finding.kind == "model-fallback")
    assert (told.fields["version"], told.fields["wanted_version"]) == ("1.0", "1.1")
    assert "SIGSEGV" in told.detail
    world.models = (replace(MODEL, version="1.1"),)
    assert sorted(watch.seconds(60)) == ["model-released", "model-restored"]


def test_a_disk_that_cannot_be_written_is_told(world: World, watch: Watch) -> None:
    world.storage_degraded = True
    assert watch.seconds(60) == ["storage-degraded"]
    world.storage_degraded = False
    assert watch.seconds(60) == ["storage-ok"]


# All of it


@given(
    st.lists(
        st.sampled_from(["answer", "nearby", "refuse", "expire", "hot", "cool", "fault", "ok", "down", "up", "crash"]),
        max_size=200,
    )
)
def test_whatever_happens_starts_and_ends_alternate_and_kinds_are_topics(steps: list[str]) -> None:
    world = World()
    watch = Watch(world)
    acts: dict[str, Callable[[], object]] = {
        "answer": world.answer,
        "nearby": lambda: world.answer(Placement.NEARBY),
        "refuse": lambda: [world.refuse() for _ in range(12)],
        "expire": world.expire,
        "hot": lambda: setattr(world, "level", ThermalLevel.HOT),
        "cool": lambda: setattr(world, "level", ThermalLevel.NOMINAL),
        "fault": lambda: setattr(world, "sensor", SensorState.ABSURD),
        "ok": lambda: setattr(world, "sensor", SensorState.OK),
        "down": lambda: world.link_states.update(fleet=LinkState.UNREACHABLE),
        "up": lambda: world.link_states.update(fleet=LinkState.CONNECTED),
        "crash": lambda: world.crashes.update(det=world.crashes.get("det", 0) + 1),
    }
    for step in steps:
        watch.seconds(1, acts[step])
    kinds = [finding.kind for finding in watch.seen]
    topics = Topics("edgeinfer", "lab", "cam1")
    assert set(kinds) <= KINDS.keys()
    for kind in kinds:
        assert topics.event(kind).endswith(f"/event/{kind}")
    for begin, end in (
        ("throttle-start", "throttle-end"),
        ("offload-open", "offload-close"),
        ("refusal-burst", "refusal-burst-end"),
        ("sensor-fault", "sensor-ok"),
        ("link-down", "link-up"),
    ):
        pair = [kind for kind in kinds if kind in {begin, end}]
        assert pair == [begin, end] * (len(pair) // 2) + [begin] * (len(pair) % 2)
    for finding in watch.seen:
        assert all(not isinstance(value, float) or math.isfinite(value) for value in finding.fields.values())
