"""Say who this machine is, in a way that cloned SD cards don't share."""

from __future__ import annotations

import hashlib
import platform
import socket
from pathlib import Path

from edgeinfer.plain_file import read_plain

_MACHINE_ID_FILES = ("etc/machine-id", "var/lib/dbus/machine-id")
_MAX_BYTES = 4096


def default_id(root: Path = Path("/")) -> str:
    """Return `HOST-xxxxxxxx`: the host name for people, eight hex digits of the machine's own id for uniqueness.

    The digits come from the board's serial number where firmware tells it (an image copied to a second board then
    has another one), else from the machine id; both are hashed, neither is told to anyone.
    """
    host = "".join(char if char.isalnum() or char == "-" else "-" for char in socket.gethostname())[:32].strip("-")
    digest = hashlib.sha256(b"edgeinfer" + _machine_id(root)).hexdigest()[:8]
    return f"{host or 'device'}-{digest}"


def _machine_id(root: Path) -> bytes:
    for name in ("proc/device-tree/serial-number", *_MACHINE_ID_FILES):
        try:
            raw = read_plain(root / name, _MAX_BYTES).strip(b"\0\n ")
        except OSError:
            continue
        if raw:
            return raw
    return platform.node().encode()
