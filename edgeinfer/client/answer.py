"""Say what came back: an answer with its outputs, or an exception that says why there is none."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer import oip
from edgeinfer.errors import EdgeInferError, ProtocolError, SessionError
from edgeinfer.request import Reason

_NUMPY_TYPES = {
    "BOOL": "?", "UINT8": "u1", "INT8": "i1", "UINT16": "<u2", "INT16": "<i2", "UINT32": "<u4", "INT32": "<i4",
    "UINT64": "<u8", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


EXIT_CODES: dict[Reason, int] = {
    Reason.DEADLINE_UNREACHABLE: 75,
    Reason.QUEUE_FULL: 75,
    Reason.DISPLACED: 75,
    Reason.SUPERSEDED: 75,
    Reason.MEMORY: 75,
    Reason.THERMAL: 75,
    Reason.MODEL_UNAVAILABLE: 69,  # EX_UNAVAILABLE
    Reason.QUARANTINED: 70,  # EX_SOFTWARE
    Reason.RUNTIME_UNUSABLE: 70,
    Reason.INPUT_INVALID: 65,  # EX_DATAERR
    Reason.DATA_SCOPE: 75,
    Reason.COST: 75,
    Reason.DRAINING: 75,
}
"""Exit status of a command whose request was refused: EX_TEMPFAIL only where asking again later may help."""


class Rejected(EdgeInferError):
    """edgeinfer refused the request; `reason` says why, in one of the words of docs/client.md."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        self.exit_code = EXIT_CODES[Reason(reason)] if reason in set(Reason) else 75
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
        if self.datatype not in _NUMPY_TYPES:
            raise ProtocolError(f"output {self.name!r} is {self.datatype}, which numpy does not have; read .raw")
        return numpy.frombuffer(self.raw, dtype=_NUMPY_TYPES[self.datatype]).reshape(self.shape)


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


def read_answer(status: int, header_length: str | None, body: bytes | bytearray | memoryview) -> Inference:
    """Return the answer in a reply to an inference.

    Raises:
        Rejected, DeadlineExpired, SessionError: the reply says that there is none, and why.
        ProtocolError: it is no reply of edgeinfer's.
    """
    if status != 200:
        raise refusal(status, body)
    length = int(header_length) if header_length and header_length.isdecimal() else None
    header, payload = oip.decode_response(*oip.split(body, length))
    said = header.parameters
    label, score, latency_ms = said.get("label"), said.get("score"), said.get("latency_ms")
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
        latency_ms=float(latency_ms) if isinstance(latency_ms, int | float) else 0.0,
        late=said.get("outcome") == "late",
        parameters=said,
    )


def read_document(status: int, body: bytes | bytearray | memoryview, kind: type[Any]) -> Any:
    """Return the JSON document in a reply to a question.

    Raises:
        Rejected: there is no such thing.
        ProtocolError: it is no reply of edgeinfer's.
    """
    if status != 200:
        raise refusal(status, body)
    document = _parse(body)
    if not isinstance(document, kind):
        raise ProtocolError(f"the reply is no {kind.__name__} ({bytes(body[:60])!r}); is this edgeinfer?")
    return document


def refusal(status: int, body: bytes | bytearray | memoryview) -> EdgeInferError:
    """Return the exception for a reply that is no answer."""
    document = _parse(body)
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


def _parse(body: bytes | bytearray | memoryview) -> Any:
    try:
        return json.loads(bytes(body))
    except ValueError as error:
        raise ProtocolError(f"the reply is not JSON ({bytes(body[:60])!r}); is this edgeinfer?") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    return value.hex() if isinstance(value, bytes) else value
