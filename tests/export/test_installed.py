"""The pins of the extra `export` are installed, work together, and stay out of everything but the child."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = [pytest.mark.export, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def pins() -> list[Requirement]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [Requirement(line) for line in (*extras["export"], *extras["tools"]) if not line.startswith("edgeinfer")]


@pytest.mark.parametrize("pin", pins(), ids=lambda pin: pin.name)
def test_what_is_installed_is_what_is_pinned(pin: Requirement) -> None:
    assert pin.specifier.contains(version(pin.name).partition("+")[0])


def test_the_exporters_import_together() -> None:
    code = (
        "import torch, onnxscript, transformers, accelerate, optimum.exporters.onnx, onnxslim, onnxruntime.quantization"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


def test_no_room_of_the_toolchain_but_the_child_imports_torch() -> None:
    code = "import sys, edgeinfer_tools.build, edgeinfer_tools.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
