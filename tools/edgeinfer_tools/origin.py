"""What a recipe says of where its model and data come from: packages, files, and how a model becomes ONNX.

Owns the schema of `[source]` and `[[data]]` and what can be checked of it without looking anything up. Getting them is
`fetch`'s and `sources`'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer.errors import Problem

KINDS = ("onnx", "huggingface", "pytorch")
TASKS = (
    "feature-extraction",
    "text-classification",
    "token-classification",
    "image-classification",
    "object-detection",
    "semantic-segmentation",
)
"""What optimum exports and this toolchain can compare with the model itself."""
DATATYPES = ("FP32", "FP16", "FP64", "INT64", "INT32", "UINT8", "INT8", "BOOL")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODULE = re.compile(r"(?:[\w./-]+\.py|[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class PackageFile:
    """One file of a published package, or of this machine; bytes are what `sha256` says or it is refused."""

    file: str
    """Path inside the package; with neither `pypi` nor `debian`, a path beside the recipe."""
    sha256: str = ""
    """Must be given for files of packages. Of the wheel, where `file` is a folder."""
    pypi: str = ""
    """`NAME==VERSION` of a wheel."""
    debian: str = ""
    """Name of a Debian package."""
    name: str = ""
    """Key by which data.py finds it; default the file's own name."""
    license: str = ""

    @property
    def key(self) -> str:
        """Name for data.py."""
        return self.name or Path(self.file).name

    @property
    def origin(self) -> str:
        """Where it comes from, for people."""
        package = self.pypi or (f"Debian {self.debian}" if self.debian else "")
        return f"{package}: {self.file}" if package else self.file


@dataclass(frozen=True, slots=True)
class Wheel:
    """A Python package that a PyTorch model imports; unpacked beside, never installed."""

    pypi: str
    sha256: str
    """Of the wheel."""


@dataclass(frozen=True, slots=True)
class ModuleInput:
    """One argument of a PyTorch module, in order."""

    name: str
    datatype: str
    shape: list[int]
    """-1 where the size may vary."""
    max_shape: list[int] = field(default_factory=list)
    axes: list[str] = field(default_factory=list)
    """Names of the dimensions; equal names are equal sizes. Empty: `INPUT_AXIS`."""


@dataclass(frozen=True, slots=True)
class Validation:
    """How far the exported graph may be from the model in its own framework."""

    tolerance: float = 1e-3
    """Largest difference, as a share of the largest value of the output."""
    cosine: float = 0.9999
    """Least cosine of an output's values."""
    waiver: str = ""
    """Why a miss is accepted all the same; goes into the bundle's report."""


@dataclass(frozen=True, slots=True)
class Source(PackageFile):
    """Where the model comes from, and how it becomes ONNX."""

    file: str = ""
    kind: str = "onnx"
    """`onnx` (an .onnx file, or a folder of them), `huggingface` (a folder) or `pytorch` (file: its checkpoint)."""
    graph: str = ""
    """`onnx`: which of a folder's graphs, by file name."""
    hub: str = ""
    """`huggingface`: ORGANISATION/NAME on the hub, instead of a file."""
    revision: str = ""
    """`hub`: the commit, 40 hex digits."""
    task: str = ""
    """`huggingface`: default as the model's own configuration says."""
    module: str = ""
    """`pytorch`: `FILE.py:FUNCTION` beside the recipe, or `PACKAGE.MODULE:FUNCTION`."""
    packages: list[Wheel] = field(default_factory=list)
    """`pytorch`: wheels that the module imports."""
    inputs: list[ModuleInput] = field(default_factory=list)
    """`pytorch`: the module's arguments; default the recipe's own inputs."""
    outputs: list[str] = field(default_factory=list)
    """`pytorch`: names for what the module returns; default the recipe's own outputs."""
    opset: int = 0
    """Export at this one; 0: the recipe's, or the least that the model needs."""
    validation: Validation = field(default_factory=Validation)

    @property
    def origin(self) -> str:
        """Where it comes from, for people."""
        if self.hub:
            return f"{self.hub} at {self.revision}"
        package = self.pypi or (f"Debian {self.debian}" if self.debian else "")
        what = self.file or self.module
        return f"{package}: {what}" if package else what

    @property
    def is_folder(self) -> bool:
        """Whether `file` names a folder: everything but one ONNX file or a checkpoint is one."""
        return self.kind == "huggingface" or (self.kind == "onnx" and not self.file.endswith((".onnx", ".tflite")))


