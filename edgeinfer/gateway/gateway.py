"""Serve local apps on a UNIX socket: the Open Inference Protocol v2, and a status document.

    GET  /v2                                        what this is
    GET  /v2/health/live, /v2/health/ready          200, or 503 while not ready
    GET  /v2/models                                 every model and whether it is ready
    POST /v2/repository/index                       the same, as Triton's clients ask for it
    GET  /v2/models/NAME[/versions/V]               metadata, from the manifest
    GET  /v2/models/NAME[/versions/V]/ready
    POST /v2/models/NAME[/versions/V]/infer         one inference, JSON or binary tensors, in and out
    GET  /status                                    the daemon's own status document

Owns the socket and its connections; decides nothing about requests beyond their validity. A caller that goes away has
its request cancelled. HEAD is answered as GET, without the document. Whoever may write to the
socket's file may ask: its mode is 0660.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from edgeinfer import __version__, oip
from edgeinfer.artifact.contract import max_medium_bytes
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.clock import Clock
from edgeinfer.errors import LinkError
from edgeinfer.gateway.catalog import ModelInfo, describe_models, find_model, index, metadata
from edgeinfer.gateway.http import (
    READER_BYTES,
    BadRequest,
    Bounds,
    Connection,
    Head,
    Room,
    read_away,
    refuse_connection,
)
from edgeinfer.gateway.intake import Intake, take_request
from edgeinfer.gateway.reply import Reply, error_reply, json_reply, outcome_reply, refusal_reply
from edgeinfer.request import Outcome, Reason, Refusal, Submit, Ticket

_log = logging.getLogger(__name__)

_MOST_FAULTS_LOGGED = 16
"""Kinds of our own faults whose traceback is logged, each once; `faults` counts all."""
_MAX_PATH_BYTES = 107
"""sun_path of Linux, without its final zero."""


@dataclass(frozen=True, slots=True)
class GatewaySnapshot:
    """What the gateway has seen so far."""

    connections: int
    submitted: int
    """Requests handed to the scheduler, which counts their endings."""
    refused: Mapping[str, int]
    """Requests that never got there, by reason; they are in no other count."""
    abandoned: int
    """Requests whose caller went away."""
    faults: int = 0
    """Connections that ended by a fault of ours; its caller was told 500."""


class Gateway:
    """The local door. Loop thread only."""

    def __init__(
        self,
        *,
        socket_path: Path,
        submit: Submit,
        models: Callable[[], Sequence[ModelInfo]],
        status: Callable[[], Mapping[str, Any]],
        clock: Clock,
        bounds: Bounds | None = None,
    ) -> None:
        """Make a gateway; `run` opens it.

        `models` and `status` are asked at each request that needs them, so they must be cheap. `status` may say
        `ready: false`; without that key the service counts as ready.
        """
        self.listening = asyncio.Event()
        """Set once callers can connect."""
        self._path = socket_path
        self._submit = submit
        self._models = models
        self._status = status
        self._clock = clock
        self._bounds = bounds or Bounds()
        self._bodies = Room(self._bounds.body_bytes_in_flight)
        self._copies = Room(self._bounds.copied_bytes)
        self._connections: set[Connection] = set()
        self._leaving = 0
        self._owed = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._numbers = itertools.count(1)
        self._submitted = 0
        self._abandoned = 0
        self._refused: Counter[str] = Counter()
        self._faults = 0
        self._logged: set[tuple[str, int]] = set()

    @property
    def buffer_bytes(self) -> int:
        """Most bytes that its buffers have at once: what the daemon reserves for it."""
        return self._bounds.buffer_bytes

    def snapshot(self) -> GatewaySnapshot:
        """Return the counts so far."""
        return GatewaySnapshot(
            len(self._connections), self._submitted, dict(self._refused), self._abandoned, self._faults
        )

    async def settled(self) -> None:
        """Return once every request that was submitted has its reply on the wire: what a clean end waits for."""
        await self._settled.wait()

    async def run(self) -> None:
        """Serve for ever; when cancelled, close every connection and remove the socket.

        Raises:
            LinkError: the socket cannot be made, or another service listens on it.
        """
        listener = _listen(self._path)
        try:
            async with asyncio.TaskGroup() as group:

                def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    if len(self._connections) >= self._bounds.connections and not self._dismiss_idle():
                        group.create_task(self._turn_away(reader, writer), name=f"gateway[{next(self._numbers)}]")
                        return
                    connection = Connection(reader, writer, self._bounds, self._bodies, self._copies)
                    self._connections.add(connection)
                    group.create_task(self._converse(connection), name=f"gateway[{next(self._numbers)}]")

                server = await asyncio.start_unix_server(accept, sock=listener, backlog=64, limit=READER_BYTES)
                try:
                    self.listening.set()
                    await asyncio.get_running_loop().create_future()
                finally:
                    self.listening.clear()
                    server.close()
        finally:
            self._path.unlink(missing_ok=True)

    def _dismiss_idle(self) -> bool:
        """Close the connection that has been spare for longest; return whether there was one."""
        now_s = asyncio.get_running_loop().time()
        waiting = [
            (connection.spare_from_s, number, connection)
            for number, connection in enumerate(self._connections)
            if connection.spare_from_s is not None and connection.spare_from_s <= now_s
        ]
        if not waiting:
            return False
        _, _, longest = min(waiting)
        self._connections.discard(longest)
        longest.dismiss()
        return True

    async def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell a caller why it is not served."""
        try:
            refuse_connection(writer, self._bounds.connections)
            await self._see_off(read_away(reader, writer, self._bounds.linger_s))
        finally:
            writer.close()

    async def _see_off(self, reading_away: Coroutine[Any, Any, None]) -> None:
        """Give a caller that was told to go the chance to read so, unless too many are on their way out."""
        self._leaving += 1
        try:
            if self._leaving <= self._bounds.connections:
                await reading_away
        finally:
            self._leaving -= 1
            reading_away.close()

    async def _converse(self, connection: Connection) -> None:
        """Serve one connection, until either side ends it. No fault of one leaves here."""
        try:
            try:
                await self._serve(connection)
            except ConnectionError:
                pass  # the caller's business; what it had asked for is cancelled
            except Exception as error:  # noqa: BLE001  # a bug that one trips over must not end everybody's inference
                self._fault(error)
                with contextlib.suppress(ConnectionError):
                    await connection.apologize(f"edgeinfer failed ({type(error).__name__}); its log says where")
            self._connections.discard(connection)
            if connection.interrupted:
                connection.finish()
                await self._see_off(connection.read_away())
        finally:
            self._connections.discard(connection)
            connection.close()

    async def _serve(self, connection: Connection) -> None:
        """Answer its requests in order; the first that is none is the last.

        Raises:
            ConnectionError: the caller is gone, or does not read.
        """
        try:
            while (head := await connection.next_head()) is not None:
                await self._reply_to(connection, head)
                if not connection.finish():
                    break
                await asyncio.sleep(0)  # requests that were sent ahead take turns with everything else
        except BadRequest as error:
            await connection.respond(error_reply(error.status, str(error)))

    def _fault(self, error: Exception) -> None:
        self._faults += 1
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        if where not in self._logged and len(self._logged) < _MOST_FAULTS_LOGGED:
            self._logged.add(where)
            _log.error("a request failed by a fault of ours, told once", exc_info=error)

    async def _reply_to(self, connection: Connection, head: Head) -> None:
        path = [unquote(part) for part in head.target.partition("?")[0].split("/") if part]
        match path:
            case ["v2", "models", name, "infer"]:
                await self._infer(connection, head, name, None)
            case ["v2", "models", name, "versions", version, "infer"]:
                await self._infer(connection, head, name, version)
            case _:
                await connection.read_body(limit_bytes=1 << 16)
                if path == ["v2", "repository", "index"] and head.method == "POST":
                    await connection.respond(json_reply(index(self._models())))
                elif head.method not in {"GET", "HEAD"}:
                    await connection.respond(error_reply(405, f"{head.method} is not for {head.target[:200]}"))
                else:
                    await connection.respond(self._document(path, head.target))

    def _document(self, path: list[str], target: str) -> Reply:
        match path:
            case ["v2"]:
                extensions = ["binary_tensor_data", "sequence"]
                return json_reply({"name": "edgeinfer", "version": __version__, "extensions": extensions})
            case ["v2", "health", "live"]:
                return json_reply({"live": True})
            case ["v2", "health", "ready"]:
                ready = self._status().get("ready", True) is not False
                return json_reply({"ready": ready}, 200 if ready else 503)
            case ["v2", "models"]:
                return json_reply(index(self._models()))
            case ["v2", "models", name, *rest]:
                return self._model_document(name, rest, target)
            case ["status"]:
                return json_reply(self._status())
        return error_reply(404, f"there is no {target[:200]}; GET /v2 tells what this is")

    def _model_document(self, name: str, rest: list[str], target: str) -> Reply:
        version = None
        if len(rest) >= 2 and rest[0] == "versions":
            version, rest = rest[1], rest[2:]
        models = self._models()
        model = find_model(models, name, version)
        if model is None:
            return refusal_reply(_unknown(name, version, models))
        if rest == ["ready"]:
            return json_reply({"name": name, "ready": model.ready}, 200 if model.ready else 503)
        if rest:
            return error_reply(404, f"there is no {target[:200]}")
        return json_reply(metadata(model, models))

    async def _infer(self, connection: Connection, head: Head, name: str, version: str | None) -> None:
        models = self._models()
        model = find_model(models, name, version)
        if head.method != "POST":
            raise BadRequest(405, f"{head.method} is not for inference; POST it")
        if model is None:
            await self._refuse(connection, _unknown(name, version, models))
            return
        body = await connection.read_body(_max_body_bytes(model.manifest))
        taken = take_request(model, version, head.headers, body, now_ns=self._clock.now_ns())
        if isinstance(taken, Refusal):
            await self._refuse(connection, taken)
            return
        self._submitted += 1
        self._owed += 1
        self._settled.clear()
        try:
            outcome = await self._outcome(connection, self._submit(taken.request))
            if outcome is not None:
                await self._deliver(connection, outcome, taken)
        finally:
            self._owed -= 1
            if not self._owed:
                self._settled.set()

    async def _refuse(self, connection: Connection, refusal: Refusal) -> None:
        self._refused[refusal.reason.value] += 1
        await connection.respond(refusal_reply(refusal))

    async def _outcome(self, connection: Connection, ticket: Ticket) -> Outcome | None:
        """Return the outcome; None when the caller went away, whose request is then cancelled and concluded."""
        waiting = asyncio.create_task(ticket.outcome(), name="gateway-outcome")
        watching = asyncio.create_task(connection.gone(), name="gateway-watch")
        try:
            await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            self._abandoned += 1
            ticket.cancel()
            outcome = await waiting
            if outcome.result is not None:
                outcome.result.release()
            return None
        finally:
            ticket.cancel()
            watching.cancel()
            await asyncio.wait({watching})
            waiting.cancel()

    async def _deliver(self, connection: Connection, outcome: Outcome, taken: Intake) -> None:
        await connection.respond(outcome_reply(outcome, taken.binary))
        outcome.request.timeline.delivered_ns = self._clock.now_ns()


