"""A connection without OpenSSL in the process is as good as one with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

WITHOUT_OPENSSL = """
    import socket, sys
    sys.modules["_ssl"] = None  # as in a service that encrypts nothing
    from edgeinfer.mqtt.session import _Client

    ours, other = socket.socketpair()
    ours.setblocking(False)
    client = _Client("device", ours)
    client._sock = ours
    for attempt in (lambda: client._sock_recv(10), lambda: client._sock_send(bytes(1 << 24)) and client._sock_send(bytes(1 << 24))):
        try:
            attempt()
        except BlockingIOError:
            print("would block")
    assert "ssl" not in sys.modules or sys.modules["ssl"] is None
"""


def test_a_socket_that_has_nothing_or_is_full_blocks_and_breaks_nothing() -> None:
    """paho 2.2 evaluates `ssl.SSLWantReadError` whenever a socket raises, with `ssl = None` where there is none."""
    code = textwrap.dedent(WITHOUT_OPENSSL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "would block\nwould block\n"
