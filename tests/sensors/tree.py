"""A /sys and /proc made of files, as a board would show them."""

from __future__ import annotations

from pathlib import Path


class FakeClock:
    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def now_ns(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


class FakeTree:
    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.proc = root / "proc"
        self.sys.mkdir(parents=True)
        self.proc.mkdir(parents=True)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def zone(self, index: int, kind: str, temp: int | str, trips: list[tuple[str, int]] | None = None) -> Path:
        folder = self.sys / "class" / "thermal" / f"thermal_zone{index}"
        self.write(folder / "type", f"{kind}\n")
        self.write(folder / "temp", f"{temp}\n")
        for number, (trip_kind, trip_mc) in enumerate(trips or []):
            self.write(folder / f"trip_point_{number}_type", f"{trip_kind}\n")
            self.write(folder / f"trip_point_{number}_temp", f"{trip_mc}\n")
            self.write(folder / f"trip_point_{number}_hyst", "2000\n")
        return folder

    def cooler(self, index: int, kind: str, state: int) -> None:
        folder = self.sys / "class" / "thermal" / f"cooling_device{index}"
        self.write(folder / "type", f"{kind}\n")
        self.write(folder / "cur_state", f"{state}\n")

    def cgroup_v2(self, path: str, **files: str) -> None:
        self.write(self.proc / "self" / "cgroup", f"0::{path}\n")
        folder = self.sys / "fs" / "cgroup" / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        self.group(path, **files)

    def group(self, path: str, **files: str) -> None:
        """Write files of a group, whose names are given with `_` for `.`."""
        folder = self.sys / "fs" / "cgroup" / path.strip("/")
        for name, text in files.items():
            self.write(folder / name.replace("_", ".", 1), text)

    def cpus(self, allowed: str, online: str) -> None:
        self.write(self.proc / "self" / "status", f"Name:\tx\nCpus_allowed_list:\t{allowed}\n")
        self.write(self.sys / "devices" / "system" / "cpu" / "online", f"{online}\n")
