"""The `edgeinfer` command: read arguments, call the room that does the work, turn faults into one clear line.

Imports happen inside the subcommands, so that `edgeinfer infer` does not pay for the daemon.
Exit status: 0 done, 2 wrong usage, 65 a bundle is wrong, 66 a file cannot be read, 69 nobody answers, 75 refused or
expired (try again later), 78 wrong config, 130 interrupted; others are in `edgeinfer.errors`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer import __version__
from edgeinfer.errors import EdgeInferError

if TYPE_CHECKING:
    from edgeinfer.client import Inference
    from edgeinfer.store.compiled import CompiledForm
    from edgeinfer.store.store import BundleStore, Installed

DEFAULT_CONFIG = Path("/etc/edgeinfer/device.toml")
DEFAULT_NEARBY_CONFIG = Path("/etc/edgeinfer/nearby.toml")
DEFAULT_STATE_DIR = Path("/var/lib/edgeinfer")
DEFAULT_SOCKET = Path("/run/edgeinfer/edgeinfer.sock")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.act(args))
    except EdgeInferError as error:
        print(f"edgeinfer: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output left; nothing to tell it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands; tests hold the README against it."""
    parser = argparse.ArgumentParser(prog="edgeinfer", description="Edge inference runtime for constrained devices.")
    parser.add_argument("--version", action="version", version=f"edgeinfer {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="the device daemon")
    run.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="device.toml (default %(default)s)")
    run.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    run.set_defaults(act=_run)

    nearby = commands.add_parser("nearby", help="the nearby service that answers offloaded requests")
    nearby.add_argument("--config", type=Path, default=DEFAULT_NEARBY_CONFIG, help="nearby.toml (default %(default)s)")
    nearby.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    nearby.set_defaults(act=_nearby)

    check = commands.add_parser("check-config", help="check a service config or board file, all problems at once")
    check.add_argument("file", type=Path)
    check.add_argument("--kind", choices=("device", "nearby", "board"), help="default: by what the file holds")
    check.set_defaults(act=_check_config)

    infer = commands.add_parser("infer", help="ask a running daemon")
    infer.add_argument("model")
    infer.add_argument("text", nargs="?", help="text to send; or use --file")
    infer.add_argument("--file", type=Path, help="a JPEG, PNG, WAV or text file to send")
    infer.add_argument("--deadline-ms", type=float, help="default: the deadline the model was built for, else 1000")
    infer.add_argument("--scope", choices=("device", "site", "any"), default="device", help="how far it may travel")
    infer.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    infer.add_argument("--socket", type=Path, default=DEFAULT_SOCKET, help="the daemon's socket (default %(default)s)")
    infer.set_defaults(act=_infer)

    status = commands.add_parser("status", help="what a running daemon is doing")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    status.add_argument("--socket", type=Path, default=DEFAULT_SOCKET, help="the daemon's socket (default %(default)s)")
    status.set_defaults(act=_status)

    _add_bench_parser(commands)
    _add_try_parser(commands)
    _add_bundle_parser(commands)

    unit = commands.add_parser("unit", help="print a systemd unit for this installation")
    unit.add_argument("--nearby", action="store_true", help="the nearby service's instead of the device's")
    unit.add_argument("--config", type=Path, help="config file to name in it (default: below /etc/edgeinfer)")
    unit.set_defaults(act=_unit)
    return parser


def _add_bench_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="put load on a running daemon and measure what comes of it")
    bench.add_argument("model")
    what = bench.add_mutually_exclusive_group()
    what.add_argument("--file", type=Path, help="a JPEG, PNG, WAV or text file to send; default: zeros")
    what.add_argument("--text", help="a text to send")
    bench.add_argument("--rate", type=_positive, help="requests a second, whatever comes back; default: as answered")
    bench.add_argument("--even", action="store_true", help="with --rate: evenly spaced, not at random (Poisson)")
    bench.add_argument("--concurrency", type=_count, help="connections (default 1, with --rate 32)")
    bench.add_argument("--seconds", type=_positive, default=10.0, help="for how long (default %(default)s)")
    bench.add_argument("--deadline-ms", type=_positive, help="default: the deadline the model was built for")
    bench.add_argument("--scope", choices=("device", "site", "any"), default="device", help="how far it may travel")
    bench.add_argument("--json", action="store_true", help="print the report as JSON")
    bench.add_argument("--socket", type=Path, default=DEFAULT_SOCKET, help="the daemon's socket (default %(default)s)")
    bench.set_defaults(act=_bench)


