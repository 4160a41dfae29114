"""Prove that a bundle is exactly what its manifest says, and read its golden files.

Nothing here loads a model or trusts a file name. A sound bundle holds its manifest, at most one signature and the
files of the manifest's table: all of them, nothing else, each a regular file with one link, of the declared size and
sha256. So a model's external data can only be a file that the manifest vouches for: a symbolic link, a device or a
hard link to something outside (which ONNX Runtime would follow) is refused here, whatever the runtime checks itself.
That the locations *inside* the ONNX files stay in the bundle is `external_data`.

Hashing takes about a second per 200 MB on a small board: call it from the storage thread, not from the event loop.
Archives are `archive`; where bundles live on a device is `edgeinfer.store`.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from edgeinfer.artifact.epcontext import refuse_compiled_contexts
from edgeinfer.artifact.external_data import check_external_data
from edgeinfer.artifact.hashing import sha256_of
from edgeinfer.artifact.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    SIGNATURE_FILE,
    File,
    Golden,
    Manifest,
    bundle_digest,
    parse_manifest,
)
from edgeinfer.errors import ArtifactError, DigestMismatch, ManifestInvalid
from edgeinfer.request import Payload

MAX_SIGNATURE_BYTES = 1 << 20
MAX_GOLDEN_BYTES = 64 << 20
MAX_DEPTH = 8
_GOLDEN_LENGTH = struct.Struct("<Q")


def verify_bundle(path: Path) -> tuple[Manifest, str]:
    """Return the manifest and the bundle digest of the bundle directory `path`, having checked every byte of it.

    Raises:
        UnsupportedSchema: made for another version of the format.
        ManifestInvalid: no manifest, one that contradicts itself, or files that are missing, too many, or no plain
            files; the text names each.
        DigestMismatch: a file's size or sha256 is not the declared one.
        ArtifactError: a model refers to data outside the bundle, or holds code that a provider has compiled.
    """
    raw = _read_whole(path, MANIFEST_FILE, MAX_MANIFEST_BYTES)
    manifest = parse_manifest(raw, str(path / MANIFEST_FILE))
    _check_listing(path, manifest)
    for name, declared in sorted(manifest.files.items()):
        _check_file(path, name, declared)
    for name in sorted({variant.file for variant in manifest.variants}):
        check_external_data(path / name, manifest.files, PurePosixPath(name))
        refuse_compiled_contexts(path / name)
    return manifest, bundle_digest(raw)


def read_golden(bundle: Path, golden: Golden) -> tuple[Payload, Payload]:
    """Return the golden request and the response that it must have.

    The tensors are cut out by the sizes that the header announces; `oip.decode_request` and `decode_response` check
    the rest. The bundle must have been verified.

    Raises:
        ManifestInvalid: missing, or not a golden file.
    """
    return (
        decode_golden(_read_whole(bundle, golden.request, MAX_GOLDEN_BYTES), f"{bundle}: {golden.request}"),
        decode_golden(_read_whole(bundle, golden.response, MAX_GOLDEN_BYTES), f"{bundle}: {golden.response}"),
    )


def encode_golden(payload: Payload) -> bytes:
    """Return `payload` as a golden file: 8-byte little-endian header length, the header, the tensors."""
    return b"".join((_GOLDEN_LENGTH.pack(len(payload.header)), payload.header, *payload.tensors))


class _Parameters(msgspec.Struct):
    binary_data_size: int


class _Described(msgspec.Struct):
    parameters: _Parameters


class _GoldenHeader(msgspec.Struct):
    inputs: list[_Described] = []
    outputs: list[_Described] = []


def decode_golden(data: bytes, source: str) -> Payload:
    """Return the payload of a golden file; its tensors are views of `data`.

    Raises:
        ManifestInvalid: not a golden file, or not in all-binary form.
    """
    if len(data) < _GOLDEN_LENGTH.size:
        raise ManifestInvalid(f"{source} has {len(data)} bytes, a golden file starts with {_GOLDEN_LENGTH.size}")
    (length,) = _GOLDEN_LENGTH.unpack_from(data)
    view = memoryview(data)[_GOLDEN_LENGTH.size :]
    if length > len(view):
        raise ManifestInvalid(f"{source} announces a header of {length} bytes, {len(view)} follow")
    header, body = bytes(view[:length]), view[length:]
    try:
        parsed = msgspec.json.decode(header, type=_GoldenHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestInvalid(f"{source} is not a golden file: {error}") from error
    tensors, at = [], 0
    for tensor in (*parsed.inputs, *parsed.outputs):
        size = tensor.parameters.binary_data_size
        if size < 0 or at + size > len(body):
            raise ManifestInvalid(f"{source} announces a tensor of {size} bytes, {len(body) - at} are left")
        tensors.append(body[at : at + size])
        at += size
    if at != len(body):
        raise ManifestInvalid(f"{source} has {len(body) - at} bytes after its last tensor")
    return Payload(header, tuple(tensors))


def _check_listing(bundle: Path, manifest: Manifest) -> None:
    """Hold the directory's entries against the file table: nothing missing, nothing extra, nothing but plain files."""
    problems, found = [], set()
    folders = {str(parent) for name in manifest.files for parent in PurePosixPath(name).parents}
    for name, entry in _walk(bundle, ""):
        mode = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(mode.st_mode):
            if name not in folders:
                problems.append(f"folder {name!r} holds no file of the manifest")
        elif not stat.S_ISREG(mode.st_mode):
            problems.append(f"{name!r} is a {_kind(mode.st_mode)}, only plain files are allowed")
        elif mode.st_nlink != 1:
            problems.append(f"{name!r} has {mode.st_nlink} hard links, so it is not the bundle's alone; copy it")
        elif name in manifest.files or name in {MANIFEST_FILE, SIGNATURE_FILE}:
            found.add(name)
            if name == SIGNATURE_FILE and mode.st_size > MAX_SIGNATURE_BYTES:
                problems.append(f"{name!r} has {mode.st_size} bytes, a signature has at most {MAX_SIGNATURE_BYTES}")
        else:
            problems.append(f"{name!r} is not in the manifest")
        if len(problems) >= 10:
            break
    problems += [f"{name!r} is missing" for name in sorted(set(manifest.files) - found) if len(problems) < 20]
    if problems:
        raise ManifestInvalid(f"{bundle}: " + "; ".join(problems))


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield every entry below `folder` by its path inside the bundle; symbolic links are not followed."""
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = f"{prefix}{entry.name}"
                yield name, entry
                if entry.is_dir(follow_symlinks=False):
                    if name.count("/") + 1 >= MAX_DEPTH:
                        raise ManifestInvalid(f"{folder / entry.name} lies deeper than {MAX_DEPTH} folders")
                    yield from _walk(folder / entry.name, f"{name}/")
    except OSError as error:
        raise ManifestInvalid(f"{folder} cannot be listed: {error.strerror}") from error


def _check_file(bundle: Path, name: str, declared: File) -> None:
    """Hash one file through one descriptor, so that what is checked is what was opened."""
    descriptor = _open_plain(bundle, name)
    try:
        actual = os.fstat(descriptor).st_size
        if actual != declared.size_bytes:
            raise DigestMismatch(
                f"{bundle / name} has {actual} bytes, the manifest declares {declared.size_bytes}: "
                "fetch or build the bundle again"
            )
        digest, size = sha256_of(descriptor, most_bytes=declared.size_bytes)
    except OSError as error:
        raise ManifestInvalid(f"{bundle / name} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if size != declared.size_bytes or digest != declared.sha256.lower():
        raise DigestMismatch(
            f"{bundle / name} has sha256 {digest[:16]}…, the manifest declares {declared.sha256[:16]}…: "
            "fetch or build the bundle again"
        )


def _read_whole(bundle: Path, name: str, most_bytes: int) -> bytes:
    descriptor = _open_plain(bundle, name)
    try:
        size = os.fstat(descriptor).st_size
        if size > most_bytes:
            raise ManifestInvalid(f"{bundle / name} has {size} bytes, at most {most_bytes} are read")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    except OSError as error:
        raise ManifestInvalid(f"{bundle / name} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _open_plain(bundle: Path, name: str) -> int:
    """Return a descriptor of a regular, single-linked file; never waits on a pipe, never follows a link."""
    try:
        descriptor = os.open(bundle / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        what = "is not a bundle: it has no" if name == MANIFEST_FILE else "lacks"
        raise ManifestInvalid(f"{bundle} {what} {name}") from None
    except OSError as error:
        raise ManifestInvalid(f"{bundle / name} cannot be opened as a plain file: {error.strerror}") from error
    mode = os.fstat(descriptor)
    if not stat.S_ISREG(mode.st_mode) or mode.st_nlink != 1:
        os.close(descriptor)
        raise ManifestInvalid(f"{bundle / name} is not a plain file with one link")
    return descriptor


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISLNK, "symbolic link"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
    )
    return next((word for is_kind, word in kinds if is_kind(mode)), "special file")


__all__ = ["ArtifactError", "decode_golden", "encode_golden", "read_golden", "verify_bundle"]
