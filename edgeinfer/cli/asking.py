"""`edgeinfer infer` and `edgeinfer status`: ask a running daemon."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.cli.arguments import MAX_DEADLINE_MS, Commands, add_socket_argument, up_to
from edgeinfer.errors import EdgeInferError
from edgeinfer.request import Reason

if TYPE_CHECKING:
    from edgeinfer.client import Client, DeadlineExpired, Inference, Rejected
    from edgeinfer.errors import SessionError


_MAX_JSON_BYTES = 64 << 20


def add_asking(commands: Commands) -> None:
    """Add `edgeinfer infer` and `edgeinfer status`."""
    infer = commands.add_parser("infer", help="ask a running daemon")
    infer.add_argument("model")
    infer.add_argument("text", nargs="?", help="text to send; or use --file or --inputs")
    infer.add_argument("--file", type=Path, help="a JPEG, PNG, WAV or text file to send")
    inputs_help = 'inputs as JSON, such as {"x": [[1, 2, 3]]}, or @FILE with the same'
    infer.add_argument("--inputs", metavar="JSON", help=inputs_help)
    deadline = up_to(MAX_DEADLINE_MS, "ms")
    infer.add_argument("--deadline-ms", type=deadline, help="default: the deadline the model was built for, else 10 s")
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
    from edgeinfer.errors import SessionError

    if sum(given is not None for given in (args.text, args.file, args.inputs)) != 1:
        print("edgeinfer infer: give one of a text, --file and --inputs", file=sys.stderr)
        return 2
    file, inputs = args.file, args.inputs
    if inputs is not None:
        file = Path(inputs[1:]) if inputs.startswith("@") else None
        try:
            inputs = json.loads(inputs if file is None else _bounded(file))
        except OSError as error:
            return _unreadable(file, error)
        except ValueError as error:
            print(f"edgeinfer: {file or '--inputs'} is not JSON: {error}", file=sys.stderr)
            return 65 if file else 2
    options = {"deadline_ms": args.deadline_ms, "scope": args.scope}
    with Client(args.socket) as client:
        try:
            if args.file is not None:
                answer = client.infer_file(args.model, args.file, **options)
            elif args.inputs is not None:
                answer = client.infer(args.model, inputs, **options)
            else:
                answer = client.infer_text(args.model, args.text, **options)
        except (Rejected, DeadlineExpired, SessionError) as ending:
            if args.json:
                print(json.dumps(_ending(ending), indent=2))
            print(f"edgeinfer: {args.model}: {ending}", file=sys.stderr)
            return _status_of(ending, args.model, client)
        except OSError as error:
            return _unreadable(file, error)
    print(json.dumps(answer.to_dict(), indent=2) if args.json else _describe(answer))
    return 0


def _bounded(file: Path) -> bytes:
    """Return what a file holds, or a pipe, which may be meant here.

    Raises:
        OSError: it cannot be read, or gives more than `_MAX_JSON_BYTES`.
    """
    with file.open("rb") as opened:
        data = opened.read(_MAX_JSON_BYTES + 1)
    if len(data) > _MAX_JSON_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_MAX_JSON_BYTES} bytes", str(file))
    return data


def _status_of(ending: Rejected | DeadlineExpired | SessionError, model: str, client: Client) -> int:
    """Return the exit status: a model that is only not in memory may be tried again, one that there is not can't."""
    if getattr(ending, "reason", "") == Reason.MODEL_UNAVAILABLE:
        with contextlib.suppress(EdgeInferError):
            if any(known["name"] == model for known in client.models()):
                return 75
    return ending.exit_code


def _unreadable(file: Path | None, error: OSError) -> int:
    print(f"edgeinfer: {file} cannot be read: {error.strerror}", file=sys.stderr)
    return 66


def _ending(ending: Rejected | DeadlineExpired | SessionError) -> dict[str, str]:
    """Return the end of a request without an answer, as the daemon's HTTP body says it."""
    from edgeinfer.client import DeadlineExpired, Rejected

    said = {"error": str(ending), "detail": ending.detail}
    if isinstance(ending, DeadlineExpired):
        return said | {"outcome": "expired", "reason": ending.phase}
    return said | {"outcome": "rejected" if isinstance(ending, Rejected) else "failed", "reason": ending.reason}


def _describe(answer: Inference) -> str:
    lines = []
    if answer.label is not None:
        name = answer.outputs[0].name if len(answer.outputs) == 1 else "score"
        lines.append(answer.label if answer.score is None else f"{answer.label} {name}={answer.score:.4f}")
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
