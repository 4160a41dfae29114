"""Ask a running edgeinfer from a local app: a deadline on every call, an answer or the reason by then.

    from edgeinfer import Client

    with Client() as edge:
        answer = edge.infer_text("support-intent", "I was charged twice for my invoice", deadline_ms=50)
        print(answer.label, answer.score)

Speaks the Open Inference Protocol v2 over the daemon's UNIX socket, without any HTTP library. numpy arrays are taken
and given when the app uses numpy, which is never imported for apps that don't. docs/client.md has the whole of it.
"""

from __future__ import annotations

import array
import http.client
import importlib
import json
import mimetypes
import os
import select
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import msgspec

from edgeinfer import oip
from edgeinfer.errors import EdgeInferError, LinkError, ProtocolError, SessionError
from edgeinfer.request import Payload

DEFAULT_SOCKET = Path("/run/edgeinfer/edgeinfer.sock")
SOCKET_VARIABLE = "EDGEINFER_SOCKET"
DEFAULT_DEADLINE_MS = 10_000.0
_PATIENCE_S = 2.0
"""How long after the deadline we still wait for the daemon to say that it has passed."""

_TEXT_TYPE = "text/plain; charset=utf-8"

_ARRAY_TYPES = {
    "b": "INT8", "B": "UINT8", "h": "INT16", "H": "UINT16", "i": "INT32", "I": "UINT32", "q": "INT64", "Q": "UINT64",
    "l": "INT64" if array.array("l").itemsize == 8 else "INT32",
    "L": "UINT64" if array.array("L").itemsize == 8 else "UINT32",
    "e": "FP16", "f": "FP32", "d": "FP64", "?": "BOOL",
}  # fmt: skip
"""Buffer formats (struct codes) to OIP datatypes."""
_INTERFACE_TYPES = {
    "b1": "BOOL", "u1": "UINT8", "i1": "INT8", "u2": "UINT16", "i2": "INT16", "u4": "UINT32", "i4": "INT32",
    "u8": "UINT64", "i8": "INT64", "f2": "FP16", "f4": "FP32", "f8": "FP64",
}  # fmt: skip
"""numpy type strings, without byte order, to OIP datatypes."""
_PACK_CODES = {"FP16": "e", "BOOL": "?"} | {
    name: code for code, name in _ARRAY_TYPES.items() if code in "bBhHiIqQfd"
}  # fmt: skip


class Rejected(EdgeInferError):
    """edgeinfer refused the request; `reason` says why, in one of the words of docs/client.md."""

    exit_code = 75  # EX_TEMPFAIL

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"rejected ({reason}): {detail}" if detail else f"rejected ({reason})")


class DeadlineExpired(EdgeInferError):
    """The deadline passed before there was an answer."""

    exit_code = 75

    def __init__(self, phase: str, detail: str) -> None:
        self.phase = phase
        """Where it was caught: `queued`, `running` or `finished`."""
        self.detail = detail
        super().__init__(f"expired ({phase}): {detail}" if detail else f"expired ({phase})")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input given explicitly: raw little-endian bytes, row-major, of a datatype and shape."""

    datatype: str
    shape: Sequence[int]
    raw: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Media:
    """An input given as an encoded file: a JPEG, PNG, WAV or text that the model's worker decodes."""

    data: bytes | bytearray | memoryview
    content_type: str


