"""Read the files that a link proves itself with: password, certificates, key.

They are read anew at each attempt, so that a mended one is used, and never on the event loop: a file may lie on a share
that is gone. What is no plain file of sensible size is refused without being read: a pipe would wait for its writer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from edgeinfer.config import BrokerSection
from edgeinfer.errors import LinkError
from edgeinfer.mqtt.aside import Aside
from edgeinfer.plain_file import read_plain

if TYPE_CHECKING:
    import ssl  # at run time only where a connection is encrypted: OpenSSL takes 4 MB

MAX_PASSWORD_BYTES = 4 << 10
MAX_CERTIFICATES_BYTES = 4 << 20
"""The certificates of a whole system are a quarter of a megabyte."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a link shows its broker."""

    user: tuple[str, str | None] | None
    """Name and password; None: anonymous."""
    tls: ssl.SSLContext | None
    """None: a plain connection."""


class CredentialFiles:
    """Reads one broker's files on at most one thread."""

    def __init__(self, broker: BrokerSection) -> None:
        self._broker = broker
        self._aside: Aside[Credentials] = Aside("edgeinfer-credentials")

    async def read(self, *, timeout_s: float) -> Credentials:
        """Return what the files hold now.

        Raises:
            LinkError: one of them can't be read within the time, or isn't what it should be; the text names it.
        """
        broker = self._broker
        files = [path for path in (broker.password_file, broker.tls_ca, broker.tls_cert, broker.tls_key) if path]
        try:
            if not files:
                return read_credentials(broker)
            async with asyncio.timeout(timeout_s):
                return await self._aside.answer(partial(read_credentials, broker))
        except TimeoutError as error:
            names = ", ".join(map(str, files))
            raise LinkError(f"{names} cannot be read: no answer of the file system within {timeout_s:g} s") from error
        except OSError as error:
            raise LinkError(str(error)) from error


def read_credentials(broker: BrokerSection) -> Credentials:
    """Read the files. Blocks.

    Raises:
        OSError: one of them can't be read, or isn't what it should be; the text says all.
    """
    return Credentials(_user(broker), _tls(broker))


def _user(broker: BrokerSection) -> tuple[str, str | None] | None:
    if not broker.username:
        return None
    if broker.password_file is None:
        return broker.username, None
    try:
        return broker.username, read_plain(broker.password_file, MAX_PASSWORD_BYTES).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"{broker.password_file} cannot be read: {_why(error)}") from error


def _tls(broker: BrokerSection) -> ssl.SSLContext | None:
    if broker.tls_ca is None and broker.tls_cert is None:
        return None
    import ssl  # noqa: PLC0415

    at = broker.tls_ca
    try:
        if broker.tls_ca is not None:
            read_plain(broker.tls_ca, MAX_CERTIFICATES_BYTES)
        context = ssl.create_default_context(cafile=broker.tls_ca)
        for at in (broker.tls_cert, broker.tls_key):
            if at is not None:
                read_plain(at, MAX_CERTIFICATES_BYTES)
        if broker.tls_cert is not None:
            at = broker.tls_cert
            # A key that wants a passphrase fails with the empty one, instead of asking for it on the terminal.
            context.load_cert_chain(broker.tls_cert, broker.tls_key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise OSError(f"{at} cannot be used for TLS: {_why(error)}") from error
    return context


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
