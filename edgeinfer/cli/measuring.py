"""`edgeinfer bench`, `measure` and `try`: measure a running daemon, a bundle, or a bare model on this device."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from edgeinfer.cli.arguments import (
    MAX_DEADLINE_MS,
    Commands,
    add_socket_argument,
    count,
    named_number,
    named_shape,
    up_to,
)

_SECONDS = up_to(86_400, "s")


def add_bench(commands: Commands) -> None:
    """Add `edgeinfer bench`."""
    bench = commands.add_parser("bench", help="put load on a running daemon and measure what comes of it")
    bench.add_argument("model")
    what = bench.add_mutually_exclusive_group()
    what.add_argument("--file", type=Path, help="a JPEG, PNG, WAV or text file to send; default: zeros")
    what.add_argument("--text", help="a text to send")
    bench.add_argument(
        "--rate", type=up_to(100_000, "a second"), help="requests a second, whatever comes back; default: as answered"
    )
    bench.add_argument("--even", action="store_true", help="with --rate: evenly spaced, not at random (Poisson)")
    bench.add_argument("--concurrency", type=count, help="connections (default 1, with --rate 32)")
    bench.add_argument("--seconds", type=_SECONDS, default=10.0, help="for how long (default %(default)s)")
    bench.add_argument(
        "--deadline-ms", type=up_to(MAX_DEADLINE_MS, "ms"), help="default: the deadline the model was built for"
    )
    bench.add_argument("--scope", choices=("device", "site", "any"), default="device", help="how far it may travel")
    bench.add_argument("--json", action="store_true", help="print the report as JSON")
    add_socket_argument(bench)
    bench.set_defaults(act=_bench)


def add_try(commands: Commands) -> None:
    """Add `edgeinfer try`."""
    trial = commands.add_parser("try", help="run a bare ONNX model on this device, without a bundle or a daemon")
    trial.add_argument("model", type=Path, help="an ONNX file")
    sources = "a file, a directory, camera[:DEVICE], microphone[:DEVICE], a stream's URL, or a command in quotes"
    trial.add_argument("--source", default="random", help=f"{sources}; default: random inputs")
    trial.add_argument("--seconds", type=_SECONDS, default=5.0, help="for how long (default %(default)s)")
    trial.add_argument("--threads", type=count, default=1, help="threads of one run (default %(default)s)")
    trial.add_argument(
        "--shape", type=named_shape, action="append", default=[], metavar="INPUT=D,D,…",
        help="shape of an input that leaves something open",
    )  # fmt: skip
    trial.add_argument(
        "--fill", type=named_number, action="append", default=[], metavar="INPUT=NUMBER",
        help="an input that holds one value throughout",
    )  # fmt: skip
    trial.add_argument("--json", action="store_true", help="print the report as JSON")
    trial.set_defaults(act=_try)


def add_measure(commands: Commands) -> None:
    """Add `edgeinfer measure`."""
    measure = commands.add_parser(
        "measure", help="measure what a bundle's variants cost on this device, without a daemon"
    )
    measure.add_argument("bundle", type=Path, help="a bundle's folder, or one .tar of it")
    measure.add_argument(
        "--threads", type=count, action="append", metavar="N", help="threads of one run; several times (default 1)"
    )
    measure.add_argument(
        "--seconds", type=_SECONDS, default=2.0, help="for each variant and thread count (default %(default)s)"
    )
    measure.add_argument("--board", default="auto", help="name of the board file that describes this device")
    measure.add_argument(
        "--json", action="store_true", help="print a profile, as edgeinfer-tools --profile-from reads it"
    )
    measure.set_defaults(act=_measure)


def _measure(args: argparse.Namespace) -> int:
    import platform

    from edgeinfer.artifact.board import find_board
    from edgeinfer.artifact.profile import encode_profile
    from edgeinfer.daemon.bundle_costs import measure_bundle
    from edgeinfer.errors import mib

    if not args.bundle.exists():
        print(f"edgeinfer: {args.bundle} does not exist", file=sys.stderr)
        return 66
    board = find_board(machine=platform.machine()).stem if args.board == "auto" else args.board
    logging.getLogger("edgeinfer").setLevel(logging.CRITICAL)  # the error says what went wrong, once
    profile = measure_bundle(args.bundle, threads=args.threads or [1], seconds=args.seconds, board=board)
    if args.json:
        print(encode_profile(profile).decode(), end="")
        return 0
    print(f"{profile.model} {profile.version} on {board}, onnxruntime {profile.onnxruntime}")
    print(f"{'variant':<24}{'threads':>8}{'p50 ms':>10}{'p99 ms':>10}{'load ms':>10}{'peak':>10}")
    for cost in profile.costs:
        print(
            f"{cost.variant:<24}{cost.threads:>8}{cost.latency.p50_us / 1000:>10.2f}{cost.latency.p99_us / 1000:>10.2f}"
            f"{cost.load_ms:>10.1f}{mib(cost.load_peak_bytes):>10}"
        )
    return 0


def _bench(args: argparse.Namespace) -> int:
    from edgeinfer.client import Client
    from edgeinfer.client.load import MAX_REQUESTS, Load, choose_inputs, describe, run_load, summarize
    from edgeinfer.client.route import DEFAULT_DEADLINE_MS

    if args.rate is not None and (planned := args.rate * args.seconds) > MAX_REQUESTS:
        text = f"--rate {args.rate:g} for {args.seconds:g} s plans {planned:,.0f} requests, at most {MAX_REQUESTS:,}"
        print(f"edgeinfer bench: {text} are kept: lower one of them", file=sys.stderr)
        return 2
    with Client(args.socket) as client:
        model = client.model(args.model)
    try:
        inputs = choose_inputs(model["inputs"], args.model, file=args.file, text=args.text)
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
        model_deadline_ms=model["parameters"].get("deadline_ms") or DEFAULT_DEADLINE_MS,
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
