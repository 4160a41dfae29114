"""The memory budget follows what the machine has left, from fake trees of /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeinfer.clock import NS_PER_S
from edgeinfer.daemon.memory import MemoryBudget, MemoryWatch
from edgeinfer.errors import BudgetExceeded
from edgeinfer.execution.ledger import OURSELVES, OUTGROWN, MemoryLedger
from edgeinfer.execution.pressure import Pressure
from edgeinfer.gateway.bounds import bounds_within

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

    def psi(self, *, some: float) -> None:
        """Say how much work in our control group waits for memory."""
        (self.proc / "self").mkdir(exist_ok=True)
        (self.proc / "self" / "cgroup").write_text("0::/box\n")
        folder = self.sys / "fs" / "cgroup" / "box"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.pressure").write_text(f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=0\n")

    def give(self, pid: int, own: int, *, private: int | None = None) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        rollup = (
            f"0-1 ---p 0 00:00 0 [rollup]\nRss: {own * 1024} kB\nPss: {own * 1024} kB\nAnonymous: {own * 1024} kB\n"
        )
        if private is not None:
            rollup += f"Private_Dirty: {private * 1024} kB\n"
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


class Watched:
    """A machine with a zygote (77) and workers, and the ledger that is kept true to it."""

    def __init__(self, machine: Machine, *, ceiling: int = 5000) -> None:
        self.machine = machine
        machine.pids = [77]
        machine.give(77, 30)
        self.ledger = MemoryLedger(ceiling * MIB)
        self.beyond = 0
        self.seen: dict[int, int] = {}
        self.watch = MemoryWatch(
            machine.budget(ceiling=ceiling), self.ledger, zygote=lambda: 77, outgrown=self.look, clock=machine.clock
        )

    def look(self, own_bytes: Mapping[int, int]) -> int:
        self.seen = dict(own_bytes)
        return self.beyond

    def step(self, seconds: int = 1) -> int:
        ceiling = 0
        for _ in range(seconds):
            self.machine.later()
            ceiling = self.watch.step()
        return ceiling

    @property
    def ours(self) -> int:
        return self.ledger.snapshot().by_owner.get(OURSELVES, 0) // MIB


def test_daemon_and_zygote_are_charged_what_they_take_and_workers_only_what_is_their_own(machine: Machine) -> None:
    watched = Watched(machine)
    assert watched.step() == (1000 + 130 - 200) * MIB
    assert watched.ours == 130
    machine.pids = [77, 78]
    machine.give(77, 20)  # ten of its thirty are now counted with the worker, which shares them
    machine.give(78, 60, private=50)
    watched.step()
    assert watched.ours == 130
    assert watched.seen == {78: 50 * MIB}


def test_the_daemons_growth_is_charged_within_a_second_and_given_back_after_ten(machine: Machine) -> None:
    watched = Watched(machine)
    watched.step()
    machine.give(os.getpid(), 140)
    watched.step()
    assert watched.ours == 170
    machine.give(os.getpid(), 139)
    watched.step(30)
    assert watched.ours == 170, "so little is not worth a change"
    machine.give(os.getpid(), 100)
    watched.step(9)
    machine.give(os.getpid(), 140)  # the collector has run, and the daemon grows again
    watched.step()
    machine.give(os.getpid(), 100)
    watched.step(10)
    assert watched.ours == 170
    watched.step()
    assert watched.ours == 130


def test_growth_that_does_not_fit_is_charged_too_and_somebody_has_to_give_way(machine: Machine) -> None:
    watched = Watched(machine, ceiling=300)
    watched.step()
    model = watched.ledger.reserve("model", 160 * MIB)
    machine.give(os.getpid(), 150)
    watched.step()
    assert watched.ledger.overdrawn_bytes == 40 * MIB
    model.release()
    assert watched.ledger.overdrawn_bytes == 0
    watched.beyond = 50 * MIB
    watched.step()
    assert watched.ledger.snapshot().by_owner == {OURSELVES: 180 * MIB, OUTGROWN: 50 * MIB}
    watched.beyond = 0
    watched.step()
    assert OUTGROWN not in watched.ledger.snapshot().by_owner


def test_pressure_lowers_the_ceiling_says_why_and_lets_it_recover(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(machine)
    full = watched.step()
    watched.ledger.reserve("model", 100 * MIB)
    machine.psi(some=35.0)
    held = watched.step(4)
    assert held == watched.ledger.snapshot().reserved_bytes < full
    assert watched.watch.pressure.level is Pressure.HIGH
    assert "memory pressure level=high was=none" in caplog.text
    with pytest.raises(BudgetExceeded, match="memory pressure: work waits for memory 35 % of the time"):
        watched.ledger.share("weights of a model", 10 * MIB)
    assert watched.step(5) < held
    machine.psi(some=0.0)
    assert watched.step(100) == full
    assert watched.ledger.snapshot().why_lowered.startswith("the machine has 1000 MiB left; 130 MiB is in use")
    watched.ledger.share("weights of a model", 10 * MIB)


def test_a_ceiling_below_the_configured_one_says_what_binds_it_and_how_much_of_that_is_ours(machine: Machine) -> None:
    (machine.proc / "self").mkdir()
    (machine.proc / "self" / "cgroup").write_text("0::/box\n")
    box = machine.sys / "fs" / "cgroup" / "box"
    box.mkdir(parents=True)
    (box / "memory.max").write_text(f"{600 * MIB}\n")
    (box / "memory.current").write_text(f"{350 * MIB}\n")
    watched = Watched(machine, ceiling=300)
    assert watched.step() == (600 - 350 + 130 - 200) * MIB
    why = watched.ledger.snapshot().why_lowered
    assert f"the control group {box} has 350 MiB of 600 MiB in use; 130 MiB is in use by edgeinfer" in why
    assert "200 MiB stays free (memory.reserve)" in why
    with pytest.raises(BudgetExceeded, match="has 350 MiB of 600 MiB in use") as caught:
        watched.ledger.reserve("model", 200 * MIB)
    assert "raise memory.ceiling" not in str(caught.value), "that would not help"
    (box / "memory.current").write_text(f"{100 * MIB}\n")
    assert watched.step() == 300 * MIB
    assert watched.ledger.snapshot().why_lowered == ""


def test_nothing_is_done_twice_within_a_second(machine: Machine) -> None:
    watched = Watched(machine)
    watched.step()
    machine.give(os.getpid(), 500)
    machine.clock.at_ns += NS_PER_S // 2
    watched.watch.step()
    assert watched.ours == 130


def test_what_another_reservation_covers_is_not_charged_to_the_daemon_as_well(machine: Machine) -> None:
    watched = Watched(machine)
    buffers = watched.ledger.reserve("gateway", 40 * MIB)
    in_use = 0
    watched.watch.charged_elsewhere(buffers, lambda: in_use)
    watched.step()
    assert watched.ours == 130
    in_use = 30 * MIB
    machine.give(os.getpid(), 130)  # thirty more, which are the gateway's
    watched.step()
    assert watched.ours == 130
    in_use = 60 * MIB  # more than was reserved for it: the rest is ours to explain
    machine.give(os.getpid(), 160)
    watched.step()
    assert watched.ours == 150


def test_the_pages_example_adds_up_and_charges_the_gateway_what_the_code_does() -> None:
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    table = page[page.index("The README's device, with a budget of 1 GiB") :]
    table = table[: table.index("### ")]
    rows = [(what, int(size)) for what, size in re.findall(r"^\| (.+?) \| (\d+) \|$", table, re.MULTILINE)]
    assert dict(rows)["gateway"] == round(bounds_within(1 << 30).buffer_bytes / MIB)
    *parts, (_, together) = rows
    assert sum(size for _, size in parts) == together
    assert f"{1024 - together} are free" in table
