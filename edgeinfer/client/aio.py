"""The client for asyncio apps: any number of calls at once, each on a connection of its own while it lasts.

A few connections are kept for further calls. A call that is cancelled hangs up, which cancels the request inside the
daemon too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from edgeinfer.client.answer import Inference, read_answer, read_document
from edgeinfer.client.memory import Registered, SharedTensor, in_place, shared_in
from edgeinfer.client.options import check_options
from edgeinfer.client.route import answer_within_s, find_socket, model_path, no_daemon
from edgeinfer.client.values import (
    TEXT_TYPE,
    Media,
    Specs,
    Value,
    as_text,
    make_request,
    media_of_file,
    needs_specs,
    only_input,
)
from edgeinfer.client.wire import (
    BUFFER_BYTES,
    HEADER_LENGTH,
    HTTP_OK,
    MAX_PARTS,
    Buffer,
    Reply,
    request_parts,
    rest_of,
)
from edgeinfer.errors import LinkError, ProtocolError
from edgeinfer.request import Payload

_MOST_IDLE: Final = 4
"""Connections that are kept for further calls; the daemon has 32 for everybody."""
_KNOCK_AGAIN_S: Final = 0.002


class AsyncClient:
    """Asks the daemon on this device from an event loop. Keeps a few connections; `async with` or `close` ends them."""

    def __init__(self, socket: Path | str | None = None) -> None:
        """Remember where the daemon listens; as `Client`."""
        self.socket = find_socket(socket)
        self._inputs: dict[tuple[str, str | None], Specs] = {}
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that no call uses; calls go on, and further ones open new ones."""
        self._inputs.clear()
        while self._idle:
            self._idle.pop().close()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Value] | Value,
        *,
        version: str | None = None,
        deadline_ms: float | None = None,
        outputs: Sequence[str] = (),
        **parameters: Any,
    ) -> Inference:
        """Run a model once and return its answer; arguments and exceptions as `Client.infer`."""
        check_options(parameters)
        if deadline_ms is not None:
            parameters["deadline_ms"] = deadline_ms
        specs = await self._specs(model, version) if needs_specs(inputs) else ()
        payload = make_request(model, inputs, specs, outputs=outputs, parameters=parameters)
        path = f"{model_path(model, version)}/infer"
        shared = shared_in(payload, inputs)
        reply = await self._exchange("POST", path, answer_within_s(deadline_ms), payload, shared)
        return read_answer(reply.status, reply.headers.get(HEADER_LENGTH), reply.body)

    async def infer_media(
        self,
        model: str,
        data: bytes | bytearray | memoryview,
        content_type: str,
        *,
        input: str = "",  # noqa: A002 - the protocol's word
        **options: Any,
    ) -> Inference:
        """Run a model on an encoded image, recording or text; as `Client.infer_media`."""
        check_options(options)
        name = input or only_input(model, await self._specs(model, options.get("version")))
        return await self.infer(model, {name: Media(data, content_type)}, **options)

    async def infer_text(self, model: str, text: str, **options: Any) -> Inference:
        """Run a model on a text; as `Client.infer_text`."""
        return await self.infer_media(model, as_text(text), TEXT_TYPE, **options)

    async def infer_file(self, model: str, path: Path | str, **options: Any) -> Inference:
        """Run a model on a file, read beside the event loop; as `Client.infer_file`."""
        media = await asyncio.to_thread(media_of_file, Path(path))
        return await self.infer_media(model, media.data, media.content_type, **options)

    async def models(self) -> list[dict[str, Any]]:
        """Return name, version and readiness of every model."""
        models: list[dict[str, Any]] = await self._document("/v2/models", list)
        return models

    async def model(self, name: str, version: str | None = None) -> dict[str, Any]:
        """Return a model's inputs, outputs and parameters; as `Client.model`."""
        model: dict[str, Any] = await self._document(model_path(name, version), dict)
        return model

    async def status(self) -> dict[str, Any]:
        """Return the daemon's status document."""
        status: dict[str, Any] = await self._document("/status", dict)
        return status

    async def ready(self) -> bool:
        """Return whether the daemon is there and would take requests; never raises for one that is not."""
        try:
            return (await self._exchange("GET", "/v2/health/ready", 5.0)).status == HTTP_OK
        except LinkError:
            return False

    async def _specs(self, model: str, version: str | None) -> Specs:
        """Return the model's declared inputs, asked for once; a model that changed them refuses by name."""
        key = (model, version)
        if key not in self._inputs:
            self._inputs[key] = (await self.model(model, version))["inputs"]
        return self._inputs[key]

    async def _document(self, path: str, kind: type[Any]) -> Any:
        reply = await self._exchange("GET", path, 10.0)
        return read_document(reply.status, reply.body, kind)

    async def _exchange(
        self,
        method: str,
        path: str,
        timeout_s: float,
        payload: Payload | None = None,
        shared: Sequence[SharedTensor] = (),
    ) -> Reply:
        """Send a request and return the reply."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connected()
                try:
                    if payload is not None and shared:
                        payload = await connection.share(payload, shared)
                    reply = await connection.exchange(request_parts(method, path, payload))
                except BaseException:
                    connection.close()  # interrupted half way; hanging up cancels the request in the daemon too
                    raise
        except TimeoutError as error:
            raise LinkError(
                f"{self.socket}: the daemon did not answer within {timeout_s:.1f} s; is it hung?"
            ) from error
        except OSError as error:
            raise LinkError(f"{self.socket}: the daemon hung up: {error.strerror or error}") from error
        except ProtocolError as error:
            raise ProtocolError(f"{self.socket}: what listens there is not edgeinfer: {error}") from error
        if reply.ends or len(self._idle) >= _MOST_IDLE:
            connection.close()
        else:
            self._idle.append(connection)
        return reply

    async def _connected(self) -> _Connection:
        """Return a connection that no call uses: the one that was used last, or a new one."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.loop is loop and not connection.is_stale():
                return connection
            connection.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):  # more are knocking than the kernel keeps for the daemon
                    sock.connect(os.fspath(self.socket))
                    return _Connection(sock, loop)
                await asyncio.sleep(_KNOCK_AGAIN_S)
        except OSError as error:
            sock.close()
            raise no_daemon(self.socket, error) from error
        except BaseException:
            sock.close()
            raise


