"""`edgeinfer check-config`: everything that is wrong with a file, before anything starts.

Problems make the file unusable anywhere. Warnings are about what is odd, or about this machine, which need not be the
one that the file is for; they don't change the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgeinfer.cli.arguments import Commands
from edgeinfer.errors import ConfigError, Problem

if TYPE_CHECKING:
    from edgeinfer.config import DeviceConfig, SchedulerSection

Kind = Literal["device", "nearby", "board"]


def add_check(commands: Commands) -> None:
    """Add `edgeinfer check-config`."""
    check = commands.add_parser("check-config", help="check a service config or board file, all problems at once")
    check.add_argument("file", type=Path)
    check.add_argument("--kind", choices=("device", "nearby", "board"), help="default: by what the file holds")
    check.set_defaults(act=_check_config)


def guess_kind(table: dict[str, Any], file: Path) -> Kind:
    """Return what a file is by the keys that only one kind has, else by its name."""
    from edgeinfer.artifact.board import Board
    from edgeinfer.config import DeviceConfig, NearbyConfig

    device, nearby, board = ({field.name for field in fields(cls)} for cls in (DeviceConfig, NearbyConfig, Board))
    if table.keys() & device - nearby - board:
        return "device"
    if table.keys() & board - nearby - device:
        return "board"
    if table.keys() & nearby - device:
        return "nearby"
    return "nearby" if file.stem.startswith("nearby") else "device"


def _check_config(args: argparse.Namespace) -> int:
    from edgeinfer.toml_file import load_toml

    file: Path = args.file
    kind: Kind = args.kind or guess_kind(load_toml(file), file)
    try:
        warnings = _check(file, kind)
    except ConfigError as error:
        if error.source != str(file):  # another file, which this one names
            raise
        how = f"{file} (checked as a {kind} file; --kind changes that)"
        raise ConfigError(how, error.problems) from error
    for warning in warnings:
        print(f"edgeinfer: {file}: warning: {warning}", file=sys.stderr)
    print(f"{file}: a sound {kind} file")
    return 0


def _check(file: Path, kind: Kind) -> list[Problem]:
    """Return the warnings about a sound file.

    Raises:
        ConfigError: it is not sound.
    """
    from edgeinfer.artifact import board
    from edgeinfer.config import doubts, load_device_config, load_nearby_config
    from edgeinfer.toml_file import load_toml

    if kind == "board":
        return board.doubts(board.load_board(file))
    if kind == "nearby":
        nearby = load_nearby_config(file)
        return [*_trusted("keys", nearby.keys, load_toml(file)), *_cpus(nearby.scheduler)]
    try:
        config = load_device_config(file)
    except ConfigError as error:
        raise ConfigError(error.source, (*error.problems, *_unknown_board(_board_of(file)))) from error
    if problems := tuple(_unknown_board(config.board)):
        raise ConfigError(str(file), problems)
    trusted = _trusted("paths.keys", config.paths.keys, load_toml(file).get("paths", {}))
    return [*_board_file(config), *trusted, *_cpus(config.scheduler), *_memory(config), *doubts(config)]


def _board_of(file: Path) -> Any:
    from edgeinfer.toml_file import load_toml

    return load_toml(file).get("board", "auto")


def _is_path(board: str) -> bool:
    return board.endswith(".toml") or "/" in board


def _unknown_board(board: Any) -> Iterator[Problem]:
    from edgeinfer.artifact.board import known_boards

    if isinstance(board, str) and board != "auto" and not _is_path(board) and board not in (known := known_boards()):
        yield Problem("board", f"no board {board!r}; known are {', '.join(known)}, or give a path to a .toml file")


def _board_file(config: DeviceConfig) -> Iterator[Problem]:
    from edgeinfer.artifact.board import load_board

    if not _is_path(config.board):
        return
    try:
        Path(config.board).stat()
    except OSError as error:
        yield Problem("board", f"{config.board} cannot be read here: {error.strerror}")
    else:
        load_board(Path(config.board))


def _trusted(where: str, keys: Path, section: dict[str, Any]) -> Iterator[Problem]:
    """Yield why `edgeinfer bundle add` would take nothing here: the folder of keys is no good as it is."""
    from edgeinfer.store.trust import key_files

    try:
        key_files(keys, named="keys" in section)
    except ConfigError as error:
        for problem in error.problems:
            yield Problem(where, f"{keys}: {problem.message}; until then no bundle is taken here")


def _cpus(scheduler: SchedulerSection) -> Iterator[Problem]:
    usable = os.sched_getaffinity(0)
    if missing := sorted(set(scheduler.cpus or ()) - usable):
        text = f"this machine has no CPU {', '.join(map(str, missing))} (usable here: {sorted(usable)})"
        yield Problem("scheduler.cpus", text)


def _memory(config: DeviceConfig) -> Iterator[Problem]:
    """Yield when what edgeinfer takes itself leaves no room for a model below the ceiling."""
    from edgeinfer.daemon.memory import USUAL_OWN_BYTES
    from edgeinfer.errors import mib
    from edgeinfer.gateway.bounds import bounds_within

    ceiling_bytes = config.memory.ceiling
    if ceiling_bytes is None:
        return
    buffer_bytes = bounds_within(ceiling_bytes).buffer_bytes
    if (taken_bytes := USUAL_OWN_BYTES + buffer_bytes) >= ceiling_bytes:
        text = f"edgeinfer itself takes about {mib(USUAL_OWN_BYTES)}, the local socket's buffers {mib(buffer_bytes)}"
        yield Problem(
            "memory.ceiling", f"{mib(ceiling_bytes)} have room for no model: {text}; set it above {mib(taken_bytes)}"
        )
