"""Start the zygote's process, with the environment that ONNX Runtime must see before its import.

Daemon's side; imports nothing that takes long (no asyncio, msgspec, ctypes or dataclasses), so that `edgeinfer run` can
start a zygote first of all: it imports the runtime while the daemon imports itself. Who follows the process, becomes
the parent of what it forks, and starts the next one when it dies, is `nursery`'s.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from edgeinfer.worker.pair import make_pair

_ENVIRONMENT: Final = {
    "ORT_DISABLE_TELEMETRY": "1",  # the Linux wheel else starts a thread at import, which makes a fork unsafe
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # numpy's OpenBLAS else starts a pool at import
    "MALLOC_ARENA_MAX": "2",  # each thread's own malloc arena would keep freed memory from the others
    "PYTHONDONTWRITEBYTECODE": "1",
}
_ZYGOTE_FD: Final = 3


class Hatched(NamedTuple):
    """A zygote's process that nobody follows yet, and our end of its channel (which the receiver owns)."""

    pid: int
    sock: socket.socket


def hatch(*, python: str = sys.executable, environment: Mapping[str, str] | None = None) -> Hatched:
    """Start a zygote, which forks nothing before it is asked to. Main thread only: it dies with that.

    Raises:
        OSError: it cannot be started; nothing is left of it.
    """
    ours, theirs = make_pair()
    try:
        with theirs:
            pid = os.posix_spawn(
                python,
                [python, "-P", "-m", "edgeinfer.worker.zygote", str(_ZYGOTE_FD), str(os.getpid())],
                _zygote_environment(environment or {}),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), _ZYGOTE_FD),
                ],
                setpgroup=0,  # a Ctrl-C at the terminal is for the daemon alone
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
            )
    except BaseException:
        ours.close()
        raise
    return Hatched(pid, ours)


def _zygote_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon's environment with what the import needs, and the way to this very package."""
    environment = {**os.environ, **_ENVIRONMENT}
    home = str(Path(__file__).resolve().parents[2])
    if Path(home).name not in {"site-packages", "dist-packages"}:  # an editable installation, or the sources themselves
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{inherited}" if inherited else home
    return {**environment, **extra}
