"""Make the two ends of a channel. Both sides; a module of its own because a start needs it before all else."""

from __future__ import annotations

import socket


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return the daemon's and the process's end of a new channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)  # noqa: FBT003
    return ours, theirs
