"""Open a file that somebody else puts in our way: never one whose opening or reading waits for anybody."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from edgeinfer.pipeline.frame import SourceError


def open_regular(path: Path) -> BinaryIO:
    """Return the file, open for reading in binary; the caller closes it.

    Raises:
        SourceError: it cannot be opened, or is a pipe, a device or a directory.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SourceError(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")
