from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeinfer.sensors.cpu import (
    BusyMeter,
    CpuClock,
    clock_share,
    cpu_clock,
    parse_cpu_list,
    quota_cores,
    quota_faults,
    thread_budget,
    usable_cpus,
)
from tests.sensors.tree import FakeTree


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3\n", {0, 1, 2, 3}), ("0,2-3,6", {0, 2, 3, 6}), ("5", {5}), ("", set()),
        ("garbage", set()), ("3-1", set()), ("0-99999999", set()),
    ],
)  # fmt: skip
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_offline_cores_are_not_usable(tree: FakeTree) -> None:
    tree.cpus("0-3", "0-1")
    assert usable_cpus(tree.sys, tree.proc) == {0, 1}
    tree.cpus("0-3", "0-3")
    assert usable_cpus(tree.sys, tree.proc) == {0, 1, 2, 3}


def test_usable_cpus_are_never_none_at_all(tree: FakeTree) -> None:
    assert usable_cpus(tree.sys, tree.proc) == {0}
    tree.cpus("2-3", "0-1")  # what a moment between two reads can show
    assert usable_cpus(tree.sys, tree.proc) == {2, 3}


def test_usable_cpus_of_this_machine_are_its_affinity() -> None:
    assert usable_cpus(Path("/sys"), Path("/proc")) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("150000 100000", 1), ("400000 100000", 4), ("50000 100000", 1), ("max 100000", None), ("garbage", None)],
)
def test_quota_is_rounded_down_to_at_least_one_thread(tree: FakeTree, quota: str, expected: int | None) -> None:
    tree.cgroup_v2("/a", cpu_max=quota)
    assert quota_cores(tree.proc, tree.sys) == expected
    assert bool(quota_faults(tree.proc, tree.sys)) == (quota == "garbage")


def test_tightest_quota_above_us_counts(tree: FakeTree) -> None:
    tree.cgroup_v2("/a/b", cpu_max="max 100000")
    tree.group("/a", cpu_max="250000 100000")
    assert quota_cores(tree.proc, tree.sys) == 2


def test_version_1_without_quota(tree: FakeTree) -> None:
    tree.write(tree.proc / "self" / "cgroup", "4:cpu,cpuacct:/\n")
    tree.group("cpu,cpuacct", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert quota_cores(tree.proc, tree.sys) is None


@pytest.mark.parametrize(
    ("cpus", "quota", "threads"),
    [({0, 1}, 4, 2), ({0, 1, 2, 3}, 1, 1), ({0, 1, 2, 3}, None, 4), (set(), None, 1), ({0}, 0, 1)],
)
def test_thread_budget_is_the_smaller_of_affinity_and_quota(cpus: set[int], quota: int | None, threads: int) -> None:
    assert thread_budget(frozenset(cpus), quota) == threads


def test_clock_of_the_fastest_cluster(tree: FakeTree) -> None:
    root = tree.sys / "devices" / "system" / "cpu" / "cpufreq"
    for policy, maximum in (("policy0", 1_800_000), ("policy4", 2_400_000)):
        tree.write(root / policy / "cpuinfo_max_freq", f"{maximum}\n")
        tree.write(root / policy / "scaling_cur_freq", f"{maximum // 2}\n")
        tree.write(root / policy / "scaling_max_freq", f"{maximum - 600_000}\n")
        tree.write(root / policy / "scaling_governor", "schedutil\n")
    assert cpu_clock(tree.sys) == CpuClock(1_200_000_000, 2_400_000_000, 1_800_000_000, "schedutil")


def test_no_cpufreq_and_unreadable_frequency_are_unknown(tree: FakeTree) -> None:
    assert cpu_clock(tree.sys) == CpuClock(None, None, None, "")
    tree.write(tree.sys / "devices/system/cpu/cpufreq/policy0/scaling_cur_freq", "<unknown>\n")
    assert cpu_clock(tree.sys).now_hz is None


def test_busy_share_between_two_looks(tree: FakeTree) -> None:
    meter = BusyMeter(tree.proc)
    assert meter.share() is None
    tree.write(tree.proc / "stat", "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1\n")
    assert meter.share() is None
    tree.write(tree.proc / "stat", "cpu  130 0 120 740 110 0 0 0 0 0\n")
    assert meter.share() == 0.5
    assert meter.share() is None  # no time has passed
    tree.write(tree.proc / "stat", "garbage\n")
    assert meter.share() is None


@pytest.mark.parametrize(
    ("clock", "working", "share"),
    [
        (CpuClock(None, None, None, ""), True, 1.0),
        (CpuClock(600, 2_400, 2_400, "schedutil"), False, 1.0),  # an idle board's clock rises with the work
        (CpuClock(600, 2_400, 2_400, "schedutil"), True, 0.25),
        (CpuClock(600, 2_400, 1_800, "schedutil"), False, 0.75),
        (CpuClock(2_400, 2_400, 1_800, "schedutil"), True, 0.75),
        (CpuClock(1_200, 2_400, 2_400, "performance"), False, 0.5),
        (CpuClock(None, 2_400, None, ""), True, 1.0),
        (CpuClock(2_600, 2_400, None, "schedutil"), True, 1.0),
    ],
)
def test_the_share_of_the_clock_is_what_a_busy_core_has(clock: CpuClock, working: bool, share: float) -> None:
    assert clock_share(clock, working=working) == share
