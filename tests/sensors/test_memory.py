from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import pytest

from edgeinfer.sensors.memory import MemoryReader, read_memory
from edgeinfer.sensors.pressure import MemoryPressure
from tests.sensors.tree import FakeClock, FakeTree

MIB = 1 << 20
ROLLUP = """\
5581a000-7ffe0000 ---p 00000000 00:00 0                                  [rollup]
Rss:              120000 kB
Pss:               {pss} kB
Pss_Anon:          {anon} kB
Pss_File:          40000 kB
Pss_Shmem:          5000 kB
Anonymous:         90000 kB
"""


def meminfo(tree: FakeTree, available_kib: int = 1_500_000) -> None:
    tree.write(tree.proc / "meminfo", f"MemTotal: 2000000 kB\nMemFree: 100 kB\nMemAvailable: {available_kib} kB\n")


def test_smallest_limit_among_the_ancestors_can_be_seen(tree: FakeTree) -> None:
    meminfo(tree)
    tree.cgroup_v2("/parent/child", memory_max=f"{512 * MIB}\n", memory_current=f"{30 * MIB}\n")
    tree.group("/parent", memory_max=f"{256 * MIB}\n", memory_current=f"{40 * MIB}\n")
    reading = read_memory(tree.proc, tree.sys)
    assert reading.headrooms == ((512 * MIB, 30 * MIB), (256 * MIB, 40 * MIB))
    assert (reading.total_bytes, reading.available_bytes) == (2_000_000 << 10, 1_500_000 << 10)


def test_own_memory_is_the_sum_over_the_given_processes(tree: FakeTree) -> None:
    meminfo(tree)
    tree.write(tree.proc / "10" / "smaps_rollup", ROLLUP.format(pss=60000, anon=20000))
    tree.write(tree.proc / "11" / "smaps_rollup", ROLLUP.format(pss=30000, anon=10000))
    own = read_memory(tree.proc, tree.sys, [10, 11, 12]).own
    assert (own.pss_bytes, own.anonymous_bytes, own.shm_bytes, own.estimated) == (
        90000 << 10,
        30000 << 10,
        10000 << 10,
        0,
    )
    assert own.held_bytes == 40000 << 10


def test_what_is_shared_with_the_zygote_is_no_workers_own(tree: FakeTree) -> None:
    meminfo(tree)
    tree.write(tree.proc / "10" / "smaps_rollup", ROLLUP.format(pss=60000, anon=20000) + "Private_Dirty: 14000 kB\n")
    tree.write(tree.proc / "11" / "smaps_rollup", ROLLUP.format(pss=60000, anon=9000) + "Private_Dirty: 14000 kB\n")
    found = read_memory(tree.proc, tree.sys, [10, 11, 12]).processes
    assert {pid: memory.private_bytes >> 10 for pid, memory in found.items()} == {10: 14000, 11: 9000}


def test_unreadable_rollup_is_estimated_and_said_so(tree: FakeTree) -> None:
    meminfo(tree)
    tree.write(tree.proc / "10" / "statm", "9999 700 200 1 0 500 0\n")
    own = read_memory(tree.proc, tree.sys, [10]).own
    assert (own.pss_bytes, own.estimated) == (500 * os.sysconf("SC_PAGE_SIZE"), 1)


def test_pressure_is_read_where_it_is(tree: FakeTree) -> None:
    meminfo(tree)
    assert read_memory(tree.proc, tree.sys).faults.psi is None
    text = "some avg10=12.50 avg60=3.00 avg300=1.00 total=99\nfull avg10=4.25 avg60=1.00 avg300=0.50 total=50\n"
    tree.write(tree.proc / "pressure" / "memory", text)
    assert read_memory(tree.proc, tree.sys).faults.psi == MemoryPressure(12.5, 4.25)


@pytest.mark.parametrize("text", ["garbage\n", "\n"])
def test_limit_that_makes_no_sense_is_no_limit_and_one_log_line(
    tree: FakeTree, clock: FakeClock, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    meminfo(tree)
    tree.cgroup_v2("/a", memory_max=text)
    caplog.set_level(logging.WARNING)
    reader = MemoryReader(tree.proc, tree.sys, clock=clock)
    for _ in range(500):
        assert reader.read().headrooms == ()
        clock.advance(1)
    assert len(caplog.records) == 1
    assert "state=absurd" in caplog.text
    assert "memory.max" in caplog.text


def test_missing_meminfo_is_unknown_not_zero(
    tree: FakeTree, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    reading = MemoryReader(tree.proc, tree.sys, clock=clock).read()
    assert reading.available_bytes is None
    assert "meminfo" in caplog.text


def test_real_process_is_measured_as_it_grows(clock: FakeClock) -> None:
    before = read_memory(Path("/proc"), Path("/sys"), [os.getpid()]).own
    with mmap.mmap(
        -1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as ballast:  # malloc may reuse what it has
        for page in range(0, 32 * MIB, 4096):
            ballast[page] = 1
        after = read_memory(Path("/proc"), Path("/sys"), [os.getpid()]).own
    assert 30 * MIB < after.anonymous_bytes - before.anonymous_bytes < 40 * MIB
