"""An exporter without torch: the process that the toolchain starts, with a model and answers that tests choose."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

STUB = '''#!{python}
"""Stands for the exporting child: `-m edgeinfer_tools.sources.child ORDER.json`."""
import json, sys
import numpy as np, onnx
from onnx import TensorProto, helper, numpy_helper

order = json.load(open(sys.argv[3]))
with open({log!r}, "a") as log:
    log.write(order["verb"] + "\\n")

def scale(x):
    return x * np.float32(2)

if {broken!r} == "dies":
    sys.exit(9)
if order["verb"] == "export":
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["y"], name="twice")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [{batch}, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [{batch}, 4])],
        [numpy_helper.from_array(np.float32(2), "two")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", order["opset"])], ir_version=10)
    names = {files!r}
    for name in names:
        onnx.save(model, order["out"] + "/" + name)
    answer = {{"files": names, "tied": [["a.weight", "b.weight"]], "exporter": "stub 1"}}
    if {broken!r} == "opset":
        answer = {{"reason": "opset", "detail": "opset 9 is too low for this model, it needs 14"}}
    if {broken!r} == "raises":
        answer = {{"reason": "failed", "detail": "RuntimeError: boom"}}
else:
    with np.load(order["samples"]) as samples:
        found = {{}}
        for index in range(order["count"]):
            y = scale(samples[f"{{index}}.x"]) + np.float32({delta!r})
            found[f"{{index}}.y"] = y
    np.savez(open(order["answers"], "wb"), **found)
    answer = {{"count": order["count"]}}
print("a library prints\\n" + json.dumps(answer))
'''

RECIPE = """\
name = "twice"
version = "0.1.0"
task = "test"

[source]
kind = "pytorch"
module = "net.py:make"
{source}

[[inputs]]
name = "x"
datatype = "FP32"
shape = [1, 4]

[[outputs]]
name = "y"
datatype = "FP32"
shape = [1, 4]

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
    for seed in range(3):
        yield Stream(f"s{seed}", [{"x": np.random.default_rng(seed).normal(size=(1, 4)).astype(np.float32)}])
"""

Stub = Callable[..., Path]


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Put a stub in the exporter's place; returns the log of what it was asked."""
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "asked"

    def make(
        *, delta: float | str = 0.0, broken: str = "", files: tuple[str, ...] = ("model.onnx",), batch: str = "1"
    ) -> Path:
        path = tmp_path / "stub-python"
        text = STUB.format(
            python=sys.executable, log=str(log), delta=0.0, broken=broken, files=list(files), batch=batch
        )
        path.write_text(text.replace("np.float32(0.0)", f"np.float32({delta!r})"))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("EDGEINFER_EXPORT_PYTHON", str(path))
        return log

    return make


@pytest.fixture
def twice(tmp_path: Path) -> Callable[..., Path]:
    """A recipe of a PyTorch module that doubles; more lines for its `[source]` can be given."""

    def make(source: str = "") -> Path:
        folder = tmp_path / "twice"
        folder.mkdir(exist_ok=True)
        (folder / "recipe.toml").write_text(RECIPE.format(source=source))
        (folder / "data.py").write_text(DATA)
        (folder / "net.py").write_text("def make(): ...\n")
        return folder

    return make
