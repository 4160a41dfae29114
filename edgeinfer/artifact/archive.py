"""Carry a bundle as one plain tar: packed so that equal bundles give equal bytes, unpacked so that nothing can escape.

An archive is hostile until it is unpacked into a fresh folder of our own and verified. Only plain files and folders
are taken from it, under plain relative names, each once, in a bounded number and a bounded total size that is checked
before a byte is written. Links, devices, sparse members and compression are refused: weights don't compress, and a
compressed archive has no honest size.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.manifest import MANIFEST_FILE, SIGNATURE_FILE
from edgeinfer.errors import ArtifactError, mib

MAX_MEMBERS = 4096
MAX_ARCHIVE_BYTES = 8 << 30
MAX_DEPTH = 8
_CHUNK_BYTES = 1 << 20


def pack_bundle(bundle: Path, archive: Path) -> str:
    """Write the verified bundle as a tar at `archive` and return the bundle digest.

    The manifest comes first, then the signature, then the files by name; times, owners and modes are fixed. It is
    written beside its place and renamed last, so that `archive` is whole or not there.

    Raises:
        ArtifactError: the bundle is not sound.
        OSError: the archive cannot be written; nothing is left of it.
    """
    manifest, digest = verify_bundle(bundle)
    if archive.resolve().is_relative_to(bundle.resolve()):
        raise ArtifactError(f"{archive} would lie inside the bundle, where nothing may be added; name another place")
    signature = [SIGNATURE_FILE] if (bundle / SIGNATURE_FILE).exists() else []
    descriptor, beside = tempfile.mkstemp(prefix=f".{archive.name}.", dir=archive.parent)
    partial = Path(beside)
    try:
        with os.fdopen(descriptor, "wb") as out:
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for name in (MANIFEST_FILE, *signature, *sorted(manifest.files)):
                    with (bundle / name).open("rb") as file:
                        member = tarfile.TarInfo(name)
                        member.size = os.fstat(file.fileno()).st_size
                        member.mode = 0o644
                        tar.addfile(member, file)
            out.flush()
            os.fchmod(out.fileno(), 0o644)
            os.fsync(out.fileno())
        partial.replace(archive)
    finally:
        partial.unlink(missing_ok=True)
    return digest


def unpack_bundle(archive: Path, folder: Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> None:
    """Unpack `archive` into the new folder `folder`, whose parent exists; verify it afterwards.

    On any failure the folder is removed and nothing outside it was written.

    Raises:
        ArtifactError: not a plain tar, or one that tries something.
        OSError: it cannot be read, or `folder` not be written (a full disk, say).
        FileExistsError: `folder` is already there; it is left alone.
    """
    folder.mkdir(mode=0o755)
    try:
        with _BoundedReader(archive) as file:
            _unpack(file, archive, folder, max_bytes)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _unpack(file: io.FileIO, archive: Path, folder: Path, max_bytes: int) -> None:
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes + MAX_MEMBERS * 2048:
        raise ArtifactError(f"{archive} has {mib(size)}, at most {mib(max_bytes)} are unpacked")
    if file.read(4)[:2] in {b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5"}:
        raise ArtifactError(f"{archive} is compressed; pack bundles as plain tar (gunzip it first)")
    file.seek(0)
    written, seen = 0, set[str]()
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="strict") as tar:
            for member in _members(tar, archive):
                name = _plain_name(member.name, archive)
                if member.isdir() and name == ".":
                    continue
                if name in seen:
                    raise ArtifactError(f"{archive} has {name!r} twice")
                seen.add(name)
                target = folder / name
                if member.isdir():
                    target.mkdir(mode=0o755, parents=True, exist_ok=True)
                    continue
                if member.type not in {tarfile.REGTYPE, tarfile.AREGTYPE} or member.issparse():
                    raise ArtifactError(f"{archive}: {name!r} is no plain file (a link, a device, sparse)")
                if member.size < 0 or written + member.size > max_bytes:
                    raise ArtifactError(
                        f"{archive}: {name!r} of {mib(member.size)} exceeds the {mib(max_bytes)} that are unpacked"
                    )
                written += member.size
                target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                _extract(tar, member, target, archive)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:  # headers upon headers
        raise ArtifactError(f"{archive} is not a sound tar archive: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise ArtifactError(f"{archive} has a file where it also has a folder: {error.filename}") from error
    if not seen:
        raise ArtifactError(f"{archive} is empty or no tar archive")
    if MANIFEST_FILE not in seen:
        folders = [name.removesuffix(f"/{MANIFEST_FILE}") for name in seen if name.endswith(f"/{MANIFEST_FILE}")]
        remedy = f"; use tar -C {folders[0]} -cf {archive.name} ." if folders else ", and there is none in it"
        raise ArtifactError(f"{archive}: {MANIFEST_FILE} must be at the top{remedy}")


def _members(tar: tarfile.TarFile, archive: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the members one by one, no more than `MAX_MEMBERS`."""
    count = 0
    while (member := tar.next()) is not None:
        count += 1
        if count > MAX_MEMBERS:
            raise ArtifactError(f"{archive} has more than {MAX_MEMBERS} members")
        yield member


def _plain_name(name: str, archive: Path) -> str:
    pure = PurePosixPath(name)
    bad = pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name
    if bad or len(pure.parts) > MAX_DEPTH or len(name) > 512 or any(len(part.encode()) > 255 for part in pure.parts):
        raise ArtifactError(f"{archive}: {name[:80]!r} is not a plain path inside the bundle")
    return str(pure)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, archive: Path) -> None:
    source = tar.extractfile(member)
    if source is None:
        raise ArtifactError(f"{archive}: {member.name!r} has no data")
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "wb") as out, source:  # noqa: PTH123
        left = member.size
        while left:
            chunk = source.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ArtifactError(f"{archive} ends inside {member.name!r}: fetch it again")
            out.write(chunk)
            left -= len(chunk)
        out.flush()
        os.fsync(out.fileno())


class _BoundedReader(io.FileIO):
    """A file whose single reads are small: `tarfile` reads extended headers of any announced length into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= 2 * _CHUNK_BYTES:
            raise ValueError(f"a header announces {size} bytes")
        return super().read(size)
