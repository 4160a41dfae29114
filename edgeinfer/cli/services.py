"""`edgeinfer run`, `nearby` and `unit`: the services and how systemd starts them."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.cli.arguments import DEFAULT_CONFIG, DEFAULT_NEARBY_CONFIG, Commands

if TYPE_CHECKING:
    from edgeinfer.config import MqttSection
    from edgeinfer.worker.hatch import Hatched


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
    import logging

    under_systemd = "JOURNAL_STREAM" in os.environ
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(name)s %(message)s" if under_systemd else "%(asctime)s %(levelname)-7s %(name)s %(message)s",
    )


def _run(args: argparse.Namespace) -> int:
    with _starting() as hatched:
        from edgeinfer.daemon.reading import in_child, read_device

        reading = in_child(partial(read_device, args.config))
        from edgeinfer.daemon.service import run_device

        found = reading()
    _set_up_logging(args.log_level)
    for doubt in found.doubts:
        _warn(f"{args.config}: {doubt}")
    _let_in_for(found.config.mqtt)
    with _blaming(args.config):
        return run_device(found.config, found.board, hatched=hatched)


def _nearby(args: argparse.Namespace) -> int:
    with _starting() as hatched:
        from edgeinfer.daemon.reading import in_child, read_nearby

        reading = in_child(partial(read_nearby, args.config))
        from edgeinfer.daemon.nearby_service import run_nearby

        config = reading()
    _set_up_logging(args.log_level)
    _let_in_for(config.mqtt)
    with _blaming(args.config):
        return run_nearby(config, hatched=hatched)


@contextlib.contextmanager
def _starting() -> Iterator[Hatched | None]:
    """Start the zygote before anything that takes long: it imports the runtime while the body imports the service.

    What imports make stays: no garbage is looked for meanwhile.
    """
    from edgeinfer.worker.hatch import hatch

    hatched = None
    with contextlib.suppress(OSError):  # the service tries again, and says why not
        hatched = hatch()
    from edgeinfer.cli import openssl

    openssl.keep_out()
    gc.disable()
    try:
        yield hatched
    finally:
        gc.enable()


def _warn(text: str) -> None:
    import logging

    logging.getLogger(__name__).warning("%s", text)


def _let_in_for(mqtt: MqttSection) -> None:
    """Let OpenSSL in where a connection is encrypted."""
    brokers = (mqtt.site, mqtt.fleet)
    from edgeinfer.cli import openssl

    if any(broker is not None and (broker.tls_ca or broker.tls_cert) for broker in brokers):
        openssl.let_in()


@contextlib.contextmanager
def _blaming(config: Path) -> Iterator[None]:
    """Name the file in problems with a configuration that had been read when they were found.

    Raises:
        ConfigError: instead of one that names no file.
    """
    from edgeinfer.errors import ConfigError

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
