"""The `edgeinfer` command: read arguments, call the room that does the work, turn faults into one clear line.

One module per family of subcommands. Imports happen inside the subcommands, so that `edgeinfer infer` does not pay for
the daemon. Exit status: 0 done, 2 wrong usage, 65 a bundle or an input is wrong, 66 a file cannot be read, 69 nobody
answers or there is no such model, 75 refused or expired (try again later), 78 wrong config, 130 interrupted; others are
in `edgeinfer.errors`.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from edgeinfer import __version__
from edgeinfer.cli.services import add_services, add_unit

if TYPE_CHECKING:
    from edgeinfer.cli.arguments import Commands
    from edgeinfer.errors import EdgeInferError

_SERVICES = ("run", "nearby")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser, commands = _services_parser()
    if words[:1] not in [[service] for service in _SERVICES]:  # a service starts sooner without the others' imports
        _add_others(commands)
    args = parser.parse_args(words)
    try:
        return int(args.act(args))
    except _fault() as error:
        print(f"edgeinfer: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output left; nothing to tell it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands; tests hold the README against it."""
    parser, commands = _services_parser()
    _add_others(commands)
    return parser


def _fault() -> type[EdgeInferError]:
    """Return what a fault of ours is; imported when something has gone wrong."""
    from edgeinfer.errors import EdgeInferError

    return EdgeInferError


def _services_parser() -> tuple[argparse.ArgumentParser, Commands]:
    parser = argparse.ArgumentParser(prog="edgeinfer", description="Edge inference runtime for constrained devices.")
    parser.add_argument("--version", action="version", version=f"edgeinfer {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_services(commands)
    return parser, commands


def _add_others(commands: Commands) -> None:
    from edgeinfer.cli.asking import add_asking
    from edgeinfer.cli.bundles import add_bundle
    from edgeinfer.cli.checking import add_check
    from edgeinfer.cli.measuring import add_bench, add_measure, add_try
    from edgeinfer.cli.sensors import add_sensors

    add_check(commands)
    add_sensors(commands)
    add_asking(commands)
    add_bench(commands)
    add_measure(commands)
    add_try(commands)
    add_bundle(commands)
    add_unit(commands)
