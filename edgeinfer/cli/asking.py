"""`edgeinfer infer` and `edgeinfer status`: ask a running daemon."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.cli.arguments import Commands, add_socket_argument

if TYPE_CHECKING:
    from edgeinfer.client import Inference


def add_asking(commands: Commands) -> None:
    """Add `edgeinfer infer` and `edgeinfer status`."""
    infer = commands.add_parser("infer", help="ask a running daemon")
    infer.add_argument("model")
    infer.add_argument("text", nargs="?", help="text to send; or use --file")
    infer.add_argument("--file", type=Path, help="a JPEG, PNG, WAV or text file to send")
    infer.add_argument("--deadline-ms", type=float, help="default: the deadline the model was built for, else 10000")
    infer.add_argument("--scope", choices=("device", "site", "any"), default="device", help="how far it may travel")
    infer.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    add_socket_argument(infer)
    infer.set_defaults(act=_infer)

    status = commands.add_parser("status", help="what a running daemon is doing")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    add_socket_argument(status)
    status.set_defaults(act=_status)


def _infer(args: argparse.Namespace) -> int:
    from edgeinfer.client import Client, DeadlineExpired, Rejected

    if (args.text is None) == (args.file is None):
        print("edgeinfer infer: give either a text or --file", file=sys.stderr)
        return 2
    with Client(args.socket) as client:
        try:
            if args.file is not None:
                answer = client.infer_file(args.model, args.file, deadline_ms=args.deadline_ms, scope=args.scope)
            else:
                answer = client.infer_text(args.model, args.text, deadline_ms=args.deadline_ms, scope=args.scope)
        except (Rejected, DeadlineExpired) as refused:
            print(f"edgeinfer: {args.model}: {refused}", file=sys.stderr)
            return 75
        except OSError as error:
            print(f"edgeinfer: {args.file} cannot be read: {error.strerror}", file=sys.stderr)
            return 66
    print(json.dumps(answer.to_dict(), indent=2) if args.json else _describe(answer))
    return 0


def _describe(answer: Inference) -> str:
    lines = []
    if answer.label is not None:
        lines.append(f"{answer.label} probability={answer.score:.4f}")
    else:
        for output in answer.outputs:
            values = output.elements()
            shown = ", ".join(f"{value:.4f}" if isinstance(value, float) else str(value) for value in values[:8])
            more = f", … ({len(values)} values)" if len(values) > 8 else ""
            lines.append(f"{output.name} {output.datatype} {output.shape}: {shown}{more}")
    lines.append(
        f"({answer.placement} on {answer.where}, {answer.model} {answer.version} {answer.variant}, "
        f"{answer.latency_ms:.1f} ms)"
    )
    return "\n".join(lines)


def _status(args: argparse.Namespace) -> int:
    from edgeinfer.client import Client
    from edgeinfer.telemetry.report import describe_status

    with Client(args.socket) as client:
        status = client.status()
    print(json.dumps(status, indent=2) if args.json else describe_status(status))
    return 0
