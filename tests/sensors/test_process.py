from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.sensors.process import process_time, process_tree
from tests.sensors.tree import FakeTree


def stat(pid: int, parent: int, *, user: int = 0, system: int = 0, reaped: int = 0, name: str = "x") -> str:
    return f"{pid} ({name}) S {parent} 1 1 0 -1 4194304 1 2 3 4 {user} {system} {reaped} 0 20 0 1 0 777 1 1\n"


def test_tree_is_the_root_and_all_its_descendants(tree: FakeTree) -> None:
    for pid, parent in ((1, 0), (10, 1), (11, 10), (12, 11), (20, 1), (13, 10)):
        tree.write(tree.proc / str(pid) / "stat", stat(pid, parent))
    assert {item.pid for item in process_tree(tree.proc, 10)} == {10, 11, 12, 13}
    assert process_tree(tree.proc, 99) == []


def test_name_with_spaces_and_parentheses(tree: FakeTree) -> None:
    tree.write(tree.proc / "10" / "stat", stat(10, 7, user=50, system=25, reaped=10, name="a) S 1 (b"))
    found = process_time(tree.proc, 10)
    assert found is not None
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert (found.parent, found.started_ticks, found.cpu_ns, found.reaped_ns) == (7, 777, 75 * tick_ns, 10 * tick_ns)


@pytest.mark.slow
def test_time_of_a_child_that_ended_is_found_with_its_parent() -> None:
    def total() -> int:
        return sum(item.cpu_ns + item.reaped_ns for item in process_tree(Path("/proc"), os.getpid()))

    before, own = total(), os.times()
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    spent_here_s = sum(os.times()[:2]) - sum(own[:2])
    assert 0.28 < (total() - before) / 1e9 - spent_here_s < 1.0
