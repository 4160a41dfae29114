"""Open a TCP (and TLS) connection without ever blocking the event loop.

paho's own `connect` resolves, connects and shakes hands in blocking calls; this does the three on the loop and hands
paho the finished socket. Only name resolution needs a thread, because the C library has no other way: `Resolver` has
at most one (see `aside`), named `edgeinfer-resolve`. Numeric addresses need none.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgeinfer.config import BrokerSection
from edgeinfer.errors import LinkError
from edgeinfer.mqtt.aside import Aside

if TYPE_CHECKING:
    import ssl  # at run time only where a connection is encrypted: OpenSSL takes 4 MB

Address = tuple[int, Any]
"""Address family and what `socket.connect` takes."""

Resolve = Callable[[str, int], list[Address]]


def getaddrinfo(host: str, port: int) -> list[Address]:
    """Resolve a name. Blocks.

    Raises:
        OSError: it can't be resolved.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


class Resolver:
    """Resolves one broker's name on at most one thread; while an old question hangs, no new one is asked."""

    def __init__(self, resolve: Resolve = getaddrinfo) -> None:
        self._resolve = resolve
        self._aside: Aside[list[Address]] = Aside("edgeinfer-resolve")

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Return the addresses of `host`. When the waiting is cancelled, the question stays and can be awaited again.

        Raises:
            LinkError: it can't be resolved.
        """
        if numeric := _numeric(host, port):
            return numeric

        def resolve() -> list[Address]:
            try:
                return self._resolve(host, port)
            except UnicodeError as error:  # an impossible host name
                raise OSError(str(error)) from error

        try:
            return await self._aside.answer(resolve)
        except OSError as error:
            raise LinkError(f"{host} cannot be resolved: {error.strerror or error}") from error


async def open_socket(
    broker: BrokerSection, resolver: Resolver, context: ssl.SSLContext | None, *, timeout_s: float
) -> socket.socket:
    """Return a connected, non-blocking socket with TCP_NODELAY; the caller owns it.

    Resolving may take `timeout_s`, and so may all addresses of the name together: each gets its share, so that one
    that swallows everything doesn't keep us from the next.

    Raises:
        LinkError: no address of the broker answers, or it isn't who its certificate should say.
    """
    failures = []
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await resolver.addresses(broker.host, broker.port)
    except TimeoutError as error:
        raise LinkError(f"{broker.host} cannot be resolved: no answer within {timeout_s} s") from error
    for family, address in addresses:
        plain = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            plain.setblocking(False)  # noqa: FBT003
            # Without it Nagle's algorithm and delayed acknowledgements add 42 ms to a QoS 1 publish.
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(timeout_s / len(addresses)):
                await asyncio.get_running_loop().sock_connect(plain, address)
                return plain if context is None else await _shake_hands(plain, context, broker.host)
        except OSError as error:  # TimeoutError and ssl.SSLError are such
            plain.close()
            failures.append(f"{address[0]}: {error.strerror or str(error) or 'no answer in time'}")
        except BaseException:  # cancelled
            plain.close()
            raise
    raise LinkError(f"{broker.host}:{broker.port} cannot be reached ({'; '.join(failures) or 'no address'})")


async def _shake_hands(plain: socket.socket, context: ssl.SSLContext, host: str) -> socket.socket:
    import ssl  # noqa: PLC0415

    loop = asyncio.get_running_loop()
    tls = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    try:
        while True:
            try:
                tls.do_handshake()
                return tls  # noqa: TRY300
            except ssl.SSLWantReadError:
                await _ready(tls, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _ready(tls, loop.add_writer, loop.remove_writer)
    except BaseException:  # wrap_socket has taken the descriptor over: closing `plain` doesn't close it
        tls.close()
        raise


async def _ready(sock: socket.socket, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
    ready = asyncio.Event()
    add(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        remove(sock.fileno())


def _numeric(host: str, port: int) -> list[Address]:
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return [(family, address) for family, _, _, _, address in found]
    return []
