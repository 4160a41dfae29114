"""Where the daemon is, what it is asked under which path, and how long to wait for it: the same for both clients."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from urllib.parse import quote

from edgeinfer.errors import LinkError

DEFAULT_SOCKET = Path("/run/edgeinfer/edgeinfer.sock")
SOCKET_VARIABLE = "EDGEINFER_SOCKET"
DEFAULT_DEADLINE_MS = 10_000.0
PATIENCE_S = 2.0
"""How long after the deadline a client still waits for the daemon to say that it has passed."""


def find_socket(given: Path | str | None) -> Path:
    """Return the daemon's socket: as given, else from the environment, else where the service puts it."""
    return Path(given or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)


def no_daemon(path: Path, error: OSError) -> LinkError:
    """Return the exception for a socket that nobody answers on, or that we may not write to."""
    if error.errno == errno.EACCES:
        group = _group_of(path)
        return LinkError(
            f"no permission to use {path}: join the group {group} (usermod -aG {group} USER, then log in again)"
        )
    return LinkError(
        f"no edgeinfer on {path}: {error.strerror or error}; start it (systemctl start edgeinfer), "
        f"or name its socket in ${SOCKET_VARIABLE}"
    )


def _group_of(path: Path) -> str:
    """Return the group that may use the socket; the unit's own where its folder hides it."""
    with contextlib.suppress(OSError, KeyError):
        return path.group()
    return "edgeinfer"


def model_path(name: str, version: str | None) -> str:
    """Return the path of a model, or of one version of it."""
    path = f"/v2/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def answer_within_s(deadline_ms: float | None) -> float:
    """Return how long to wait for the reply to a request with that deadline."""
    return (deadline_ms or DEFAULT_DEADLINE_MS) / 1000 + PATIENCE_S
