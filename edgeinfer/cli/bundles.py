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

from edgeinfer.cli.arguments import (
    DEFAULT_CONFIG,
    DEFAULT_KEYS,
    DEFAULT_NEARBY_STATE_DIR,
    DEFAULT_STATE_DIR,
    Commands,
)
from edgeinfer.cli.checking import guess_kind
from edgeinfer.errors import ConfigError, Problem

if TYPE_CHECKING:
    from edgeinfer.store.compiled import CompiledForm
    from edgeinfer.store.store import BundleStore, Installed


def add_bundle(commands: Commands) -> None:
    """Add `edgeinfer bundle` and its verbs."""
    bundle = commands.add_parser("bundle", help="the bundles installed on this device")
    verbs = bundle.add_subparsers(title="verbs", required=True, metavar="VERB")
    add = verbs.add_parser("add", help="verify, probe in a throw-away worker, install and activate")
    add.add_argument("path", type=Path, help="a bundle directory, or one .tar of it")
    keys_help = "folder of public keys (*.pem) by one of which it must be signed (default: the one that --config names)"
    add.add_argument("--keys", type=Path, help=keys_help)
    add.add_argument("--no-compile", action="store_true", help="don't look for the form that loads best here")
    add.set_defaults(act=_bundle_add)
    listing = verbs.add_parser("list", help="what is installed")
    listing.add_argument("--json", action="store_true", help="print it as JSON")
    listing.set_defaults(act=_bundle_list)
    verify = verbs.add_parser("verify", help="check installed bundles, or a bundle directory, byte by byte")
    verify.add_argument("what", nargs="*", help="names, or paths with a / in them; default: everything installed")
    verify.set_defaults(act=_bundle_verify)
    remove = verbs.add_parser("remove", help="remove an installed bundle")
    remove.add_argument("name")
    remove.add_argument("version", nargs="?", default="", help="needed when several are installed")
    remove.add_argument("--all", action="store_true", help="every version")
    remove.set_defaults(act=_bundle_remove)
    for verb in (add, listing, verify, remove):
        place = verb.add_mutually_exclusive_group()
        place.add_argument("--state-dir", type=Path, help="the store (default: the one that --config names)")
        config_help = f"the device.toml or nearby.toml that says where it is (default {DEFAULT_CONFIG}, if there)"
        place.add_argument("--config", type=Path, help=config_help)


def _bundle_add(args: argparse.Namespace) -> int:
    from edgeinfer.daemon.install import install_bundle

    state_dir = _state_dir(args)
    keys, named = _keys(args)
    installed = install_bundle(args.path, state_dir, keys=keys, keys_named=named, compiled=not args.no_compile)
    print(f"installed {_title(installed)} at {installed.path}")
    for form in _forms(state_dir, installed):
        print(f"  {form.record.variant} loads in its {form.record.form} form: {form.record.why}")
    others = [item for item in _reading(state_dir).installed() if item.manifest.name == installed.manifest.name]
    if len(others) > 1:  # without an earlier version a running service is waiting for this one
        print("a running service keeps the version it has loaded until it is restarted or given the load command")
    return 0


def _bundle_list(args: argparse.Namespace) -> int:
    from edgeinfer.store.crashes import CrashFile

    state_dir = _state_dir(args)
    store = _reading(state_dir)
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
                    for form in _forms(state_dir, item)
                },
                "quarantined": {
                    record.key.variant: {"detail": record.detail, "onnxruntime": record.key.runtime}
                    for record in CrashFile(state_dir).quarantined(item.digest)
                },
            }
            for item in installed
        ]
        print(json.dumps(rows, indent=2))
        return 0
    for item in installed:
        notes = {form.record.variant: f" ({form.record.form})" for form in _forms(state_dir, item)}
        quarantined = CrashFile(state_dir).quarantined(item.digest)
        notes |= {record.key.variant: " (quarantined)" for record in quarantined}
        variants = ", ".join(f"{variant.name}{notes.get(variant.name, '')}" for variant in item.manifest.variants)
        print(f"{'*' if item.active else ' '} {_title(item)}  [{variants}]  {item.manifest.description}")
        for record in quarantined:
            print(f"    {record.key.variant} is quarantined with onnxruntime {record.key.runtime}: {record.detail}")
    for problem in store.problems():
        print(f"edgeinfer: {problem}", file=sys.stderr)
    if not installed:
        print(f"no bundles in {state_dir}; add one with: edgeinfer bundle add PATH")
    return 0


