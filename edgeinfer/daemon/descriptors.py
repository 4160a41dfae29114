"""Have enough file descriptors: raise the process's own limit at the start, and tell when it is still too low."""

from __future__ import annotations

import contextlib
import logging
import resource

_log = logging.getLogger(__name__)

WANTED = 4096
"""More than any configuration needs; the usual soft limit is 1,024, some boards' images have 256."""
_OURSELVES = 48
"""Event loop, logs, sensors, store, zygote, gateway's listeners."""
_PER_WORKER = 12
"""Its channel, its pidfd, and a descriptor for each of its slots."""
_PER_LOOP = 8
"""A source's pipes and pidfd, a sink's file."""
_CALLERS = 32 * (1 + 4) + 256
"""Local apps that are connected at once with their shared memory, and those that are being told to come later."""


def raise_limit(*, workers: int, loops: int) -> int:
    """Raise the soft limit towards the hard one and return what it is now; a log line tells when that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    needed = _OURSELVES + _PER_WORKER * workers + _PER_LOOP * loops + _CALLERS
    if soft != resource.RLIM_INFINITY and soft < needed:
        _log.warning(
            "file descriptors limit=%d needed=%d workers=%d loops=%d: requests may be refused; raise the hard limit "
            "(LimitNOFILE= in the service's unit, or ulimit -Hn)",
            soft, needed, workers, loops,
        )  # fmt: skip
    return soft
