from __future__ import annotations

import pytest

from edgeinfer.sensors.cgroup import LimitState, cpu_limit, groups, memory_limit, parse_limit
from tests.sensors.tree import FakeTree

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "state", "limit"),
    [
        ("max", LimitState.UNLIMITED, None),
        ("-1", LimitState.UNLIMITED, None),
        ("9223372036854771712", LimitState.UNLIMITED, None),  # pages of 4 KiB
        ("9223372036854710272", LimitState.UNLIMITED, None),  # pages of 64 KiB
        ("", LimitState.EMPTY, None),
        (None, LimitState.MISSING, None),
        ("garbage", LimitState.GARBAGE, None),
        ("12 MB", LimitState.GARBAGE, None),
        ("-5", LimitState.GARBAGE, None),
        ("536870912", LimitState.LIMITED, 512 * MIB),
        ("0", LimitState.LIMITED, 0),
    ],
)
def test_each_text_of_a_limit_has_a_defined_meaning(text: str | None, state: LimitState, limit: int | None) -> None:
    found, value, detail = parse_limit(text)
    assert (found, value) == (state, limit)
    assert bool(detail) == (state in {LimitState.EMPTY, LimitState.GARBAGE})


def test_every_ancestor_counts_innermost_first(tree: FakeTree) -> None:
    tree.cgroup_v2("/a/b/c", memory_max="max\n")
    tree.group("/a/b", memory_max=f"{512 * MIB}\n", memory_current=f"{100 * MIB}\n")
    tree.group("/a", memory_max=f"{256 * MIB}\n")
    found = [memory_limit(group) for group in groups("memory", tree.proc, tree.sys)]
    assert [item.limit_bytes for item in found] == [None, 512 * MIB, 256 * MIB, None]
    assert found[1].usage_bytes == 100 * MIB
    assert found[-1].state is LimitState.MISSING


def test_soft_limit_binds_too(tree: FakeTree) -> None:
    tree.cgroup_v2("/a", memory_max="max\n", memory_high=f"{64 * MIB}\n")
    assert memory_limit(groups("memory", tree.proc, tree.sys)[0]).limit_bytes == 64 * MIB


def test_droppable_file_cache_is_no_usage(tree: FakeTree) -> None:
    # Mapped weights are active; their hot set is charged in the ledger, so that it must not count here as well.
    stat = f"anon {60 * MIB}\nfile {50 * MIB}\ninactive_file {30 * MIB}\nactive_file {15 * MIB}\nshmem {5 * MIB}\n"
    tree.cgroup_v2("/a", memory_max=f"{200 * MIB}\n", memory_current=f"{110 * MIB}\n", memory_stat=stat)
    assert memory_limit(groups("memory", tree.proc, tree.sys)[0]).usage_bytes == 65 * MIB


def test_version_1_is_read_where_its_controller_is_mounted(tree: FakeTree) -> None:
    lines = "11:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/ignored\n"
    tree.write(tree.proc / "self" / "cgroup", lines)
    tree.group("memory/docker/x", memory_limit_in_bytes=f"{300 * MIB}\n", memory_usage_in_bytes=f"{20 * MIB}\n")
    tree.group("memory/docker/x", memory_stat=f"active_file 7\ninactive_file 5\ntotal_inactive_file {8 * MIB}\n")
    tree.group("memory", memory_limit_in_bytes="9223372036854771712\n")
    tree.group("cpu,cpuacct/docker/x", cpu_cfs_quota_us="50000\n", cpu_cfs_period_us="100000\n")
    found = [memory_limit(group) for group in groups("memory", tree.proc, tree.sys)]
    assert (found[0].limit_bytes, found[0].usage_bytes) == (300 * MIB, 12 * MIB)
    assert (found[-1].state, found[-1].limit_bytes) == (LimitState.UNLIMITED, None)
    assert cpu_limit(groups("cpu", tree.proc, tree.sys)[0]).cores == 0.5


def test_a_usage_that_cannot_be_read_is_unknown_and_never_negative(tree: FakeTree) -> None:
    tree.cgroup_v2("/a/b", memory_max=f"{64 * MIB}\n", memory_current="garbage\n")
    tree.group(
        "/a", memory_max=f"{64 * MIB}\n", memory_current="100\n", memory_stat="inactive_file 4096\nactive_file x\n"
    )
    inner, outer, _ = [memory_limit(group) for group in groups("memory", tree.proc, tree.sys)]
    assert (inner.limit_bytes, inner.usage_bytes) == (64 * MIB, None)
    assert outer.usage_bytes == 0


def test_hybrid_hierarchy_is_read_where_the_memory_controller_is(tree: FakeTree) -> None:
    tree.write(tree.proc / "self" / "cgroup", "1:name=systemd:/x\n0::/x\n")
    tree.group("unified/x", memory_max=f"{96 * MIB}\n")
    tree.group("systemd/x", tasks="1\n")
    assert memory_limit(groups("memory", tree.proc, tree.sys)[0]).limit_bytes == 96 * MIB


def test_limits_deep_in_a_tree_all_bind(tree: FakeTree) -> None:
    path = "/".join(f"level{i}" for i in range(12))
    tree.cgroup_v2(f"/{path}", memory_max="max\n")
    tree.group("/level0/level1/level2", memory_max=f"{40 * MIB}\n")
    found = groups("memory", tree.proc, tree.sys)
    assert len(found) == 13
    assert [memory_limit(group).limit_bytes for group in found if memory_limit(group).limit_bytes] == [40 * MIB]


def test_container_that_shows_only_its_own_part_of_the_tree(tree: FakeTree) -> None:
    # Without a cgroup namespace the path is the host's, and the mount's root is the container.
    tree.write(tree.proc / "self" / "cgroup", "0::/docker/0123abcd\n")
    tree.group("/", memory_max=f"{512 * MIB}\n")
    assert [memory_limit(group).limit_bytes for group in groups("memory", tree.proc, tree.sys)] == [512 * MIB]


def test_no_control_groups_at_all(tree: FakeTree) -> None:
    assert groups("memory", tree.proc, tree.sys) == []


def test_path_cannot_leave_the_mount(tree: FakeTree) -> None:
    tree.write(tree.proc / "self" / "cgroup", "0::/../../../etc\n")
    tree.group("/", memory_max="max\n")
    mount = tree.sys / "fs" / "cgroup"
    assert all(group.path.is_relative_to(mount) for group in groups("memory", tree.proc, tree.sys))


@pytest.mark.parametrize(
    ("text", "state", "cores"),
    [
        ("150000 100000\n", LimitState.LIMITED, 1.5),
        ("50000 100000\n", LimitState.LIMITED, 0.5),
        ("max 100000\n", LimitState.UNLIMITED, None),
        ("200000\n", LimitState.LIMITED, 2.0),
        ("\n", LimitState.EMPTY, None),
        ("garbage\n", LimitState.GARBAGE, None),
        ("100000 0\n", LimitState.GARBAGE, None),
    ],
)
def test_cpu_quota_texts(tree: FakeTree, text: str, state: LimitState, cores: float | None) -> None:
    tree.cgroup_v2("/a", cpu_max=text)
    found = cpu_limit(groups("cpu", tree.proc, tree.sys)[0])
    assert (found.state, found.cores) == (state, cores)
