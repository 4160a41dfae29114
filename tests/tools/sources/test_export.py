"""An export is right or it is no bundle; and it is made once. The exporter is a stub: real ones are in tests/export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgeinfer.artifact.board import Board
from edgeinfer_tools.build import Options, Result, build
from edgeinfer_tools.cli import main
from edgeinfer_tools.faults import ExportDiffers, ExportFailed, ExtraMissing
from edgeinfer_tools.recipe import load_recipe
from tests.tools.sources.conftest import Stub

pytestmark = [pytest.mark.system, pytest.mark.slow]

Twice = Callable[..., Path]


def make(recipe: Path, board: Board, output: Path) -> Result:
    return build(load_recipe(recipe), board, output, Options(seconds=0.05, replace=True), lambda _: None)


def left(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "out").iterdir() if path.name != "bundle.profile.json"]


def test_a_bundle_says_what_exported_it_and_how_well_it_agrees(
    exporter: Stub, twice: Twice, board: Board, tmp_path: Path
) -> None:
    exporter()
    report = make(twice(), board, tmp_path / "out" / "bundle").report
    source = report["preparation"]["source"]
    assert (source["exporter"], source["kind"]) == ("stub 1", "pytorch")
    validation = source["validation"]
    assert (validation["requests"], validation["inputs"], validation["waiver"]) == (3, "real", "")
    assert validation["outputs"][0]["max_abs"] == 0
    assert "tied weights in the source: a.weight = b.weight" in report["notes"]


def test_a_second_build_asks_no_exporter(exporter: Stub, twice: Twice, board: Board, tmp_path: Path) -> None:
    log = exporter()
    make(twice(), board, tmp_path / "out" / "bundle")
    assert log.read_text().split() == ["export", "run"]
    exporter(broken="dies")
    make(twice(), board, tmp_path / "out" / "bundle")
    assert log.read_text().split() == ["export", "run"]
    (twice() / "net.py").write_text("def make(): pass  # another network\n")
    with pytest.raises(ExportFailed, match=r"net\.py:make: the exporting process ended with exit 9"):
        make(tmp_path / "twice", board, tmp_path / "out" / "bundle")


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (0.5, r"output 'y' differs by up to 0\.5 \(mean 0\.5, cosine 0\.\d+\), the limit is 0\.00\d+"),
        ("nan", r"output 'y' is NaN in the source model itself \(request 0\)"),
    ],
    ids=["+0.5", "NaN"],
)
def test_a15_an_export_over_tolerance_is_a_failure_with_numbers(
    exporter: Stub, twice: Twice, board: Board, tmp_path: Path, delta: float | str, words: str
) -> None:
    exporter(delta=delta)
    with pytest.raises(ExportDiffers, match=words) as refused:
        make(twice(), board, tmp_path / "out" / "bundle")
    assert refused.value.exit_code == 4
    assert "3 real requests" in str(refused.value)
    assert left(tmp_path) == []


def test_a15_a_waiver_is_written_into_the_bundle(exporter: Stub, twice: Twice, board: Board, tmp_path: Path) -> None:
    exporter(delta=0.5)
    recipe = twice('[source.validation]\nwaiver = "the offset is calibrated away"')
    report = make(recipe, board, tmp_path / "out" / "bundle").report
    assert report["preparation"]["source"]["validation"]["waiver"] == "the offset is calibrated away"
    assert any(
        note.startswith("waived (the offset is calibrated away): output 'y' differs") for note in report["notes"]
    )


def test_inputs_that_the_recipe_has_none_of_are_generated_and_that_is_said(
    exporter: Stub, twice: Twice, board: Board, tmp_path: Path
) -> None:
    exporter(batch='"n"')
    recipe = twice()
    (recipe / "recipe.toml").write_text((recipe / "recipe.toml").read_text().replace('name = "x"', 'name = "z"'))
    (recipe / "data.py").write_text((recipe / "data.py").read_text().replace('"x"', '"z"'))
    (recipe / "graph.py").write_text(
        "def prepare(model):\n    model.graph.input[0].name = model.graph.node[0].input[0] = 'z'\n    return model\n"
    )
    report = make(recipe, board, tmp_path / "out" / "bundle").report
    assert report["preparation"]["source"]["validation"]["inputs"] == "generated"
    assert any("validated on 4 generated requests" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("dies", "the exporting process ended with exit 9"),
        ("raises", "RuntimeError: boom"),
        ("opset", "opset 9 is too low for this model, it needs 14; leave source.opset out"),
    ],
)
def test_an_exporter_that_fails_is_told_and_leaves_nothing(
    exporter: Stub, twice: Twice, board: Board, tmp_path: Path, broken: str, words: str
) -> None:
    exporter(broken=broken)
    with pytest.raises(ExportFailed, match=words):
        make(twice(), board, tmp_path / "out" / "bundle")
    assert left(tmp_path) == []
    assert list((tmp_path / "cache" / "exports").iterdir()) == []


def test_an_export_of_several_graphs_is_refused_with_their_names(
    exporter: Stub, twice: Twice, board: Board, tmp_path: Path
) -> None:
    exporter(files=("encoder.onnx", "decoder.onnx"))
    with pytest.raises(ExportFailed, match=r"several graphs \(encoder\.onnx, decoder\.onnx\)"):
        make(twice(), board, tmp_path / "out" / "bundle")


def test_without_torch_the_way_to_get_it_is_told(
    twice: Twice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGEINFER_EXPORT_PYTHON", "/nowhere/python")
    command = ["build", str(twice()), "--board", "generic-x86", "-o", str(tmp_path / "out" / "bundle")]
    assert main(command) == ExtraMissing.exit_code
    assert "EDGEINFER_EXPORT_PYTHON=/nowhere/python cannot be started" in capsys.readouterr().err
    assert left(tmp_path) == []
