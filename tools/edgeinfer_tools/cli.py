"""The command `edgeinfer-tools`: build, sign, pack, inspect and compare bundles, write sample inputs.

Exit codes are in docs/exit-status.md. Nothing is published unless the code is 0, or 3: built, but over budget.

Progress goes to stderr, results to stdout; `--json` makes the result one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.artifact.board import Board, known_boards, load_board
from edgeinfer.artifact.profile import read_profile
from edgeinfer.errors import ConfigError, EdgeInferError, Problem

if TYPE_CHECKING:
    from edgeinfer_tools.recipe import Recipe
    from edgeinfer_tools.search.run import SearchOptions

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
            case "fit":
                return _fit(arguments)
            case _:
                return _samples(arguments)
    except EdgeInferError as error:
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        print(f"edgeinfer-tools: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("edgeinfer-tools: interrupted; nothing was published", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        extra = f"`{EXTRAS[module]}` (docs/toolchain.md)"
        text = f"{arguments.command} needs {module}: install edgeinfer with its extra {extra}"
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
    _add_search(build)
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
    fit = commands.add_parser("fit", help="estimate what boards could sustain with a bundle")
    fit.add_argument("bundle", type=Path, help="a bundle's folder, or one .tar of it")
    fit.add_argument("--boards", default="all", help="board files or names, with commas between (default: all known)")
    fit.add_argument(
        "--ambient", type=float, default=25.0, help="degrees Celsius around the board (default %(default)g)"
    )
    fit.add_argument("--seconds", type=float, default=1.0, help="for each measurement here (default %(default)g)")
    fit.add_argument("--profile-from", type=Path, help="profile that one of the boards itself has measured")
    for command in (build, inspect, sign, pack, diff, samples, fit):
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_search(build: argparse.ArgumentParser) -> None:
    """Add what a search within a budget takes."""
    group = build.add_argument_group("search for the best variants within a budget")
    bounds = "peak=64MiB,p99=30ms@2,size=8MiB,drop=0.01: any of them (default: the recipe's [budget])"
    group.add_argument("--budget", help=bounds)
    group.add_argument("--time-limit", type=float, default=900.0, help="seconds for the search (default %(default)g)")
    group.add_argument("--keep-variants", type=int, default=3, help="most variants in the bundle (default %(default)s)")
    group.add_argument("--profile-from", type=Path, help="profile that the board itself has measured")
    group.add_argument("--on", metavar="ssh://[USER@]BOARD[:PORT]", help="measure the candidates on this board")
    group.add_argument("--ssh-config", type=Path, help="configuration for ssh, instead of the user's own")
    group.add_argument("--fresh", action="store_true", help="forget what earlier searches have found")


def _search_options(arguments: argparse.Namespace, recipe: Recipe) -> SearchOptions | None:
    from edgeinfer_tools.search.budget import budget_of, parse_budget
    from edgeinfer_tools.search.progress import progress_for
    from edgeinfer_tools.search.remote import parse_address
    from edgeinfer_tools.search.run import SearchOptions

    if not arguments.budget and not recipe.file.budget:
        for flag in ("profile_from", "on", "fresh"):
            if getattr(arguments, flag):
                text = "is for a search: give --budget too"
                raise ConfigError(f"--{flag.replace('_', '-')}", (Problem("", text),))
        return None
    if arguments.costs_from:
        text = "a search measures; a board's own figures are for --profile-from"
        raise ConfigError("--costs-from", (Problem("", text),))
    where = str(recipe.folder / "recipe.toml") + " [budget]"
    return SearchOptions(
        budget=parse_budget(arguments.budget) if arguments.budget else budget_of(recipe.file.budget, where),
        time_limit_s=arguments.time_limit,
        keep=arguments.keep_variants,
        profile_from=read_profile(arguments.profile_from) if arguments.profile_from else None,
        on=parse_address(arguments.on) if arguments.on else None,
        ssh_config=arguments.ssh_config,
        fresh=arguments.fresh,
        progress=progress_for(sys.stderr, _say),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _board(name: str) -> Board:
    """Return the board of a file, or of one that came with edgeinfer."""
    path = Path(name)
    if not path.is_file():
        boards = known_boards()
        if name not in boards:
            known = ", ".join(boards)
            raise ConfigError("--board", (Problem("", f"{name!r} is no file and no known board ({known})"),))
        path = boards[name]
    return load_board(path)


def _build(arguments: argparse.Namespace) -> int:
    from edgeinfer_tools.build import Options, build
    from edgeinfer_tools.recipe import load_recipe

    board, recipe = _board(arguments.board), load_recipe(arguments.recipe)
    options = Options(
        seconds=arguments.seconds,
        replace=arguments.replace,
        costs_from=read_profile(arguments.costs_from) if arguments.costs_from else None,
        search=_search_options(arguments, recipe),
    )
    result = build(recipe, board, arguments.output, options, _say)
    if arguments.json:
        print(
            json.dumps(
                {
                    "bundle": str(result.bundle),
                    "digest": result.digest,
                    "variants": [v.name for v in result.manifest.variants],
                    **({"shortfall": result.shortfall} if result.shortfall else {}),
                }
            )
        )
    else:
        print(result.bundle)
    if result.shortfall:
        print(f"edgeinfer-tools: {result.shortfall}", file=sys.stderr)
        return 3
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


def _fit(arguments: argparse.Namespace) -> int:
    from edgeinfer_tools.fit import as_json, as_text, fit
    from edgeinfer_tools.opening import opened

    names = list(known_boards()) if arguments.boards == "all" else arguments.boards.split(",")
    boards = [_board(name.strip()) for name in names]
    profile = read_profile(arguments.profile_from) if arguments.profile_from else None
    with opened(arguments.bundle) as bundle:
        found = fit(bundle, boards, ambient_c=arguments.ambient, profile=profile, seconds=arguments.seconds)
    shown = as_json if arguments.json else as_text
    told = shown(found, ambient_c=arguments.ambient)
    print(json.dumps(told) if arguments.json else told)
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
