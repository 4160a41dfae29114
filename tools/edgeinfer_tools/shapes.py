"""Dimensions: fix those that the device never varies, and let shapes be inferred as far as anyone can.

A smaller choice of shapes is a faster graph: what is fixed can be folded. What the graph has fixed cannot be widened
here; that needs a new export, and is refused with that advice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import onnx

from edgeinfer_tools import model_file
from edgeinfer_tools.faults import ModelRefused, plain
from edgeinfer_tools.steps.chain import open_inputs


def fix_dimensions(model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    """Give dynamic dimensions sizes, by the names that the graph has for them; `model` is changed.

    Raises:
        ModelRefused: there is no dimension of such a name; those that there are, are named.
    """
    known = {dim.dim_param for _, dims in _inputs(model) for dim in dims if dim.dim_param}
    if unknown := sorted(set(sizes) - known):
        there = ", ".join(sorted(known)) or "none"
        raise ModelRefused(f"dimensions: the graph has no dynamic dimension {unknown[0]!r} (it has: {there})")
    from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

    for name, size in sizes.items():
        make_dim_param_fixed(model.graph, name, size)


def narrow(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Fix what is dynamic in the graph's inputs and fixed in `shapes` (-1: stays); `model` is changed.

    A name that two of these shapes give different sizes stays dynamic: the first sizes hold where they were given.
    """
    sizes: dict[str, set[int]] = {}
    for name, dims in _inputs(model):
        wanted = shapes.get(name)
        if wanted is None or len(wanted) != len(dims):
            continue  # the contract's check names it
        for dim, size in zip(dims, wanted, strict=True):
            if size >= 1 and not dim.HasField("dim_value"):
                if dim.dim_param:
                    sizes.setdefault(dim.dim_param, set()).add(size)
                else:
                    dim.dim_value = size
    fix_dimensions(model, {name: next(iter(found)) for name, found in sizes.items() if len(found) == 1})


def _inputs(model: onnx.ModelProto) -> Iterator[tuple[str, list[onnx.TensorShapeProto.Dimension]]]:
    for item in open_inputs(model):
        yield item.name, list(item.type.tensor_type.shape.dim)


def infer(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return the model with shapes written into it, and a note where less could be inferred than hoped.

    Asked in turn: ONNX Runtime's symbolic inference, which follows computed shapes but not every operator, then ONNX's
    own. A model that neither can take is returned as it is: shapes help the quantizers, but they need not have them.
    """
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    if model_file.is_large(model):
        return _plain(model, "")
    logger = logging.getLogger("onnxruntime.tools.symbolic_shape_infer")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        inferred = SymbolicShapeInference.infer_shapes(_copy(model), auto_merge=True)
        onnx.checker.check_model(inferred)
    except Exception as error:  # noqa: BLE001  it raises what it likes, a bare Exception too
        return _plain(model, f"symbolic shape inference: {type(error).__name__}: {plain(str(error))}")
    finally:
        logger.setLevel(level)
    return inferred, ""


def _plain(model: onnx.ModelProto, why: str) -> tuple[onnx.ModelProto, str]:
    try:
        inferred = model_file.infer_shapes(model)
    except Exception as error:  # noqa: BLE001  from C++: InferenceError, RuntimeError
        return model, f"shapes are not inferred ({why + '; ' if why else ''}onnx: {plain(str(error))})"
    return inferred, ""


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    return made
