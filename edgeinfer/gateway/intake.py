"""Make an `InferRequest` out of an HTTP body and its headers, or say why it cannot be one.

In two steps, because the tensors may come later than what is said about them, and a request may be refused before:
`draft` reads the JSON header, `Draft.complete` takes the tensors.

Pure: what is valid depends on the manifest and the bytes alone. Parameters of the request (also as headers where
noted; the header wins):

    deadline_ms (Edgeinfer-Deadline-Ms)  from now; default the manifest's, else 10 s; at most 10 minutes
    timeout                              the same in microseconds, as Triton's clients say it
    priority, firm, accept_late, scope   as `InferRequest` has them; scope is "device", "site" or "any"
    sequence_id, sequence_start          the state of a stateful model is kept by the id
    binary_data_output                   all outputs in binary form; per output: parameters.binary_data
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from edgeinfer import oip
from edgeinfer.artifact.contract import check_inputs, check_shapes
from edgeinfer.artifact.manifest import MAX_DEADLINE_MS
from edgeinfer.clock import NS_PER_MS
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.errors import ProtocolError
from edgeinfer.gateway.catalog import ModelInfo
from edgeinfer.gateway.regions import Place, place_of
from edgeinfer.gateway.turns import LEAST_ELEMENT_BYTES, MAX_JSON_BYTES, check_json_bytes
from edgeinfer.request import DataScope, Deadlines, InferRequest, Payload, Reason, Refusal, Timeline

DEADLINE_HEADER = "edgeinfer-deadline-ms"
DEFAULT_DEADLINE_MS = 10_000.0
MAX_FACTS_BYTES = 64 << 10
"""Most bytes of a request's header without its data: names, shapes and parameters."""
_RECALLED_BYTES = 4 << 10
_MOST_DIGITS = 40
_MOST_BITS = 64
_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a caller wants its answer."""

    id: str = ""
    """The caller's own name for the request, given back."""
    outputs: frozenset[str] = frozenset()
    """Those that it wants; empty for all."""
    binary: frozenset[str] | bool = True
    """Outputs wanted in binary form; True for all, False for none."""

    def takes(self, output: str) -> bool:
        """Return whether an output is wanted at all."""
        return not self.outputs or output in self.outputs

    def in_json(self, output: str) -> bool:
        """Return whether an output is wanted, and as JSON."""
        if not self.takes(output):
            return False
        return self.binary is False or (self.binary is not True and output not in self.binary)


class Layout:
    """Where the tensors of a request lie whose header alone says whether they fit: all binary, none of texts."""

    __slots__ = ("_header", "_sizes")

    def __init__(self) -> None:
        self._header: bytes | None = None
        self._sizes: tuple[tuple[str, int], ...] = ()

    def learn(self, parsed: oip.RequestHeader, payload: Payload) -> None:
        """Remember a request that was checked completely."""
        sizes = (memoryview(tensor).nbytes for tensor in payload.tensors)
        self._header = payload.header
        self._sizes = tuple(zip((tensor.name for tensor in parsed.inputs), sizes, strict=True))

    def lay(self, body: bytes | bytearray | memoryview, shared: Mapping[str, memoryview]) -> Payload | None:
        """Return the payload of a request with the same header; None when its tensors don't lie as they did."""
        if self._header is None:
            return None
        view, at, tensors = memoryview(body), 0, []
        for name, size_bytes in self._sizes:
            raw = shared.get(name)
            if raw is None:
                raw = view[at : at + size_bytes]
                at += size_bytes
            if len(raw) != size_bytes:
                return None
            tensors.append(raw)
        return Payload(self._header, tuple(tensors)) if at == len(view) else None


class Recall:
    """What one caller said last: one that says the same again, but for its numbers, is not read anew."""

    def __init__(self) -> None:
        self._last: tuple[Mapping[str, str], bytes, str | None, Draft] | None = None

    def draft(
        self, model: ModelInfo, version: str | None, headers: Mapping[str, str], header: bytes, *, now_ns: int
    ) -> Draft | Refusal:
        """As `draft`; `headers` are the same object when the same head came again."""
        if self._last is not None:
            its_headers, its_header, its_version, drafted = self._last
            if (
                headers is its_headers
                and header == its_header
                and version == its_version
                and model.manifest is drafted.model.manifest
            ):
                return drafted.again(now_ns)
        found = draft(model, version, headers, header, now_ns=now_ns)
        is_worth_it = isinstance(found, Draft) and found.layout is not None and len(header) <= _RECALLED_BYTES
        self._last = (headers, header, version, found) if is_worth_it and isinstance(found, Draft) else None
        return found


