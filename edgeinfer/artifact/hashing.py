"""Hash a file of any size without making this process large, and without stopping its other threads.

Python's own sha256 holds the interpreter's lock and is slow; OpenSSL's is four times as fast and lets others run, but
takes 4 MB for ever once it is loaded. So a process that has it uses it, and one that has not has large files hashed by
a short-lived process that does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from typing import Final

_SMALL_BYTES: Final = 4 << 20
"""Up to this many are hashed here in any case: [measured] 3 ms a MiB, where another process takes 12 and 0.6 a MiB."""
_CHUNK_BYTES: Final = 64 << 10
"""Python's own sha256 keeps other threads waiting for as long as it takes for one: 0.2 ms."""
_PATIENCE_S: Final = 600.0

_HASH_STDIN: Final = """
import os; os.nice(5)
import _hashlib, sys
digest, size, most, chunk = _hashlib.openssl_sha256(), 0, int(sys.argv[1]), bytearray(1 << 20)
while size <= most and (count := os.readv(0, [chunk])):
    digest.update(memoryview(chunk)[:count])
    size += count
os.write(1, f"{digest.hexdigest()} {size}".encode())
"""


def sha256_of(descriptor: int, *, most_bytes: int) -> tuple[str, int]:
    """Return the sha256, in hexadecimal digits, and the size of what an open file holds from its position on. Blocks.

    Of a file that turns out longer than `most_bytes` only a little more than that is read; the size says so.

    Raises:
        OSError: it cannot be read.
    """
    if most_bytes > _SMALL_BYTES and sys.modules.get("_hashlib") is None:
        begin = os.lseek(descriptor, 0, os.SEEK_CUR)
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):  # no process to be had, say
            return _hash_elsewhere(descriptor, most_bytes)
        os.lseek(descriptor, begin, os.SEEK_SET)
    return _hash_here(descriptor, most_bytes)


def _hash_here(descriptor: int, most_bytes: int) -> tuple[str, int]:
    digest, size, chunk = hashlib.sha256(), 0, bytearray(_CHUNK_BYTES)
    while size <= most_bytes and (count := os.readv(descriptor, [chunk])):
        digest.update(memoryview(chunk)[:count])
        size += count
    return digest.hexdigest(), size


def _hash_elsewhere(descriptor: int, most_bytes: int) -> tuple[str, int]:
    """Have another process do it.

    Raises:
        OSError: it cannot be started.
        SubprocessError: it failed, or did not come to an end.
        ValueError: it said something else.
    """
    argv = [sys.executable, "-I", "-S", "-c", _HASH_STDIN, str(most_bytes)]
    done = subprocess.run(
        argv, stdin=descriptor, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=_PATIENCE_S
    )
    digest, size = done.stdout.decode().split()
    return digest, int(size)
