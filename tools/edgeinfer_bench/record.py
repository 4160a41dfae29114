"""What a benchmark leaves behind: one JSON file per benchmark, one schema for all.

A figure carries its goal, so that the verdict can be read later without the code that measured it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

PACKAGES = ("edgeinfer", "onnxruntime", "numpy", "paho-mqtt", "msgspec", "cattrs", "pillow")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, and what it is held against."""

    id: str
    value: float | None
    """None when it could not be measured here; `note` says why."""
    unit: str
    goal: float | None
    better: Literal["lower", "higher"]
    peer: str | None = None
    """What the value is relative to, or stands beside."""
    runs: int = 1
    note: str = ""

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or `-` without a goal or a value."""
        if self.goal is None or self.value is None:
            return "-"
        met = self.value <= self.goal if self.better == "lower" else self.value >= self.goal
        return "met" if met else "missed"


def commit() -> str:
    """Return the checkout's commit, with `+` when the tree differs from it, or `unknown`."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head}+" if _git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True, timeout=10)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "Model")):
            model = line.partition(":")[2].strip()
            break
    memory_kib = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1])
    return {
        "cpu": model,
        "architecture": platform.machine(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_mib": memory_kib // 1024,
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "load_average": round(os.getloadavg()[0], 2),
        "nice": os.nice(0),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


@dataclass(slots=True)
class Record:
    """The whole of build/bench/NAME.json."""

    bench: str
    workload: dict[str, Any]
    """Model digest, concurrency, where the clock starts and stops."""
    figures: list[Figure]
    commit: str = field(default_factory=commit)
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)


def write_record(record: Record, folder: Path) -> Path:
    """Write the record and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.bench}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(record)), indent=2) + b"\n")
    return path


def read_records(folder: Path) -> list[Record]:
    """Return every record of the folder, by name."""
    return [msgspec.json.decode(path.read_bytes(), type=Record) for path in sorted(folder.glob("*.json"))]
