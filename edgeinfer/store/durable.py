"""Write files so that a power cut leaves the old or the new one, never half of one.

The order is always: write beside the place, fsync the file, rename, fsync the folder. A full or read-only disk is a
`StorageError` that names the path and the remedy; what was begun is removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.errors import EdgeInferError

_REMEDIES = {
    errno.ENOSPC: "the disk is full: remove bundles (edgeinfer bundle remove) or free space",
    errno.EDQUOT: "the disk quota is used up: free space or raise it",
    errno.EROFS: "the file system is read-only: remount it writable, or point paths.state_dir elsewhere",
    errno.EACCES: "permission denied: run as the service's user, or point paths.state_dir elsewhere",
    errno.EPERM: "not permitted: run as the service's user, or point paths.state_dir elsewhere",
    errno.EIO: "the storage fails: check the card or disk and the kernel's log",
}


class StorageError(EdgeInferError):
    """The state directory cannot be read or written; what is loaded keeps running, nothing was changed."""

    exit_code = 74  # EX_IOERR

    def __init__(self, what: str, error: OSError) -> None:
        self.errno = error.errno
        remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
        where = f" ({error.filename})" if error.filename else ""
        super().__init__(f"{what}: {remedy}{where}")


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn an OSError of the block into a `StorageError` that says what was being done.

    Raises:
        StorageError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(what, error) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; whoever reads it, also after a power cut, sees all of the old or all of the new.

    Raises:
        OSError: it cannot be written. `path` is as it was, and nothing is left beside it.
    """
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(partial, path)  # noqa: PTH105
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_durably(source: Path, target: Path) -> None:
    """Copy a plain file's bytes (nothing else of it) to the new file `target`, and fsync it.

    Raises:
        OSError: it cannot be read or written.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with (
        open(os.open(source, flags), "rb") as reader,  # noqa: PTH123
        target.open("xb") as writer,
    ):
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fchmod(writer.fileno(), 0o644)
        os.fsync(writer.fileno())


def fsync_tree(folder: Path) -> None:
    """Make every folder below and including `folder` durable; its files were synced when they were written."""
    for parent, _, _ in os.walk(folder, topdown=False):
        fsync_directory(Path(parent))


def remove_tree(folder: Path) -> None:
    """Remove a folder and what is in it, as far as that is possible; what stays is removed at the next opening."""
    shutil.rmtree(folder, ignore_errors=True)
