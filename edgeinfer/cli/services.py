"""`edgeinfer run`, `nearby` and `unit`: the services and how systemd starts them."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.cli.arguments import DEFAULT_CONFIG, DEFAULT_NEARBY_CONFIG, Commands
from edgeinfer.errors import ConfigError

_log = logging.getLogger(__name__)


def add_services(commands: Commands) -> None:
    """Add `edgeinfer run` and `edgeinfer nearby`."""
    run = commands.add_parser("run", help="the device daemon")
    run.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="device.toml (default %(default)s)")
    run.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    run.set_defaults(act=_run)

    nearby = commands.add_parser("nearby", help="the nearby service that answers offloaded requests")
    nearby.add_argument("--config", type=Path, default=DEFAULT_NEARBY_CONFIG, help="nearby.toml (default %(default)s)")
    nearby.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    nearby.set_defaults(act=_nearby)


def add_unit(commands: Commands) -> None:
    """Add `edgeinfer unit`."""
    unit = commands.add_parser("unit", help="print a systemd unit for this installation")
    unit.add_argument("--nearby", action="store_true", help="the nearby service's instead of the device's")
    unit.add_argument("--config", type=Path, help="config file to name in it (default: below /etc/edgeinfer)")
    unit.set_defaults(act=_unit)


def _set_up_logging(level: str) -> None:
    """Log to standard error: with priorities for the journal under systemd, with the time elsewhere."""
    under_systemd = "JOURNAL_STREAM" in os.environ
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(name)s %(message)s" if under_systemd else "%(asctime)s %(levelname)-7s %(name)s %(message)s",
    )


def _run(args: argparse.Namespace) -> int:
    from edgeinfer.config import doubts, load_device_config
    from edgeinfer.daemon.service import run_device

    config = load_device_config(args.config)
    _set_up_logging(args.log_level)
    for doubt in doubts(config):
        _log.warning("%s: %s", args.config, doubt)
    with _blaming(args.config):
        return run_device(config)


def _nearby(args: argparse.Namespace) -> int:
    from edgeinfer.config import load_nearby_config
    from edgeinfer.daemon.nearby_service import run_nearby

    config = load_nearby_config(args.config)
    _set_up_logging(args.log_level)
    with _blaming(args.config):
        return run_nearby(config)


@contextlib.contextmanager
def _blaming(config: Path) -> Iterator[None]:
    """Name the file in problems with a configuration that had been read when they were found.

    Raises:
        ConfigError: instead of one that names no file.
    """
    try:
        yield
    except ConfigError as error:
        if "/" in error.source or error.source.endswith(".toml"):  # a file already: a board's
            raise
        raise ConfigError(str(config), error.problems) from error


def _unit(args: argparse.Namespace) -> int:
    from edgeinfer.daemon.unit import render_unit

    executable = Path(sys.argv[0]).resolve()
    config = args.config or (DEFAULT_NEARBY_CONFIG if args.nearby else DEFAULT_CONFIG)
    print(render_unit("nearby" if args.nearby else "device", executable, config), end="")
    return 0
