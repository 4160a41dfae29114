"""Find the control groups that bind this process, and read their limits, under either version.

A limit anywhere above a process binds it, so every ancestor counts. Each file is read into a defined state: `max`, the
old version's huge number, an empty or missing file and plain garbage are five different things to say, and none of them
may quietly become "the whole machine" or a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from edgeinfer.sensors.probe import read_static

_V1_UNLIMITED_BYTES = 1 << 62
"""Version 1 says "no limit" with the largest multiple of the page size below 2^63, which depends on the page size."""
_MAX_DEPTH = 32


class LimitState(StrEnum):
    """What a limit file said."""

    LIMITED = "limited"
    UNLIMITED = "unlimited"
    MISSING = "missing"
    """No such file: normal at the root of version 2, and where the controller is not enabled."""
    EMPTY = "empty"
    GARBAGE = "garbage"


@dataclass(frozen=True, slots=True)
class Group:
    """One control group that binds the process."""

    path: Path
    version: int
    """1 or 2."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What a group may take and what it has taken."""

    group: Path
    state: LimitState
    limit_bytes: int | None
    """Set exactly when `state` is `limited`."""
    usage_bytes: int | None
    """Charged memory without the file cache, as MemAvailable has it; None when it can't be read.

    Cache that is in use can be dropped too; that this is bad to do shows as refaults (`pressure`)."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """How much CPU time a group may take."""

    group: Path
    state: LimitState
    cores: float | None
    """Quota by period, set exactly when `state` is `limited`."""
    detail: str = ""


def groups(controller: str, proc_root: Path, sys_root: Path) -> list[Group]:
    """Return the groups that bind this process for `controller` (`memory`, `cpu`), innermost first.

    Version 1 where the controller is mounted so, else version 2; empty where there are no control groups.
    """
    text = read_static(proc_root / "self" / "cgroup") or ""
    mount = sys_root / "fs" / "cgroup"
    unified: str | None = None
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(","):
            for folder in (mount / names, mount / controller):
                if folder.is_dir():
                    return _ancestors(folder, path, 1)
        elif hierarchy == "0" and not names:
            unified = path
    if unified is None:
        return []
    hybrid = mount / "unified"
    return _ancestors(hybrid if hybrid.is_dir() else mount, unified, 2)


def _ancestors(mount: Path, path: str, version: int) -> list[Group]:
    """Return the group and its ancestors up to the mount.

    In a container without its own cgroup namespace `path` is the host's and the mount shows only the container's part
    of it: leading components that aren't there are left out.
    """
    parts = [part for part in path.split("/") if part not in {"", ".", ".."}][:_MAX_DEPTH]
    while parts and not (mount / Path(*parts)).is_dir():
        parts = parts[1:]
    found = [Group(mount / Path(*parts[:count]), version) for count in range(len(parts), 0, -1)]
    return [*found, Group(mount, version)] if mount.is_dir() else found


def memory_limit(group: Group) -> MemoryLimit:
    """Return what `group` may take; the lower of `memory.max` and `memory.high` under version 2."""
    if group.version == 1:
        limits = [_bytes_of(group.path / "memory.limit_in_bytes")]
        usage = _usage(group.path / "memory.usage_in_bytes", group.path / "memory.stat", "total_")
    else:
        limits = [_bytes_of(group.path / "memory.max"), _bytes_of(group.path / "memory.high")]
        usage = _usage(group.path / "memory.current", group.path / "memory.stat", "")
    state, limit, detail = limits[0]
    for other_state, other, _ in limits[1:]:  # a limit that only slows down binds us too: we'd be stalled in reclaim
        if other_state is LimitState.LIMITED and other is not None and (limit is None or other < limit):
            state, limit, detail = other_state, other, ""
    return MemoryLimit(group.path, state, limit, usage, detail)


def cpu_limit(group: Group) -> CpuLimit:
    """Return how many cores' time `group` may take."""
    if group.version == 1:
        quota = read_static(group.path / "cpu.cfs_quota_us")
        period = read_static(group.path / "cpu.cfs_period_us")
        words = None if quota is None else [quota, period or ""]
    else:
        text = read_static(group.path / "cpu.max")
        words = None if text is None else text.split(maxsplit=1) or [""]
    if words is None:
        return CpuLimit(group.path, LimitState.MISSING, None)
    if not words[0]:
        return CpuLimit(group.path, LimitState.EMPTY, None, "the quota is empty")
    if words[0] in {"max", "-1"}:
        return CpuLimit(group.path, LimitState.UNLIMITED, None)
    try:
        quota_us, period_us = int(words[0]), int(words[1]) if len(words) > 1 else 100_000
    except ValueError:
        quota_us = period_us = 0
    if quota_us <= 0 or period_us <= 0:
        return CpuLimit(group.path, LimitState.GARBAGE, None, f"{' '.join(words)[:40]!r} is not a quota and a period")
    return CpuLimit(group.path, LimitState.LIMITED, quota_us / period_us)


def parse_limit(text: str | None) -> tuple[LimitState, int | None, str]:
    """Return what the text of a memory limit file means: state, bytes and a remark."""
    if text is None:
        return LimitState.MISSING, None, ""
    if not text:
        return LimitState.EMPTY, None, "the limit is empty"
    if text in {"max", "-1"}:
        return LimitState.UNLIMITED, None, ""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        return LimitState.GARBAGE, None, f"{text[:40]!r} is not a number of bytes"
    if value >= _V1_UNLIMITED_BYTES:
        return LimitState.UNLIMITED, None, ""
    return LimitState.LIMITED, value, ""


def _bytes_of(path: Path) -> tuple[LimitState, int | None, str]:
    state, value, detail = parse_limit(read_static(path))
    return state, value, f"{path.name}: {detail}" if detail else ""


def _usage(current: Path, stat: Path, prefix: str) -> int | None:
    _, used, _ = parse_limit(read_static(current))
    if used is None:
        return None
    cache = {f"{prefix}inactive_file", f"{prefix}active_file"}
    for line in (read_static(stat) or "").splitlines():
        name, _, value = line.partition(" ")
        if name in cache and value.isdigit():
            used -= int(value)
    return max(0, used)
