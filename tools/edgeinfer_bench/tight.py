"""Hold processes under a memory limit, and take files out of the page cache: what a small board is like.

Control groups of version 1 only; where one may not be made, `OSError` says so and the figure is null.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup/memory")
_EMPTY_WITHIN_S: Final = 5.0


def own_group(listing: str) -> str:
    """Return the memory group of a process from its /proc/PID/cgroup.

    Raises:
        OSError: it is in none of version 1.
    """
    for line in listing.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path
    raise OSError("there are no memory control groups of version 1 here")


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[Path]:
    """Make a group with that limit below our own; `move` processes into it, which must have ended after the body.

    Raises:
        OSError: it may not be made here.
    """
    ours = _ROOT / own_group(Path("/proc/self/cgroup").read_text(encoding="ascii")).lstrip("/")
    group = ours / f"edgeinfer-bench-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes), encoding="ascii")
        yield group
    finally:
        _remove(group)


def move(group: Path, pids: Iterable[int]) -> None:
    """Put processes, and what they start from now on, into the group."""
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid), encoding="ascii")


def forget(files: Iterable[Path]) -> None:
    """Take files out of the page cache; what somebody has mapped stays."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)  # a page that is not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _remove(group: Path) -> None:
    """Remove the group once its last process is gone; one that stays is left to the machine's end."""
    deadline = time.monotonic() + _EMPTY_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
