"""The shipped recipes that export pass their gates; what tells good schemes from bad ones is seen on real data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.artifact.board import Board, load_board, shipped_boards
from edgeinfer_tools.evaluate import label_of
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.samples import decode_inputs
from edgeinfer_tools.scheme import Scheme
from edgeinfer_tools.sources.obtain import obtain
from tests.tools.conftest import MODELS
from tests.tools.judging import Bench

pytestmark = [pytest.mark.export, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """EfficientNet-Lite0 for a board whose 8-bit sums are exact."""
    board = load_board(shipped_boards() / "generic-x86.toml")
    exact = replace(board, cpu=replace(board.cpu, instruction_sets=["avx2", "avx512_vnni"]))
    return Bench.of(MODELS / "efficientnet-lite0", exact, tmp_path_factory.mktemp("photographs"))


def changed_photographs(bench: Bench, scheme: Scheme) -> list[str]:
    """Return the whole photographs of the evaluation that the scheme gives another label than the float model."""
    assert bench.recipe.classes is not None
    plain, quantized, changed = bench.runner(bench.model), bench.runner(bench.make(scheme)), []
    for stream in bench.streams("evaluation"):
        if stream.name.endswith(" whole"):
            (request,) = stream.requests
            tensors = decode_inputs(request, bench.recipe.inputs)
            labels = [label_of(runner.run(tensors), bench.recipe.classes) for runner in (plain, quantized)]
            changed += [stream.name] if labels[0] != labels[1] else []
    return changed


def test_one_scale_per_channel_keeps_every_photograph_and_one_per_tensor_does_not(photographs: Bench) -> None:
    scheme = photographs.scheme("int8")
    assert scheme.per_channel
    assert changed_photographs(photographs, scheme) == []
    assert changed_photographs(photographs, replace(scheme, per_channel=False)) != []


def test_the_gate_lets_per_channel_pass_and_stops_per_tensor(photographs: Bench) -> None:
    scheme = photographs.scheme("int8")
    good, bad = (photographs.judge(photographs.make(replace(scheme, per_channel=each))) for each in (True, False))
    assert [str(item) for item in good.values() if not item.passed] == []
    assert not bad["label_agreement"].passed


@pytest.mark.parametrize(("name", "every"), [("minilm-embeddings", 4), ("mnist-cnn", 1)])
def test_8_bits_pass_the_gates(name: str, every: int, board: Board, tmp_path: Path) -> None:
    bench = Bench.of(MODELS / name, board, tmp_path, every=every)
    verdicts = bench.judge(bench.make(bench.scheme("int8")))
    assert [str(item) for item in verdicts.values() if not item.passed] == []


def test_training_twice_gives_the_same_network(fresh_exports: Path) -> None:
    recipe = load_recipe(MODELS / "mnist-cnn")
    first = obtain(recipe)
    assert first is not None
    content = first.path.read_bytes()
    first.path.unlink()
    (first.path.parent / "facts.json").unlink()  # forgotten: it is trained again
    second = obtain(recipe)
    assert second is not None
    assert second.path.read_bytes() == content
    assert not second.reused


def test_sentences_become_the_tokens_that_the_models_own_tokenizer_makes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from edgeinfer_tools.fetch import fetch, fetch_folder

    recipe = load_recipe(MODELS / "minilm-embeddings")
    assert recipe.file.source is not None
    folder = fetch_folder(recipe.file.source, folder=recipe.folder)
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.no_padding()
    own.no_truncation()
    files = {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}
    tokens, vocabulary_of, sentences = (recipe.hook("data", name) for name in ("tokens", "vocabulary_of", "sentences"))
    assert tokens is not None
    assert vocabulary_of is not None
    assert sentences is not None
    vocabulary, checked = vocabulary_of(files), 0
    for key, path in files.items():
        for sentence in sentences(path) if key.endswith(".rst") else []:
            wanted = own.encode(sentence).ids
            assert tokens(sentence, vocabulary) == (wanted if len(wanted) <= 128 else [*wanted[:127], wanted[-1]])
            checked += 1
    assert checked > 100