@dataclass(frozen=True, slots=True)
class Draft:
    """A request whose tensors are not there yet."""

    model: ModelInfo
    parsed: oip.RequestHeader
    fields: Mapping[str, Any]
    """The arguments of `InferRequest` but for its payload."""
    form: Form
    places: Mapping[str, Place]
    """Inputs that lie in the caller's shared memory."""
    layout: Layout | None = None
    """How its tensors lay when they were last checked; None when only the tensors themselves tell."""

    def again(self, now_ns: int) -> Draft:
        """Return the draft of the same request that comes anew."""
        timeline: Timeline = self.fields["timeline"]
        deadlines: Deadlines = self.fields["deadlines"]
        due_ns = now_ns + deadlines.total_ns - timeline.received_ns
        fields = {**self.fields, "deadlines": Deadlines(due_ns), "timeline": Timeline(received_ns=now_ns)}
        return Draft(self.model, self.parsed, fields, self.form, self.places, self.layout)

    def request(self, payload: Payload = Payload(b"")) -> InferRequest:  # noqa: B008 - it is frozen
        """Return the request with that payload; without one it is good for being refused only."""
        return InferRequest(payload=payload, **self.fields)

    def overdue(self, now_ns: int) -> InferRequest:
        """Return a request whose tensors had not come at its deadline: it cannot but expire."""
        return InferRequest(payload=Payload(b""), **{**self.fields, "deadlines": Deadlines(now_ns)})

    @property
    def due_ns(self) -> int | None:
        """When nobody will wait for the answer any more; None when late ones are taken."""
        deadlines: Deadlines = self.fields["deadlines"]
        return None if self.fields["accept_late"] else deadlines.total_ns

    @property
    def shared_bytes(self) -> int:
        """Bytes of the inputs that lie in shared memory."""
        return sum(place.size_bytes for place in self.places.values())

    def complete(self, body: bytes | bytearray | memoryview, shared: Mapping[str, memoryview]) -> Intake | Refusal:
        """Check the tensors, and return the whole request; `shared` holds those that lay in shared memory."""
        if self.layout is not None and (known := self.layout.lay(body, shared)) is not None:
            return Intake(self.request(known), self.form)
        try:
            payload = oip.attach(self.parsed, body, shared)
        except ProtocolError as error:
            return Refusal(Reason.INPUT_INVALID, str(error))
        refusal = check_inputs(self.model.manifest, self.parsed, payload)
        if refusal is None and self.layout is not None:
            self.layout.learn(self.parsed, payload)
        return refusal or Intake(self.request(payload), self.form)


@dataclass(frozen=True, slots=True)
class Intake:
    """A request as the scheduler takes it, and the form in which its caller wants the answer."""

    request: InferRequest
    form: Form


def take_request(
    model: ModelInfo, version: str | None, headers: Mapping[str, str], body: bytes | bytearray, *, now_ns: int
) -> Intake | Refusal:
    """Check an inference request completely whose body is there; as `draft`."""
    try:
        header, tensors = oip.split(body, header_length(headers))
    except ProtocolError as error:
        return Refusal(Reason.INPUT_INVALID, str(error))
    drafted = draft(model, version, headers, header, now_ns=now_ns)
    return drafted if isinstance(drafted, Refusal) else drafted.complete(tensors, {})


