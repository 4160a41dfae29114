"""Serve local apps on a UNIX socket: the Open Inference Protocol v2, and a status document.

    GET  /v2                                        what this is
    GET  /v2/health/live, /v2/health/ready          200, or 503 while not ready
    GET  /v2/models                                 every model and whether it is ready
    POST /v2/repository/index                       the same, as Triton's clients ask for it
    GET  /v2/models/NAME[/versions/V]               metadata, from the manifest
    GET  /v2/models/NAME[/versions/V]/ready
    POST /v2/models/NAME[/versions/V]/infer         one inference, JSON or binary tensors, in and out
    POST /v2/systemsharedmemory/...                 tensors in the caller's shared memory: `shared`
    GET  /status                                    the daemon's own status document

Owns the socket and its connections; decides nothing about requests beyond their validity. A caller that goes away has
its request cancelled. HEAD is answered as GET, without the document. Whoever may write to the
socket's file may ask: its mode is 0660.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from edgeinfer import oip
from edgeinfer.artifact.contract import max_medium_bytes
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.errors import ProtocolError
from edgeinfer.gateway.bounds import SCRATCH_BYTES, Bounds, Room
from edgeinfer.gateway.catalog import ModelInfo, find_model, index, unknown_model
from edgeinfer.gateway.connection import Connection
from edgeinfer.gateway.documents import document_reply
from edgeinfer.gateway.door import Door, listen
from edgeinfer.gateway.head import BadRequest, Head
from edgeinfer.gateway.intake import Draft, Form, Intake, Recall, header_length
from edgeinfer.gateway.reply import (
    Reply,
    busy_reply,
    detach,
    error_reply,
    json_bytes,
    json_reply,
    outcome_reply,
    refusal_reply,
    too_large_reply,
)
from edgeinfer.gateway.shared import answer_shared_memory, read_shared
from edgeinfer.gateway.stream import Stream
from edgeinfer.gateway.turns import MAX_JSON_BYTES, Turns, check_json_bytes
from edgeinfer.request import InferRequest, Outcome, Reason, Refusal, Submit, Ticket

_log = logging.getLogger(__name__)

_MOST_FAULTS_LOGGED = 16
"""Kinds of our own faults whose traceback is logged, each once; `faults` counts all."""
_TOO_MANY: Final = 429
_TOO_LARGE: Final = 413
_NEXT_MAY_BE_BETTER: Final = frozenset({405, _TOO_LARGE, _TOO_MANY})
"""Statuses of requests whose body nobody takes, after which the connection goes on."""
_BYTES_OF_OBJECTS: Final = 16
"""What a byte of JSON becomes while it is objects."""
ASK_FIRST_BYTES: Final = 512 << 10
"""With so much of a request still to come, whether it would be refused anyway is asked before; less is read sooner."""


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
        decline: Callable[[InferRequest], Ticket | None] | None = None,
        active: Callable[[str], ModelInfo | None] = lambda _: None,
    ) -> None:
        """Make a gateway; `run` opens it.

        `models` and `status` are asked at each request that needs them, so they must be cheap. `status` may say
        `ready: false`; without that key the service counts as ready. `decline` is shown large requests whose tensors
        have not come yet (its payload is empty), and takes over those that it would refuse anyway. `active` finds a
        model's active version without looking at all of them.
        """
        self.listening = asyncio.Event()
        """Set once callers can connect."""
        self._path = socket_path
        self._submit = submit
        self._decline = decline
        self._active = active
        self._models = models
        self._status = status
        self._clock = clock
        self._bounds = bounds or Bounds()
        self._bodies = Room(self._bounds.body_bytes_in_flight, self._dismiss_stalled)
        self._copies = Room(self._bounds.copied_bytes)
        self._turns = Turns()
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

    @property
    def buffered_bytes(self) -> int:
        """Bytes of requests that it holds now: part of what was reserved for it."""
        return self._bodies.used_bytes

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
        listener = listen(self._path)
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        try:
            async with asyncio.TaskGroup() as group:
                with Door(self._bounds, scratch, partial(self._take_in, group, scratch)).open(listener):
                    try:
                        self.listening.set()
                        await asyncio.get_running_loop().create_future()
                    finally:
                        self.listening.clear()
        finally:
            self._path.unlink(missing_ok=True)

    def _take_in(self, group: asyncio.TaskGroup, scratch: memoryview, caller: socket.socket) -> bool:
        """Begin to serve a caller, unless there are too many."""
        if len(self._connections) >= self._bounds.connections and not self._dismiss_idle():
            self._refused[Reason.QUEUE_FULL.value] += 1
            return False
        connection = Connection(Stream(caller, scratch), self._bounds, self._bodies, self._copies)
        self._connections.add(connection)
        group.create_task(self._converse(connection), name=f"gateway[{next(self._numbers)}]")
        return True

    def _dismiss_idle(self) -> bool:
        """Close the connection that has been spare for longest; return whether there was one."""
        return self._dismiss(self._connections)

    def _dismiss_stalled(self) -> bool:
        """As `_dismiss_idle`, of those whose bodies hold memory and do not come on."""
        return self._dismiss(connection for connection in self._connections if connection.held_bytes)

    def _dismiss(self, candidates: Iterable[Connection]) -> bool:
        now_s = asyncio.get_running_loop().time()
        waiting = [
            (connection.spare_from_s, number, connection)
            for number, connection in enumerate(candidates)
            if connection.spare_from_s is not None and connection.spare_from_s <= now_s
        ]
        if not waiting:
            return False
        _, _, longest = min(waiting)
        self._connections.discard(longest)
        longest.dismiss()
        return True

    async def _converse(self, connection: Connection) -> None:
        """Serve one connection, until either side ends it. No fault of one leaves here."""
        try:
            try:
                await self._serve(connection)
            except ConnectionError:
                pass  # the caller's business; what it had asked for is cancelled
            except Exception as error:  # noqa: BLE001  # a bug that one trips over must not end everybody's inference
                self._fault(error)
                connection.apologize(f"edgeinfer failed ({type(error).__name__}); its log says where")
            self._connections.discard(connection)
            if connection.interrupted and self._leaving < self._bounds.connections:
                self._leaving += 1
                try:
                    await connection.read_away()
                finally:
                    self._leaving -= 1
        finally:
            self._connections.discard(connection)
            connection.close()

    async def _serve(self, connection: Connection) -> None:
        """Answer its requests in order; the first that is none is the last.

        Raises:
            ConnectionError: the caller is gone, or does not read.
        """
        try:
            recall = Recall()
            while (head := await connection.next_head()) is not None:
                try:
                    await self._reply_to(connection, head, recall)
                except BadRequest as error:
                    if error.status not in _NEXT_MAY_BE_BETTER:
                        raise
                    await self._turn_down(connection, error)
                if not await connection.finish():
                    break
        except BadRequest as error:
            await connection.refuse(error_reply(error.status, str(error)))

    async def _turn_down(self, connection: Connection, error: BadRequest) -> None:
        if error.status == _TOO_MANY:
            self._refused[Reason.QUEUE_FULL.value] += 1
            await connection.respond(busy_reply(str(error), error.status))
        else:
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

    async def _reply_to(self, connection: Connection, head: Head, recall: Recall) -> None:
        path = [unquote(part) for part in head.target.partition("?")[0].split("/") if part]
        match path:
            case ["v2", "models", name, "infer"]:
                await self._infer(connection, head, recall, name, None)
            case ["v2", "models", name, "versions", version, "infer"]:
                await self._infer(connection, head, recall, name, version)
            case ["v2", "systemsharedmemory", *rest]:
                await connection.respond(await answer_shared_memory(connection, head, rest))
            case _:
                await connection.read_body(limit_bytes=1 << 16)
                if path == ["v2", "repository", "index"] and head.method == "POST":
                    await connection.respond(json_reply(index(self._models())))
                elif head.method not in {"GET", "HEAD"}:
                    await connection.respond(error_reply(405, f"{head.method} is not for {head.target[:200]}"))
                else:
                    await connection.respond(document_reply(path, head.target, self._models, self._status))

    async def _infer(self, connection: Connection, head: Head, recall: Recall, name: str, version: str | None) -> None:
        if head.method != "POST":
            raise BadRequest(405, f"{head.method} is not for inference; POST it")
        model = self._active(name)
        if model is None or version not in {None, model.manifest.version}:
            models = self._models()
            model = find_model(models, name, version)
            if model is None:
                await self._refuse(connection, unknown_model(name, version, models))
                return
        try:
            taken = await self._take_request(connection, head, recall, model, version)
        except ProtocolError as error:
            taken = Refusal(Reason.INPUT_INVALID, str(error))
        except BadRequest as error:
            if error.status != _TOO_LARGE:
                raise
            self._refused[Reason.INPUT_INVALID.value] += 1
            await connection.respond(too_large_reply(str(error)))
            return
        if isinstance(taken, Refusal):
            await self._refuse(connection, taken)
        elif isinstance(taken, Intake):
            await self._answer(connection, self._submit(taken.request), taken.form)
        else:
            await self._answer(connection, taken, Form())

    async def _take_request(
        self, connection: Connection, head: Head, recall: Recall, model: ModelInfo, version: str | None
    ) -> Intake | Refusal | Ticket:
        """Read a request, no more of it than is needed to refuse it: then its ticket, or why it got none, comes back.

        Raises:
            ProtocolError: it is not a valid inference request.
        """
        received_ns = self._clock.now_ns()
        most_bytes = _max_body_bytes(model.manifest)
        header_bytes = header_length(head.headers)
        body: bytes | bytearray | memoryview
        if head.body_bytes is None:
            said, body = oip.split(await connection.read_body(most_bytes), header_bytes)
            check_json_bytes(len(said))
            header = bytes(said)
        else:
            header_bytes = head.body_bytes if header_bytes is None else header_bytes
            if head.body_bytes <= most_bytes or connection.holds_back:
                connection.check_length(most_bytes)  # else its header may say which input is too large
            check_json_bytes(min(header_bytes, head.body_bytes))
            oip.check_header_bytes(header_bytes, head.body_bytes)
            header, body = bytes(await connection.read(header_bytes)), b""
        left_bytes = 0 if head.body_bytes is None else head.body_bytes - len(header)

        def understand() -> Draft | Intake | Refusal:
            found = recall.draft(model, version, head.headers, header, now_ns=received_ns)
            if left_bytes or isinstance(found, Refusal) or found.places:
                return found
            return found.complete(body, {})

        drafted = await self._turns.run(len(header), understand)
        if not isinstance(drafted, Draft):
            return drafted
        connection.check_length(most_bytes - len(header))
        if len(header) > MAX_JSON_BYTES // _BYTES_OF_OBJECTS:
            connection.hold(_BYTES_OF_OBJECTS * len(header))  # until the rest is there it stays objects
        if max(connection.unsent_bytes, drafted.shared_bytes) >= ASK_FIRST_BYTES and self._decline is not None:
            declined = self._decline(drafted.request())
            if declined is not None:
                return declined
        if left_bytes:
            try:
                body = await connection.read(left_bytes, self._due_s(drafted))
            except TimeoutError:
                return self._submit(drafted.overdue(self._clock.now_ns()))
        shared = read_shared(connection, drafted.places, most_bytes)
        return await self._turns.run(len(header), partial(drafted.complete, body, shared))

    def _due_s(self, drafted: Draft) -> float | None:
        """Return the moment, on the loop's clock, from which on nobody waits for the answer."""
        due_ns = drafted.due_ns
        if due_ns is None:
            return None
        return asyncio.get_running_loop().time() + (due_ns - self._clock.now_ns()) / NS_PER_S

    async def _answer(self, connection: Connection, ticket: Ticket, form: Form) -> None:
        """Wait for a request's outcome and send it; one whose caller goes away is cancelled."""
        self._submitted += 1
        self._owed += 1
        self._settled.clear()
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            ticket.cancel()

        connection.watch(leave)
        try:
            try:
                outcome = await ticket.outcome()
            finally:
                connection.unwatch()
                ticket.cancel()
            if not gone:
                await connection.respond(await self._written(outcome, form))
                outcome.request.timeline.delivered_ns = self._clock.now_ns()
                return
            self._abandoned += 1
            if outcome.result is not None:
                outcome.result.release()
            raise ConnectionAbortedError("the caller hung up")
        finally:
            self._owed -= 1
            if not self._owed:
                self._settled.set()

    async def _written(self, outcome: Outcome, form: Form) -> Reply:
        """Return the reply to an inference; what is to be JSON alone waits for its turn without the worker's memory."""
        size_bytes = json_bytes(outcome, form)
        result = outcome.result
        if result is None or not self._turns.would_wait(size_bytes):
            return await self._turns.run(size_bytes, partial(outcome_reply, outcome, form))
        try:
            if form.binary is False:
                detach(result, form)
            return await self._turns.run(size_bytes, partial(outcome_reply, outcome, form))
        except BaseException:
            result.release()
            raise

    async def _refuse(self, connection: Connection, refusal: Refusal) -> None:
        self._refused[refusal.reason.value] += 1
        await connection.respond(refusal_reply(refusal))


def _max_body_bytes(manifest: Manifest) -> int:
    """Most bytes that a valid request for this model has: a JSON header, and tensors or encoded media behind it."""
    return MAX_JSON_BYTES + sum(max_medium_bytes(spec) for spec in manifest.inputs)