def _add_try_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trial = commands.add_parser("try", help="run a bare ONNX model on this device, without a bundle or a daemon")
    trial.add_argument("model", type=Path, help="an ONNX file")
    sources = "a file, a directory, camera[:DEVICE], microphone[:DEVICE], a stream's URL, or a command in quotes"
    trial.add_argument("--source", default="random", help=f"{sources}; default: random inputs")
    trial.add_argument("--seconds", type=_positive, default=5.0, help="for how long (default %(default)s)")
    trial.add_argument("--threads", type=_count, default=1, help="threads of one run (default %(default)s)")
    trial.add_argument(
        "--shape", type=_named_shape, action="append", default=[], metavar="INPUT=D,D,…",
        help="shape of an input that leaves something open",
    )  # fmt: skip
    trial.add_argument(
        "--fill", type=_named_number, action="append", default=[], metavar="INPUT=NUMBER",
        help="an input that holds one value throughout",
    )  # fmt: skip
    trial.add_argument("--json", action="store_true", help="print the report as JSON")
    trial.set_defaults(act=_try)


def _named_shape(text: str) -> tuple[str, list[int]]:
    name, equals, dims = text.rpartition("=")
    with contextlib.suppress(ValueError):
        shape = [int(dim) for dim in dims.split(",")]
        if equals and name and all(dim >= 1 for dim in shape):
            return name, shape
    raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as image=1,3,640,640")


def _named_number(text: str) -> tuple[str, float]:
    name, equals, number = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if equals and name:
            return name, float(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not a value such as sr=16000")


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 1 <= (value := int(text)) <= 1024:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number between 1 and 1024")


def _add_bundle_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bundle = commands.add_parser("bundle", help="the bundles installed on this device")
    verbs = bundle.add_subparsers(title="verbs", required=True, metavar="VERB")
    add = verbs.add_parser("add", help="verify, probe in a throw-away worker, install and activate")
    add.add_argument("path", type=Path, help="a bundle directory, or one .tar of it")
    add.set_defaults(act=_bundle_add)
    listing = verbs.add_parser("list", help="what is installed")
    listing.add_argument("--json", action="store_true", help="print it as JSON")
    listing.set_defaults(act=_bundle_list)
    verify = verbs.add_parser("verify", help="check installed bundles, or a bundle directory, byte by byte")
    verify.add_argument("what", nargs="*", help="names, or paths with a / in them; default: everything installed")
    verify.set_defaults(act=_bundle_verify)
    remove = verbs.add_parser("remove", help="remove an installed bundle")
    remove.add_argument("name")
    remove.add_argument("version", nargs="?", default="", help="default: every version")
    remove.set_defaults(act=_bundle_remove)
    for verb in (add, listing, verify, remove):
        verb.add_argument("--state-dir", type=Path, default=DEFAULT_STATE_DIR, help="the store (default %(default)s)")


def _set_up_logging(level: str) -> None:
    """Log to standard error: with priorities for the journal under systemd, with the time elsewhere."""
    under_systemd = "JOURNAL_STREAM" in os.environ
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(name)s %(message)s" if under_systemd else "%(asctime)s %(levelname)-7s %(name)s %(message)s",
    )


def _run(args: argparse.Namespace) -> int:
    from edgeinfer.config import load_device_config
    from edgeinfer.daemon.service import run_device

    config = load_device_config(args.config)
    _set_up_logging(args.log_level)
    return run_device(config)


def _nearby(args: argparse.Namespace) -> int:
    from edgeinfer.config import load_nearby_config
    from edgeinfer.daemon.nearby_service import run_nearby

    config = load_nearby_config(args.config)
    _set_up_logging(args.log_level)
    return run_nearby(config)


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


def _bench(args: argparse.Namespace) -> int:
    from edgeinfer.client import Client
    from edgeinfer.client.load import Load, choose_inputs, describe, run_load, summarize

    with Client(args.socket) as client:
        specs = client.model(args.model)["inputs"]
    try:
        inputs = choose_inputs(specs, args.model, file=args.file, text=args.text)
    except OSError as error:
        print(f"edgeinfer: {args.file} cannot be read: {error.strerror}", file=sys.stderr)
        return 66
    load = Load(
        model=args.model,
        inputs=inputs,
        seconds=args.seconds,
        rate_hz=args.rate,
        concurrency=args.concurrency or (1 if args.rate is None else 32),
        evenly=args.even,
        deadline_ms=args.deadline_ms,
        options={"scope": args.scope},
    )
    report = summarize(load, run_load(load, args.socket))
    print(json.dumps(report, indent=2) if args.json else describe(report))
    return 0 if report["in_time"] else 75