def draft(
    model: ModelInfo,
    version: str | None,
    headers: Mapping[str, str],
    header: bytes | bytearray | memoryview,
    *,
    now_ns: int,
) -> Draft | Refusal:
    """Check what is said about a request, and return what is known of it before its tensors are.

    `headers` have lower-case names, `header` is the JSON part of the body, `now_ns` when the request came.
    """
    try:
        _require_short(header)
        parsed = oip.parse_request(header)
        parameters = parsed.parameters
        deadline_ms = _deadline_ms(model, headers, parameters)
        fields = {
            "model": model.manifest.name,
            "deadlines": Deadlines(now_ns + round(deadline_ms * NS_PER_MS)),
            "timeline": Timeline(received_ns=now_ns),
            "version": version,
            "priority": _priority(parameters),
            "scope": _scope(parameters),
            "firm": _flag(parameters, "firm", default=True),
            "accept_late": _flag(parameters, "accept_late", default=False),
            "stream": _stream(model.manifest.name, parameters),
            "sequence_start": _flag(parameters, "sequence_start", default=False),
        }
        places = _places(parsed.inputs)
    except ProtocolError as error:
        return Refusal(Reason.INPUT_INVALID, str(error))
    form = Form(parsed.id, frozenset(tensor.name for tensor in parsed.outputs), _binary(parsed))
    refusal = _check_outputs(model, parsed) or check_shapes(model.manifest, parsed) or _check_form(model, form)
    is_plain = all(tensor.data is None and tensor.datatype != "BYTES" for tensor in parsed.inputs)
    return refusal or Draft(model, parsed, fields, form, places, Layout() if is_plain else None)


def _places(tensors: Sequence[oip.Tensor]) -> dict[str, Place]:
    places = {}
    for tensor in tensors:
        if (place := place_of(tensor.parameters)) is not None:
            places[tensor.name] = place
    return places


