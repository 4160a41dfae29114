"""`edgeinfer bundle`: the bundles installed on this device."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.cli.arguments import DEFAULT_STATE_DIR, Commands

if TYPE_CHECKING:
    from edgeinfer.store.compiled import CompiledForm
    from edgeinfer.store.store import BundleStore, Installed


def add_bundle(commands: Commands) -> None:
    """Add `edgeinfer bundle` and its verbs."""
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
