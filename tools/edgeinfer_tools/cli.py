"""The command `edgeinfer-tools`: build, sign, pack, inspect and compare bundles, write sample inputs.

Exit codes are in docs/exit-status.md. Nothing is published unless the code is 0. (3 is kept for "built, but over
budget".)

Progress goes to stderr, results to stdout; `--json` makes the result one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from edgeinfer.artifact.board import known_boards, load_board
from edgeinfer.artifact.profile import read_profile
from edgeinfer.errors import ConfigError, EdgeInferError, Problem

EXTRAS = {
    **dict.fromkeys(("onnx", "rich", "onnx_ir", "onnxslim", "sympy", "rapidfuzz", "pycocotools"), "tools"),
    **dict.fromkeys(("model_signing", "OpenSSL"), "signing"),
    "cryptography": "signatures",
}
"""By which extra of edgeinfer a module is installed."""
USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        match arguments.command:
            case "build":
                return _build(arguments)
            case "inspect":
                return _inspect(arguments)
            case "sign":
                return _sign(arguments)
            case "pack":
                return _pack(arguments)
            case "diff":
                return _diff(arguments)
            case _:
                return _samples(arguments)
    except EdgeInferError as error:
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        print(f"edgeinfer-tools: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        extra = f"pip install 'edgeinfer[{EXTRAS[module]}]'"
        text = f"{arguments.command} needs the extra: {extra} ({module} is not installed)"
        if arguments.json:
            print(json.dumps({"error": "ExtraMissing", "message": text}))
        print(f"edgeinfer-tools: {text}", file=sys.stderr)
        return USAGE


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="edgeinfer-tools", description="Build and inspect edgeinfer bundles.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build a bundle from a recipe, for a board")
    build.add_argument("recipe", type=Path, help="folder with recipe.toml, or that file")
    build.add_argument("--board", required=True, help="board file, or the name of one that came with edgeinfer")
    build.add_argument("-o", "--output", type=Path, required=True, help="the bundle's folder; must not exist")
    build.add_argument("--replace", action="store_true", help="replace the output when it exists")
    build.add_argument(
        "--seconds", type=float, default=2.0, help="time for each latency measurement, all rounds (default 2)"
    )
    build.add_argument("--costs-from", type=Path, help="profile whose costs are taken instead of measuring again")
    inspect = commands.add_parser("inspect", help="show what a bundle says about itself")
    inspect.add_argument("bundle", type=Path, help="a bundle's folder, or one .tar of it")
    inspect.add_argument("--verify", action="store_true", help="check every file and run the golden requests")
    inspect.add_argument(
        "--key", type=Path, action="append", default=[], help="public key by which it must be signed; several: any"
    )
    sign = commands.add_parser("sign", help="sign a bundle by a private key (OpenSSF model-signing)")
    sign.add_argument("bundle", type=Path, help="the bundle's folder; model.sig is written into it")
    sign.add_argument("--key", type=Path, required=True, help="private key on an elliptic curve, in PEM form")
    sign.add_argument("--password-file", type=Path, help="file whose first line is the key's password")
    sign.add_argument("--replace", action="store_true", help="replace the signature that is there")
    pack = commands.add_parser("pack", help="make one .tar of a bundle; equal bundles give equal bytes")
    pack.add_argument("bundle", type=Path, help="the bundle's folder")
    pack.add_argument("-o", "--output", type=Path, required=True, help="the archive; must not exist")
    pack.add_argument("--replace", action="store_true", help="replace the output when it exists")
    diff = commands.add_parser("diff", help="say in what two bundles differ; the status is 1 when they do")
    diff.add_argument("before", type=Path, help="a bundle's folder, or one .tar of it")
    diff.add_argument("after", type=Path, help="another one")
    samples = commands.add_parser("samples", help="write a recipe's sample inputs as files, for demos and tests")
    samples.add_argument("recipe", type=Path, help="folder with recipe.toml, or that file")
    samples.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    for command in (build, inspect, sign, pack, diff, samples):
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _build(arguments: argparse.Namespace) -> int:
    from edgeinfer_tools.build import Options, build
    from edgeinfer_tools.recipe import load_recipe

    board_path = Path(arguments.board)
    if not board_path.is_file():
        boards = known_boards()
        if arguments.board not in boards:
            known = ", ".join(boards)
            raise ConfigError("--board", (Problem("", f"{arguments.board!r} is no file and no known board ({known})"),))
        board_path = boards[arguments.board]
    options = Options(
        seconds=arguments.seconds,
        replace=arguments.replace,
        costs_from=read_profile(arguments.costs_from) if arguments.costs_from else None,
    )
    result = build(
        load_recipe(arguments.recipe),
        load_board(board_path),
        arguments.output,
        options,
        lambda line: print(line, file=sys.stderr),
    )
    if arguments.json:
        print(
            json.dumps(
                {
                    "bundle": str(result.bundle),
                    "digest": result.digest,
                    "variants": [v.name for v in result.manifest.variants],
                }
            )
        )
    else:
        print(result.bundle)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from edgeinfer_tools import inspection
    from edgeinfer_tools.opening import opened

    with opened(arguments.bundle) as bundle:
        if arguments.verify:
            from edgeinfer_tools.verify import prove

            prove(bundle)
        signer = ""
        if arguments.key:
            from edgeinfer_tools.verify import prove_signature

            signer = prove_signature(bundle, arguments.key)
        show = inspection.as_json if arguments.json else inspection.as_text
        shown = show(bundle, verified=arguments.verify, signer=signer)
    print(json.dumps(shown) if arguments.json else shown)
    return 0


def _sign(arguments: argparse.Namespace) -> int:
    from edgeinfer_tools.sign import read_password, sign

    password = read_password(arguments.password_file)
    trusted = sign(arguments.bundle, arguments.key, password=password, replace=arguments.replace)
    if arguments.json:
        print(json.dumps({"bundle": str(arguments.bundle), "key": trusted.fingerprint}))
    else:
        print(f"{arguments.bundle} is signed by key {trusted.fingerprint[:12]}")
    return 0


def _pack(arguments: argparse.Namespace) -> int:
    from edgeinfer.artifact.archive import pack_bundle
    from edgeinfer_tools.faults import OutputExists

    if arguments.output.exists() and not arguments.replace:
        raise OutputExists(f"{arguments.output} exists; name another file, or add --replace")
    digest = pack_bundle(arguments.bundle, arguments.output)
    print(json.dumps({"archive": str(arguments.output), "digest": digest}) if arguments.json else arguments.output)
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from edgeinfer_tools.difference import as_json, as_text, difference
    from edgeinfer_tools.opening import opened

    with opened(arguments.before) as before, opened(arguments.after) as after:
        changes = difference(before, after)
    print(json.dumps(as_json(changes)) if arguments.json else as_text(changes))
    return 1 if changes else 0


def _samples(arguments: argparse.Namespace) -> int:
    from edgeinfer_tools.sample_files import write_samples

    written = write_samples(arguments.recipe, arguments.output)
    if arguments.json:
        print(json.dumps({"folder": str(arguments.output), "files": [path.name for path in written]}))
    else:
        print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
