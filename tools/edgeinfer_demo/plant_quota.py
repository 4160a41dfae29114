"""Slow processes down for real, as a lower clock would: a control group with a CPU quota.

Needs a writable `cpu` controller (root, or a delegated group). Where there is none, `open_quota` says so and the plant
only pretends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from edgeinfer.sensors.cgroup import groups

_PERIOD_US = 10_000
"""The kernel's default of 100 ms would make short runs either unaffected or stalled; the shortest allowed is 1 ms."""


class CpuQuota:
    """One control group below our own. Owner calls `close`."""

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._version = version

    def add(self, pids: Iterable[int]) -> None:
        """Move processes in; what they fork later is born inside."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                _write(self._folder / "cgroup.procs", str(pid))

    def set(self, cores: float | None) -> None:
        """Allow the time of so many cores together; None: no limit."""
        quota_us = None if cores is None else max(1000, round(cores * _PERIOD_US))
        if self._version == 2:
            _write(self._folder / "cpu.max", f"{'max' if quota_us is None else quota_us} {_PERIOD_US}")
        else:
            _write(self._folder / "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us))

    def close(self) -> None:
        """Lift the limit, move everyone back to our own group, and remove the group."""
        with contextlib.suppress(OSError):
            self.set(None)
        with contextlib.suppress(OSError):
            for pid in (self._folder / "cgroup.procs").read_text(encoding="ascii").split():
                with contextlib.suppress(OSError):
                    _write(self._folder.parent / "cgroup.procs", pid)
            self._folder.rmdir()


def open_quota(name: str, *, proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> CpuQuota | str:
    """Return a control group named `name` below our own, or why there can't be one."""
    found = groups("cpu", proc_root, sys_root)
    if not found:
        return "no cpu controller is mounted"
    parent = found[0]
    folder = parent.path / name
    try:
        folder.mkdir()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    quota = CpuQuota(folder, parent.version)
    try:
        if parent.version == 1:
            _write(folder / "cpu.cfs_period_us", str(_PERIOD_US))
        quota.set(None)
    except OSError as error:
        folder.rmdir()
        return f"{folder}: {error.strerror} (the cpu controller is not delegated)"
    return quota


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
