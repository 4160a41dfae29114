from __future__ import annotations

import pytest

from edgeinfer.sensors.cpu import CpuClock, cpu_clock, fastest_clock, load_average
from edgeinfer.sensors.cpufreq import PolicyReader, read_policies
from tests.sensors.boards import cluster, rk3588
from tests.sensors.tree import FakeTree


def test_each_cluster_has_its_own_clock(tree: FakeTree) -> None:
    rk3588(tree)
    policies = read_policies(tree.sys)
    assert [(item.name, sorted(item.cpus), item.max_hz) for item in policies] == [
        ("policy0", [0, 1, 2, 3], 1_800_000_000), ("policy4", [4, 5], 2_400_000_000), ("policy6", [6, 7], 2_352_000_000),
    ]  # fmt: skip
    assert {(item.min_hz, item.governor, item.driver) for item in policies} == {
        (408_000_000, "schedutil", "cpufreq-dt")
    }


def test_policies_are_in_the_order_of_their_cpus_not_of_their_names(tree: FakeTree) -> None:
    for first in (0, 4, 10):
        cluster(tree, first, str(first), 1_000_000, 500_000, 1_000_000, "x")
    assert [item.name for item in read_policies(tree.sys)] == ["policy0", "policy4", "policy10"]


def test_kernels_without_the_common_folder_have_one_in_each_core(tree: FakeTree) -> None:
    tree.write(tree.sys / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "1000000\n")
    (policy,) = read_policies(tree.sys)
    assert (policy.name, policy.max_hz, policy.now_hz) == ("cpu0", 1_000_000_000, None)


@pytest.mark.parametrize("text", ["<unknown>", "0", "-5", "garbage", "", "99999999999"])
def test_clock_that_cannot_be_is_unknown(tree: FakeTree, text: str) -> None:
    cluster(tree, 0, "0", 1_000_000, 500_000, 1_000_000, "x")
    tree.write(tree.sys / "devices/system/cpu/cpufreq/policy0/scaling_cur_freq", text)
    assert read_policies(tree.sys)[0].now_hz is None


def test_cluster_whose_cores_are_offline_is_not_the_fastest(tree: FakeTree) -> None:
    rk3588(tree)
    for first in (4, 6):
        tree.write(tree.sys / f"devices/system/cpu/cpufreq/policy{first}/affected_cpus", "\n")
    clock = cpu_clock(tree.sys)
    assert (clock.max_hz, clock.now_hz) == (1_800_000_000, 1_800_000_000)
    assert read_policies(tree.sys)[1].cpus == frozenset()


def test_what_is_fixed_is_read_again_after_a_while_and_the_rest_each_time(tree: FakeTree) -> None:
    cluster(tree, 0, "0 1", 1_000_000, 500_000, 1_000_000, "x")
    reader, folder = PolicyReader(tree.sys), tree.sys / "devices/system/cpu/cpufreq/policy0"
    reader.read()
    for name, text in (("cpuinfo_max_freq", "2000000"), ("scaling_cur_freq", "800000"), ("affected_cpus", "1")):
        (folder / name).write_text(text)
    (policy,) = reader.read()
    assert (policy.now_hz, sorted(policy.cpus), policy.max_hz) == (800_000_000, [1], 1_000_000_000)
    for _ in range(60):
        (policy,) = reader.read()
    assert policy.max_hz == 2_000_000_000


def test_driver_that_is_loaded_later_is_found_with_the_next_sample(tree: FakeTree) -> None:
    reader = PolicyReader(tree.sys)
    assert reader.read() == ()
    cluster(tree, 0, "0", 1_000_000, 500_000, 1_000_000, "x")
    assert len(reader.read()) == 1


def test_no_policy_is_no_clock() -> None:
    assert fastest_clock(()) == CpuClock(None, None, None, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.50 0.75 0.25 2/300 42\n", (1.5, 0.75, 0.25)),
        ("garbage", None), ("", None), ("1.0 2.0", None), ("nan 1 1", None), ("inf 1 1 1/1 1", None), ("-1 0 0", None),
    ],
)  # fmt: skip
def test_load_average(tree: FakeTree, text: str, expected: tuple[float, ...] | None) -> None:
    tree.write(tree.proc / "loadavg", text)
    assert load_average(tree.proc) == expected
