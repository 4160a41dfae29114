"""Make an `InferRequest` out of an HTTP body and its headers, or say why it cannot be one.

Pure: what is valid depends on the manifest and the bytes alone. Parameters of the request (also as headers where
noted; the header wins):

    deadline_ms (Edgeinfer-Deadline-Ms)  from now; default the manifest's, else 10 s; at most 10 minutes
    timeout                              the same in microseconds, as Triton's clients say it
    priority, firm, accept_late, scope   as `InferRequest` has them; scope is "device", "site" or "any"
    sequence_id, sequence_start          the state of a stateful model is kept by the id
    binary_data_output                   all outputs in binary form; per output: parameters.binary_data
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer import oip
from edgeinfer.artifact.contract import check_inputs
from edgeinfer.clock import NS_PER_MS
from edgeinfer.errors import ProtocolError
from edgeinfer.gateway.catalog import ModelInfo
from edgeinfer.request import DataScope, Deadlines, InferRequest, Reason, Refusal, Timeline

DEADLINE_HEADER = "edgeinfer-deadline-ms"
DEFAULT_DEADLINE_MS = 10_000.0
MAX_DEADLINE_MS = 600_000.0


@dataclass(frozen=True, slots=True)
class Intake:
    """A request as the scheduler takes it, and the form in which its caller wants the answer."""

    request: InferRequest
    binary: frozenset[str] | bool
    """Outputs wanted in binary form; True for all, False for none."""


def take_request(
    model: ModelInfo, version: str | None, headers: Mapping[str, str], body: bytes, *, now_ns: int
) -> Intake | Refusal:
    """Check an inference request completely.

    `headers` have lower-case names. The request's tensors are views of `body`.
    """
    try:
        parsed, payload = oip.decode_request(*oip.split(body, _header_length(headers)))
        parameters = parsed.parameters
        deadline_ms = _deadline_ms(model, headers, parameters)
        request = InferRequest(
            model=model.manifest.name,
            payload=payload,
            deadlines=Deadlines(now_ns + round(deadline_ms * NS_PER_MS)),
            timeline=Timeline(received_ns=now_ns),
            version=version,
            priority=_priority(parameters),
            scope=_scope(parameters),
            firm=_flag(parameters, "firm", default=True),
            accept_late=_flag(parameters, "accept_late", default=False),
            stream=_stream(model.manifest.name, parameters),
            sequence_start=_flag(parameters, "sequence_start", default=False),
        )
    except ProtocolError as error:
        return Refusal(Reason.INPUT_INVALID, str(error))
    refusal = check_inputs(model.manifest, parsed, payload) or _check_outputs(model, parsed)
    return refusal or Intake(request, _binary(parsed))


def _header_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get(oip.HEADER_LENGTH.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise ProtocolError(f"{oip.HEADER_LENGTH} {text[:40]!r} is not a length")
    return int(text)


def _deadline_ms(model: ModelInfo, headers: Mapping[str, str], parameters: Mapping[str, Any]) -> float:
    value = headers.get(DEADLINE_HEADER, parameters.get("deadline_ms"))
    if value is None and isinstance(timeout_us := parameters.get("timeout"), int) and timeout_us > 0:
        value = timeout_us / 1000
    if value is None:
        return model.manifest.deadline_ms or DEFAULT_DEADLINE_MS
    try:
        if isinstance(value, bool):
            raise TypeError  # noqa: TRY301
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ProtocolError(f"deadline_ms {str(value)[:40]!r} is not a number of milliseconds") from None
    if not 0 < number <= MAX_DEADLINE_MS:
        raise ProtocolError(f"deadline_ms {number:g} is not between 0 and {MAX_DEADLINE_MS:g}")
    return number


def _priority(parameters: Mapping[str, Any]) -> int:
    value = parameters.get("priority", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not -1000 <= value <= 1000:
        raise ProtocolError(f"priority {value!r} is not a whole number between -1000 and 1000")
    return value


def _stream(model: str, parameters: Mapping[str, Any]) -> str | None:
    value = parameters.get("sequence_id", 0)
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > 128:
        raise ProtocolError(f"sequence_id {str(value)[:40]!r} is not a number or a text of at most 128 characters")
    return f"client:{model}:{value}" if value else None


def _scope(parameters: Mapping[str, Any]) -> DataScope:
    value = parameters.get("scope", "device")
    for scope in DataScope:
        if value == scope.name.lower():
            return scope
    raise ProtocolError(f"scope {value!r} is not device, site or any")


def _flag(parameters: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} {value!r} is neither true nor false")
    return value


def _check_outputs(model: ModelInfo, parsed: oip.RequestHeader) -> Refusal | None:
    known = [spec.name for spec in model.manifest.outputs]
    for tensor in parsed.outputs:
        if tensor.name not in known:
            return Refusal(
                Reason.INPUT_INVALID,
                f"there is no output {tensor.name!r}; {model.manifest.name} gives {', '.join(known)}",
            )
    return None


def _binary(parsed: oip.RequestHeader) -> frozenset[str] | bool:
    everything = parsed.parameters.get("binary_data_output") is True
    chosen = {tensor.name: tensor.parameters.get("binary_data", everything) is True for tensor in parsed.outputs}
    if not chosen or len(set(chosen.values())) == 1:
        return next(iter(chosen.values()), everything)
    return frozenset(name for name, wanted in chosen.items() if wanted)
