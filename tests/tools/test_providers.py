"""Variants for execution providers, built and proved on them; compiled code from elsewhere is refused at every door."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest
from onnx import helper

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.epcontext import UnsignedContext
from edgeinfer.errors import ConfigError, SessionError
from edgeinfer_tools import inspection
from edgeinfer_tools.build import Options, build
from edgeinfer_tools.graph import load_source
from edgeinfer_tools.recipe import load_recipe
from tests.artifact.making import make_bundle
from tests.artifact.test_epcontext import PLACES, context, model
from tests.tools.conftest import RecipeMaker, conv_net

OPENVINO = "OpenVINOExecutionProvider"
FAST = f'[[variants]]\nname = "openvino"\nmethod = "keep"\nproviders = ["{OPENVINO}"]\n'

needs_openvino = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_openvino") is None,
    reason="the extra is not installed: pip install -e '.[openvino]', or make test-openvino (53 MB, 158 MB unpacked)",
)


@needs_openvino
@pytest.mark.system
@pytest.mark.slow
def test_a_variant_is_built_on_its_provider(conv_recipe: RecipeMaker, board: Board, tmp_path: Path) -> None:
    recipe = load_recipe(conv_recipe(variant=FAST + f'provider_options = {{{OPENVINO} = {{precision = "f32"}}}}\n'))
    result = build(recipe, board, tmp_path / "bundle", Options(seconds=0.05), lambda _: None)
    made = result.manifest.variant("openvino")
    assert made.providers == [OPENVINO]
    assert made.provider_options == {OPENVINO: {"precision": "f32"}}
    assert result.manifest.variant("fp32").providers == ["CPUExecutionProvider"]
    assert result.manifest.golden_for("openvino")
    profile = (tmp_path / "bundle.profile.json").read_text()
    assert OPENVINO in profile
    assert f"; {OPENVINO}" in inspection.as_text(result.bundle)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxruntime_qnn") is not None, reason="QNN is installed here")
def test_a_provider_that_is_not_here_stops_the_build_with_the_remedy(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path
) -> None:
    recipe = load_recipe(conv_recipe(variant=FAST.replace("OpenVINO", "QNN")))
    with pytest.raises(SessionError, match=r"provider_unavailable: .*pip install onnxruntime-qnn"):
        build(recipe, board, tmp_path / "bundle", Options(seconds=0.05), lambda _: None)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('providers = ["Xnnpack"]', "does not know"),
        (f'providers = ["CPUExecutionProvider", "{OPENVINO}"]', "must come last"),
        (f'providers = ["{OPENVINO}"]\nprovider_options = {{{OPENVINO} = {{cache_dir = "/tmp"}}}}', "takes device"),
        (f'providers = ["{OPENVINO}"]\nprovider_options = {{{OPENVINO} = {{precision = 32}}}}', "table of texts"),
    ],
)
def test_a_recipe_cannot_say_what_a_manifest_can_not(conv_recipe: RecipeMaker, lines: str, problem: str) -> None:
    folder = conv_recipe(variant=f'[[variants]]\nname = "fast"\nmethod = "keep"\n{lines}\n')
    with pytest.raises(ConfigError, match=problem):
        load_recipe(folder)


@pytest.mark.parametrize("where", PLACES[:4])
def test_a_source_with_compiled_code_is_refused(where: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model(where, context()))
    with pytest.raises(UnsignedContext, match=r"EPContext.*plain ONNX model"):
        load_source(path)


def test_inspect_refuses_compiled_code(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", model=model("subgraph", context(embedded=False)))
    for show in (inspection.as_text, inspection.as_json):
        with pytest.raises(UnsignedContext, match="signed bundle"):
            show(tmp_path / "b")


def test_a_node_with_a_name_like_it_is_fine(tmp_path: Path) -> None:
    net = conv_net()
    net.graph.node[0].name = "EPContext"
    net.graph.node[0].doc_string = str(helper.make_node("EPContext", [], []))
    onnx.save(net, tmp_path / "m.onnx")
    load_source(tmp_path / "m.onnx")
