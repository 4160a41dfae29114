"""What the subcommands' arguments have in common: defaults, and values that are checked while they are parsed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no other name

DEFAULT_CONFIG = Path("/etc/edgeinfer/device.toml")
DEFAULT_NEARBY_CONFIG = Path("/etc/edgeinfer/nearby.toml")
DEFAULT_STATE_DIR = Path("/var/lib/edgeinfer")
DEFAULT_NEARBY_STATE_DIR = Path("/var/lib/edgeinfer-nearby")
DEFAULT_KEYS = Path("/etc/edgeinfer/keys")
DEFAULT_SOCKET = Path("/run/edgeinfer/edgeinfer.sock")
MAX_DEADLINE_MS = 600_000.0
"""The longest that the daemon takes, which a test holds this against."""


def positive(text: str) -> float:
    """Return a positive, finite number."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def up_to(most: float, unit: str) -> Callable[[str], float]:
    """Return what takes a positive number of at most `most`."""

    def bounded(text: str) -> float:
        if (value := positive(text)) <= most:
            return value
        raise argparse.ArgumentTypeError(f"{text!r} is more than {most:,.0f} {unit}")

    return bounded


def count(text: str) -> int:
    """Return a whole number between 1 and 1024."""
    with contextlib.suppress(ValueError):
        if 1 <= (value := int(text)) <= 1024:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number between 1 and 1024")


def named_shape(text: str) -> tuple[str, list[int]]:
    """Return `INPUT=D,D,…` as a name and a shape."""
    name, equals, dims = text.rpartition("=")
    with contextlib.suppress(ValueError):
        shape = [int(dim) for dim in dims.split(",")]
        if equals and name and all(dim >= 1 for dim in shape):
            return name, shape
    raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as image=1,3,640,640")


def named_number(text: str) -> tuple[str, float]:
    """Return `INPUT=NUMBER` as a name and a number."""
    name, equals, number = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if equals and name:
            return name, float(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not a value such as sr=16000")


def add_socket_argument(command: argparse.ArgumentParser) -> None:
    """Let a command name the daemon's socket; without it the client finds it, as `Client` does for every app."""
    help_text = f"the daemon's socket (default: $EDGEINFER_SOCKET, else {DEFAULT_SOCKET})"
    command.add_argument("--socket", type=Path, help=help_text)
