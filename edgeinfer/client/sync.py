"""The client for apps that block: one connection, used by one thread, replaced when the daemon was restarted."""

from __future__ import annotations

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

_CONNECT_S: Final = 5.0


class Client:
    """A connection to the daemon on this device. Use one per thread; it reconnects by itself."""

    def __init__(self, socket: Path | str | None = None) -> None:
        """Remember where the daemon listens: `socket`, else $EDGEINFER_SOCKET, else the installed service's place."""
        self.socket = find_socket(socket)
        self._connection: _Connection | None = None
        self._inputs: dict[tuple[str, str | None], Specs] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Value] | Value,
        *,
        version: str | None = None,
        deadline_ms: float | None = None,
        outputs: Sequence[str] = (),
        **parameters: Any,
    ) -> Inference:
        """Run a model once and return its answer.

        `inputs` maps input names to values; a value alone is the model's only input. A value is a `Tensor`, a
        `SharedTensor` (the daemon reads it where it lies), a `Media`, a numpy array or any other buffer, a (nested)
        list of numbers or texts, or a text. Lists, and numpy arrays of numpy's default types (float64, int64), are
        given the datatype that the model declares. `deadline_ms` counts from the call's arrival; default the model's
        own. Further `parameters`: `priority` (higher goes first), `firm` (False: may be dropped for more urgent
        work), `accept_late`, `scope` ("device", "site" or "any": how far the data may travel; default "device"),
        `sequence_id` and `sequence_start` (stateful models).

        Raises:
            Rejected: refused, with the reason; also for inputs that do not fit the model.
            DeadlineExpired: no answer by the deadline.
            SessionError: the model failed.
            LinkError: the daemon cannot be reached.
            ProtocolError: what listens there is not edgeinfer, or an input cannot be written as a tensor.
            TypeError: there is no such option.
        """
        check_options(parameters)
        if deadline_ms is not None:
            parameters["deadline_ms"] = deadline_ms
        specs = self._specs(model, version) if needs_specs(inputs) else ()
        payload = make_request(model, inputs, specs, outputs=outputs, parameters=parameters)
        path = f"{model_path(model, version)}/infer"
        shared, timeout_s = shared_in(payload, inputs), answer_within_s(deadline_ms)
        reply = self._exchange("POST", path, timeout_s=timeout_s, payload=payload, shared=shared)
        return read_answer(reply.status, reply.headers.get(HEADER_LENGTH), reply.body)

    def infer_media(
        self,
        model: str,
        data: bytes | bytearray | memoryview,
        content_type: str,
        *,
        input: str = "",  # noqa: A002 - the protocol's word
        **options: Any,
    ) -> Inference:
        """Run a model on an encoded image, recording or text; `options` as for `infer`, which says what is raised."""
        check_options(options)
        name = input or only_input(model, self._specs(model, options.get("version")))
        return self.infer(model, {name: Media(data, content_type)}, **options)

    def infer_text(self, model: str, text: str, **options: Any) -> Inference:
        """Run a model on a text; as `infer_media`."""
        return self.infer_media(model, as_text(text), TEXT_TYPE, **options)

    def infer_file(self, model: str, path: Path | str, **options: Any) -> Inference:
        """Run a model on a file whose name tells its content type (.jpg, .png, .wav, .txt); as `infer_media`.

        Raises:
            OSError: it cannot be read.
        """
        media = media_of_file(Path(path))
        return self.infer_media(model, media.data, media.content_type, **options)

    def models(self) -> list[dict[str, Any]]:
        """Return name, version and readiness of every model."""
        models: list[dict[str, Any]] = self._document("/v2/models", list)
        return models

    def model(self, name: str, version: str | None = None) -> dict[str, Any]:
        """Return a model's inputs, outputs and parameters.

        Raises:
            Rejected: there is no such model.
        """
        model: dict[str, Any] = self._document(model_path(name, version), dict)
        return model

    def status(self) -> dict[str, Any]:
        """Return the daemon's status document."""
        status: dict[str, Any] = self._document("/status", dict)
        return status

    def ready(self) -> bool:
        """Return whether the daemon is there and would take requests; never raises for one that is not."""
        try:
            return self._exchange("GET", "/v2/health/ready", timeout_s=5.0).status == HTTP_OK
        except LinkError:
            return False

    def _specs(self, model: str, version: str | None) -> Specs:
        """Return the model's declared inputs, asked for once per connection."""
        key = (model, version)
        if key not in self._inputs:
            self._inputs[key] = self.model(model, version)["inputs"]
        return self._inputs[key]

    def _document(self, path: str, kind: type[Any]) -> Any:
        reply = self._exchange("GET", path, timeout_s=10.0)
        return read_document(reply.status, reply.body, kind)

    def _exchange(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        payload: Payload | None = None,
        shared: Sequence[SharedTensor] = (),
    ) -> Reply:
        """Send a request and return the reply.

        Raises:
            LinkError: no daemon, or none that answers in time.
            ProtocolError: it does not speak HTTP.
        """
        connection = self._connected(timeout_s)
        try:
            if payload is not None and shared:
                payload = connection.share(payload, shared)
            reply = connection.exchange(request_parts(method, path, payload))
        except TimeoutError as error:
            self.close()
            raise LinkError(
                f"{self.socket}: the daemon did not answer within {timeout_s:.1f} s; is it hung?"
            ) from error
        except OSError as error:
            self.close()
            raise LinkError(f"{self.socket}: the daemon hung up: {error.strerror or error}") from error
        except ProtocolError as error:
            self.close()
            raise ProtocolError(f"{self.socket}: what listens there is not edgeinfer: {error}") from error
        except BaseException:
            self.close()  # interrupted half way: the reply must not be taken for the next request's
            raise
        if reply.ends:
            self.close()
        return reply

    def _connected(self, timeout_s: float) -> _Connection:
        """Return a live connection; one that the daemon has closed while it was idle is replaced."""
        if self._connection is not None and self._connection.is_stale():
            self.close()
        try:
            if self._connection is None:
                self._inputs.clear()
                self._connection = _Connection(self.socket)
            self._connection.set_timeout(timeout_s)
        except OSError as error:
            self.close()
            raise no_daemon(self.socket, error) from error
        return self._connection