def _try(args: argparse.Namespace) -> int:
    from edgeinfer.daemon.trial import Trial, try_model
    from edgeinfer.daemon.trial_report import describe

    if not args.model.is_file():
        print(f"edgeinfer: {args.model} is no file", file=sys.stderr)
        return 66
    trial = Trial(
        model=args.model,
        source=args.source,
        seconds=args.seconds,
        threads=args.threads,
        shapes=dict(args.shape),
        fills=dict(args.fill),
    )
    logging.getLogger("edgeinfer").setLevel(logging.CRITICAL)  # the report says what went wrong, once
    report = try_model(trial)
    print(json.dumps(report, indent=2) if args.json else describe(report))
    return 0 if report["runs"] else 70


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


def _bundle_add(args: argparse.Namespace) -> int:
    from edgeinfer.daemon.install import install_bundle

    installed = install_bundle(args.path, args.state_dir)
    print(f"installed {_title(installed)} at {installed.path}")
    for form in _forms(args, installed):
        print(f"  {form.record.variant} loads in its {form.record.form} form: {form.record.why}")
    return 0


def _bundle_list(args: argparse.Namespace) -> int:
    store = _store(args)
    installed = store.installed()
    if args.json:
        rows = [
            {
                "name": item.manifest.name,
                "version": item.manifest.version,
                "digest": item.digest,
                "active": item.active,
                "path": str(item.path),
                "variants": [variant.name for variant in item.manifest.variants],
                "forms": {
                    form.record.variant: {
                        "form": form.record.form,
                        "why": form.record.why,
                        "onnxruntime": form.record.onnxruntime,
                        "disk_bytes": form.disk_bytes,
                        "mapped_bytes": form.record.cost.hot_bytes,
                    }
                    for form in _forms(args, item)
                },
            }
            for item in installed
        ]
        print(json.dumps(rows, indent=2))
        return 0
    for item in installed:
        forms = {form.record.variant: f" ({form.record.form})" for form in _forms(args, item)}
        variants = ", ".join(f"{variant.name}{forms.get(variant.name, '')}" for variant in item.manifest.variants)
        print(f"{'*' if item.active else ' '} {_title(item)}  [{variants}]  {item.manifest.description}")
    for problem in store.problems():
        print(f"edgeinfer: {problem}", file=sys.stderr)
    if not installed:
        print(f"no bundles in {args.state_dir}; add one with: edgeinfer bundle add PATH")
    return 0


def _bundle_verify(args: argparse.Namespace) -> int:
    from edgeinfer.errors import ArtifactError

    store = _store(args)
    checks: list[Callable[[], str]] = []
    for what in args.what or sorted({item.manifest.name for item in store.installed()}):
        if os.sep in what or what in {".", ".."}:
            checks.append(partial(_verify_folder, Path(what)))
            continue
        versions = [item.manifest.version for item in store.installed() if item.manifest.name == what]
        checks += [partial(_verify_installed, store, what, version) for version in versions or [""]]
    wrong = [] if args.what else store.problems()
    for check in checks:
        try:
            print(f"ok {check()}")
        except ArtifactError as error:
            wrong.append(str(error))
    if not checks and not wrong:
        print(f"no bundles in {args.state_dir}; add one with: edgeinfer bundle add PATH")
    for problem in wrong:
        print(f"edgeinfer: {problem}", file=sys.stderr)
    return ArtifactError.exit_code if wrong else 0


def _verify_folder(path: Path) -> str:
    from edgeinfer.artifact.bundle import verify_bundle

    manifest, digest = verify_bundle(path)
    return f"{manifest.name} {manifest.version} {digest[:12]}"


def _verify_installed(store: BundleStore, name: str, version: str) -> str:
    return _title(store.verify(name, version))


def _bundle_remove(args: argparse.Namespace) -> int:
    for item in _store(args).remove(args.name, args.version):
        print(f"removed {_title(item)}")
    return 0


def _store(args: argparse.Namespace) -> BundleStore:
    from edgeinfer.store.store import BundleStore

    return BundleStore(args.state_dir)


def _forms(args: argparse.Namespace, item: Installed) -> list[CompiledForm]:
    from edgeinfer.store.compiled import CompiledStore

    return CompiledStore(args.state_dir).forms(item.digest)


def _title(item: Installed) -> str:
    return f"{item.manifest.name} {item.manifest.version} {item.digest[:12]}"


def _unit(args: argparse.Namespace) -> int:
    from edgeinfer.daemon.unit import render_unit

    executable = Path(sys.argv[0]).resolve()
    config = args.config or (DEFAULT_NEARBY_CONFIG if args.nearby else DEFAULT_CONFIG)
    print(render_unit("nearby" if args.nearby else "device", executable, config), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
