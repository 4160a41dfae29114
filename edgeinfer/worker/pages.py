"""Let go of the pages of libraries that were only needed to get ready.

An import runs through megabytes of code and tables once: relocation, static constructors, registrations. They stay
mapped, and count as in use, until the kernel is short of memory. A process that then only waits can unmap them itself;
what it needs again is mapped again from the page cache, or read from the file, as after any pressure.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MADV_DONTNEED: Final = 4
_MAPPING: Final = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) r-[x-]p [0-9a-f]+ \S+ (\d+) ")


def let_go_of_files() -> None:
    """Unmap every page of a file that this process has only read. One thread only; takes some milliseconds."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for begin, end in list(_only_read()):
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


def _only_read() -> Iterator[tuple[int, int]]:
    """Yield the read-only, private mappings of files without a page of our own: relocated tables have some."""
    area: tuple[int, int] | None = None
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps").read_bytes().splitlines():
            if (found := _MAPPING.match(line)) is not None:
                area = (int(found[1], 16), int(found[2], 16)) if found[3] != b"0" else None
            elif not line[:1].isupper():  # another mapping
                area = None
            elif area is not None and line.startswith((b"Anonymous:", b"Swap:")) and int(line.split()[1]) > 0:
                area = None  # pages of our own would be lost
            elif area is not None and line.startswith(b"VmFlags:"):
                yield area
                area = None
