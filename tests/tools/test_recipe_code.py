"""Whatever a recipe's Python raises or hands over is one line with file, line and cause: never a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_tools import recipe_code
from edgeinfer_tools.cli import main
from edgeinfer_tools.faults import DataRefused, RecipeCodeFailed
from edgeinfer_tools.recipe import Recipe, load_recipe
from edgeinfer_tools.samples import Stream, decode_inputs
from tests.tools.conftest import RecipeMaker

HEAD = "import numpy as np\nfrom edgeinfer_tools.samples import Stream\n\n"


def recipe_with(make: RecipeMaker, data: str) -> Recipe:
    folder = make()
    (folder / "data.py").write_text(HEAD + data)
    return load_recipe(folder)


def evaluated(recipe: Recipe) -> list[Stream]:
    hook = recipe.hook("data", "evaluation")
    assert hook is not None
    found = list(recipe_code.streams(recipe.code("data"), hook, {}))
    for stream in found:
        list(stream.requests)
    return found


@pytest.mark.parametrize(
    ("data", "line", "said"),
    [
        ("def evaluation(files):\n    return [][0]\n", 5, "IndexError: list index out of range"),
        ("def evaluation(files):\n    yield Stream('a', [])\n    yield files['none.png']\n", 6, "KeyError: 'none.png'"),
        ("def evaluation():\n    return []\n", 4, "TypeError: evaluation() takes 0 positional arguments"),
        ("def evaluation(files):\n    pass\n", 4, "evaluation() gives NoneType; it must yield, or return a list"),
        ("def evaluation(files):\n    yield {'x': 1}\n", 4, "evaluation() yields dict, not edgeinfer_tools.samples.Stream"),
        ("def evaluation(files):\n    yield Stream('a', [np.ones(3)])\n", 4, "a request of stream 'a' is ndarray, not a dict"),
        ("def evaluation(files):\n    yield Stream('a', (1 / n for n in [0]))\n", 5, "ZeroDivisionError: division by zero"),
        ("def _deep():\n    raise OSError('gone')\n\ndef evaluation(files):\n    _deep()\n", 5, "OSError: gone"),
        ("import no_such_module_anywhere\n", 4, "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("def evaluation(files)\n    pass\n", 4, "SyntaxError: expected ':'"),
        ("COUNT = 1 / 0\n", 4, "ZeroDivisionError: division by zero"),
        ("import sys\n\ndef evaluation(files):\n    sys.exit(0)\n", 7, "SystemExit: 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line(conv_recipe: RecipeMaker, data: str, line: int, said: str) -> None:
    recipe = recipe_with(conv_recipe, data)
    with pytest.raises(RecipeCodeFailed) as caught:
        evaluated(recipe)
    assert str(caught.value).startswith(f"{recipe.folder / 'data.py'} line {line}: {said}")
    assert caught.value.exit_code == 78


def test_our_own_faults_pass_as_they_are(conv_recipe: RecipeMaker) -> None:
    data = "from edgeinfer_tools.faults import DataRefused\ndef evaluation(files):\n    raise DataRefused('no page')\n"
    with pytest.raises(DataRefused, match=r"^no page$"):
        evaluated(recipe_with(conv_recipe, data))


def test_what_the_one_who_iterates_raises_is_not_blamed_on_the_recipe(conv_recipe: RecipeMaker) -> None:
    recipe = load_recipe(conv_recipe())
    hook = recipe.hook("data", "evaluation")
    assert hook is not None
    with pytest.raises(ValueError, match="mine"):  # noqa: PT012
        for _ in recipe_code.streams(recipe.code("data"), hook, {}):
            raise ValueError("mine")


def test_the_streams_of_a_right_recipe_are_as_it_gave_them(conv_recipe: RecipeMaker) -> None:
    streams = evaluated(load_recipe(conv_recipe()))
    assert [stream.name for stream in streams] == [f"s{n}" for n in range(6)]
    assert [len(list(stream.requests)) for stream in streams] == [1] * 6, "they can be read again"


def test_another_dtype_is_refused_with_the_remedy(conv_recipe: RecipeMaker) -> None:
    with pytest.raises(DataRefused, match=r"input 'x' is FP32, a sample has float64; use .astype\(np.float32\)"):
        decode_inputs({"x": np.ones((1, 3, 16, 16))}, load_recipe(conv_recipe()).inputs)


def test_a_graph_that_forgets_to_return_the_model(
    conv_recipe: RecipeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = conv_recipe()
    (folder / "graph.py").write_text("import onnx\n\ndef prepare(model):\n    model.doc_string = 'x'\n")
    assert main(["build", str(folder), "--board", "generic-x86", "-o", str(tmp_path / "out")]) == 78
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("conv-net/graph.py line 3: prepare() returns NoneType, not an onnx.ModelProto")


def test_samples_that_are_no_pairs(
    conv_recipe: RecipeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = conv_recipe()
    for wrong, said in (
        ("b'abc'", "ValueError: "),
        ("('a.txt', 'text')", "TypeError: memoryview: a bytes-like object"),
    ):
        (folder / "data.py").write_text(f"def samples(files):\n    yield {wrong}\n")
        assert main(["samples", str(folder), "-o", str(tmp_path / "out")]) == 78
        assert f"data.py line 1: {said}" in capsys.readouterr().err


def test_the_recipe_may_be_named_by_its_file(conv_recipe: RecipeMaker) -> None:
    folder = conv_recipe()
    assert load_recipe(folder / "recipe.toml").folder == folder


def test_without_the_extra_the_remedy_is_told(
    conv_recipe: RecipeMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name == "onnx" or name.startswith(("onnx.", "edgeinfer_tools."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["build", str(conv_recipe()), "--board", "generic-x86", "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    remedy = "install edgeinfer with its extra `tools` (docs/toolchain.md)"
    assert error == f"edgeinfer-tools: build needs onnx: {remedy}\n"