def _unknown(name: str, version: str | None, models: Sequence[ModelInfo]) -> Refusal:
    what = f"model {name[:64]!r}" + (f" version {version[:64]!r}" if version else "")
    return Refusal(Reason.MODEL_UNAVAILABLE, f"there is no {what}; there are: {describe_models(models)}")


def _max_body_bytes(manifest: Manifest) -> int:
    """Most bytes that a valid request for this model has: a JSON header, and tensors or encoded media behind it."""
    return oip.MAX_HEADER_BYTES + sum(max_medium_bytes(spec) for spec in manifest.inputs)


def _listen(path: Path) -> socket.socket:
    """Bind the socket, over what a service that is gone left there.

    Raises:
        LinkError: it is taken or cannot be made.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise LinkError(f"the socket path {path} has more than {_MAX_PATH_BYTES} bytes; shorten paths.socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if path.exists() or path.is_symlink():
            _make_way(path)
        listener.bind(os.fspath(path))
        path.chmod(0o660)
    except OSError as error:
        listener.close()
        raise LinkError(f"cannot listen on {path}: {error.strerror}") from error
    except LinkError:
        listener.close()
        raise
    return listener


def _make_way(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise LinkError(f"{path} exists and is no socket; remove it, or change paths.socket")
    if _answers(path):
        raise LinkError(f"another service listens on {path}; stop it, or change paths.socket")
    path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(os.fspath(path))
        except OSError:
            return False
        return True
