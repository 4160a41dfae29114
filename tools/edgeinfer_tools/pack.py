"""Write a bundle directory so that it is there completely or not at all.

Everything is written into a staging folder beside the target, synced, and renamed into place last. Equal content gives
an equal bundle digest: no time, path or random name enters a file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edgeinfer.artifact.manifest import MANIFEST_FILE, File, Manifest, encode_manifest
from edgeinfer_tools.faults import OutputExists
from edgeinfer_tools.fetch import sha256


@contextmanager
def staging(target: Path, *, replace: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends well, and is removed when it does not.

    Raises:
        OutputExists: `target` is there and may not be replaced, or is no bundle; also when it appears meanwhile.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 - a link at the end must not be followed, as resolve() does
    _require_replaceable(target, replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    try:
        yield folder
        _sync(folder)
        folder.chmod(0o755)
        _publish(folder, target, replace=replace)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_replaceable(target: Path, *, replace: bool) -> None:
    """Let only a bundle, or nothing at all, be replaced: a folder of anything else is somebody's work."""
    if not os.path.lexists(target):
        return
    if not replace:
        raise OutputExists(f"{target} exists; name another folder, or add --replace")
    if target.is_symlink() or not (target / MANIFEST_FILE).is_file():
        raise OutputExists(f"{target} is no bundle, and --replace replaces nothing else; name another folder")


def _publish(folder: Path, target: Path, *, replace: bool) -> None:
    """Rename into place; the bundle that stood there is moved away first and removed after."""
    _require_replaceable(target, replace=replace)
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
        target.replace(old / "bundle")
        folder.replace(target)
        shutil.rmtree(old)
    else:
        folder.replace(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    for path in [*sorted(folder.rglob("*")), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace one file of a published bundle, at once; until then it lies beside the bundle, not in it."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)
    _sync(path.parent)


def write_json(path: Path, content: object) -> None:
    """Write sorted, indented JSON with one newline at its end."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=2) + b"\n")


def file_table(folder: Path) -> dict[str, File]:
    """Return size and sha256 of every file in the folder, for the manifest."""
    table = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            table[str(path.relative_to(folder))] = File(sha256=sha256(data), size_bytes=len(data))
    return table


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json.

    Raises:
        ManifestInvalid: it contradicts itself.
    """
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
