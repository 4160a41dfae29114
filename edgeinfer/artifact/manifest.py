"""What a bundle says about itself: the seam between toolchain and device.

`manifest.json` explains a model completely: identity, inputs and outputs with bounds, state, variants, how media
are decoded, labels, the deadline it was built for, and the size and sha256 of every other file of the bundle but
the signature. The device can answer "what will it cost, may it run here, is this request valid" from the manifest
alone, before it loads anything.

The *bundle digest* is the sha256 of manifest.json as it lies on disk; through the file table it covers everything.
Format rules: docs/bundle.md. A change that an older device would misread raises `SCHEMA`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edgeinfer.artifact.provider import CPU_PROVIDER, MAX_PROVIDERS, check_providers
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.errors import ManifestInvalid, UnsupportedSchema
from edgeinfer.plain_file import read_plain

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
SIGNATURE_FILE = "model.sig"
MAX_MANIFEST_BYTES = 4 << 20
MAX_DEADLINE_MS = 600_000.0
"""Longest deadline that a model or a request may have."""

MAX_RANK = 8
_MAX_TENSOR_BYTES = 1 << 40
_MAX_PART_BYTES = 255
_MOST_PROBLEMS = 20
_MOST_SAID = 4000

# Every number has an upper bound that no model reaches and no arithmetic trips over, checked as it is read.
Dims = Annotated[list[Annotated[int, Meta(ge=-1, le=1 << 40)]], Meta(max_length=MAX_RANK)]
Size = Annotated[int, Meta(ge=0, le=1 << 48)]
Amount = Annotated[float, Meta(ge=-1e9, le=1e9)]

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_RUNTIME = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}([-+.]?[0-9A-Za-z.]{1,32})?")
_THREADS = re.compile(r"[1-9][0-9]{0,3}")
_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}([-+][0-9A-Za-z.-]{1,64})?")


class Decode(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the worker turns an encoded medium into this input's tensor."""

    kind: str
    """`image` (JPEG or PNG to UINT8 [1,H,W,3], RGB), `audio` (WAV to FP32 [1,N], mono, -1..1) or
    `words` (UTF-8 text to BYTES [N], the runs that `pattern` matches)."""
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] = 1 << 24
    """`image`: larger ones are refused before they are decoded."""
    sample_rate_hz: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """`audio`: the rate that the WAV must have."""
    pattern: Annotated[str, Meta(max_length=1024)] = ""
    """`words`: regular expression of one word."""
    lowercase: bool = False
    """`words`: lower the text first."""
    max_items: Annotated[int, Meta(ge=1, le=1 << 24)] = 4096
    """`words`: more words than this are refused."""


class TensorSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One input or output of the contract."""

    name: str
    datatype: str
    """OIP datatype, `FP32` say."""
    shape: Dims
    """-1 where the size may vary; then `max_shape` bounds it."""
    max_shape: Dims = []
    """Upper bound of every dimension; empty when `shape` is fixed."""
    decode: Decode | None = None
    """Inputs only: encoded media are accepted and decoded like this."""
    allow_non_finite: bool = False
    """Whether NaN and infinity are meant; elsewhere they are an error."""
    description: str = ""

    @property
    def bound(self) -> list[int]:
        """The largest shape."""
        return self.max_shape or self.shape

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest tensor of this spec (BYTES: 64 per element are reserved)."""
        size = ITEM_BYTES.get(self.datatype, 64)
        for dim in self.bound:
            size *= dim
        return size


class StateSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that one run hands to the next of the same stream; starts as zeros."""

    input: str
    """Graph input that takes it. Not part of the public inputs."""
    output: str
    """Graph output that yields its next value. Not part of the public outputs."""
    datatype: str
    shape: Dims


class Classes(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an output becomes a label, in the worker.

    With `threshold` the output is one probability: `labels[1]` at or above it, else `labels[0]`.
    Without, it is one score per label and the largest wins. The response carries `parameters.label` and
    `parameters.score` (the probability of the positive label, or the largest score).
    """

    output: str
    labels: list[str]
    threshold: Amount | None = None


