"""Write down nodes and constants of a graph while keeping account of types and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.samples import Array

FLOAT, UINT8, INT64, BOOL = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT64, TensorProto.BOOL


@dataclass(frozen=True, slots=True)
class Wire:
    """A tensor of the graph."""

    name: str
    kind: int
    """ONNX element type."""
    shape: tuple[int, ...]
    """-1 where it is not known before the run."""

    def axis(self, axis: int, step: str) -> int:
        """Return an axis counted from the front.

        Raises:
            ModelRefused: there is no such axis.
        """
        if not -len(self.shape) <= axis < len(self.shape):
            raise ModelRefused(f"step {step}: {self.name!r} has shape {list(self.shape)} and no axis {axis}")
        return axis % len(self.shape)


@dataclass(slots=True)
class Wiring:
    """Nodes and constants, in order. Every name it makes begins with the prefix."""

    prefix: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def node(self, operator: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output and return that."""
        return self.split(operator, inputs, 1, **attributes)[0]

    def split(self, operator: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs and return them."""
        name = f"{self.prefix}{len(self.nodes)}.{operator}"
        names = [f"{name}.{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=name, **attributes))
        return names

    def floats(self, values: Any) -> str:
        """Add a float constant and return its name."""
        return self.constant(np.asarray(values, np.float32))

    def ints(self, values: Any) -> str:
        """Add an integer constant (INT64) and return its name."""
        return self.constant(np.asarray(values, np.int64))

    def constant(self, array: Array) -> str:
        """Add a constant and return its name."""
        name = f"{self.prefix}constant.{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def to_float(self, wire: Wire) -> Wire:
        """Return the tensor in float32."""
        if wire.kind == FLOAT:
            return wire
        return Wire(self.node("Cast", [wire.name], to=FLOAT), FLOAT, wire.shape)
