"""The whole pipeline on real workers: what is published is proved, and what is not good enough is not published."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec import structs

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.manifest import encode_manifest
from edgeinfer.artifact.profile import read_profile
from edgeinfer.errors import SessionError
from edgeinfer_tools.build import Options, Result, build
from edgeinfer_tools.cli import main
from edgeinfer_tools.faults import DataRefused, GateFailed, OutputExists
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.smoke import smoke
from edgeinfer_tools.verify import prove
from tests.tools.conftest import MODELS, RecipeMaker

pytestmark = [pytest.mark.system, pytest.mark.slow]

QUICK = Options(seconds=0.05)


def make(recipe: Path, board: Board, output: Path, options: Options = QUICK) -> Result:
    return build(load_recipe(recipe), board, output, options, lambda _: None)


def test_a_quantized_bundle_holds_both_variants_best_first(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path
) -> None:
    result = make(conv_recipe(), board, tmp_path / "bundle")
    manifest, digest = verify_bundle(result.bundle)
    assert digest == result.digest
    assert (manifest.variants[0].name, manifest.variants[0].quality) == ("fp32", 1.0)
    int8 = manifest.variant("int8")
    assert 0.8 <= int8.quality < 1.0
    assert int8.tolerance > manifest.variant("fp32").tolerance > 0
    assert set(int8.latency_us) >= {"1"}
    assert manifest.files[int8.file].size_bytes > 0
    assert {"report.json", "reference.json"} <= set(manifest.files)
    profile = read_profile(tmp_path / "bundle.profile.json")
    assert profile.bundle_digest == digest
    assert profile.origin == "estimated"
    assert profile.cost("int8", provider="CPUExecutionProvider", threads=1) is not None


def test_every_variant_must_give_its_own_answers_again(conv_recipe: RecipeMaker, board: Board, tmp_path: Path) -> None:
    result = make(conv_recipe(), board, tmp_path / "bundle")
    named = [(golden.request, golden.variant) for golden in result.manifest.golden]
    assert named == [(f"golden/00{n}.request", name) for name in ("fp32", "int8") for n in (0, 1)]
    # The float model's answers are as good as it gets, and still not what a sound int8 kernel computes.
    swapped = [structs.replace(golden, variant="int8") for golden in result.manifest.golden_for("fp32")]
    manifest = structs.replace(result.manifest, golden=[*result.manifest.golden_for("fp32"), *swapped])
    (result.bundle / "manifest.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(SessionError, match=r"golden_mismatch: conv-net, variant int8: golden request \d: output 'y'"):
        prove(result.bundle)


def test_the_same_inputs_and_costs_give_the_same_digest(conv_recipe: RecipeMaker, board: Board, tmp_path: Path) -> None:
    recipe = conv_recipe()
    first = make(recipe, board, tmp_path / "first")
    costs = read_profile(tmp_path / "first.profile.json")
    second = make(recipe, board, tmp_path / "second", Options(costs_from=costs))
    assert second.digest == first.digest


def test_a_gate_that_fails_says_the_numbers_and_leaves_nothing(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path
) -> None:
    recipe = conv_recipe(maximum=1e-6)
    with pytest.raises(GateFailed, match=r"variant int8: mean_abs_error\(y\) is 0\.0\d+, the gate is <= 1e-06"):
        make(recipe, board, tmp_path / "out" / "bundle")
    assert list((tmp_path / "out").iterdir()) == []


def test_a2_a_bad_configuration_exits_4_with_the_numbers_and_publishes_nothing(
    conv_recipe: RecipeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = 'scheme = { per_channel = false, calibrator = "percentile", percentile = 55 }'
    command = ["build", str(conv_recipe(variant=bad)), "--board", "generic-x86", "-o", str(tmp_path / "out" / "b")]
    assert main([*command, "--seconds", "0.05"]) == 4
    assert re.search(r"variant int8: mean_abs_error\(y\) is \d\.\d+, the gate is <= 0\.2", capsys.readouterr().err)
    assert list((tmp_path / "out").iterdir()) == []


def test_a2_the_report_has_each_outputs_error_and_how_it_was_made(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path
) -> None:
    report = make(conv_recipe(variant='scheme = { calibrator = "entropy" }'), board, tmp_path / "bundle").report
    int8 = next(item for item in report["variants"] if item["name"] == "int8")
    assert int8["errors"]["y"]["mean_abs"] > 0
    assert (int8["calibrator"], int8["calibration_samples"]) == ("entropy", 8)
    assert json.loads(int8["scheme"])["reduced_range"]
    assert int8["stayed_float"]["multiplications_share"] == 0
    assert 0 < int8["size_ratio"] < 2


def test_what_hurts_stays_float_when_the_recipe_allows_it(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path, empty_cache: Path
) -> None:
    bad = 'keep_sensitive = true\nscheme = { calibrator = "percentile", percentile = 55 }'
    report = make(conv_recipe(maximum=1.2, variant=bad), board, tmp_path / "bundle").report
    int8 = next(item for item in report["variants"] if item["name"] == "int8")
    assert len(int8["stayed_float"]["kept_on_purpose"]) == 1
    assert list((empty_cache / "sensitivity").glob("*.json"))


def test_a17_both_latencies_are_told_and_the_faster_is_preferred(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path
) -> None:
    recipe = conv_recipe()
    make(recipe, board, tmp_path / "first")
    measured = read_profile(tmp_path / "first.profile.json")
    for slow, fast in (("int8", "fp32"), ("fp32", "int8")):
        costs = [
            structs.replace(
                cost, latency=structs.replace(cost.latency, p50_us=795_000 if cost.variant == slow else 130_000)
            )
            for cost in measured.costs
        ]
        profile = structs.replace(measured, costs=costs)
        report = make(recipe, board, tmp_path / fast, Options(costs_from=profile)).report
        assert report["preferred"]["variant"] == fast
        assert f"{slow} 795.00 ms" in report["preferred"]["reason"]
        told = "int8 is slower than fp32 on this machine (p50 795000 us against 130000 us)"
        assert (told in report["notes"]) == (slow == "int8")


def test_an_optional_variant_that_fails_is_left_out_and_the_report_says_so(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path
) -> None:
    result = make(conv_recipe(maximum=1e-6, variant="optional = true"), board, tmp_path / "bundle")
    assert [variant.name for variant in result.manifest.variants] == ["fp32"]
    assert any(note.startswith("left out: variant int8: mean_abs_error") for note in result.report["notes"])
    assert not (result.bundle / "model" / "int8.onnx").exists()


@pytest.mark.parametrize(
    ("calibration", "expected"),
    [
        ("return iter(())", "yields no sample"),
        ('yield Stream("z", [{"x": np.zeros((1, 3, 16, 16), np.float32)}])', "constant 0"),
        ('yield Stream("n", [{"x": np.full((1, 3, 16, 16), np.nan, np.float32)}])', "holds NaN"),
    ],
    ids=["empty", "all-zero", "NaN"],
)
def test_degenerate_calibration_data_never_become_a_bundle(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path, calibration: str, expected: str
) -> None:
    recipe = conv_recipe(calibration=calibration)
    with pytest.raises(DataRefused, match=expected):
        make(recipe, board, tmp_path / "out" / "bundle")
    assert list((tmp_path / "out").iterdir()) == []


def test_figures_of_another_architecture_are_marked(
    conv_recipe: RecipeMaker, arm_board: Board, board: Board, tmp_path: Path
) -> None:
    recipe = conv_recipe()
    notes = make(recipe, arm_board, tmp_path / "arm").report["notes"]
    assert any("arm is aarch64" in note for note in notes)
    assert any("no asimddp" in note for note in notes)
    assert not any("aarch64" in note for note in make(recipe, board, tmp_path / "x86").report["notes"])


def test_what_exists_is_not_overwritten(conv_recipe: RecipeMaker, board: Board, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with pytest.raises(OutputExists):
        make(conv_recipe(), board, tmp_path / "bundle")


def test_a_changed_weight_is_found(conv_recipe: RecipeMaker, board: Board, tmp_path: Path) -> None:
    result = make(conv_recipe(), board, tmp_path / "bundle")
    path = result.bundle / "model" / "fp32.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"fp32\.onnx"):
        prove(result.bundle)


def test_smoke_names_a_file_that_the_runtime_cannot_load(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(SessionError, match=r"load_failed: m\.onnx"):
        smoke(path, {}, [])


def test_the_command_builds_inspects_and_proves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "support-intent"
    command = [
        "build",
        str(MODELS / "support-intent"),
        "--board",
        "generic-x86",
        "-o",
        str(bundle),
        "--seconds",
        "0.05",
    ]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    built = json.loads(out)
    assert built["variants"] == ["fp32"]
    assert "published" in err
    assert main(["inspect", str(bundle), "--json", "--verify"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["digest"] == built["digest"]
    assert shown["manifest"]["classes"]["labels"] == ["other", "support_request"]
    assert main(["inspect", str(bundle)]) == 0
    assert "labels    other, support_request from probability" in capsys.readouterr().out
    assert main(command) == 73
    assert "exists" in capsys.readouterr().err
    assert main([*command, "--replace"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["build", "models/absent", "--board", "generic-x86"], 78, "recipe.toml"),
        (["build", "models/support-intent", "--board", "amiga"], 78, "'amiga' is no file and no known board"),
        (["inspect", "."], 65, "is not a bundle"),
    ],
)
def test_faults_have_their_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    if arguments[0] == "build":
        arguments = [*arguments, "-o", str(tmp_path / "b")]
    assert main([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert words in json.loads(out)["message"]
    assert words in err


def test_a_gate_failure_exits_4(conv_recipe: RecipeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["build", str(conv_recipe(maximum=1e-6)), "--board", "generic-x86", "-o", str(tmp_path / "b")]
    assert main([*command, "--seconds", "0.05"]) == 4
    assert "nothing was published" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
