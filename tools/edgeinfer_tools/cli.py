"""The command `edgeinfer-tools`: build and inspect bundles, write sample inputs.

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

EXTRA = ("onnx", "rich", "onnx_ir", "rapidfuzz", "pycocotools")
"""Modules that only the extra `edgeinfer[tools]` installs."""
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
            case _:
                return _samples(arguments)
    except EdgeInferError as error:
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        print(f"edgeinfer-tools: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        text = f"{arguments.command} needs the extra: pip install 'edgeinfer[tools]' ({error.name} is not installed)"
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
    inspect.add_argument("bundle", type=Path)
    inspect.add_argument("--verify", action="store_true", help="check every file and run the golden requests")
    samples = commands.add_parser("samples", help="write a recipe's sample inputs as files, for demos and tests")
    samples.add_argument("recipe", type=Path, help="folder with recipe.toml, or that file")
    samples.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    for command in (build, inspect, samples):
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

    if arguments.verify:
        from edgeinfer_tools.verify import prove

        prove(arguments.bundle)
    show = inspection.as_json if arguments.json else inspection.as_text
    shown = show(arguments.bundle, verified=arguments.verify)
    print(json.dumps(shown) if arguments.json else shown)
    return 0


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
