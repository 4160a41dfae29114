"""The client for asyncio apps: any number of calls at once, each on a connection of its own.

A connection to a UNIX socket costs less than 0.1 ms, and so a call that is cancelled hangs up, which cancels the
request inside the daemon too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edgeinfer import oip
from edgeinfer.client.answer import Inference, read_answer, read_document
from edgeinfer.client.route import answer_within_s, find_socket, model_path, no_daemon, request_headers
from edgeinfer.client.values import TEXT_TYPE, Media, Specs, Value, make_request, media_of_file, needs_specs, only_input
from edgeinfer.errors import LinkError, ProtocolError
from edgeinfer.request import Payload

_MAX_HEAD_BYTES = 1 << 16


class AsyncClient:
    """Asks the daemon on this device from an event loop. Needs no closing; `async with` is welcome all the same."""

    def __init__(self, socket: Path | str | None = None) -> None:
        """Remember where the daemon listens; as `Client`."""
        self.socket = find_socket(socket)
        self._inputs: dict[tuple[str, str | None], Specs] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inputs.clear()

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
        if deadline_ms is not None:
            parameters["deadline_ms"] = deadline_ms
        specs = await self._specs(model, version) if needs_specs(inputs) else ()
        payload = make_request(model, inputs, specs, outputs=outputs, parameters=parameters)
        path = f"{model_path(model, version)}/infer"
        status, headers, body = await self._exchange("POST", path, answer_within_s(deadline_ms), payload)
        return read_answer(status, headers.get(oip.HEADER_LENGTH.lower()), body)

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
        name = input or only_input(model, await self._specs(model, options.get("version")))
        return await self.infer(model, {name: Media(data, content_type)}, **options)

    async def infer_text(self, model: str, text: str, **options: Any) -> Inference:
        """Run a model on a text; as `Client.infer_text`."""
        return await self.infer_media(model, text.encode(), TEXT_TYPE, **options)

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
            return (await self._exchange("GET", "/v2/health/ready", 5.0))[0] == 200
        except LinkError:
            return False

    async def _specs(self, model: str, version: str | None) -> Specs:
        """Return the model's declared inputs, asked for once; a model that changed them refuses by name."""
        key = (model, version)
        if key not in self._inputs:
            self._inputs[key] = (await self.model(model, version))["inputs"]
        return self._inputs[key]

    async def _document(self, path: str, kind: type[Any]) -> Any:
        status, _, body = await self._exchange("GET", path, 10.0)
        return read_document(status, body, kind)

    async def _exchange(
        self, method: str, path: str, timeout_s: float, payload: Payload | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return status, headers (lower-case names) and body of the reply."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._connect()
                try:
                    return await self._ask(reader, writer, method, path, payload)
                finally:
                    writer.close()
        except TimeoutError as error:
            raise LinkError(
                f"{self.socket}: the daemon did not answer within {timeout_s:.1f} s; is it hung?"
            ) from error
        except OSError as error:
            raise LinkError(f"{self.socket}: the daemon hung up: {error.strerror or error}") from error

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self.socket, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise no_daemon(self.socket, error) from error

    async def _ask(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        method: str,
        path: str,
        payload: Payload | None,
    ) -> tuple[int, dict[str, str], bytes]:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in request_headers(payload).items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        if payload is not None:
            writer.writelines((payload.header, *payload.tensors))
        with contextlib.suppress(ConnectionError):  # refused before it was read whole: the reply says why
            await writer.drain()
        try:
            status_line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(_header(line) for line in fields if line)
            status = int(status_line.split(" ")[1])
            body = await reader.readexactly(int(headers["content-length"]))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, LookupError) as error:
            raise ProtocolError(f"{self.socket}: what listens there is not edgeinfer: {error!r}") from error
        return status, headers, body


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()
