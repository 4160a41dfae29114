"""Describe a board: what its hardware is, where its firmware throttles, and what we allow ourselves.

One file per board in device-configs/; `board = "auto"` finds it by the device tree's compatible strings, else by the
CPU's name, else by architecture. The toolchain builds *for* a board file, the daemon runs *with* one, the lab emulates
one. Every number has a source, in the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer.artifact.board_bounds import check_bounds
from edgeinfer.errors import ConfigError, Problem
from edgeinfer.limits import ThermalLevel
from edgeinfer.quantity import Bytes, MilliCelsius, Nanoseconds

GENERIC = {"aarch64": "generic-arm64", "x86_64": "generic-x86"}
"""The board file of an architecture's machines that no other file fits."""
_ROOM_MC = 2_000
"""Between the last trip and the firmware's: a board warms by about a degree a second."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, as the toolchain needs to know it."""

    architecture: str
    """`aarch64` or `x86_64`."""
    cores: int
    max_clock_mhz: int
    instruction_sets: list[str]
    """/proc/cpuinfo flags that every board of this kind has (`asimddp`, `avx2`, `avx512_vnni`, …)."""
    models: list[str] = field(default_factory=list)
    """Parts of /proc/cpuinfo's `model name` by which `auto` finds the board where there is no device tree."""


@dataclass(frozen=True, slots=True)
class Memory:
    """How much there is and how much of it is ours."""

    total: Bytes
    ceiling: Bytes
    """Most that models and their workers may take."""
    reserve: Bytes = Bytes(64 << 20)
    """Left free for the rest of the system, whatever the ceiling says."""
    bandwidth_mb_s: int | None = None
    """What copying moves, reads and writes together, in 10^6 bytes a second; only the toolchain's estimates use it."""


@dataclass(frozen=True, slots=True)
class Trip:
    """A temperature at which we act, and how."""

    level: str
    """`warm`, `hot` or `critical`."""
    at_c: MilliCelsius
    """Reached: the level begins."""
    hysteresis_c: MilliCelsius
    """The level ends this far below `at_c`."""
    duty_cycle: float
    """Share of the time that local workers may run when `at_c` is reached; between two trips it is interpolated."""

    @property
    def thermal_level(self) -> ThermalLevel:
        """The level as the governor knows it."""
        return ThermalLevel[self.level.upper()]


@dataclass(frozen=True, slots=True)
class UnusedZone:
    """A zone that the board has and that must not be taken for the CPU's temperature."""

    zone: str
    """Its type."""
    why: str
    """What it is, or how it lies; `edgeinfer sensors` says it."""


@dataclass(frozen=True, slots=True)
class Thermal:
    """Which zones to believe, and the trip points."""

    zones: list[str]
    """Types of the thermal zones that tell the CPU's temperature, in order of preference (`cpu-thermal`).

    `hwmon:CHIP` or `hwmon:CHIP/LABEL` names a temperature of hwmon, asked while no such zone can be believed.
    """
    firmware_trip_c: MilliCelsius
    """Where firmware or kernel throttles; every trip of ours lies below."""
    trips: list[Trip]
    dwell: Nanoseconds = Nanoseconds(5_000_000_000)
    """Shortest stay in a level before it may fall again."""
    fault_duty_cycle: float = 0.5
    """Duty cycle while no zone can be believed."""
    trips_from_kernel: bool = False
    """For boards that are not known exactly: all trips move with the first passive trip that the kernel has."""
    unused: list[UnusedZone] = field(default_factory=list)
    """Zones that are known to lie, or to tell something else."""


@dataclass(frozen=True, slots=True)
class Power:
    """What tells how much power the board draws."""

    rails: list[str] = field(default_factory=list)
    """Labels of hwmon rails and names of powercap domains, in order of preference; one is read, none are added up."""


@dataclass(frozen=True, slots=True)
class LabModel:
    """First-order thermal model of the board for the device lab: T' = (ambient + R * P - T) / (R * C)."""

    resistance_c_per_w: float
    capacity_j_per_c: float
    idle_w: float
    watt_per_core: float
    """Power of one busy core at the highest clock."""
    throttled_share: float = 0.5
    """Share of the clock that firmware leaves while it throttles."""
    throttle_hysteresis_c: float = 3.0
    """Firmware lets go when the board is this much cooler than `thermal.firmware_trip_c`, in degrees."""


@dataclass(frozen=True, slots=True)
class Board:
    """The whole of a board file."""

    name: str
    description: str
    cpu: Cpu
    memory: Memory
    thermal: Thermal
    compatible: list[str] = field(default_factory=list)
    """Device-tree compatible strings that identify it."""
    quirks: list[str] = field(default_factory=list)
    """For people: which sensors lie, what is special."""
    sources: list[str] = field(default_factory=list)
    """Where the numbers come from."""
    power: Power = field(default_factory=Power)
    lab: LabModel | None = None


def load_board(path: Path) -> Board:
    """Read a board file.

    Raises:
        ConfigError: with every problem found.
    """
    from edgeinfer.toml_file import load_toml, make_converter, structure  # noqa: PLC0415 - cattrs: 4 MB for one file

    return structure(load_toml(path), Board, str(path), make_converter(), check_board)


