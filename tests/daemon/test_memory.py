"""The memory budget follows what the machine has left, from fake trees of /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeinfer.clock import NS_PER_S
from edgeinfer.daemon.memory import MemoryBudget

MIB = 1 << 20


@dataclass
class Clock:
    at_ns: int = 0

    def now_ns(self) -> int:
        return self.at_ns


class Machine:
    """A /proc with our process in it."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys, self.clock = folder / "proc", folder / "sys", Clock()
        self.sys.mkdir()
        self.pids: list[int] = []
        self.set(available=1000, own=100)

    def set(self, *, available: int | None, own: int) -> None:
        folder = self.proc / str(os.getpid())
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"MemTotal: {2000 * 1024} kB"]
        if available is not None:
            lines.append(f"MemAvailable: {available * 1024} kB")
        (self.proc / "meminfo").write_text("\n".join(lines) + "\n")
        self.give(os.getpid(), own)

    def give(self, pid: int, own: int) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        rollup = (
            f"0-1 ---p 0 00:00 0 [rollup]\nRss: {own * 1024} kB\nPss: {own * 1024} kB\nAnonymous: {own * 1024} kB\n"
        )
        (folder / "smaps_rollup").write_text(rollup)

    def budget(self, *, ceiling: int = 5000, reserve: int = 200) -> MemoryBudget:
        return MemoryBudget(
            ceiling_bytes=ceiling * MIB, reserve_bytes=reserve * MIB, proc_root=self.proc, sys_root=self.sys,
            pids=lambda: self.pids, clock=self.clock,
        )  # fmt: skip

    def later(self) -> None:
        self.clock.at_ns += NS_PER_S


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_budget_is_what_is_left_and_what_we_have_less_the_reserve(machine: Machine) -> None:
    budget = machine.budget()
    assert budget.ceiling() == (1000 + 100 - 200) * MIB
    machine.set(available=500, own=600)  # we grew by what the machine lost: nothing changed for us
    machine.later()
    assert budget.ceiling() == (500 + 600 - 200) * MIB
    machine.set(available=100, own=600)  # somebody else takes it
    machine.later()
    assert budget.ceiling() == (100 + 600 - 200) * MIB
    machine.set(available=10, own=100)
    machine.later()
    assert budget.ceiling() == 0, "never below zero"


def test_the_configured_ceiling_is_never_passed(machine: Machine) -> None:
    assert machine.budget(ceiling=300).ceiling() == 300 * MIB


def test_zygote_and_workers_count_as_ours(machine: Machine) -> None:
    machine.pids = [77, 78]
    machine.give(77, 50)  # 78 has just gone
    budget = machine.budget()
    assert budget.ceiling() == (1000 + 150 - 200) * MIB
    assert budget.peak_own_bytes == 150 * MIB
    machine.pids = []
    machine.later()
    assert budget.reading().own.held_bytes == 100 * MIB
    assert budget.peak_own_bytes == 150 * MIB


def test_a_machine_that_does_not_tell_has_the_configured_ceiling(machine: Machine) -> None:
    (machine.proc / "meminfo").unlink()
    assert machine.budget(ceiling=300).ceiling() == 300 * MIB


def test_processes_are_not_read_more_than_once_a_second(machine: Machine) -> None:
    budget = machine.budget()
    first = budget.ceiling()
    machine.set(available=1, own=1)
    machine.clock.at_ns += NS_PER_S - 1
    assert budget.ceiling() == first
    machine.clock.at_ns += 1
    assert budget.ceiling() != first
