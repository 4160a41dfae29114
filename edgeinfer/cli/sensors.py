"""`edgeinfer sensors`: what this board has, what is used of it, and why. Needs no daemon and changes nothing."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.cli.arguments import DEFAULT_CONFIG, Commands

if TYPE_CHECKING:
    from edgeinfer.config import DeviceConfig
    from edgeinfer.sensors.findings import Finding
    from edgeinfer.sensors.survey import Survey


def add_sensors(commands: Commands) -> None:
    """Add `edgeinfer sensors`."""
    sensors = commands.add_parser("sensors", help="which sensors this board has, what is used and why")
    sensors.add_argument("--config", type=Path, help=f"device.toml (default: {DEFAULT_CONFIG}, where it exists)")
    sensors.add_argument("--board", help="a board's name or file; default: as device.toml says, else auto")
    sensors.add_argument("--json", action="store_true", help="print everything as JSON")
    sensors.set_defaults(act=_sensors)


def _sensors(args: argparse.Namespace) -> int:
    import time
    from dataclasses import replace

    from edgeinfer.clock import MonotonicClock
    from edgeinfer.daemon.reading import find_own_board
    from edgeinfer.sensors.survey import survey

    config = _config(args.config)
    if args.board is not None:
        config = replace(config, board=args.board)
    logging.getLogger("edgeinfer").setLevel(logging.CRITICAL)  # what is wrong with a sensor is in the list
    paths = config.paths
    board = find_own_board(config)
    found = survey(board, paths.sys_root, paths.proc_root, clock=MonotonicClock(), sleep=time.sleep)
    print(json.dumps(as_json(found), indent=2) if args.json else describe(found))
    return 0


def _config(path: Path | None) -> DeviceConfig:
    from edgeinfer.config import DeviceConfig, load_device_config

    if path is None and not DEFAULT_CONFIG.exists():
        return DeviceConfig()
    return load_device_config(path or DEFAULT_CONFIG)


def as_json(found: Survey) -> dict[str, Any]:
    """Return a survey as JSON; numbers in millidegrees, hertz and milliwatts."""
    reading = found.reading
    return {
        "board": found.board,
        "temperature": {
            "zone": reading.thermal.zone,
            "temp_mc": reading.thermal.temp_mc,
            "state": reading.thermal.state,
            "detail": reading.thermal.detail,
        },
        "slowdown": reading.firmware.slowdown,
        "throttle_flags": None if reading.firmware.flags is None else reading.firmware.flags.bits,
        "power": {
            "source": reading.power.source,
            "state": reading.power.state,
            "power_mw": reading.power.power_mw,
            "energy_j": round(reading.power.total_j, 3),
            "seconds": round(reading.power.known_s, 3),
        },
        "sensors": [_row(item) for item in found.findings],
        "remarks": list(found.remarks),
    }


def _row(item: Finding) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": item.kind, "where": item.where, "name": item.name, "state": item.state, "value": item.value,
        "number": item.number, "used": item.used, "why": item.why,
    }  # fmt: skip
    if item.trips:
        trips = [{"kind": t.kind, "temp_mc": t.temp_mc, "hysteresis_mc": t.hysteresis_mc} for t in item.trips]
        row["trips"] = trips
    return row


def describe(found: Survey) -> str:
    """Return a survey for people: `*` marks what is used."""
    lines = [f"board {found.board}   (* is used)"]
    kind = ""
    width = max((len(_title(item)) for item in found.findings), default=0)
    for item in found.findings:
        if item.kind != kind:
            kind = item.kind
            lines += ["", kind]
        said = item.value or item.state
        lines.append(f"{'*' if item.used else ' '} {_title(item):<{width}}  {said:>14}  {item.why}")
        if item.trips:
            trips = ", ".join(f"{trip.kind} {trip.temp_mc / 1000:.1f} C" for trip in item.trips)
            lines.append(
                f"  {'':<{width}}  {'':>14}  {'limits' if item.name.startswith('hwmon:') else 'kernel trips'}: {trips}"
            )
    lines += ["", *(f"! {remark}" for remark in found.remarks)] if found.remarks else []
    return "\n".join(lines)


def _title(item: Finding) -> str:
    return " ".join(part for part in (item.where, item.name) if part) or "-"
