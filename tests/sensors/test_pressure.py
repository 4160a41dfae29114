"""What tells that memory is short: read where it is, missing where it is not, never made up."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.clock import NS_PER_S
from edgeinfer.sensors.cgroup import groups
from edgeinfer.sensors.memory import MemoryReader
from edgeinfer.sensors.pressure import (
    FaultCounters,
    MemoryPressure,
    PressureMeter,
    PressureSample,
    parse_psi,
    read_counters,
)
from tests.sensors.tree import FakeClock, FakeTree

PAGE = os.sysconf("SC_PAGE_SIZE")
PSI = "some avg10=12.50 avg60=3.00 avg300=1.00 total=99\nfull avg10=4.25 avg60=1.00 avg300=0.50 total=50\n"
V1_PATHS = "4:memory:/box\n0::/\n"


def stat_of(tree: FakeTree, pid: int, faults: int, name: str = "edgeinfer-worker") -> None:
    fields = ["S", "1", "1", "1", "0", "-1", "4194304", "5000", "0", str(faults), "0", *["7"] * 40]
    tree.write(tree.proc / str(pid) / "stat", f"{pid} ({name}) {' '.join(fields)}\n")


def counters(tree: FakeTree, *pids: int) -> FaultCounters:
    found = groups("memory", tree.proc, tree.sys)
    return read_counters(tree.proc, found[0] if found else None, pids)


def test_version_2_tells_refaults_and_the_groups_own_psi(tree: FakeTree) -> None:
    stat = "anon 1\nworkingset_refault_anon 3\nworkingset_refault_file 70\npgmajfault 9\n"
    tree.cgroup_v2("/a", memory_stat=stat, memory_pressure=PSI)
    tree.write(tree.proc / "pressure" / "memory", PSI.replace("12.50", "99.00"))
    found = counters(tree)
    assert (found.refaulted_pages, found.group_major_faults) == (70, None)
    assert found.psi == MemoryPressure(12.5, 4.25)
    assert found.sources == ("refaults", "psi")
    assert not found.machine_wide


def test_a_kernel_before_5_9_has_one_refault_counter(tree: FakeTree) -> None:
    tree.cgroup_v2("/a", memory_stat="workingset_refault 12\n")
    assert counters(tree).refaulted_pages == 12


def test_version_1_has_major_faults_only(tree: FakeTree) -> None:
    tree.write(tree.proc / "self" / "cgroup", V1_PATHS)
    tree.group("memory/box", memory_stat="pgmajfault 2\ntotal_pgmajfault 31\n", memory_limit_in_bytes="1\n")
    tree.write(tree.proc / "pressure" / "memory", PSI)
    found = counters(tree)
    assert (found.refaulted_pages, found.group_major_faults) == (None, 31)
    assert found.machine_wide
    assert found.psi == MemoryPressure(12.5, 4.25)


def test_major_faults_of_each_process_whatever_it_is_called(tree: FakeTree) -> None:
    stat_of(tree, 10, 5)
    stat_of(tree, 11, 8, name="odd) name (x")
    tree.write(tree.proc / "12" / "stat", "garbage\n")
    assert counters(tree, 10, 11, 12, 13).major_faults == {10: 5, 11: 8}


@pytest.mark.parametrize(
    ("text", "pressure"),
    [
        (PSI, MemoryPressure(12.5, 4.25)),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", MemoryPressure(0.0, 0.0)),
        ("", None),
        ("garbage\n", None),
        ("some avg10=x\n", None),
        ("some avg10=nan\n", None),
        ("some avg10=-3\n", None),
        ("some avg10=250.0\n", None),
        ("full avg10=1.0\n", None),
    ],
)
def test_each_text_of_psi_has_a_defined_meaning(text: str, pressure: MemoryPressure | None) -> None:
    assert parse_psi(text) == pressure


@pytest.mark.parametrize(
    ("stat", "psi", "told"),
    [
        ("garbage\n", PSI, "memory.stat"),
        ("anon 5\n", "garbage\n", "memory.pressure"),
        ("\0\0", "\0", "memory.stat"),
    ],
)
def test_garbage_is_told_once_and_judged_by_nothing(
    tree: FakeTree, clock: FakeClock, caplog: pytest.LogCaptureFixture, stat: str, psi: str, told: str
) -> None:
    tree.cgroup_v2("/a", memory_max="max\n", memory_stat=stat, memory_pressure=psi)
    tree.write(tree.proc / "meminfo", "MemAvailable: 1000 kB\n")
    caplog.set_level(logging.WARNING)
    reader = MemoryReader(tree.proc, tree.sys, clock=clock)
    for _ in range(300):
        faults = reader.read().faults
        assert faults.refaulted_pages is None
        clock.advance(1)
    assert len(caplog.records) == 1
    assert "name=memory-pressure state=absurd" in caplog.text
    assert told in caplog.text


def test_a_system_without_any_of_them_is_said_once_and_no_warning(
    tree: FakeTree, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    tree.write(tree.proc / "meminfo", "MemAvailable: 1000 kB\n")
    caplog.set_level(logging.INFO)
    reader = MemoryReader(tree.proc, tree.sys, clock=clock)
    for _ in range(300):
        assert reader.read().faults.sources == ()
        clock.advance(1)
    lines = [record for record in caplog.records if "memory-pressure" in record.getMessage()]
    assert [line.levelname for line in lines] == ["INFO"]
    assert "judged by nothing" in lines[0].getMessage()


def sampled(*steps: tuple[float, FaultCounters]) -> PressureSample:
    meter = PressureMeter()
    found = PressureSample()
    for at_s, read in steps:
        found = meter.sample(read, round(at_s * NS_PER_S))
    return found


def test_rates_are_per_second() -> None:
    found = sampled((0, FaultCounters(refaulted_pages=100)), (2, FaultCounters(refaulted_pages=300)))
    assert found.refault_bytes_s == 100 * PAGE
    assert found.major_faults_s is None


def test_a_counter_that_began_anew_counts_nothing() -> None:
    found = sampled((0, FaultCounters(refaulted_pages=10**9)), (1, FaultCounters(refaulted_pages=5)))
    assert found.refault_bytes_s == 0


def test_a_process_that_is_still_loading_says_nothing_about_pressure() -> None:
    def read(old: int, new: int | None) -> FaultCounters:
        return FaultCounters(
            group_major_faults=old + (new or 0), major_faults={1: old} | ({} if new is None else {2: new})
        )

    start, before, loading = (0, read(0, None)), (20, read(0, None)), (21, read(0, 10))
    assert sampled(start, before, loading, (22, read(6, 5000))).major_faults_s == 6
    assert sampled(start, before, loading, (22, read(6, 5000))).group_faults_s is None
    assert sampled(start, before, (21, read(6, None))).group_faults_s == 6
    assert sampled(start, before, loading, (40, read(6, 5000)), (41, read(6, 5300))).major_faults_s == 300


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.dictionaries(st.integers(1, 4), st.integers(0, 10**9))), max_size=12)
)
def test_rates_are_never_negative(steps: list[tuple[int, dict[int, int]]]) -> None:
    meter = PressureMeter()
    for at_s, (refaults, faults) in enumerate(steps):
        found = meter.sample(FaultCounters(refaults, refaults, faults), at_s * 8 * NS_PER_S)
        assert (found.refault_bytes_s or 0) >= 0
        assert (found.major_faults_s or 0) >= 0


def test_this_machine_can_be_read() -> None:
    found = groups("memory", Path("/proc"), Path("/sys"))
    read = read_counters(Path("/proc"), found[0] if found else None, [os.getpid()])
    assert read.major_faults is not None
    assert set(read.major_faults) == {os.getpid()}
    assert read.garbage == ()
