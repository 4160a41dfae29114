"""Decide whose bundles this device takes: those signed by a key in its folder of trusted keys.

Without any key there, every sound bundle is taken. With one, an unsigned or strange bundle is refused before any of it
is run: there is no switch to let one pass, for the way to trust somebody is to add a key. A folder that cannot be read
trusts nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgeinfer.artifact.manifest import Manifest
from edgeinfer.errors import ConfigError, Problem

Vouch = Callable[[Path, Manifest, str], None]
"""Takes a verified bundle's folder, manifest and digest; raises to refuse it."""

MAX_KEYS = 64


def anyone(_bundle: Path, _manifest: Manifest, _digest: str) -> None:
    """Take every sound bundle."""


def voucher(keys: Path) -> Vouch:
    """Return what lets only those bundles pass that are signed by a key `keys`/*.pem; `anyone` without such a key.

    Raises:
        ConfigError: the folder or a key in it cannot be read, or is no key; or the extra `signatures` is missing.
    """
    files = _key_files(keys)
    if not files:
        return anyone
    try:
        from edgeinfer.artifact.signature import read_keys, verify_signature  # noqa: PLC0415 - cryptography: 18 MB
    except ModuleNotFoundError as error:
        text = f"checking signatures needs the extra: pip install 'edgeinfer[signatures]' ({error.name} is missing)"
        raise ConfigError(str(keys), (Problem("", text),)) from error
    trusted = read_keys(files)

    def vouch(bundle: Path, manifest: Manifest, digest: str) -> None:
        verify_signature(bundle, manifest, digest, trusted)

    return vouch


def _key_files(keys: Path) -> list[Path]:
    """Return the key files of a folder; none when there is no folder."""
    try:
        files = sorted(path for path in keys.iterdir() if path.suffix == ".pem")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(str(keys), (Problem("", f"the trusted keys cannot be read: {error.strerror}"),)) from error
    if len(files) > MAX_KEYS:
        raise ConfigError(str(keys), (Problem("", f"{len(files)} keys, at most {MAX_KEYS} are looked at"),))
    return files