class _Connection:
    """A connection to the daemon, and the memory that is shared over it."""

    def __init__(self, path: Path) -> None:
        """Connect.

        Raises:
            OSError: nobody is there.
        """
        self._registered = Registered()
        self._shares = True
        self._scratch = bytearray(BUFFER_BYTES)
        self._poll = select.poll()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(_CONNECT_S)
            self._sock.connect(os.fspath(path))
        except BaseException:
            self._sock.close()
            raise
        self._poll.register(self._sock, select.POLLIN)

    def set_timeout(self, timeout_s: float) -> None:
        """Wait for each part of a reply at most so long."""
        self._sock.settimeout(timeout_s)

    def is_stale(self) -> bool:
        """Return whether the other side has closed, or sent what nobody asked for."""
        return bool(self._poll.poll(0))

    def exchange(self, parts: list[Buffer], pass_on: Sequence[int] = ()) -> Reply:
        """Send a request, and descriptors beside its first byte, and return the reply.

        Raises:
            OSError: the daemon hangs up or does not answer.
            ProtocolError: what comes is no reply of the daemon's.
        """
        try:
            if pass_on:
                parts = rest_of(parts, socket.send_fds(self._sock, parts[:1], list(pass_on)))
            while parts:
                parts = rest_of(parts, self._sock.sendmsg(parts[:MAX_PARTS]))
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before it was read whole: the reply says why
        reply = Reply(self._scratch)
        while not reply.take(self._sock.recv_into(reply.buffer)):
            pass
        return reply

    def share(self, payload: Payload, tensors: Sequence[SharedTensor]) -> Payload:
        """Return the request as it is sent here: with the tensors in shared memory, where the daemon knows them by now.

        A daemon that cannot share gets them through the socket.
        """
        if not self._shares:
            return payload
        for parts, fds in self._registered.requests(tensors):
            reply = self.exchange(parts, fds)
            if reply.status != HTTP_OK and fds:
                self._shares = False
                return payload
        return in_place(payload, tensors)

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
