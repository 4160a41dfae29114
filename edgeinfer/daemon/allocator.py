"""Keep what the C library's allocator holds in reserve small, and hand back what the start has freed.

glibc only; elsewhere nothing happens, and nothing needs to.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

_M_ARENA_MAX: Final = -8


def use_one_arena() -> None:
    """Have all threads allocate from one arena: each would else keep what it has freed from the others.

    Before the first thread.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


def settle() -> None:
    """Give back what the start has left over; what it has made is for ever, and no collection looks at it again."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