class Variant(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One form of the model: same contract, another price and quality."""

    name: str
    """`fp32`, `int8`, …: unique in the bundle."""
    file: str
    """The ONNX file, relative to the bundle."""
    quality: Amount
    """1.0 = as the float model; measured by the toolchain (see report.json for the metric)."""
    load_peak_bytes: Size
    """Anonymous memory at the peak of loading and running at the largest shape, measured by the toolchain;
    the device's profile replaces it."""
    steady_bytes: Size
    """Anonymous memory between runs, after loading."""
    latency_us: Annotated[dict[str, Annotated[int, Meta(le=3_600_000_000)]], Meta(max_length=64)] = {}
    """Estimated p99 of one run by thread count, `{"1": 9800}`: a seed until the device has measured."""
    providers: list[str] = msgspec.field(default_factory=lambda: [CPU_PROVIDER])
    """Execution providers in order of precedence. Without the CPU's at the end no operator may run on the CPU."""
    provider_options: Annotated[dict[str, dict[str, str]], Meta(max_length=MAX_PROVIDERS)] = {}
    """Options of each, of those that `artifact.provider` lists."""
    instruction_sets: list[str] = []
    """/proc/cpuinfo flags that this variant needs to be right (not only fast)."""
    tolerance: Annotated[float, Meta(ge=0, le=1e9)] = 1e-3
    """Largest absolute difference from the golden outputs that is still right: what CPUs may differ by."""


class Runtime(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The least that can run this bundle."""

    onnxruntime: str
    """Lowest version, `1.32.0`."""
    opset: Annotated[int, Meta(ge=0, le=10_000)]
    ir_version: Annotated[int, Meta(ge=0, le=10_000)]


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of the bundle must be."""

    sha256: str
    size_bytes: Size


class Golden(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One golden request and what it must answer; both are OIP bodies with their header length first.

    File format: 8-byte little-endian header length, then the body.
    """

    request: str
    response: str
    variant: str = ""
    """The only variant that must give this answer; empty: every one."""


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where the model comes from, for people."""

    source: str = ""
    license: str = ""
    revision: str = ""
    data: str = ""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The whole of manifest.json."""

    schema: int
    name: str
    version: str
    task: str
    """`text-detection`, `voice-activity`, `text-classification`, …: for people and dashboards."""
    inputs: Annotated[list[TensorSpec], Meta(max_length=64)]
    outputs: Annotated[list[TensorSpec], Meta(max_length=64)]
    variants: Annotated[list[Variant], Meta(max_length=64)]
    """Best quality first."""
    runtime: Runtime
    files: Annotated[dict[str, File], Meta(max_length=10_000)]
    """Every file of the bundle by relative path, but the manifest itself and the signature."""
    state: Annotated[list[StateSpec], Meta(max_length=256)] = []
    classes: Classes | None = None
    golden: Annotated[list[Golden], Meta(max_length=4096)] = []
    deadline_ms: float | None = None
    """The deadline it was built for."""
    provenance: Provenance = Provenance()
    description: str = ""
    metadata: dict[str, str] = {}

    @property
    def stateful(self) -> bool:
        """Whether requests are ordered and never retried."""
        return bool(self.state)

    def variant(self, name: str) -> Variant:
        """Return the variant of that name.

        Raises:
            ManifestInvalid: there is none.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        known = ", ".join(variant.name for variant in self.variants)
        raise ManifestInvalid(f"{self.name} {self.version} has no variant {name!r}; it has {known}")

    def golden_for(self, variant: str) -> list[Golden]:
        """Return the golden requests that judge the variant, in their order."""
        return [golden for golden in self.golden if golden.variant in {"", variant}]

    @property
    def max_request_bytes(self) -> int:
        """Room that a request's tensors need: raw tensors, or the encoded medium when that may be larger."""
        return sum(max(spec.max_bytes, 1 << 16) if spec.decode else spec.max_bytes for spec in self.inputs)

    @property
    def max_response_bytes(self) -> int:
        """Room that a response's tensors need."""
        return sum(spec.max_bytes for spec in self.outputs)


def parse_manifest(raw: bytes, source: str) -> Manifest:
    """Read and check a manifest completely.

    Raises:
        UnsupportedSchema: made for another version of the format.
        ManifestInvalid: not a manifest, or one that contradicts itself.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ManifestInvalid(f"{source} has {len(raw)} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
    try:
        head: Any = msgspec.json.decode(raw)
        schema = head.get("schema") if isinstance(head, dict) else None
        if schema != SCHEMA:
            raise UnsupportedSchema(
                f"{source} has schema {schema!r}, this edgeinfer reads {SCHEMA}; rebuild the bundle or update edgeinfer"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
        problems = check_manifest(manifest)
    # ValueError: UnicodeDecodeError, whole numbers of thousands of digits; the rest: regular expressions out of bounds
    except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ManifestInvalid(f"{source} is not a manifest: {str(error)[:_MOST_SAID]}") from error
    if problems:
        raise ManifestInvalid(f"{source}: {_told(problems)}")
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json: sorted keys, two-space indent, one newline; the same for equal manifests.

    Raises:
        ManifestInvalid: it contradicts itself.
    """
    if problems := check_manifest(manifest):
        raise ManifestInvalid(f"{manifest.name}: {_told(problems)}")
    compact = msgspec.json.encode(manifest, order="sorted")
    try:
        msgspec.json.decode(compact, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ManifestInvalid(f"{manifest.name}: {error}") from error
    return msgspec.json.format(compact, indent=2) + b"\n"


def bundle_digest(manifest_bytes: bytes) -> str:
    """Return the bundle digest: the hex sha256 of manifest.json."""
    import hashlib  # noqa: PLC0415 - OpenSSL, with it; zygote and workers read manifests' types only

    return hashlib.sha256(manifest_bytes).hexdigest()


def _told(problems: list[str]) -> str:
    more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
    return "; ".join(problems[:_MOST_PROBLEMS])[:_MOST_SAID] + more


def check_manifest(manifest: Manifest) -> list[str]:
    """Return everything that contradicts itself, as sentences; empty when it is sound."""
    problems: list[str] = []
    if not _NAME.fullmatch(manifest.name):
        problems.append(f"name {manifest.name!r} is not 1 to 64 of a-z 0-9 . _ - with a letter or digit at both ends")
    if not _VERSION.fullmatch(manifest.version):
        problems.append(f"version {manifest.version!r} is not MAJOR.MINOR.PATCH")
    if not _RUNTIME.fullmatch(manifest.runtime.onnxruntime):
        problems.append(f"runtime.onnxruntime {manifest.runtime.onnxruntime!r} is not a version")
    if not manifest.inputs or not manifest.outputs or not manifest.variants:
        problems.append("inputs, outputs and variants each need at least one entry")
    for role, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        problems += _duplicates(role, [spec.name for spec in specs])
        for spec in specs:
            problems += [f"{role} {spec.name!r} {problem}" for problem in _check_spec(spec)]
    for state in manifest.state:
        if state.datatype not in ITEM_BYTES or any(dim < 1 for dim in state.shape):
            problems.append(f"state {state.input!r} needs a fixed-size datatype and a positive shape")
        if state.input in {spec.name for spec in manifest.inputs}:
            problems.append(f"state {state.input!r} is also a public input")
    problems += _check_variants(manifest)
    for path in manifest.files:
        problems += _check_path(path)
    problems += _check_golden(manifest)
    if manifest.classes is not None:
        problems += _check_classes(manifest.classes, manifest.outputs)
    if manifest.deadline_ms is not None and not 0 < manifest.deadline_ms <= MAX_DEADLINE_MS:
        problems.append(f"deadline_ms {manifest.deadline_ms} is not above 0 and at most {MAX_DEADLINE_MS:g}")
    return problems


def _check_spec(spec: TensorSpec) -> list[str]:
    problems = []
    if spec.datatype != "BYTES" and spec.datatype not in ITEM_BYTES:
        problems.append(f"has unknown datatype {spec.datatype!r}")
    if any(dim < 0 for dim in spec.bound) or len(spec.bound) != len(spec.shape):
        problems.append(f"has shape {spec.shape}, which max_shape {spec.max_shape} does not bound")
    elif any(dim not in {-1, bound} for dim, bound in zip(spec.shape, spec.bound, strict=True)):
        problems.append(f"has shape {spec.shape} and max_shape {spec.max_shape}: fixed dimensions must agree")
    elif spec.max_bytes > _MAX_TENSOR_BYTES:
        problems.append(f"takes {spec.max_bytes} bytes at its largest, more than {_MAX_TENSOR_BYTES}")
    if spec.decode is not None:
        if spec.decode.kind not in {"image", "audio", "words"}:
            problems.append(f"has unknown decode kind {spec.decode.kind!r}")
        if spec.decode.kind == "audio" and spec.decode.sample_rate_hz <= 0:
            problems.append("decodes audio and needs decode.sample_rate_hz")
        if spec.decode.kind == "words":
            try:
                re.compile(spec.decode.pattern)
            except (re.error, OverflowError, RecursionError) as error:
                problems.append(f"has a decode.pattern that is no regular expression: {error}")
    return problems


def _check_variants(manifest: Manifest) -> list[str]:
    problems = _duplicates("variant", [variant.name for variant in manifest.variants])
    for variant in manifest.variants:
        if variant.file not in manifest.files:
            problems.append(f"variant {variant.name!r} names {variant.file!r}, which is not in files")
        if not 0 < variant.steady_bytes <= variant.load_peak_bytes:
            problems.append(f"variant {variant.name!r} needs 0 < steady_bytes <= load_peak_bytes")
        wrong = check_providers(variant.providers, variant.provider_options)
        problems += [f"variant {variant.name!r} {problem}" for problem in wrong]
        for threads, latency in variant.latency_us.items():
            if not _THREADS.fullmatch(threads) or latency < 1:
                problems.append(f"variant {variant.name!r} has latency_us {threads!r}: {latency}")
    return problems


def _check_golden(manifest: Manifest) -> list[str]:
    problems = []
    names = {variant.name for variant in manifest.variants}
    for golden in manifest.golden:
        problems += [f"golden file {file!r} is not in files" for file in (golden.request, golden.response)
                     if file not in manifest.files]  # fmt: skip
        if golden.variant and golden.variant not in names:
            problems.append(f"golden {golden.response!r} is for variant {golden.variant!r}, which there is not")
    if manifest.golden:
        problems += [f"variant {name!r} has no golden request, others have" for name in sorted(names)
                     if not manifest.golden_for(name)]  # fmt: skip
    return problems


def _check_classes(classes: Classes, outputs: list[TensorSpec]) -> list[str]:
    problems = []
    if classes.output not in {spec.name for spec in outputs}:
        problems.append(f"classes.output {classes.output!r} is not an output")
    if classes.threshold is not None and len(classes.labels) != 2:
        problems.append(f"classes.threshold needs exactly 2 labels, not {len(classes.labels)}")
    return problems


def _check_path(path: str) -> list[str]:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path or str(pure) != path or path == ".":
        return [f"file path {path!r} is not a plain path inside the bundle"]
    if not path.isprintable() or any(len(os.fsencode(part)) > _MAX_PART_BYTES for part in pure.parts):
        return [f"file path {path[:_MAX_PART_BYTES]!r} has unprintable characters, or a part that is too long"]
    if path in {MANIFEST_FILE, SIGNATURE_FILE}:
        return [f"file {path!r} cannot vouch for itself"]
    return []


def _duplicates(role: str, names: list[str]) -> list[str]:
    return [f"{role} {name!r} appears {count} times" for name, count in sorted(Counter(names).items()) if count > 1]


def read_manifest(bundle: Path) -> tuple[Manifest, str]:
    """Return the manifest of the bundle directory, and the bundle digest.

    Raises:
        ManifestInvalid: the file is missing or wrong.
        UnsupportedSchema: made for another version of the format.
    """
    path = bundle / MANIFEST_FILE
    try:
        raw = read_plain(path, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise ManifestInvalid(f"{bundle} is not a bundle: {path.name}: {error.strerror}") from error
    return parse_manifest(raw, str(path)), bundle_digest(raw)
