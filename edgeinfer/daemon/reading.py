"""Read a service's configuration in a child process: what reading takes goes with it.

Turning TOML into checked sections takes 4 MB of libraries and generated code, once. A child does it, and hands over the
finished values, while the service imports itself. A child that finds something wrong says nothing: the reading is then
done here, so that whoever started the service is told in the usual way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edgeinfer.artifact.board import Board, find_board, known_boards, load_board
from edgeinfer.config import DeviceConfig, NearbyConfig
from edgeinfer.errors import ConfigError, Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """What a device was told, and the board it is."""

    config: DeviceConfig
    board: Board
    doubts: tuple[Problem, ...]
    """What is allowed but can hardly be meant."""


def read_device(path: Path) -> DeviceReading:
    """Read device.toml and the board file that it means.

    Raises:
        ConfigError: one of them is wrong, or there is no such board; the source names the file.
    """
    from edgeinfer.config import doubts, load_device_config  # noqa: PLC0415 - a child's, mostly

    config = load_device_config(path)
    try:
        return DeviceReading(config, find_own_board(config), tuple(doubts(config)))
    except ConfigError as error:
        if "/" in error.source or error.source.endswith(".toml"):  # the board's own file
            raise
        raise ConfigError(str(path), error.problems) from error


def read_nearby(path: Path) -> NearbyConfig:
    """Read nearby.toml.

    Raises:
        ConfigError: with every problem found.
    """
    from edgeinfer.config import load_nearby_config  # noqa: PLC0415

    return load_nearby_config(path)


def find_own_board(config: DeviceConfig) -> Board:
    """Return the board that the configuration means: `auto`, a path, or a name.

    Raises:
        ConfigError: there is none, or its file is wrong.
    """
    named = config.board
    if named == "auto":
        path = find_board(proc_root=config.paths.proc_root, machine=platform.machine())
    elif named.endswith(".toml") or "/" in named:
        path = Path(named)
    else:
        boards = known_boards()
        if named not in boards:
            text = f"no board {named!r}; known are {', '.join(boards)}, or give a path to a .toml file"
            raise ConfigError("board", (Problem("board", text),))
        path = boards[named]
    board = load_board(path)
    if config.thermal.zones is not None:
        thermal = dataclasses.replace(board.thermal, zones=config.thermal.zones)
        board = dataclasses.replace(board, thermal=thermal)
    return board


def in_child(work: Callable[[], T]) -> Callable[[], T]:
    """Start `work` in a child process and return how to wait for its result.

    The result must survive pickling; work that raises, or whose child dies, is done again here when it is waited for.
    In a process with threads, which must not fork, it is done here at once.
    """
    if threading.active_count() > 1:
        result = work()
        return lambda: result
    read_fd, write_fd = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(read_fd)
        os.close(write_fd)
        return work
    if child == 0:
        os.close(read_fd)
        _answer(work, write_fd)
    os.close(write_fd)

    def wait() -> T:
        with os.fdopen(read_fd, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(child, 0)
        if status != 0:
            return work()
        found: T = pickle.loads(raw)  # noqa: S301 - our own child's
        return found

    return wait


def _answer(work: Callable[[], T], write_fd: int) -> None:
    """Do the work, send its result, and end this process, whatever happens."""
    status = 1
    with contextlib.suppress(BaseException):
        raw = pickle.dumps(work(), pickle.HIGHEST_PROTOCOL)
        with os.fdopen(write_fd, "wb") as pipe:
            pipe.write(raw)
        status = 0
    os._exit(status)
