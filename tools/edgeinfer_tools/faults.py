"""Name the toolchain's own faults, by what the engineer who reads them does next.

What is wrong with a bundle or a file of the operator is in `edgeinfer.errors`; here is what only building can meet.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgeinfer.errors import ArtifactError, ConfigError, EdgeInferError


class FetchError(EdgeInferError):
    """A package or a file in it cannot be had: correct the recipe, or connect once so that it is cached."""

    exit_code = 69  # EX_UNAVAILABLE


class ModelRefused(ArtifactError):
    """The source model cannot be built as the recipe asks: change the model or the recipe."""


class ExportFailed(ModelRefused):
    """The model's framework could not export it: change the source as the text says."""


class ExtraMissing(EdgeInferError):
    """What the command needs is not installed: install the extra that the text names."""

    exit_code = 2


class DataRefused(ArtifactError):
    """Calibration or evaluation data are empty, not finite, constant, or not what the contract says."""


class RecipeCodeFailed(EdgeInferError):
    """The Python of a recipe raised something, or gives what it should not: mend that line."""

    exit_code = ConfigError.exit_code

    def __init__(self, path: Path, line: int, what: str) -> None:
        super().__init__(f"{path} line {line}: {what}")


class GateFailed(EdgeInferError):
    """The variant is not as good as the recipe demands. Nothing was published."""

    exit_code = 4


class ExportDiffers(GateFailed):
    """The exported graph does not compute what the model computes. Nothing was published."""


class KeyRefused(EdgeInferError):
    """The private key cannot be used to sign: name another file, or its password."""

    exit_code = 66  # EX_NOINPUT


class OutputExists(EdgeInferError):
    """Something stands where the bundle would go."""

    exit_code = 73  # EX_CANTCREAT


_NO_KERNEL = re.compile(r"Could not find an implementation for (\S+) node with name '(.*?)'")
_SOURCE = re.compile(
    r"(?:/\S+|\b\S+)\.(?:cc|cpp|h)[: ]\d+\s*(?:[\w:~<>*& ,]+\([^)]*\)\s*(?:\[[^\]]*\])?\s*(?:const)?\s*)?"
)
_CODE = re.compile(r"^\d+ : [A-Z_]+ : ")


def plain(text: str) -> str:
    """Return what ONNX or ONNX Runtime says in one line, without codes, C++ signatures and source paths."""
    line = next((item for item in text.strip().splitlines() if item.strip()), "no reason given")
    line = _CODE.sub("", line.rpartition("ONNXRuntimeError] : ")[2] or line)
    if found := _NO_KERNEL.search(line):
        return f"the runtime has no kernel for {found[1]} (node {found[2]!r}); keep that node float, or choose `static`"
    line = re.sub(r"\s+", " ", _SOURCE.sub("", line)).strip(" :")
    return line.removeprefix("Load model from ").strip() or "no reason given"
