"""A /sys tree of an emulated board: the files that sensors read, kept current by the plant.

Files are written in place, as sysfs shows them: same inode, one write, never an empty moment. The first zone is a decoy
that shows a constant, as `acpitz` does on many boxes; the board's own zone comes second.
"""

from __future__ import annotations

import os
from pathlib import Path

from edgeinfer.artifact.board import Board

_WIDTH = 12
"""Every value is padded to this width, so that a shorter one leaves no rest of the longer one before it."""
_DECOY_MC = 27_800
_CRITICAL_ABOVE_MC = 10_000
_SINCE_BOOT_BITS = 0x40000
_THROTTLED_NOW = 0x4


class BoardTree:
    """The fake tree below `root`. Owns its files' descriptors until `close`."""

    def __init__(self, board: Board, root: Path, *, host_sys: Path = Path("/sys")) -> None:
        self.root = root
        self._board = board
        self._files: dict[str, int] = {}
        self._throttled_once = False
        self._raspberry = any(item.startswith("raspberrypi,") for item in board.compatible)
        self._zones(board)
        self._cpus(board, host_sys)
        if not (root / "fs").exists():
            # Control groups are the machine's own: limits and quotas are real.
            (root / "fs").symlink_to(host_sys / "fs")

    def show(self, temp_c: float, *, throttling: bool) -> None:
        """Let the sensors say this temperature, and whether firmware holds the clock down."""
        lab = self._board.lab
        share = lab.throttled_share if lab is not None and throttling else 1.0
        khz = round(self._board.cpu.max_clock_mhz * 1000 * share)
        self._write("class/thermal/thermal_zone1/temp", round(temp_c * 1000))
        self._write("class/thermal/cooling_device0/cur_state", int(throttling))
        self._write("devices/system/cpu/cpufreq/policy0/scaling_cur_freq", khz)
        self._write("devices/system/cpu/cpufreq/policy0/scaling_max_freq", khz)
        if self._raspberry:
            self._throttled_once |= throttling
            bits = (_THROTTLED_NOW if throttling else 0) | (_SINCE_BOOT_BITS if self._throttled_once else 0)
            self._write("devices/platform/soc/soc:firmware/get_throttled", f"{bits:x}")

    def close(self) -> None:
        """Close the files; the tree stays, with the last values."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _zones(self, board: Board) -> None:
        trip_mc = board.thermal.firmware_trip_c
        self._text("class/thermal/thermal_zone0/type", "acpitz")
        self._text("class/thermal/thermal_zone0/temp", str(_DECOY_MC))
        zone = "class/thermal/thermal_zone1"
        self._text(f"{zone}/type", board.thermal.zones[0])
        for index, (kind, temp_mc) in enumerate((("passive", trip_mc), ("critical", trip_mc + _CRITICAL_ABOVE_MC))):
            self._text(f"{zone}/trip_point_{index}_type", kind)
            self._text(f"{zone}/trip_point_{index}_temp", str(temp_mc))
            self._text(f"{zone}/trip_point_{index}_hyst", "2000")
        self._text("class/thermal/cooling_device0/type", "cpufreq-cpu0")
        self._text("class/thermal/cooling_device0/max_state", "1")

    def _cpus(self, board: Board, host_sys: Path) -> None:
        cpu = "devices/system/cpu"
        try:
            online = (host_sys / cpu / "online").read_text(encoding="ascii").strip()
        except OSError:
            online = f"0-{board.cpu.cores - 1}"
        for name in ("online", "present", "possible"):
            self._text(f"{cpu}/{name}", online)
        self._text(f"{cpu}/cpufreq/policy0/cpuinfo_max_freq", str(board.cpu.max_clock_mhz * 1000))
        self._text(f"{cpu}/cpufreq/policy0/affected_cpus", " ".join(str(index) for index in range(board.cpu.cores)))
        self._text(f"{cpu}/cpufreq/policy0/scaling_governor", "schedutil")

    def _text(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")

    def _write(self, name: str, value: int | str) -> None:
        fd = self._files.get(name)
        if fd is None:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = self._files[name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.pwrite(fd, f"{value}".ljust(_WIDTH).encode() + b"\n", 0)
