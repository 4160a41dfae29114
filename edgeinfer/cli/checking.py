"""`edgeinfer check-config`: everything that is wrong with a file, before anything starts."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from edgeinfer.cli.arguments import Commands


def add_check(commands: Commands) -> None:
    """Add `edgeinfer check-config`."""
    check = commands.add_parser("check-config", help="check a service config or board file, all problems at once")
    check.add_argument("file", type=Path)
    check.add_argument("--kind", choices=("device", "nearby", "board"), help="default: by what the file holds")
    check.set_defaults(act=_check_config)


def _check_config(args: argparse.Namespace) -> int:
    from edgeinfer.artifact.board import load_board
    from edgeinfer.config import DeviceConfig, NearbyConfig, load_device_config, load_nearby_config
    from edgeinfer.toml_file import load_toml

    table = load_toml(args.file)
    nearby_only = {field.name for field in fields(NearbyConfig)} - {field.name for field in fields(DeviceConfig)}
    guess = "board" if "cpu" in table else "nearby" if nearby_only & table.keys() else "device"
    kind = args.kind or guess
    if kind == "board":
        load_board(args.file)
    elif kind == "nearby":
        load_nearby_config(args.file)
    else:
        load_device_config(args.file)
    print(f"{args.file}: a sound {kind} file")
    return 0