@dataclass(frozen=True, slots=True)
class Output:
    """One output tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: memoryview
    """Little-endian, row-major."""

    def elements(self) -> list[Any]:
        """Return the elements as a flat list."""
        return oip.elements(oip.Tensor(name=self.name, datatype=self.datatype, shape=list(self.shape)), self.raw)

    def as_numpy(self) -> Any:
        """Return the tensor as a numpy array (read-only, without a copy where there can be).

        Raises:
            ImportError: numpy is not installed.
            ProtocolError: BF16, which numpy does not have.
        """
        numpy = importlib.import_module("numpy")
        if self.datatype == "BYTES":
            return numpy.array(self.elements(), dtype=object).reshape(self.shape)
        kinds = {name: f"<{code}" for code, name in _INTERFACE_TYPES.items()}
        if self.datatype not in kinds:
            raise ProtocolError(f"output {self.name!r} is {self.datatype}, which numpy does not have; read .raw")
        return numpy.frombuffer(self.raw, dtype=kinds[self.datatype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Inference:
    """A model's answer, and where it came from."""

    model: str
    version: str
    outputs: tuple[Output, ...]
    label: str | None
    """What the manifest's classes make of the outputs; None for models without."""
    score: float | None
    placement: str
    """`local` or `nearby`."""
    where: str
    """The device or peer that computed it."""
    variant: str
    digest: str
    latency_ms: float
    """From its reception by the daemon to the result."""
    late: bool
    """Only with `accept_late`: it came after the deadline."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Everything the daemon said beside the outputs."""

    def __getitem__(self, name: str) -> Output:
        """Return the output of that name."""
        for output in self.outputs:
            if output.name == name:
                return output
        raise KeyError(f"no output {name!r}; there are {', '.join(output.name for output in self.outputs)}")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, numbers and texts, fit for JSON (NaN and infinity are None)."""
        return {
            "model": self.model,
            "version": self.version,
            "variant": self.variant,
            "digest": self.digest,
            "label": self.label,
            "score": self.score,
            "placement": self.placement,
            "where": self.where,
            "latency_ms": self.latency_ms,
            "late": self.late,
            "outputs": [
                {
                    "name": output.name,
                    "datatype": output.datatype,
                    "shape": list(output.shape),
                    "data": [_plain(value) for value in output.elements()],
                }
                for output in self.outputs
            ],
        }


Value = Tensor | Media | str | bytes | Sequence[Any] | Any
"""What an input may be given as; see `Client.infer`."""


class Client:
    """A connection to the daemon on this device. Use one per thread; it reconnects by itself."""

    def __init__(self, socket: Path | str | None = None) -> None:
        """Remember where the daemon listens: `socket`, else $EDGEINFER_SOCKET, else the installed service's place."""
        self.socket = Path(socket or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)
        self._connection: _UnixConnection | None = None
        self._metadata: dict[tuple[str, str | None], dict[str, Any]] = {}

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

        `inputs` maps input names to values; a value alone is the model's only input. A value is a `Tensor`, a `Media`,
        a numpy array or any other buffer, a (nested) list of numbers or texts, or a text. `deadline_ms` counts from
        the call's arrival; default the model's own. Further `parameters`: `priority` (higher goes first), `firm`
        (False: may be dropped for more urgent work), `accept_late`, `scope` ("device", "site" or "any": how far the
        data may travel; default "device"), `sequence_id` and `sequence_start` (stateful models).

        Raises:
            Rejected: refused, with the reason; also for inputs that do not fit the model.
            DeadlineExpired: no answer by the deadline.
            SessionError: the model failed.
            LinkError: the daemon cannot be reached.
            ProtocolError: what listens there is not edgeinfer, or an input cannot be written as a tensor.
        """
        if not isinstance(inputs, Mapping):
            inputs = {self._only_input(model, version): inputs}
        tensors, content_types = [], {}
        for name, given in inputs.items():
            value = self._text_as_media(model, version, name, given)
            if isinstance(value, Media):
                content_types[name] = value.content_type
            tensors.append((name, *self._encode(model, version, name, value)))
        options = {"binary_data_output": True, **parameters}
        if deadline_ms is not None:
            options["deadline_ms"] = deadline_ms
        payload = oip.encode_request(tensors, parameters=options, content_types=content_types)
        if outputs:
            header = oip.request_header(payload)
            header.outputs = [oip.Tensor(name=name) for name in outputs]
            payload = Payload(msgspec.json.encode(header), payload.tensors)
        return self._infer(model, version, payload, deadline_ms)

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
        name = input or self._only_input(model, options.get("version"))
        return self.infer(model, {name: Media(data, content_type)}, **options)

    def infer_text(self, model: str, text: str, **options: Any) -> Inference:
        """Run a model on a text; as `infer_media`."""
        return self.infer_media(model, text.encode(), _TEXT_TYPE, **options)

    def infer_file(self, model: str, path: Path | str, **options: Any) -> Inference:
        """Run a model on a file whose name tells its content type (.jpg, .png, .wav, .txt); as `infer_media`.

        Raises:
            OSError: it cannot be read.
        """
        path = Path(path)
        content_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return self.infer_media(model, path.read_bytes(), content_type, **options)

    def models(self) -> list[dict[str, Any]]:
        """Return name, version and readiness of every model."""
        models: list[dict[str, Any]] = self._get_json("/v2/models", list)
        return models

    def model(self, name: str, version: str | None = None) -> dict[str, Any]:
        """Return a model's inputs, outputs and parameters.

        Raises:
            Rejected: there is no such model.
        """
        model: dict[str, Any] = self._get_json(_model_path(name, version), dict)
        return model

    def status(self) -> dict[str, Any]:
        """Return the daemon's status document."""
        status: dict[str, Any] = self._get_json("/status", dict)
        return status

    def ready(self) -> bool:
        """Return whether the daemon is there and would take requests; never raises for one that is not."""
        try:
            return self._exchange("GET", "/v2/health/ready", timeout_s=5.0)[0] == 200
        except LinkError:
            return False

    def _infer(self, model: str, version: str | None, payload: Payload, deadline_ms: float | None) -> Inference:
        headers = {
            oip.HEADER_LENGTH: str(len(payload.header)),
            "Content-Type": "application/octet-stream",
            "Content-Length": str(payload.size_bytes),
        }
        path = f"{_model_path(model, version)}/infer"
        timeout_s = (deadline_ms or DEFAULT_DEADLINE_MS) / 1000 + _PATIENCE_S
        status, received, body = self._exchange("POST", path, timeout_s=timeout_s, payload=payload, headers=headers)
        if status != 200:
            raise _refusal(status, body)
        length = received.get(oip.HEADER_LENGTH)
        header, answer = oip.decode_response(*oip.split(body, int(length) if length else None))
        return _inference(header, answer)

    def _text_as_media(self, model: str, version: str | None, name: str, value: Value) -> Value:
        """Return a text as the medium that the model cuts into words, where it does."""
        if isinstance(value, str):
            decode = self._spec(model, version, name).get("parameters", {}).get("decode")
            return Media(value.encode(), _TEXT_TYPE) if decode == "words" else value
        return value

    def _encode(self, model: str, version: str | None, name: str, value: Value) -> tuple[str, list[int], Any]:
        """Return datatype, shape and raw bytes of an input value."""
        if isinstance(value, Tensor):
            return value.datatype, list(value.shape), value.raw
        if isinstance(value, Media):
            return "BYTES", [1], oip.bytes_element(value.data)
        if isinstance(value, str):
            return "BYTES", [1], oip.bytes_element(value.encode())
        if (interface := getattr(value, "__array_interface__", None)) is not None:
            return _from_array(name, value, interface)
        if isinstance(value, bytes | bytearray | memoryview | array.array):
            return _from_buffer(name, memoryview(value))
        spec = self._spec(model, version, name)
        return _from_list(name, value, str(spec["datatype"]))

    def _spec(self, model: str, version: str | None, name: str) -> dict[str, Any]:
        specs = self._inputs(model, version)
        for spec in specs:
            if spec["name"] == name:
                return spec
        names = ", ".join(str(spec["name"]) for spec in specs)
        raise Rejected("input_invalid", f"there is no input {name!r}; {model} takes {names}")

    def _only_input(self, model: str, version: str | None) -> str:
        specs = self._inputs(model, version)
        if len(specs) != 1:
            names = ", ".join(str(spec["name"]) for spec in specs)
            raise Rejected("input_invalid", f"{model} takes {names}; name the input")
        return str(specs[0]["name"])

    def _inputs(self, model: str, version: str | None) -> list[dict[str, Any]]:
        """Return the model's declared inputs, asked for once per connection."""
        key = (model, version)
        if key not in self._metadata:
            self._metadata[key] = self.model(model, version)
        return list(self._metadata[key]["inputs"])

    def _get_json(self, path: str, kind: type[Any]) -> Any:
        status, _, body = self._exchange("GET", path, timeout_s=10.0)
        if status != 200:
            raise _refusal(status, body)
        document = _document(body)
        if not isinstance(document, kind):
            raise ProtocolError(f"{self.socket}: {path} is no {kind.__name__}; is this edgeinfer?")
        return document

    def _exchange(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        payload: Payload | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request and return status, headers and body of the reply.

        Raises:
            LinkError: no daemon, or none that answers in time.
            ProtocolError: it does not speak HTTP.
        """
        connection = self._connected(timeout_s)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders()
            try:
                for part in (payload.header, *payload.tensors) if payload else ():
                    connection.send(part)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before it was read whole: the reply says why
            with connection.getresponse() as response:
                return response.status, response.headers, response.read()
        except TimeoutError as error:
            self.close()
            raise LinkError(
                f"{self.socket}: the daemon did not answer within {timeout_s:.1f} s; is it hung?"
            ) from error
        except OSError as error:
            self.close()
            raise LinkError(f"{self.socket}: the daemon hung up: {error.strerror or error}") from error
        except http.client.HTTPException as error:
            self.close()
            raise ProtocolError(f"{self.socket}: what listens there is not edgeinfer: {error!r}") from error
        except BaseException:
            self.close()  # interrupted half way: the reply must not be taken for the next request's
            raise

    def _connected(self, timeout_s: float) -> _UnixConnection:
        """Return a live connection; one that the daemon has closed while it was idle is replaced."""
        if self._connection is not None and self._connection.is_stale():
            self.close()
        if self._connection is None:
            self._metadata.clear()
            self._connection = _UnixConnection(self.socket)
        connection = self._connection
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(timeout_s)
        except OSError as error:
            self.close()
            raise LinkError(
                f"no edgeinfer on {self.socket}: {error.strerror or error}; start it (systemctl start edgeinfer), "
                f"or name its socket in ${SOCKET_VARIABLE}"
            ) from error
        return connection


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(5.0)
        self.sock.connect(os.fspath(self._path))

    def is_stale(self) -> bool:
        """Return whether the other side has closed, or sent what nobody asked for."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))


def _model_path(name: str, version: str | None) -> str:
    path = f"/v2/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _inference(header: oip.ResponseHeader, payload: Payload) -> Inference:
    said = header.parameters
    label, score = said.get("label"), said.get("score")
    return Inference(
        model=header.model_name,
        version=header.model_version,
        outputs=tuple(
            Output(tensor.name, tensor.datatype, tuple(tensor.shape), memoryview(raw))
            for tensor, raw in zip(header.outputs, payload.tensors, strict=True)
        ),
        label=label if isinstance(label, str) else None,
        score=float(score) if isinstance(score, int | float) else None,
        placement=str(said.get("placement", "")),
        where=str(said.get("where", "")),
        variant=str(said.get("variant", "")),
        digest=str(said.get("digest", "")),
        latency_ms=float(said.get("latency_ms", 0.0)),
        late=said.get("outcome") == "late",
        parameters=said,
    )


def _refusal(status: int, body: bytes) -> EdgeInferError:
    """Return the exception for a reply that is no answer."""
    document = _document(body)
    said: dict[str, Any] = document if isinstance(document, dict) else {}
    outcome, reason = said.get("outcome"), str(said.get("reason", ""))
    detail = str(said.get("detail") or said.get("error") or f"HTTP {status}")
    match outcome:
        case "rejected":
            return Rejected(reason, detail)
        case "expired":
            return DeadlineExpired(reason, detail)
        case "failed":
            return SessionError(reason, detail)
    return ProtocolError(f"HTTP {status}: {detail}")


def _document(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"the reply is not JSON ({body[:60]!r}); is this edgeinfer?") from error


def _from_array(name: str, value: Any, interface: Mapping[str, Any]) -> tuple[str, list[int], bytes]:
    """Return a numpy-like array as a tensor, without importing numpy."""
    typestr = str(interface["typestr"])
    datatype = _INTERFACE_TYPES.get(typestr[1:])
    if datatype is None:
        if typestr[1:2] in "OUS":
            flat = value.reshape(-1).tolist()
            return (
                "BYTES",
                list(interface["shape"]),
                b"".join(oip.bytes_element(_as_bytes(name, item)) for item in flat),
            )
        raise ProtocolError(f"input {name!r}: arrays of type {typestr!r} cannot be sent")
    if typestr[0] == ">" or (typestr[0] == "=" and sys.byteorder == "big"):
        value = value.byteswap()
    return datatype, list(interface["shape"]), value.tobytes()


def _from_buffer(name: str, view: memoryview) -> tuple[str, list[int], bytes | memoryview]:
    code = view.format.lstrip("@=<")
    if code not in _ARRAY_TYPES or (sys.byteorder == "big" and view.itemsize > 1):
        raise ProtocolError(f"input {name!r}: a buffer of format {view.format!r} cannot be sent; give a Tensor")
    shape = list(view.shape or [])
    return _ARRAY_TYPES[code], shape, view.cast("B") if view.c_contiguous else view.tobytes()


def _from_list(name: str, value: Any, datatype: str) -> tuple[str, list[int], bytes]:
    """Return a nested list (or a single number) as a tensor of the datatype that the model declares."""
    shape, flat = [], [value]
    while flat and isinstance(flat[0], list | tuple):
        length = len(flat[0])
        if any(not isinstance(row, list | tuple) or len(row) != length for row in flat):
            raise ProtocolError(f"input {name!r}: the lists are not all of one length")
        shape.append(length)
        flat = [item for row in flat for item in row]
    if datatype == "BYTES":
        return datatype, shape, b"".join(oip.bytes_element(_as_bytes(name, item)) for item in flat)
    if datatype not in _PACK_CODES:
        raise ProtocolError(f"input {name!r}: {datatype} cannot be made from a list; give a Tensor")
    return datatype, shape, _pack(name, flat, datatype)


def _pack(name: str, flat: list[Any], datatype: str) -> bytes:
    try:
        return struct.pack(f"<{len(flat)}{_PACK_CODES[datatype]}", *flat)
    except (struct.error, OverflowError, TypeError) as error:
        raise ProtocolError(f"input {name!r}: not all elements are {datatype}: {error}") from error


def _as_bytes(name: str, item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise ProtocolError(f"input {name!r}: {type(item).__name__} is neither text nor bytes")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    return value.hex() if isinstance(value, bytes) else value


__all__ = [
    "Client", "DeadlineExpired", "Inference", "Media", "Output", "Rejected", "Tensor",
]  # fmt: skip