def check_package(item: PackageFile, path: str) -> list[Problem]:
    """Return what is wrong with one file's origin."""
    problems = []
    if item.pypi and item.debian:
        problems.append(Problem(path, "names both pypi and debian; one file has one origin"))
    if item.pypi and "==" not in item.pypi:
        problems.append(Problem(f"{path}.pypi", f"{item.pypi!r} has no version: write NAME==VERSION"))
    if (item.pypi or item.debian) and not _SHA256.fullmatch(item.sha256):
        what = "the wheel's" if isinstance(item, Source) and item.is_folder else "the file's"
        problems.append(Problem(f"{path}.sha256", f"must be the 64 hex digits of {what} sha256"))
    return problems


def check_source(source: Source, *, has_steps: bool) -> list[Problem]:
    """Return what is wrong with `[source]`."""
    problems = check_package(source, "source")
    if source.kind not in KINDS:
        return [*problems, Problem("source.kind", f"{source.kind!r} is not {', '.join(KINDS)}")]
    problems += [
        Problem(f"source.{key}", f"is for kind = {kind!r}, this is {source.kind!r}")
        for key, kind in _OF_KIND.items()
        if getattr(source, key) and source.kind != kind
    ]
    if source.is_folder and source.debian:
        problems.append(Problem("source.debian", "gives single files; a folder can come from pypi or from beside"))
    match source.kind:
        case "huggingface":
            problems += _check_huggingface(source)
        case "pytorch":
            problems += _check_pytorch(source, has_steps=has_steps)
        case _ if not source.file:
            problems.append(Problem("source.file", "is missing"))
    if source.validation.tolerance <= 0:
        problems.append(Problem("source.validation.tolerance", f"{source.validation.tolerance} is not above 0"))
    return problems


_OF_KIND = {
    "graph": "onnx",
    "hub": "huggingface",
    "revision": "huggingface",
    "task": "huggingface",
    "module": "pytorch",
    "packages": "pytorch",
    "inputs": "pytorch",
    "outputs": "pytorch",
}


def _check_huggingface(source: Source) -> Iterator[Problem]:
    if bool(source.file) == bool(source.hub):
        yield Problem("source", "needs either file (a folder) or hub")
    if source.hub and not _COMMIT.fullmatch(source.revision):
        yield Problem(
            "source.revision", f"{source.revision!r} is no commit of 40 hex digits: a branch's content changes"
        )
    if source.task and source.task not in TASKS:
        more = " (text generation comes with language models)" if "generation" in source.task else ""
        yield Problem("source.task", f"{source.task!r} is not {', '.join(TASKS)}{more}")


def _check_pytorch(source: Source, *, has_steps: bool) -> Iterator[Problem]:
    if not _MODULE.fullmatch(source.module):
        yield Problem("source.module", f"{source.module!r} is not FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
    if has_steps and not source.inputs:
        yield Problem("source.inputs", "are needed, because preprocess changes what the module is given")
    if has_steps and not source.outputs:
        yield Problem("source.outputs", "are needed: names for what the module returns, before the steps")
    for index, wheel in enumerate(source.packages):
        where = f"source.packages[{index}]"
        if "==" not in wheel.pypi:
            yield Problem(f"{where}.pypi", f"{wheel.pypi!r} has no version: write NAME==VERSION")
        if not _SHA256.fullmatch(wheel.sha256):
            yield Problem(f"{where}.sha256", "must be the 64 hex digits of the wheel's sha256")
    for index, item in enumerate(source.inputs):
        where = f"source.inputs[{index}]"
        if item.datatype not in DATATYPES:
            yield Problem(f"{where}.datatype", f"{item.datatype!r} is not {', '.join(DATATYPES)}")
        if -1 in item.shape and len(item.max_shape) != len(item.shape):
            yield Problem(f"{where}.max_shape", "must bound every dimension where shape has -1")
        if item.axes and len(item.axes) != len(item.shape):
            yield Problem(f"{where}.axes", f"names {len(item.axes)} of {len(item.shape)} dimensions; use '' for none")
