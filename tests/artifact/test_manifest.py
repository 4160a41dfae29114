"""A manifest that contradicts itself is refused with a sentence that says where."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from edgeinfer.artifact.manifest import (
    MAX_DEADLINE_MS,
    Classes,
    Decode,
    Golden,
    Manifest,
    StateSpec,
    TensorSpec,
    check_manifest,
    encode_manifest,
    parse_manifest,
)
from edgeinfer.errors import EdgeInferError, ManifestInvalid
from tests.artifact.making import make_bundle

REQUEST, RESPONSE = "golden/000.request", "golden/000.response"


@pytest.fixture
def two_variants(tmp_path: Path) -> Manifest:
    made = make_bundle(tmp_path)
    return structs.replace(made, variants=[*made.variants, structs.replace(made.variants[0], name="int8")])


def test_golden_requests_are_those_of_the_variant_and_those_of_all_in_order(two_variants: Manifest) -> None:
    names = ["int8", "", "fp32", "int8"]
    manifest = structs.replace(two_variants, golden=[Golden(REQUEST, RESPONSE, name) for name in names])
    assert check_manifest(manifest) == []
    assert [golden.variant for golden in manifest.golden_for("int8")] == ["int8", "", "int8"]
    assert [golden.variant for golden in manifest.golden_for("fp32")] == ["", "fp32"]


def test_a_golden_answer_of_a_variant_that_is_not_there_is_refused(two_variants: Manifest) -> None:
    golden = [Golden(REQUEST, RESPONSE), Golden(REQUEST, RESPONSE, "int4")]
    with pytest.raises(
        ManifestInvalid, match=r"golden 'golden/000\.response' is for variant 'int4', which there is not"
    ):
        encode_manifest(structs.replace(two_variants, golden=golden))


def test_a_variant_that_nothing_judges_is_refused_where_others_are_judged(two_variants: Manifest) -> None:
    unjudged = structs.replace(two_variants, golden=[Golden(REQUEST, RESPONSE, "fp32")])
    assert check_manifest(unjudged) == ["variant 'int8' has no golden request, others have"]
    assert check_manifest(structs.replace(two_variants, golden=[])) == []


def test_an_answer_for_every_variant_is_written_without_the_key_and_read_so(two_variants: Manifest) -> None:
    raw = encode_manifest(two_variants)
    assert set(msgspec.json.decode(raw)["golden"][0]) == {"request", "response"}
    assert parse_manifest(raw, "manifest.json").golden == [Golden(REQUEST, RESPONSE, "")]


HOSTILE = [
    b'""', b"-1", b"0", b"1.5", b"1e308", b"-1e308", b"1e400", b"9" * 30, b"1" + b"0" * 400, b"9" * 5000, b"null", b"true",
    b"[]", b"{}", b"[null]", b"[[]]", b'{"a":1}', b'"' + b"9" * 5000 + b'"', b'{"' + b"9" * 5000 + b'":1}', b'{"0":5}',
    b'{"1":1' + b"0" * 30 + b"}", '{"\u0661":5}'.encode(), b'"\\u0000"', b'"\\ud800"', b'"("', b'"a{99999999999999}"',
    b'"((((((((((a*)*)*)*)*)*)*)*)*)*"', b'"' + b"(" * 3000 + b")" * 3000 + b'"', b'"' + b"(" * 500 + b")" * 500 + b'"',
    b"[9223372036854775807]", b"[99999999999999999999]", b"[-1]", b"[0]", b"[1,2,3,4,5,6,7,8,9,10]", b"[" * 3000,
    b'"1.2.' + b"3" * 5000 + b'"', b'"' + "\u0661.\u0661.\u0661".encode() + b'"', b'"../x"', b'"x/' + b"y" * 300 + b'"',
]  # fmt: skip


def _places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _everything() -> Any:
    """Return a manifest that uses every field, as JSON has it."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_bundle(Path(folder))
    words = TensorSpec("w", "BYTES", [-1], [8], decode=Decode("words", pattern="[a-z]+", max_items=9, max_pixels=9))
    audio = TensorSpec("a", "FP32", [1, 8], decode=Decode("audio", sample_rate_hz=16000))
    variant = structs.replace(made.variants[0], latency_us={"1": 9}, instruction_sets=["avx2"], tolerance=0.5)
    full = structs.replace(
        made, inputs=[*made.inputs, words, audio], variants=[variant], state=[StateSpec("s", "t", "FP32", [2])],
        classes=Classes("y", ["a", "b"], 0.5), deadline_ms=9.0, metadata={"a": "b"},
    )  # fmt: skip
    return msgspec.json.decode(encode_manifest(full))


EVERYTHING = _everything()
PLACES = list(_places(EVERYTHING))


def _put(place: tuple[str | int, ...], value: bytes) -> bytes:
    changed = inner = copy.deepcopy(EVERYTHING)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = msgspec.Raw(value)
    return msgspec.json.encode(changed)


def _read(raw: bytes) -> None:
    """Read it; what is taken must be safe to compute with."""
    try:
        manifest = parse_manifest(raw, "m")
    except EdgeInferError:
        return
    assert 0 <= manifest.max_request_bytes < 1 << 63
    assert 0 <= manifest.max_response_bytes < 1 << 63
    assert manifest.deadline_ms is None or 0 < manifest.deadline_ms <= MAX_DEADLINE_MS
    for variant in manifest.variants:
        assert max(variant.load_peak_bytes, *variant.latency_us.values(), variant.quality, variant.tolerance) < 1e15
        assert sum(int(threads) for threads in variant.latency_us) < 1 << 31
    for path in manifest.files:
        path.encode()
    parse_manifest(encode_manifest(manifest), "again")


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_one_damaged_value_is_refused_or_harmless(place: tuple[str | int, ...]) -> None:
    for value in HOSTILE:
        _read(_put(place, value))


@given(place=st.sampled_from(PLACES), value=st.sampled_from(HOSTILE), at=st.integers(0), junk=st.binary(max_size=6))
def test_any_damaged_bytes_are_refused_or_harmless(
    place: tuple[str | int, ...], value: bytes, at: int, junk: bytes
) -> None:
    raw = _put(place, value)
    at %= len(raw)
    _read(raw[:at] + junk + raw[at + len(junk) :])
    _read(raw[:at])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("deadline_ms", "1e308"), ("deadline_ms", "600001"), ("variants.0.load_peak_bytes", "1" + "0" * 30),
        ("variants.0.tolerance", "1e308"), ("variants.0.quality", "1e308"), ("variants.0.latency_us.1", "1" + "0" * 12),
        ("inputs.0.shape.0", "1" + "0" * 13), ("inputs.0.shape", "[1,1,1,1,1,1,1,1,1]"),
        ("inputs.0.shape", "[1000000,1000000,1000000]"), ("inputs.1.decode.pattern", '"a{99999999999999}"'),
        ("inputs.1.decode.max_pixels", "1" + "0" * 12), ("files.model/fp32.onnx.size_bytes", "1" + "0" * 18),
        ("runtime.opset", "1" + "0" * 12), ("classes.threshold", "1e300"), ("version", '"1.0.' + "1" * 5000 + '"'),
        ("runtime.onnxruntime", '"' + "1" * 5000 + '"'),
    ],
)  # fmt: skip
def test_every_number_has_an_upper_bound(place: str, value: str) -> None:
    (found,) = (keys for keys in PLACES if ".".join(map(str, keys)) == place)
    with pytest.raises(ManifestInvalid):
        parse_manifest(_put(found, value.encode()), "m")