def _bundle_verify(args: argparse.Namespace) -> int:
    from edgeinfer.errors import ArtifactError

    state_dir = _state_dir(args)
    store = _reading(state_dir)
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
        print(f"no bundles in {state_dir}; add one with: edgeinfer bundle add PATH")
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
    from edgeinfer.store.store import BundleStore

    if args.all and args.version:
        print("edgeinfer bundle remove: give a version or --all, not both", file=sys.stderr)
        return 2
    state_dir = _state_dir(args)
    mine = [item for item in _reading(state_dir).installed() if item.manifest.name == args.name]
    if len(mine) > 1 and not args.version and not args.all:
        versions = ", ".join(f"{item.manifest.version}{' (active)' if item.active else ''}" for item in mine)
        print(f"edgeinfer: {args.name} has versions {versions}; name one, or --all", file=sys.stderr)
        return 2
    for item in BundleStore(state_dir).remove(args.name, args.version):
        print(f"removed {_title(item)}")
    return 0


def _state_dir(args: argparse.Namespace) -> Path:
    """Return the store's place; see `_place`."""
    if args.state_dir is not None:
        return Path(args.state_dir)
    return _place(args, "state_dir", device=DEFAULT_STATE_DIR, nearby=DEFAULT_NEARBY_STATE_DIR)[0]


def _keys(args: argparse.Namespace) -> tuple[Path, bool]:
    """Return the folder of trusted keys, and whether somebody named it; see `_place`."""
    if args.keys is not None:
        return Path(args.keys), True
    if args.state_dir is not None:
        return DEFAULT_KEYS, False
    return _place(args, "keys", device=DEFAULT_KEYS, nearby=DEFAULT_KEYS)


def _place(args: argparse.Namespace, key: str, *, device: Path, nearby: Path) -> tuple[Path, bool]:
    """Return a place as a service's configuration has it, else the default one; and whether the configuration has it.

    Of the configuration only this one key is read: a slip elsewhere in it is no reason not to install a bundle.

    Raises:
        ConfigError: the configuration cannot be read, or has something else there.
    """
    if args.config is None:
        try:
            DEFAULT_CONFIG.stat()
        except (FileNotFoundError, NotADirectoryError):
            return device, False
        except OSError:
            pass  # one that we may not see: reading it says so
    file = args.config or DEFAULT_CONFIG
    from edgeinfer.toml_file import load_toml

    table = load_toml(file)
    default, where, found = nearby, key, table.get(key)  # nearby.toml has it at its top level
    if guess_kind(table, file) == "device":
        where, paths = f"paths.{key}", table.get("paths", {})
        default, found = device, paths.get(key) if isinstance(paths, dict) else False
    if found is None:
        return default, False
    if not isinstance(found, str) or not found:
        raise ConfigError(str(file), (Problem(where, f"{found!r} is not a path"),))
    return Path(found), True


def _reading(state_dir: Path) -> BundleStore:
    """Return the store, looked at only: whoever may read it needs no permission to write, and no lock.

    Raises:
        StorageError: it cannot be read.
    """
    from edgeinfer.store.store import BundleStore

    store = BundleStore(state_dir, clean=False)
    store.require_readable()
    return store


def _forms(state_dir: Path, item: Installed) -> list[CompiledForm]:
    from edgeinfer.store.compiled import CompiledStore

    return CompiledStore(state_dir).forms(item.digest)


def _title(item: Installed) -> str:
    return f"{item.manifest.name} {item.manifest.version} {item.digest[:12]}"
