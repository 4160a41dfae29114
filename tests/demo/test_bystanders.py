"""What other programs use is told apart from what the demo's own processes use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeinfer.clock import NS_PER_S
from edgeinfer_demo.bystanders import Bystanders, note


@dataclass
class Clock:
    at_ns: int = 0

    def now_ns(self) -> int:
        return self.at_ns


def write(proc: Path, *, busy_s: int, own_s: int) -> None:
    """A machine with one process of ours, pid 7, and its child 8, in ticks of 10 ms."""
    (proc / "stat").write_text(f"cpu  {busy_s * 50} 0 {busy_s * 50} 99999 5 0 0 0 0 0\ncpu0 1 2 3\n")
    for pid, parent in ((7, 1), (8, 7)):
        (proc / str(pid)).mkdir(parents=True, exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(own_s * 50), "0", "0", "0", *["0"] * 4, "77", *["0"] * 10]
        (proc / str(pid) / "stat").write_text(f"{pid} (edge) {' '.join(fields)}\n")


def test_only_what_others_used_counts(tmp_path: Path) -> None:
    clock = Clock()
    write(tmp_path, busy_s=100, own_s=10)
    bystanders = Bystanders(tmp_path, root_pid=7, clock=clock)
    clock.at_ns = 20 * NS_PER_S
    write(tmp_path, busy_s=135, own_s=15)
    assert bystanders.cores() == (35 - 5) / 20


def test_a_busy_machine_is_said_and_a_quiet_one_is_not() -> None:
    assert note(0.1, 2) == ""
    assert "1.4 of this machine's 2 cores" in note(1.4, 2)
