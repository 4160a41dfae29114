"""Inside the exporting child: PyTorch modules, by torch.onnx's exporter of whole graphs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

from edgeinfer_tools.sources.child_order import Declined, Order, samples_of, tied

LOWEST_OPSET = 18
"""What the exporter's own operators are written in; lower ones it only sometimes reaches."""
ONE_FILE_BYTES = 1 << 30
EXAMPLE = 3
"""Size of a dynamic dimension while exporting: 0 and 1 would be taken for constants."""


def export(order: Order) -> dict[str, Any]:
    """Write `model.onnx` into the order's folder."""
    import torch

    opset = order["opset"]
    if opset < LOWEST_OPSET:
        if order["opset_fixed"]:
            raise Declined("opset", f"opset {opset} is too low for torch's exporter, it needs {LOWEST_OPSET}")
        opset = LOWEST_OPSET
    module = _load(order)
    size = sum(item.numel() * item.element_size() for item in (*module.parameters(), *module.buffers()))
    try:
        torch.onnx.export(
            module,
            tuple(_example(spec) for spec in order["inputs"]),
            str(Path(order["out"]) / "model.onnx"),
            input_names=[spec["name"] for spec in order["inputs"]],
            output_names=order["outputs"] or None,
            opset_version=opset,
            dynamo=True,
            dynamic_shapes=_dynamic_shapes(order["inputs"]),
            external_data=size >= ONE_FILE_BYTES,
            verbose=False,
        )
    except Exception as error:
        if text := _broken_dimension(str(error.__cause__ or error), order["inputs"]):
            raise Declined("dimension", text) from error
        cause = error.__cause__ or error
        raise Declined("failed", f"{type(cause).__name__}: {_first_line(str(cause))}") from error
    _refuse_baked(Path(order["out"]) / "model.onnx", order["inputs"])
    return {"files": ["model.onnx"], "tied": tied(module), "exporter": f"torch {torch.__version__}"}


def run(order: Order) -> dict[str, Any]:
    """Run the module itself on the samples; write `NUMBER.OUTPUT` arrays, outputs in the graph's order."""
    import numpy as np
    import torch
    from torch.utils import _pytree

    module = _load(order)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for index, inputs in enumerate(samples_of(order)):
            answer = module(*(inputs[spec["name"]] for spec in order["inputs"]))
            leaves = [leaf for leaf in _pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
            if len(leaves) != len(order["outputs"]):
                raise Declined(
                    "outputs", f"the module gives {len(leaves)} tensors, the graph has {len(order['outputs'])} outputs"
                )
            for name, leaf in zip(order["outputs"], leaves, strict=True):
                found[f"{index}.{name}"] = leaf.numpy()
    with Path(order["answers"]).open("wb") as file:
        np.savez(file, **found)
    return {"count": order["count"]}


def _load(order: Order) -> Any:
    """Return the module, its checkpoint loaded, ready for inference."""
    import torch

    name, _, function = order["module"].partition(":")
    path = Path(order["folder"]) / name
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise Declined("factory", f"{path}: no such file")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    else:
        loaded = importlib.import_module(name)
    factory = getattr(loaded, function, None)
    if not callable(factory):
        raise Declined("factory", f"{name} has no function {function!r}")
    checkpoint = order["checkpoint"]
    takes = not isinstance(factory, type) and any(
        item.default is item.empty and item.kind is not item.VAR_KEYWORD
        for item in inspect.signature(factory).parameters.values()
    )
    module = factory(Path(checkpoint)) if takes else factory()
    if not isinstance(module, torch.nn.Module):
        raise Declined("factory", f"{order['module']} gives {type(module).__name__}, not a torch.nn.Module")
    if checkpoint and not takes:
        _load_state(module, Path(checkpoint))
    return module.eval()


def _load_state(module: Any, path: Path) -> None:
    import torch

    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state: Any = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    try:
        module.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise Declined("checkpoint", f"{path.name} does not fit the module: {_first_line(str(error), 3)}") from error


def _example(spec: dict[str, Any]) -> Any:
    import torch

    kinds = {"FP32": torch.float32, "FP16": torch.float16, "INT64": torch.int64, "INT32": torch.int32}
    kinds |= {"UINT8": torch.uint8, "INT8": torch.int8, "BOOL": torch.bool, "FP64": torch.float64}
    bounds = spec["max_shape"] or spec["shape"]
    shape = [min(EXAMPLE, bound) if dim < 0 else dim for dim, bound in zip(spec["shape"], bounds, strict=True)]
    kind = kinds[spec["datatype"]]
    return torch.rand(shape, dtype=kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind)


def _dynamic_shapes(inputs: list[dict[str, Any]]) -> Any:
    """Return what torch.export calls dynamic shapes; equal names mean equal sizes."""
    import torch

    dims: dict[str, Any] = {}
    shapes = []
    for spec in inputs:
        axes: dict[int, Any] = {}
        for axis, dim in enumerate(spec["shape"]):
            if dim < 0:
                name = axis_name(spec, axis)
                dims.setdefault(name, torch.export.Dim(name, min=1, max=spec["max_shape"][axis]))
                axes[axis] = dims[name]
        shapes.append(axes or None)
    return tuple(shapes) if any(shapes) else None


def axis_name(spec: dict[str, Any], axis: int) -> str:
    """Return the name of a dynamic dimension: as the recipe says, else `INPUT_AXIS`."""
    named: str = spec["axes"][axis] if spec["axes"] else ""
    return named or re.sub(r"\W", "_", f"{spec['name']}_{axis}")


def _refuse_baked(path: Path, inputs: list[dict[str, Any]]) -> None:
    """Refuse an export whose dimensions the exporter has fixed, in silence, at the example's size."""
    import onnx

    made = onnx.load(str(path), load_external_data=False).graph.input
    for spec, item in zip(inputs, made, strict=False):
        for axis, dim in enumerate(item.type.tensor_type.shape.dim):
            if spec["shape"][axis] < 0 and dim.HasField("dim_value"):
                raise Declined(
                    "dimension",
                    f"dimension {axis} of {spec['name']!r} ({axis_name(spec, axis)}) cannot vary as the recipe says: "
                    f"the module's own code fixes it to {dim.dim_value}",
                )


def _broken_dimension(text: str, inputs: list[dict[str, Any]]) -> str:
    """Return in words which dimension the module itself does not let vary, where that is what failed."""
    for spec in inputs:
        for axis, dim in enumerate(spec["shape"]):
            name = axis_name(spec, axis)
            if dim < 0 and re.search(rf"\b{re.escape(name)}\b", text) and "onstraint" in text:
                why = next((line.strip(" -") for line in text.splitlines() if name in line and "because" in line), "")
                return f"dimension {axis} of {spec['name']!r} ({name}) cannot vary as the recipe says" + (
                    f": {why}" if why else ""
                )
    return ""


def _first_line(text: str, lines: int = 1) -> str:
    found = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " ".join(found[:lines]) or "no reason given"