def check_board(board: Board) -> list[Problem]:
    """Return what contradicts itself; None stands for a trip that could not be read."""
    problems = list(check_bounds(board))
    if board.cpu.architecture not in GENERIC:
        problems.append(Problem("cpu.architecture", f"{board.cpu.architecture!r} is not {' or '.join(GENERIC)}"))
    if board.memory.ceiling > board.memory.total:
        problems.append(Problem("memory.ceiling", "is more than memory.total"))
    previous: Trip | None = None
    trips: Sequence[Trip | None] = board.thermal.trips
    for index, trip in enumerate(trips):
        path = f"thermal.trips[{index}]"
        if trip is None:
            continue
        if trip.level not in {"warm", "hot", "critical"}:
            problems.append(Problem(f"{path}.level", f"{trip.level!r} is not warm, hot or critical"))
            continue
        if trip.at_c >= board.thermal.firmware_trip_c:
            problems.append(Problem(f"{path}.at_c", "is not below thermal.firmware_trip_c: firmware would act first"))
        if trip.level == "critical" and 0 < trip.duty_cycle <= 1:
            problems.append(Problem(f"{path}.duty_cycle", f"{trip.duty_cycle} is not 0: critical means no local work"))
        if previous is not None and not (
            trip.thermal_level > previous.thermal_level
            and trip.at_c > previous.at_c
            and trip.duty_cycle <= previous.duty_cycle
        ):
            problems.append(
                Problem(path, "trips must rise in level and temperature, and never allow more than the one before")
            )
        previous = trip
    if not trips:
        problems.append(Problem("thermal.trips", "has no trip: at least `critical` is needed"))
    return problems + _check_zones(board.thermal)


def _check_zones(thermal: Thermal) -> list[Problem]:
    """Return zones that are no names, come twice, or are both used and unused."""
    problems, seen = [], set()
    zones: Sequence[str | None] = thermal.zones
    for index, zone in enumerate(zones):
        if zone is None:
            continue
        name = zone.strip().lower().replace("_", "-")
        if not name or name == "hwmon:" or name.startswith("hwmon:/"):
            problems.append(Problem(f"thermal.zones[{index}]", f"{zone!r} names no zone and no chip of hwmon"))
        elif name in seen:
            problems.append(Problem(f"thermal.zones[{index}]", f"{zone!r} comes twice ('-' and '_' are alike)"))
        seen.add(name)
    unused: Sequence[UnusedZone | None] = thermal.unused
    for index, item in enumerate(unused):
        if item is not None and item.zone.strip().lower().replace("_", "-") in seen:
            problems.append(Problem(f"thermal.unused[{index}].zone", f"{item.zone!r} is in thermal.zones, too"))
    return problems


def doubts(board: Board) -> list[Problem]:
    """Return what is odd in a sound board file: no error, but hardly meant."""
    found, trips = [], board.thermal.trips
    for index, (cooler, hotter) in enumerate(itertools.pairwise(trips)):
        if hotter.at_c - cooler.at_c < max(cooler.hysteresis_c, hotter.hysteresis_c):
            text = (
                "is closer to the one before than their hysteresis: a swing of that size crosses both, again and again"
            )
            found.append(Problem(f"thermal.trips[{index + 1}].at_c", text))
    if board.thermal.firmware_trip_c - trips[-1].at_c < _ROOM_MC:
        text = f"leaves less than {_ROOM_MC / 1000:g} C to firmware_trip_c: one late sample, and firmware acts"
        found.append(Problem(f"thermal.trips[{len(trips) - 1}].at_c", text))
    if not board.thermal.zones:
        found.append(Problem("thermal.zones", "is empty: fault_duty_cycle holds for ever"))
    if board.memory.ceiling + board.memory.reserve > board.memory.total:
        found.append(Problem("memory.ceiling", "and memory.reserve are more than memory.total together"))
    if not board.sources:
        found.append(Problem("sources", "is empty: nobody can tell where the numbers come from"))
    return found


def known_boards(folder: Path | None = None) -> dict[str, Path]:
    """Return the board files by name: those of `folder`, or the ones that came with edgeinfer."""
    root = folder or shipped_boards()
    return {path.stem: path for path in sorted(root.glob("*.toml"))}


def shipped_boards() -> Path:
    """Return the folder of the board files that came with this installation."""
    return Path(__file__).resolve().parents[1] / "device-configs"


def find_board(folder: Path | None = None, *, proc_root: Path = Path("/proc"), machine: str) -> Path:
    """Return the board file of this machine: by device tree, else by the CPU's name, else a generic one.

    Raises:
        ConfigError: no file fits.
    """
    boards = known_boards(folder)
    tables = {path: _claims(path) for path in boards.values()}
    try:
        raw = (proc_root / "device-tree" / "compatible").read_bytes()
    except OSError:
        raw = b""
    compatible = [item.decode("ascii", "replace") for item in raw.split(b"\0") if item]
    for wanted in compatible:  # most specific first
        for path, (names, _) in tables.items():
            if wanted in names:
                return path
    model = _cpu_model(proc_root) if machine == "x86_64" else ""
    for path, (_, models) in tables.items():
        if any(part and part in model for part in models):
            return path
    generic = GENERIC.get(machine)
    if generic in boards:
        return boards[generic]
    raise ConfigError(
        "board",
        (Problem("board", f"no board file fits {machine} {compatible}; name one (known: {', '.join(boards)})"),),
    )


def _claims(path: Path) -> tuple[list[str], list[str]]:
    """Return by which compatible strings and CPU names a board file is found; the file itself is checked later.

    Raises:
        ConfigError: no TOML.
    """
    from edgeinfer.toml_file import load_toml  # noqa: PLC0415 - as above

    table = load_toml(path)
    cpu = table.get("cpu")
    lists = (table.get("compatible"), cpu.get("models") if isinstance(cpu, dict) else None)
    first, second = (
        [item for item in claims if isinstance(item, str)] if isinstance(claims, list) else [] for claims in lists
    )
    return first, second


def _cpu_model(proc_root: Path) -> str:
    """Return the first CPU's name; empty where the kernel tells none (Arm)."""
    try:
        with (proc_root / "cpuinfo").open(encoding="ascii", errors="replace") as file:
            lines = file.read(1 << 16).splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
