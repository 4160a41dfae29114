"""Read small files whose path somebody else may have put something at: a pipe, a device, a link to one, a huge file.

Opening never waits and reading always ends: what is no regular file, or a longer one than can be meant, is an error
with its reason. What a file holds is the caller's matter, and so is how its absence counts.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_plain(path: Path, *, follow: bool = True) -> int:
    """Return a descriptor of a regular file, open for reading; the caller closes it.

    `follow`: a link that leads to one will do; say no where only we ourselves put files.

    Raises:
        OSError: it cannot be opened, or is something else; `strerror` says what, fit to stand behind "cannot be read:".
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a symbolic link, not a plain file", str(path)) from error
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.EINVAL, "it is a socket, not a plain file", str(path)) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "pipe" if stat.S_ISFIFO(mode) else "device"
    raise OSError(errno.EINVAL, f"it is a {kind}, not a plain file", str(path))


def read_plain(path: Path, most_bytes: int, *, follow: bool = True) -> bytes:
    """Return all that a regular file of at most `most_bytes` holds.

    Raises:
        OSError: as `open_plain`, or it is longer (EFBIG), or reading it fails.
    """
    with open(open_plain(path, follow=follow), "rb", buffering=0) as file:
        data = bytearray()
        while piece := file.read(most_bytes + 1 - len(data)):
            data += piece
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return bytes(data)
