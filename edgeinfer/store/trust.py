"""Decide whose bundles this device takes: those signed by a key in its folder of trusted keys.

Where nobody named a folder, the default one may be missing or hold no key, and then every sound bundle is taken. A
folder that was named means that signatures are wanted: it must be there with a key in it. With a key, an unsigned or
strange bundle is refused before any of it is run: there is no switch to let one pass, for the way to trust somebody is
to add a key. What cannot be read, leads nowhere, or may be a key under a name that is not looked at trusts nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgeinfer.artifact.manifest import Manifest
from edgeinfer.errors import ConfigError, EdgeInferError, Problem

Vouch = Callable[[Path, Manifest, str], None]
"""Takes a verified bundle's folder, manifest and digest; raises to refuse it."""

MAX_KEYS = 64
_LOOKS_LIKE_A_KEY = frozenset({".pem", ".pub", ".key", ".crt", ".cer", ".der"})
"""Suffixes, in small letters, of files that somebody may have meant to be a trusted key."""
_HOW = "one PEM file with a public key each, named *.pem"


class SignaturesUnchecked(EdgeInferError):
    """Signatures are wanted, and what checks them is not installed."""

    exit_code = 2


def anyone(_bundle: Path, _manifest: Manifest, _digest: str) -> None:
    """Take every sound bundle."""


def voucher(keys: Path, *, named: bool = True) -> Vouch:
    """Return what lets only those bundles pass that are signed by a key `keys`/*.pem.

    `named`: somebody chose this folder, so it must be there and hold a key; else it is the default one, and without a
    key in it this is `anyone`.

    Raises:
        ConfigError: the folder or a key in it cannot be read, or is no key; or a folder that was named has none.
        SignaturesUnchecked: the extra `signatures` is missing.
    """
    files = key_files(keys, named=named)
    if not files:
        return anyone
    try:
        from edgeinfer.artifact.signature import read_keys, verify_signature  # noqa: PLC0415 - cryptography: 18 MB
    except ModuleNotFoundError as error:
        raise SignaturesUnchecked(
            f"bundles must be signed here, for there are keys in {keys}, and {error.name} is missing, which checks "
            "signatures: install edgeinfer with its extra `signatures` (docs/operations.md, Signed bundles)"
        ) from error
    trusted = read_keys(files)

    def vouch(bundle: Path, manifest: Manifest, digest: str) -> None:
        verify_signature(bundle, manifest, digest, trusted)

    return vouch


def key_files(keys: Path, *, named: bool) -> list[Path]:
    """Return the key files of a folder; none when it is the default one, and missing or without any.

    Raises:
        ConfigError: see `voucher`.
    """
    try:
        found = sorted(keys.iterdir())
    except FileNotFoundError as error:
        if link := _leads_nowhere(keys):
            raise _wrong(keys, f"the trusted keys cannot be read: {link} is a link to nothing") from error
        if named:
            raise _wrong(keys, f"there is no such folder of trusted keys: make it, with {_HOW}") from error
        return []
    except OSError as error:
        raise _wrong(keys, f"the trusted keys cannot be read: {error.strerror}") from error
    files = [path for path in found if path.suffix == ".pem"]
    others = [path.name for path in found if path.suffix != ".pem" and path.suffix.lower() in _LOOKS_LIKE_A_KEY]
    if others:
        raise _wrong(keys, f"not looked at, for only *.pem are: {', '.join(others)}; rename or remove each")
    if named and not files:
        raise _wrong(keys, f"there is no trusted key in it: add {_HOW}")
    if len(files) > MAX_KEYS:
        raise _wrong(keys, f"{len(files)} keys, at most {MAX_KEYS} are looked at")
    return files


def _leads_nowhere(keys: Path) -> Path | None:
    """Return the link on the way to a missing folder that has nothing behind it; None when it is plainly missing."""
    for place in (keys, *keys.parents):
        if place.exists():
            return None
        if place.is_symlink():
            return place
    return None


def _wrong(keys: Path, text: str) -> ConfigError:
    return ConfigError(str(keys), (Problem("", text),))
