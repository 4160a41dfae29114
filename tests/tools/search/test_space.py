"""The order in which forms are tried: the float model, what the author names, likely winners; each once, named plainly."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from edgeinfer.artifact.board import Board
from edgeinfer_tools.origin import Source
from edgeinfer_tools.recipe import VariantRecipe
from edgeinfer_tools.scheme import Scheme, recipe_scheme
from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.search.space import Candidate, coarser, space
from edgeinfer_tools.targets import target_of

MIB = 1 << 20


def test_the_float_model_comes_first_then_what_the_recipe_names(board: Board) -> None:
    author = VariantRecipe("lstm", "dynamic", operators=["LSTM"])
    found = space([VariantRecipe("fp32", "keep"), author], target_of(board), Budget(drop=0.1), 16 * MIB)
    assert [item.name for item in found[:3]] == ["fp32", "lstm", "static-7bit"]
    assert found[1].scheme.operators == ("LSTM",)


def test_the_float_model_keeps_the_name_that_the_recipe_gives_it(board: Board) -> None:
    recipe = [VariantRecipe("int8", "static"), VariantRecipe("float", "keep", tolerance=0.5)]
    found = space(recipe, target_of(board), Budget(drop=0.1), 16 * MIB)
    assert [(item.name, item.tolerance) for item in found[:2]] == [("float", 0.5), ("int8", 1e-6)]


def test_every_form_is_there_once_under_a_plain_name_of_its_own(
    board: Board, arm_board: Board, vnni_board: Board
) -> None:
    for each in (board, arm_board, vnni_board):
        found = space([VariantRecipe("int8", "static")], target_of(each), Budget(drop=0.1), 16 * MIB)
        assert len({item.key for item in found}) == len({item.name for item in found}) == len(found) > 12
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", item.name) for item in found)


def test_a_candidate_becomes_a_variant_of_exactly_its_scheme(board: Board) -> None:
    for item in space([], target_of(board), Budget(drop=0.1), 16 * MIB):
        made = item.variant()
        assert recipe_scheme(made.method, made.operators, made.scheme, target_of(board)) == item.scheme


def test_a_tight_size_tries_four_bits_first(board: Board) -> None:
    found = space([], target_of(board), Budget(size_bytes=3 * MIB), 16 * MIB)
    assert found[1].scheme.weight_bits == 4


def test_without_calibration_data_nothing_needs_them(board: Board) -> None:
    found = space([], target_of(board), Budget(drop=0.1), 16 * MIB, calibrated=False)
    assert not any(item.scheme.calibrated for item in found)
    assert {"dynamic", "keep", "weights"} <= {item.scheme.method for item in found}


def test_a_convolutional_net_has_nothing_for_schemes_of_matrices(board: Board) -> None:
    found = space([], target_of(board), Budget(drop=0.1), 16 * MIB, operators={"Conv", "Relu"})
    assert {item.scheme.method for item in found} == {"keep", "static", "fp16"}


def test_another_network_is_tried_as_it_is_and_quantized(board: Board) -> None:
    small = Source(file="small.onnx")
    found = space([VariantRecipe("small", "keep", source=small)], target_of(board), Budget(drop=0.1), 16 * MIB)
    assert [item.name for item in found if item.source == small] == ["small", "small-static-7bit", "small-dynamic-7bit"]


STATIC = Scheme(method="static", per_channel=True)
WEIGHTS = Scheme(method="weights")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (replace(STATIC, per_channel=False), STATIC, True),
        (STATIC, replace(STATIC, per_channel=False), False),
        (replace(STATIC, per_channel=False, calibrator="entropy"), STATIC, False),
        (replace(WEIGHTS, weight_bits=4), WEIGHTS, True),
        (WEIGHTS, replace(WEIGHTS, weight_bits=4), False),
        (replace(WEIGHTS, weight_bits=4, algorithm="gptq"), WEIGHTS, False),
        (replace(WEIGHTS, weight_bits=4, block_size=128), replace(WEIGHTS, weight_bits=4), True),
        (replace(WEIGHTS, int8_compute=True), WEIGHTS, False),
        (Scheme(method="dynamic"), STATIC, False),
        (replace(STATIC, per_channel=False, exclude=("a",)), STATIC, False),
        (STATIC, STATIC, False),
    ],
)
def test_only_what_can_do_nothing_but_lose_is_coarser(one: Scheme, other: Scheme, expected: bool) -> None:
    assert coarser(one, other) is expected


def test_a_scheme_with_nodes_in_float_is_named_after_their_number() -> None:
    kept = Candidate("static", STATIC).with_scheme(STATIC.without("a", "b"))
    assert kept.name == "static-kept2"
    assert kept.with_scheme(STATIC.without("a")).name == "static-kept1"