class _Connection:
    """A connection to the daemon, and the memory that is shared over it. One call at a time."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._sock = sock
        self._registered = Registered()
        self._shares = True
        self._scratch = bytearray(BUFFER_BYTES)

    def is_stale(self) -> bool:
        """Return whether the other side has closed, or sent what nobody asked for."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    async def exchange(self, parts: list[Buffer], pass_on: Sequence[int] = ()) -> Reply:
        """Send a request, and descriptors beside its first byte, and return the reply; as the blocking client's."""
        try:
            if pass_on:
                parts = rest_of(parts, socket.send_fds(self._sock, parts[:1], list(pass_on)))
            with contextlib.suppress(BlockingIOError):
                parts = rest_of(parts, self._sock.sendmsg(parts[:MAX_PARTS]))
            for part in parts:
                await self.loop.sock_sendall(self._sock, part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before it was read whole: the reply says why
        reply = Reply(self._scratch)
        while not reply.take(await self.loop.sock_recv_into(self._sock, reply.buffer)):
            pass
        return reply

    async def share(self, payload: Payload, tensors: Sequence[SharedTensor]) -> Payload:
        """Return the request as it is sent here: with the tensors in shared memory, where the daemon knows them by now.

        A daemon that cannot share gets them through the socket.
        """
        if not self._shares:
            return payload
        for parts, fds in self._registered.requests(tensors):
            reply = await self.exchange(parts, fds)
            if reply.status != HTTP_OK and fds:
                self._shares = False
                return payload
        return in_place(payload, tensors)

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
