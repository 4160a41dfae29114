"""What processes take together as if nothing else ran on the machine.

The kernel's proportional set size divides a page of a library by all processes that map it, so another Python program
beside the benchmark would make every figure smaller. Here each page of a file that any of *our* processes has mapped
counts once and in full; anonymous memory is the kernel's proportional figure, since only our own processes, forked from
one another, can share that. On a machine without other users of the same files this is PSS.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from pathlib import Path

from edgeinfer.sensors.process import process_memory

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")
_PRESENT = 1 << 63
_OF_FILE = 1 << 61
"""A page of a file or of shared memory; not set once a private mapping was written to (then it is anonymous)."""

FilePage = tuple[str, int]
"""Device and inode, and the page's number in the file."""


def alone_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of anonymous memory and of distinct file pages that the processes have in memory."""
    processes = list(pids)
    pages = set[FilePage]()
    for pid in processes:
        pages |= file_pages(pid)
    return process_memory(_PROC, processes).anonymous_bytes + len(pages) * _PAGE


def file_pages(pid: int) -> set[FilePage]:
    """Return the pages of files and shared memory that the process has mapped and in memory."""
    pages = set[FilePage]()
    with (_PROC / str(pid) / "pagemap").open("rb") as pagemap:
        for line in (_PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
            addresses, _, offset, device, inode = line.split(maxsplit=5)[:5]
            if inode == "0":
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            pagemap.seek(begin // _PAGE * 8)
            entries = array("Q", pagemap.read((end - begin) // _PAGE * 8))
            first = int(offset, 16) // _PAGE
            file = f"{device} {inode}"
            pages.update(
                (file, first + index) for index, entry in enumerate(entries) if entry & _PRESENT and entry & _OF_FILE
            )
    return pages
