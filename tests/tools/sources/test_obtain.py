"""A source is found, chosen or refused by name, before anything is exported."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from edgeinfer.errors import ConfigError
from edgeinfer_tools.faults import FetchError, ModelRefused
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.sources.obtain import choose_graph, detect_task, obtain
from tests.tools.conftest import RecipeMaker, conv_net, matmul_net


def with_source(recipe: Path, lines: str) -> Path:
    text = (recipe / "recipe.toml").read_text()
    (recipe / "recipe.toml").write_text(text.replace('file = "model.onnx"', lines))
    return recipe


@pytest.fixture
def several(tmp_path: Path) -> Path:
    folder = tmp_path / "graphs"
    folder.mkdir()
    for name in ("encoder", "decoder", "decoder_merged"):
        onnx.save(matmul_net(), folder / f"{name}.onnx")
    return folder


def test_a16_several_graphs_need_a_choice_and_are_named(several: Path) -> None:
    with pytest.raises(ModelRefused, match=r"holds 3 graphs \(decoder\.onnx, decoder_merged\.onnx, encoder\.onnx\)"):
        choose_graph(several, "")
    with pytest.raises(ModelRefused, match=r"has no graph 'vision'; there are decoder\.onnx"):
        choose_graph(several, "vision")
    assert choose_graph(several, "decoder") == several / "decoder.onnx"
    assert choose_graph(several, "encoder.onnx") == several / "encoder.onnx"


def test_a16_the_only_graph_is_taken_with_its_weights_beside(conv_recipe: RecipeMaker) -> None:
    recipe = conv_recipe()
    (recipe / "export").mkdir()
    (recipe / "model.onnx").unlink()
    onnx.save(
        conv_net(), recipe / "export" / "net.onnx", save_as_external_data=True, location="weights", size_threshold=0
    )
    found = obtain(load_recipe(with_source(recipe, 'file = "export"')))
    assert found is not None
    assert found.path == recipe / "export" / "net.onnx"


def test_tflite_is_refused_with_what_to_do(conv_recipe: RecipeMaker) -> None:
    recipe = load_recipe(with_source(conv_recipe(), 'file = "model.tflite"'))
    with pytest.raises(ModelRefused, match=r"TFLite is not read.*tf2onnx, needs TensorFlow.*name the ONNX file"):
        obtain(recipe)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", "feature-extraction"),
        ("DistilBertForSequenceClassification", "text-classification"),
        ("ViTForImageClassification", "image-classification"),
    ],
)
def test_the_task_is_what_the_configuration_says(tmp_path: Path, architecture: str, task: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert detect_task(tmp_path / "config.json", "") == task
    assert detect_task(tmp_path / "config.json", "token-classification") == "token-classification"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_text_generation_comes_later(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ModelRefused, match=f"{architecture} generates text: that comes with language models"):
        detect_task(tmp_path / "config.json", "feature-extraction")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "has no config.json"), ("{", "config.json: "), ('{"architectures": ["Foo"]}', "Foo, which names no task")],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelRefused, match=words):
        detect_task(tmp_path / "config.json", "")


def test_a_folder_that_is_not_there_is_named(conv_recipe: RecipeMaker) -> None:
    recipe = load_recipe(with_source(conv_recipe(), 'kind = "huggingface"\nfile = "absent"'))
    with pytest.raises(FetchError, match=r"absent: no such folder"):
        obtain(recipe)


@pytest.mark.parametrize(
    ("lines", "path"),
    [
        ('kind = "keras"\nfile = "x"', "source.kind"),
        ('kind = "huggingface"\nfile = "x"\nhub = "a/b"', "source"),
        ('kind = "huggingface"\nhub = "a/b"\nrevision = "main"', "source.revision"),
        ('kind = "huggingface"\nfile = "x"\ntask = "text-generation"', "source.task"),
        ('kind = "pytorch"\nmodule = "net"', "source.module"),
        ('kind = "pytorch"\nmodule = "net.py:make"\npackages = [{ pypi = "x", sha256 = "1" }]', "source.packages[0].pypi"),
        ('file = "model.onnx"\ntask = "feature-extraction"', "source.task"),
        ('file = "model.onnx"\n[source.validation]\ntolerance = 0', "source.validation.tolerance"),
        ('pypi = "a==1"\nfile = "folder"', "source.sha256"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_right_is_refused_at_its_key(conv_recipe: RecipeMaker, lines: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(with_source(conv_recipe(), lines))
    assert path in {problem.path for problem in caught.value.problems}
