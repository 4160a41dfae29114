"""The shipped recipes that need no torch pass their gates on a part of their real data, and no datum serves two ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from edgeinfer.artifact.board import Board, load_board, shipped_boards
from edgeinfer_tools.fetch import fetch
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.samples import Array, decode_inputs
from edgeinfer_tools.session import Runner
from edgeinfer_tools.sources.obtain import obtain
from tests.tools.conftest import MODELS
from tests.tools.judging import Bench

pytestmark = pytest.mark.slow
SPLITS = ("calibration", "selection", "evaluation")
SEPARATED = ("magika", "pp-ocr-rec", "efficientnet-lite0", "minilm-embeddings", "mnist-cnn")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The text recogniser."""
    board = load_board(shipped_boards() / "generic-x86.toml")
    return Bench.of(MODELS / "pp-ocr-rec", board, tmp_path_factory.mktemp("lines"))


@pytest.mark.parametrize(("name", "every"), [("magika", 3), ("pp-ocr-rec", 5), ("pp-ocr-det", 5)])
def test_8_bits_pass_the_gates_on_a_part_of_the_data(name: str, every: int, board: Board, tmp_path: Path) -> None:
    bench = Bench.of(MODELS / name, board, tmp_path, every=every)
    made = bench.make(bench.scheme("int8"))
    verdicts = bench.judge(made)
    assert [str(item) for item in verdicts.values() if not item.passed] == []
    assert made.stat().st_size < 0.4 * bench.model.stat().st_size


@pytest.mark.parametrize("name", SEPARATED)
def test_no_request_serves_two_of_calibration_selection_and_evaluation(name: str) -> None:
    recipe = load_recipe(MODELS / name)
    files = {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}
    seen: dict[bytes, str] = {}
    for split in SPLITS:
        hook = recipe.hook("data", split)
        assert hook is not None
        count = 0
        for stream in hook(files):
            for request in stream.requests:
                tensors = decode_inputs(request, recipe.inputs)
                content = b"".join(tensors[key].tobytes() for key in sorted(tensors))
                assert seen.setdefault(content, split) == split
                count += 1
        assert count >= 15


def test_magika_is_given_what_its_own_code_makes_of_a_file() -> None:
    features = load_recipe(MODELS / "magika").hook("data", "features")
    assert features is not None
    short = features(b"  \n#!/bin/sh\necho hello\n\n")
    assert bytes(short[0, :22].astype(np.uint8)) == b"#!/bin/sh\necho hello\n\n"
    assert (short[0, 22:1024] == 256).all()
    assert bytes(short[0, -23:].astype(np.uint8)) == b"  \n#!/bin/sh\necho hello"
    assert (short[0, 1024:-23] == 256).all()  # the end keeps white space before it, as the start keeps what is behind
    long = features(b"\t" * 1024 + b"a" * 8192 + b"z" * 1000 + b" " * 3500)
    assert (long[0, :1024] == ord("a")).all()
    assert (long[0, -(4096 - 3500) :] == ord("z")).all()  # of the last 4096 bytes, what is no white space
    assert (long[0, 1024 : -(4096 - 3500)] == 256).all()


def test_the_text_recogniser_says_what_the_bare_one_and_its_dictionary_say(lines: Bench) -> None:
    source = obtain(lines.recipe)
    assert source is not None
    bare, baked = Runner(source.path), lines.runner(lines.model)
    (listed,) = (item.value for item in onnx.load(str(source.path)).metadata_props if item.key == "character")
    dictionary = ["", *listed.splitlines(), " "]
    with Image.open(lines.files["page.png"]) as page:
        line = np.asarray(page.convert("RGB").crop((2, 45, 382, 93)), np.uint8)  # 48 rows: nothing is resized
    bgr = line[..., ::-1].astype(np.float32) / 127.5 - 1
    scores: Array = bare.run({"x": bgr.transpose(2, 0, 1)[np.newaxis].copy()})["fetch_name_0"][0]
    found, said = scores.argmax(axis=1), baked.run({"image": line[np.newaxis]})
    before = np.concatenate([[0], found[:-1]])
    wanted = [dictionary[now] if now not in {0, then} else "" for now, then in zip(found, before, strict=True)]
    assert said["characters"].tolist() == wanted
    np.testing.assert_allclose(said["probabilities"], scores.max(axis=1), atol=1e-4)


def test_the_text_recogniser_reads_a_photographed_page(lines: Bench) -> None:
    page, answer = lines.recipe.hook("data", "evaluation"), lines.recipe.hook("data", "answer")
    assert page is not None
    assert answer is not None
    runner = lines.runner(lines.model)
    stream = next(iter(page(lines.files)))
    (request,) = stream.requests
    assert answer(runner.run(decode_inputs(request, lines.recipe.inputs))) == "Region-based segmentation"


@pytest.mark.parametrize("size", [(1, 1), (7, 48), (2048, 256), (2048, 1)])
def test_the_text_recogniser_takes_lines_of_any_size(size: tuple[int, int], lines: Bench) -> None:
    said = lines.runner(lines.model).run({"image": np.full((1, size[1], size[0], 3), 128, np.uint8)})
    assert 1 <= said["characters"].size == said["probabilities"].size <= 256