def header_length(headers: Mapping[str, str]) -> int | None:
    """Return where the JSON ends; None when there is nothing behind it.

    Raises:
        ProtocolError: that is no length.
    """
    text = headers.get(oip.HEADER_LENGTH.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise ProtocolError(f"{oip.HEADER_LENGTH} {text[:40]!r} is not a length")
    return int(text)


class _Facts(msgspec.Struct):
    """One tensor as its sender wrote it, measured without making objects of it."""

    name: msgspec.Raw = msgspec.Raw()
    shape: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _HeaderFacts(msgspec.Struct):
    inputs: list[_Facts] = []
    outputs: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()


_facts_decoder = msgspec.json.Decoder(_HeaderFacts)


def _require_short(header: bytes | bytearray | memoryview) -> None:
    """Refuse a header that says too much beside its data, before it costs objects on the loop.

    Raises:
        ProtocolError: it does, or is none.
    """
    if len(header) <= MAX_FACTS_BYTES:
        return
    check_json_bytes(len(header))
    oip.check_plain(header)
    try:
        facts = _facts_decoder.decode(header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the JSON header is not a valid inference header: {error}") from error
    said = [facts.outputs, facts.parameters, facts.id]
    for tensor in facts.inputs:
        said += [tensor.name, tensor.shape, tensor.parameters]
    said_bytes = sum(memoryview(raw).nbytes for raw in said) + len(said)
    if said_bytes > MAX_FACTS_BYTES:
        raise ProtocolError(
            f"names, shapes and parameters have {said_bytes} bytes, at most {MAX_FACTS_BYTES} are taken"
        )


def _deadline_ms(model: ModelInfo, headers: Mapping[str, str], parameters: Mapping[str, Any]) -> float:
    text = headers.get(DEADLINE_HEADER)
    value = parameters.get("deadline_ms") if text is None else text
    if isinstance(value, str):
        if len(value) > _MOST_DIGITS or _DECIMAL.fullmatch(value) is None:  # float() would take 1_0, nan and more
            raise ProtocolError(f"deadline_ms {_shown(value)} is not a number of milliseconds")
        value = float(value)
    if value is None and (timeout_us := parameters.get("timeout")):
        return _number("timeout", timeout_us, 1, round(MAX_DEADLINE_MS * 1000), whole=True) / 1000
    if value is None:
        value = min(model.manifest.deadline_ms or DEFAULT_DEADLINE_MS, MAX_DEADLINE_MS)
    return max(_number("deadline_ms", value, 0, MAX_DEADLINE_MS, above=True), 1 / NS_PER_MS)


def _priority(parameters: Mapping[str, Any]) -> int:
    return round(_number("priority", parameters.get("priority", 0), -1000, 1000, whole=True))


def _number(
    name: str, value: object, least: int, most: float, *, whole: bool = False, above: bool = False
) -> int | float:
    """Return a number that a caller gave, whatever it gave; `above`: more than `least`. All come through here.

    Integers are compared as they are, before anything is computed with them: they may have hundreds of digits.

    Raises:
        ProtocolError: it is no number, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ProtocolError(f"{name} {_shown(value)} is not a {'whole ' if whole else ''}number")
    if not least <= value <= most or (above and value == least):
        bounds = f"above {least} and at most {most:g}" if above else f"between {least} and {most}"
        raise ProtocolError(f"{name} {_shown(value)} is not {bounds}")
    return value


def _shown(value: object) -> str:
    """Return what a caller gave, short, for an error's text; never raises."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"with about {value.bit_length() * 30_103 // 100_000 + 1} digits"
    if isinstance(value, list | dict):
        return f"of {len(value)} values"
    return repr(value[:_MOST_DIGITS] if isinstance(value, str) else value)


def _stream(model: str, parameters: Mapping[str, Any]) -> str | None:
    value = parameters.get("sequence_id", 0)
    if isinstance(value, str) and len(value) <= 128:
        return f"client:{model}:{value}" if value else None
    if isinstance(value, bool) or not isinstance(value, int) or value.bit_length() > _MOST_BITS:
        raise ProtocolError(f"sequence_id {_shown(value)} is not a 64-bit number or a text of at most 128 characters")
    return f"client:{model}:{value}" if value else None


def _scope(parameters: Mapping[str, Any]) -> DataScope:
    value = parameters.get("scope", "device")
    for scope in DataScope:
        if value == scope.name.lower():
            return scope
    raise ProtocolError(f"scope {_shown(value)} is not device, site or any")


def _flag(parameters: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} {_shown(value)} is neither true nor false")
    return value


def _check_outputs(model: ModelInfo, parsed: oip.RequestHeader) -> Refusal | None:
    known = [spec.name for spec in model.manifest.outputs]
    for tensor in parsed.outputs:
        if tensor.name not in known:
            return Refusal(
                Reason.INPUT_INVALID,
                f"there is no output {tensor.name!r}; {model.manifest.name} gives {', '.join(known)}",
            )
        if any(name.startswith("shared_memory_") for name in tensor.parameters):
            return Refusal(
                Reason.INPUT_INVALID,
                f"output {tensor.name!r} is wanted in shared memory, where only inputs may lie; "
                "leave shared_memory_region out and take it from the answer (binary_data)",
            )
    return None


def _check_form(model: ModelInfo, form: Form) -> Refusal | None:
    """Refuse outputs in JSON that are known to be too large for it; those of no fixed size only the run tells."""
    sizes = {
        spec.name: math.prod(spec.shape) * max(ITEM_BYTES[spec.datatype], LEAST_ELEMENT_BYTES)
        for spec in model.manifest.outputs
        if form.in_json(spec.name) and spec.datatype in ITEM_BYTES and -1 not in spec.shape
    }
    return too_large_for_json(sizes)


def too_large_for_json(sizes: Mapping[str, int]) -> Refusal | None:
    """Return why outputs that count so many bytes, by name, are not written as JSON, or None when they may be."""
    size_bytes = sum(sizes.values())
    if size_bytes <= MAX_JSON_BYTES:
        return None
    largest = max(sizes, key=lambda name: sizes[name])
    return Refusal(
        Reason.INPUT_INVALID,
        f"output {largest!r} has {sizes[largest]} bytes ({LEAST_ELEMENT_BYTES} or more an element), at most "
        f"{MAX_JSON_BYTES} of all outputs together are written as JSON; ask for it in binary form "
        "(parameters.binary_data_output), as edgeinfer's Client does by itself",
    )


def _binary(parsed: oip.RequestHeader) -> frozenset[str] | bool:
    everything = parsed.parameters.get("binary_data_output") is True
    chosen = {tensor.name: tensor.parameters.get("binary_data", everything) is True for tensor in parsed.outputs}
    if not chosen or len(set(chosen.values())) == 1:
        return next(iter(chosen.values()), everything)
    return frozenset(name for name, wanted in chosen.items() if wanted)
