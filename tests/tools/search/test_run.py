"""Whole searches on small nets: what is built keeps the budget, what is known is used, what cannot be is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec import structs

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.profile import Profile, encode_profile, read_profile
from edgeinfer.cli import main as edgeinfer
from edgeinfer.errors import ConfigError
from edgeinfer_tools.build import Options, Result, build
from edgeinfer_tools.cli import main
from edgeinfer_tools.faults import FetchError
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.search import workbench
from edgeinfer_tools.search.budget import parse_budget
from edgeinfer_tools.search.run import SearchOptions
from tests.tools.conftest import MODELS, RecipeMaker, conv_net
from tests.tools.search.conftest import SshBoard

pytestmark = [pytest.mark.system, pytest.mark.slow]

on_small_nets = pytest.mark.usefixtures("empty_cache")


def searched(recipe: Path, board: Board, output: Path, budget: str, **changes: object) -> tuple[Result, list[str]]:
    said: list[str] = []
    options = Options(seconds=0.02, replace=True, search=SearchOptions(parse_budget(budget), **changes))  # type: ignore[arg-type]
    return build(load_recipe(recipe), board, output, options, said.append), said


@on_small_nets
def test_the_bundle_holds_the_winner_and_what_lies_below_it(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path
) -> None:
    result, _ = searched(conv_recipe(), board, tmp_path / "out" / "bundle", "size=64KiB")
    manifest, _ = verify_bundle(result.bundle)
    report = json.loads((tmp_path / "out" / "bundle.search.json").read_text())
    assert result.shortfall == ""
    assert {item.name for item in manifest.variants} == set(report["ladder"])
    assert manifest.variant(report["winner"]).quality == max(item.quality for item in manifest.variants)
    assert len(manifest.variants) <= 3
    assert report["estimated"]
    assert report["met"]
    assert "winner" in (tmp_path / "out" / "bundle.search.txt").read_text()
    assert (tmp_path / "out" / "bundle.search.svg").read_text().startswith("<svg")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "bundle", "bundle.profile.json", "bundle.search.json", "bundle.search.svg", "bundle.search.txt",
    ]  # fmt: skip
    assert result.report["search"]["winner"] == report["winner"]
    profile = read_profile(tmp_path / "out" / "bundle.profile.json")
    assert profile.origin == "estimated"
    assert profile.estimate_model.startswith("estimated: here *")


@on_small_nets
def test_a_second_search_goes_by_what_the_first_found_out(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = conv_recipe()
    first, _ = searched(recipe, board, tmp_path / "one", "drop=0.2")
    monkeypatch.setattr(workbench, "measure", None)  # whoever measures again fails
    monkeypatch.setattr(workbench, "evaluate", None)
    second, said = searched(recipe, board, tmp_path / "two", "drop=0.2")
    assert [item.name for item in second.manifest.variants] == [item.name for item in first.manifest.variants]
    assert any("(known from before)" in line for line in said)


@on_small_nets
def test_other_data_are_another_search(conv_recipe: RecipeMaker, board: Board, tmp_path: Path) -> None:
    recipe = conv_recipe()
    searched(recipe, board, tmp_path / "one", "drop=0.2")
    data = recipe / "data.py"
    data.write_text(data.read_text().replace("_streams(2, 6)", "_streams(3, 6)"))
    _, said = searched(recipe, board, tmp_path / "two", "drop=0.2")
    assert not any("(known from before)" in line for line in said)


@on_small_nets
def test_a_budget_that_cannot_be_met_builds_the_best_and_exits_3(
    conv_recipe: RecipeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["build", str(conv_recipe()), "--board", "generic-x86", "-o", str(tmp_path / "b"), "--seconds", "0.02"]
    assert main([*command, "--budget", "size=2KiB", "--json"]) == 3
    out, err = capsys.readouterr()
    shortfall = json.loads(out)["shortfall"]
    assert shortfall.startswith("the budget cannot be met: the best candidate, ")
    assert "size is" in shortfall
    assert "the bound is 2 KiB" in shortfall
    assert f"edgeinfer-tools: {shortfall}\n" in err
    assert verify_bundle(tmp_path / "b")
    assert not json.loads((tmp_path / "b.search.json").read_text())["met"]


@on_small_nets
def test_the_recipe_may_name_the_budget(conv_recipe: RecipeMaker, tmp_path: Path) -> None:
    recipe = conv_recipe()
    (recipe / "recipe.toml").write_text((recipe / "recipe.toml").read_text() + '\n[budget]\nsize = "2 KiB"\n')
    command = ["build", str(recipe), "--board", "generic-x86", "-o", str(tmp_path / "b"), "--seconds", "0.02"]
    assert main(command) == 3


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--budget", "p99=5ms@64"], "64 threads, generic-x86 has 2 cores"),
        (["--on", "ssh://nowhere"], "is for a search: give --budget too"),
        (["--budget", "drop=0.1", "--keep-variants", "0"], "0 is not at least 1"),
        (["--budget", "drop=0.1", "--on", "nowhere"], "write ssh://"),
        (["--budget", "drop=0.1", "--costs-from", "FILE"], "a search measures"),
    ],
)
@on_small_nets
def test_what_makes_no_sense_is_told_before_anything_is_built(
    conv_recipe: RecipeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    recipe = conv_recipe()
    if "FILE" in words:
        profile = Profile(1, "conv-net", "0.1.0", "", "b", "m", [], "1.32.0", "estimated", [])
        (tmp_path / "FILE").write_bytes(encode_profile(profile))
        words = [str(tmp_path / word) if word == "FILE" else word for word in words]
    command = ["build", str(recipe), "--board", "generic-x86", "-o", str(tmp_path / "b"), *words]
    assert main(command) == ConfigError.exit_code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@on_small_nets
def test_a_smaller_network_of_the_same_contract_becomes_a_variant(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path
) -> None:
    recipe = conv_recipe(variant='[[variants]]\nname = "small"\nmethod = "keep"\nsource = { file = "small.onnx" }\n')
    small = conv_net()
    for item in small.graph.initializer:
        if item.name == "w1":  # half of the channels do nothing: a little worse
            values = onnx.numpy_helper.to_array(item).copy()
            values[:1] *= np.float32(0.99)
            item.CopyFrom(onnx.numpy_helper.from_array(values, "w1"))
    onnx.save(small, recipe / "small.onnx")
    result = build(load_recipe(recipe), board, tmp_path / "plain", Options(seconds=0.02), lambda _: None)
    qualities = {item.name: item.quality for item in result.manifest.variants}
    assert 0.8 < qualities["small"] < qualities["fp32"] == 1.0
    _, said = searched(recipe, board, tmp_path / "found", "drop=0.2")
    assert any(line.strip().startswith("small-static-7bit:") for line in said)


@on_small_nets
def test_the_boards_own_profile_takes_the_place_of_estimates(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = conv_recipe()
    plain = build(load_recipe(recipe), board, tmp_path / "plain", Options(seconds=0.02), lambda _: None)
    assert edgeinfer(["measure", str(plain.bundle), "--json", "--seconds", "0.02", "--board", board.name]) == 0
    (tmp_path / "board.json").write_text(capsys.readouterr().out)
    profile = read_profile(tmp_path / "board.json")
    assert profile.origin == "measured"
    slow = [
        structs.replace(cost, latency=structs.replace(cost.latency, p50_us=77_000, p99_us=99_000))
        for cost in profile.costs
    ]
    profile = structs.replace(profile, costs=slow)
    (tmp_path / "board.json").write_bytes(encode_profile(profile))
    searched(recipe, board, tmp_path / "found", "drop=0.2", profile_from=profile)
    report = json.loads((tmp_path / "found.search.json").read_text())
    rows = {item["name"]: item for item in report["candidates"]}
    assert (rows["fp32"]["p50_us"], rows["int8"]["p50_us"]) == (77_000, 77_000)
    assert rows["fp16"]["p50_us"] > 5_000  # corrected by what the board says about the float model
    assert "corrected by the board's own profile" in report["estimate_model"]


@on_small_nets
def test_candidates_are_measured_on_a_board_over_ssh(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path, ssh_board: SshBoard
) -> None:
    result, said = searched(
        conv_recipe(), board, tmp_path / "found", "drop=0.2", on=ssh_board.address(), ssh_config=ssh_board.config
    )
    report = json.loads((tmp_path / "found.search.json").read_text())
    assert not report["estimated"]
    assert report["where"].startswith("ssh://")
    assert read_profile(tmp_path / "found.profile.json").origin == "measured"
    assert any(line.startswith("board     ssh://") for line in said)
    assert result.manifest.variants
    assert ssh_board.left_there() == []


def test_a_real_model_keeps_its_budget(board: Board, tmp_path: Path) -> None:
    """silero-vad: stateful, judged by labels; nothing it may lose."""
    recipe = load_recipe(MODELS / "silero-vad")
    options = Options(
        seconds=0.1, search=SearchOptions(parse_budget("drop=0.005,size=2MiB"), time_limit_s=120, fresh=True)
    )
    try:
        result = build(recipe, board, tmp_path / "vad", options, lambda _: None)
    except FetchError as error:
        pytest.skip(f"needs the model and the recordings: {error}")
    assert result.shortfall == ""
    assert all(item.quality >= 0.995 for item in result.manifest.variants)
