"""Tell what processes take: memory and CPU time, and which processes descend from which.

Reads /proc by itself because it may be a fake one, and because psutil has no `smaps_rollup`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.sensors.probe import read_static

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of some processes together; shared pages are counted once among them, as far as the kernel tells."""

    pss_bytes: int
    """Proportional set size: own pages, and of each shared page this process's part."""
    anonymous_bytes: int
    """What belongs to no file: it can't be dropped, only swapped or freed."""
    shm_bytes: int = 0
    """Of memfds and shared memory (tensor slots), proportionally: it can't be dropped either."""
    private_bytes: int = 0
    """Of `anonymous_bytes`, what no other process has as well: a worker shares its zygote's pages until it writes."""
    estimated: int = 0
    """Processes whose exact figures weren't readable, and were taken from `statm` (resident without shared)."""

    @property
    def held_bytes(self) -> int:
        """What would be free if these processes ended; mapped files are not in it: the kernel counts them available."""
        return self.anonymous_bytes + self.shm_bytes


def process_memory(proc_root: Path, pids: Iterable[int]) -> ProcessMemory:
    """Return what `pids` take together; one that has ended meanwhile counts nothing."""
    return together(process_memories(proc_root, pids).values())


def process_memories(proc_root: Path, pids: Iterable[int]) -> dict[int, ProcessMemory]:
    """Return what each of `pids` takes, without those that have ended.

    Walks page tables: about 1 ms for each 100 MiB that are mapped, so not for every request.
    """
    found = {pid: _process(proc_root / str(pid)) for pid in pids}
    return {pid: memory for pid, memory in found.items() if memory is not None}


def together(memories: Iterable[ProcessMemory]) -> ProcessMemory:
    """Return the sum."""
    pss = anonymous = shm = private = estimated = 0
    for memory in memories:
        pss, anonymous, shm = pss + memory.pss_bytes, anonymous + memory.anonymous_bytes, shm + memory.shm_bytes
        private, estimated = private + memory.private_bytes, estimated + memory.estimated
    return ProcessMemory(pss, anonymous, shm, private, estimated)


def _process(folder: Path) -> ProcessMemory | None:
    fields = _kib_fields(read_static(folder / "smaps_rollup") or "")
    if "Pss" in fields:
        # Pss_Anon came with Linux 5.4; before that, anonymous pages count in full.
        anonymous = fields.get("Pss_Anon", fields.get("Anonymous", 0))
        # Private pages of slots are dirty too, but those are mapped here and in the daemon, so they are shared.
        private = min(anonymous, fields.get("Private_Dirty", anonymous))
        return ProcessMemory(fields["Pss"], anonymous, fields.get("Pss_Shmem", 0), private)
    numbers = (read_static(folder / "statm") or "").split()
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers[:3]):
        return None
    resident = max(0, int(numbers[1]) - int(numbers[2])) * _PAGE_BYTES
    return ProcessMemory(resident, resident, 0, resident, 1) if resident else None


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """One process, its parent, and the CPU time it has used since it started."""

    pid: int
    parent: int
    started_ticks: int
    """With `pid`, what identifies it: numbers are used again."""
    cpu_ns: int
    reaped_ns: int
    """Of its descendants that have ended and were waited for: summed over a living tree nothing is lost or doubled."""


def process_time(proc_root: Path, pid: int) -> ProcessTime | None:
    """Return the CPU time of a process in steps of a clock tick (10 ms); None when it has ended."""
    text = read_static(proc_root / str(pid) / "stat")
    if not text:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name may hold spaces and parentheses
    own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return ProcessTime(pid, int(fields[1]), int(fields[19]), own * _NS_PER_TICK, reaped * _NS_PER_TICK)


def process_tree(proc_root: Path, root: int) -> list[ProcessTime]:
    """Return `root` and all its descendants; empty when it has ended."""
    by_parent: dict[int, list[ProcessTime]] = {}
    alive: dict[int, ProcessTime] = {}
    for entry in proc_root.iterdir():
        if entry.name.isdigit() and (found := process_time(proc_root, int(entry.name))):
            alive[found.pid] = found
            by_parent.setdefault(found.parent, []).append(found)
    tree = [alive[root]] if root in alive else []
    for item in tree:  # grows while it is walked
        tree.extend(by_parent.get(item.pid, ()))
    return tree


def _kib_fields(text: str) -> dict[str, int]:
    """Return the `Name:   12 kB` lines of a /proc file in bytes."""
    fields = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[0].endswith(":") and words[1].isdigit() and words[2] == "kB":
            fields[words[0][:-1]] = int(words[1]) << 10
    return fields
