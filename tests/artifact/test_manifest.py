"""A manifest that contradicts itself is refused with a sentence that says where."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from edgeinfer.artifact.manifest import Golden, Manifest, check_manifest, encode_manifest, parse_manifest
from edgeinfer.errors import ManifestInvalid
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
