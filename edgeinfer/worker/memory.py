"""Read what a process's memory is, by the one definition that ledger and reports use. Both sides.

*Anonymous* memory is what a model really takes from the others: the pages that no file backs, each divided by the
processes that share it (a worker shares the zygote's until it writes to them). So the figures of all processes add up
to what is in use. Resident memory includes mapped files, which the page cache may drop and which two workers share.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from edgeinfer.worker.messages import Memory


def read_memory(pid: int | str = "self") -> Memory | None:
    """Return a process's memory, or None when it is gone."""
    status = _kilobytes(f"/proc/{pid}/status")
    if not status or "VmRSS" not in status:
        return None  # gone, or a zombie
    anon = status.get("RssAnon", 0)
    share = _kilobytes(f"/proc/{pid}/smaps_rollup").get("Pss_Anon", anon)
    mapped = status.get("RssFile", 0) + status.get("RssShmem", 0)
    peak = max(anon, status.get("VmHWM", 0) - mapped)
    return Memory(anon_bytes=share, peak_anon_bytes=peak - (anon - share), rss_bytes=status["VmRSS"])


def own_bytes() -> int:
    """Return the anonymous memory that this process shares with no other, its zygote included."""
    fields = _kilobytes("/proc/self/smaps_rollup")
    anonymous = fields.get("Pss_Anon", fields.get("Anonymous", 0))  # Pss_Anon came with Linux 5.4
    return min(anonymous, fields.get("Private_Dirty", anonymous))


def anonymous_bytes(pid: int) -> int:
    """Return the resident anonymous memory of a process, what it shares with its zygote included; 0 when gone. Fast."""
    return _kilobytes(f"/proc/{pid}/status").get("RssAnon", 0)


def resident_file_bytes(pid: int, paths: Iterable[str]) -> int:
    """Return how much of the files at `paths` a process has touched through its mappings; 0 when it is gone.

    Costs about 1 ms for each 100 MiB that the process has mapped.
    """
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    wanted, total, counts = {os.path.realpath(path) for path in paths}, 0, False
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # `address perms offset dev inode path`
            fields = line.split(maxsplit=5)
            counts = len(fields) == 6 and fields[5] in wanted
        elif counts and name == "Rss:":
            total += int(rest.split()[0]) << 10
        elif counts and name == "Anonymous:":  # a private copy is no page of the file any more
            total -= int(rest.split()[0]) << 10
    return total


def data_bytes() -> int:
    """Return the private writable memory of this process, as RLIMIT_DATA counts it."""
    return _kilobytes("/proc/self/status").get("VmData", 0)


def forget_peak() -> None:
    """Start measuring this process's peak afresh, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the peak then includes what came before: too high, never too low


def _kilobytes(path: str) -> dict[str, int]:
    """Return the `Name: 123 kB` lines of a /proc file, in bytes; empty when it cannot be read."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}
