"""Two bundles are told apart by what their users rely on."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from edgeinfer.artifact.archive import pack_bundle
from edgeinfer.artifact.manifest import Manifest, TensorSpec, encode_manifest
from edgeinfer_tools.cli import main
from edgeinfer_tools.difference import as_text, difference
from tests.artifact.making import make_bundle


def bundle(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    manifest: Manifest = make_bundle(folder)
    if changes:
        (folder / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, **changes)))
    return folder


def test_the_same_bundle_does_not_differ(tmp_path: Path) -> None:
    assert difference(bundle(tmp_path / "a"), bundle(tmp_path / "b")) == []
    assert as_text([]) == "the same bundle"


def test_a_changed_contract_breaks_and_comes_first(tmp_path: Path) -> None:
    wider = [TensorSpec("x", "FP32", [2]), TensorSpec("z", "INT8", [1], description="new")]
    after = bundle(tmp_path / "b", version="2.0.0", inputs=wider)
    changes = difference(bundle(tmp_path / "a"), after)
    assert [(change.where, change.breaking) for change in changes] == [
        ("inputs.x.shape", True),
        ("inputs.z", True),
        ("version", False),
    ]
    text = as_text(changes)
    assert "! inputs.x.shape: [1] -> [2]" in text
    assert "! inputs.z: added name z, datatype INT8" in text
    assert "what calls the first one may not work with the second" in text


def test_words_about_an_input_break_nothing(tmp_path: Path) -> None:
    after = bundle(tmp_path / "b", inputs=[TensorSpec("x", "FP32", [1], description="now said")])
    (change,) = difference(bundle(tmp_path / "a"), after)
    assert (change.where, change.breaking) == ("inputs.x.description", False)


def test_costs_and_quality_of_variants_are_told_with_their_ratio(tmp_path: Path) -> None:
    before = bundle(tmp_path / "a")
    (tmp_path / "b").mkdir()
    manifest = make_bundle(tmp_path / "b")
    variant = msgspec.structs.replace(manifest.variants[0], quality=0.5, load_peak_bytes=4)
    smaller = msgspec.structs.replace(variant, name="int8", quality=0.25)
    manifest = msgspec.structs.replace(manifest, variants=[variant, smaller])
    (tmp_path / "b" / "manifest.json").write_bytes(encode_manifest(manifest))
    text = as_text(difference(before, tmp_path / "b"))
    assert "variants.fp32.quality: 1.0 -> 0.5 (-50.0%)" in text
    assert "variants.fp32.load_peak_bytes: 2 -> 4 (+100.0%)" in text
    assert "variants.int8: added file model/fp32.onnx" in text


def test_files_are_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    make_bundle(tmp_path / "b", files={"report.json": b"{}"})
    (change,) = difference(bundle(tmp_path / "a"), tmp_path / "b")
    assert change.where == "files.report.json"
    assert change.before is None


def test_the_command_ends_as_diff_does_and_takes_archives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = bundle(tmp_path / "a"), bundle(tmp_path / "b", version="2.0.0")
    pack_bundle(two, tmp_path / "b.tar")
    assert main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "the same bundle\n"
    assert main(["diff", str(one), str(tmp_path / "b.tar"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"where": "version", "before": "1.0.0", "after": "2.0.0", "breaking": False}
    ]
    assert main(["diff", str(one), str(tmp_path / "none")]) == 65
