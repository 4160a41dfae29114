"""Steps on pictures: [1, H, W, C] or [1, C, H, W], C being 1, 3 or 4.

The sizes of resized pictures are computed exactly in the graph, because the operator's own way to keep the aspect ratio
scales by the ratio before rounding, which shifts the last rows by up to a pixel against Pillow and OpenCV.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.steps.schema import Colour, Crop, Layout, Normalise, Resize
from edgeinfer_tools.steps.wiring import FLOAT, INT64, UINT8, Wire, Wiring

CHANNELS = (1, 3, 4)
LUMA = (0.299, 0.587, 0.114)
"""ITU-R 601."""


def channel_axis(wire: Wire, step: str) -> int:
    """Return where the channels are: the last axis, or the second.

    Raises:
        ModelRefused: it is no picture.
    """
    if len(wire.shape) == 4:
        for axis in (3, 1):
            if wire.shape[axis] in CHANNELS:
                return axis
    raise ModelRefused(
        f"step {step}: {wire.name!r} has shape {list(wire.shape)}, which is no picture: [1, H, W, C] or [1, C, H, W], "
        "with 1, 3 or 4 channels"
    )


def _plane(wire: Wire, step: str) -> tuple[int, int]:
    """Return the axes of height and width."""
    return (1, 2) if channel_axis(wire, step) == 3 else (2, 3)


def _sized(wire: Wire, step: str, size: tuple[int, int]) -> tuple[int, ...]:
    rows, columns = _plane(wire, step)
    return tuple(
        size[0] if axis == rows else size[1] if axis == columns else dim for axis, dim in enumerate(wire.shape)
    )


def resize(step: Resize, wiring: Wiring, wire: Wire) -> Wire:
    """Return the picture in its new size."""
    rows, columns = _plane(wire, "resize")
    wanted = wiring.ints(step.size)
    sizes = wanted if step.fit == "stretch" else _kept_ratio(step, wiring, wire, (rows, columns), wanted)
    name = _resized(step, wiring, wire, (rows, columns), sizes)
    if step.fit == "cover":
        return Wire(name, wire.kind, _sized(wire, "resize", (-1, -1)))
    if step.fit == "letterbox":
        name = _padded(
            step, wiring, Wire(name, wire.kind, wire.shape), axes=(rows, columns), wanted=wanted, sizes=sizes
        )
    return Wire(name, wire.kind, _sized(wire, "resize", (step.size[0], step.size[1])))


def _kept_ratio(step: Resize, wiring: Wiring, wire: Wire, axes: tuple[int, int], wanted: str) -> str:
    """Return height and width that keep the picture's aspect ratio, rounded, at least 1."""
    shape = wiring.node("Shape", [wire.name])
    plane = wiring.node("Gather", [shape, wiring.ints(list(axes))], axis=0)
    have = wiring.node("Cast", [plane], to=FLOAT)
    ratios = wiring.node("Div", [wiring.node("Cast", [wanted], to=FLOAT), have])
    pick = "ReduceMin" if step.fit == "letterbox" else "ReduceMax"
    scaled = wiring.node("Mul", [have, wiring.node(pick, [ratios], keepdims=1)])
    rounded = wiring.node("Floor", [wiring.node("Add", [scaled, wiring.floats(0.5)])])
    return wiring.node("Cast", [wiring.node("Max", [rounded, wiring.floats(1)])], to=INT64)


def _resized(step: Resize, wiring: Wiring, wire: Wire, axes: tuple[int, int], sizes: str) -> str:
    attributes: dict[str, Any] = {"mode": step.interpolation, "coordinate_transformation_mode": "half_pixel"}
    if step.interpolation == "nearest":
        attributes["nearest_mode"] = "round_prefer_ceil"
    if step.antialias and step.interpolation != "nearest":
        attributes["antialias"] = 1
    if step.interpolation == "cubic":
        if not step.antialias:
            raise ModelRefused(
                "step resize: cubic needs antialias = true; the runtime has the plain one not for pictures that shrink"
            )
        attributes["cubic_coeff_a"] = -0.5  # as Pillow
    return wiring.node("Resize", [wire.name, "", "", _all_sizes(wiring, wire, axes, sizes)], **attributes)


def _all_sizes(wiring: Wiring, wire: Wire, axes: tuple[int, int], sizes: str) -> str:
    """Return the sizes of all four axes: the runtime's optimiser loses track where Resize names only two."""
    shape = "" if min(wire.shape[0], wire.shape[3 if axes == (1, 2) else 1]) >= 0 else wiring.node("Shape", [wire.name])

    def kept(axis: int) -> str:
        known = wire.shape[axis]
        return wiring.ints([known]) if known >= 0 else wiring.node("Gather", [shape, wiring.ints([axis])], axis=0)

    parts = [kept(0), sizes, kept(3)] if axes == (1, 2) else [kept(0), kept(1), sizes]
    return wiring.node("Concat", parts, axis=0)


def _padded(step: Resize, wiring: Wiring, wire: Wire, *, axes: tuple[int, int], wanted: str, sizes: str) -> str:
    missing = wiring.node("Sub", [wanted, sizes])
    if step.place == "centre":
        before = wiring.node("Div", [missing, wiring.ints(2)])
    else:
        before = wiring.node("Mul", [missing, wiring.ints(0)])
    after = wiring.node("Sub", [missing, before])
    pads = wiring.node("Concat", [before, after], axis=0)
    fill = wiring.constant(np.asarray(step.fill, np.uint8 if wire.kind == UINT8 else np.float32))
    return wiring.node("Pad", [wire.name, pads, fill, wiring.ints(list(axes))], mode="constant")


def crop(step: Crop, wiring: Wiring, wire: Wire) -> Wire:
    """Return the middle of the picture; an odd pixel too many goes at the lower right."""
    axes = list(_plane(wire, "crop"))
    for axis, size in zip(axes, step.size, strict=True):
        if 0 <= wire.shape[axis] < size:
            raise ModelRefused(f"step crop: {step.size} cannot be cut out of a picture of {list(wire.shape)}")
    plane = wiring.node("Gather", [wiring.node("Shape", [wire.name]), wiring.ints(axes)], axis=0)
    wanted = wiring.ints(step.size)
    start = wiring.node("Div", [wiring.node("Sub", [plane, wanted]), wiring.ints(2)])
    name = wiring.node("Slice", [wire.name, start, wiring.node("Add", [start, wanted]), wiring.ints(axes)])
    return Wire(name, wire.kind, _sized(wire, "crop", (step.size[0], step.size[1])))


def colour(step: Colour, wiring: Wiring, wire: Wire) -> Wire:
    """Return the picture in BGR or in grey (float32 then)."""
    axis = channel_axis(wire, "colour")
    if wire.shape[axis] != 3:
        raise ModelRefused(f"step colour: {wire.name!r} has {wire.shape[axis]} channels, not 3")
    if step.order == "bgr":
        return Wire(wiring.node("Gather", [wire.name, wiring.ints([2, 1, 0])], axis=axis), wire.kind, wire.shape)
    weights = np.asarray(LUMA, np.float32).reshape([3 if index == axis else 1 for index in range(4)])
    weighted = wiring.node("Mul", [wiring.to_float(wire).name, wiring.constant(weights)])
    name = wiring.node("ReduceSum", [weighted, wiring.ints([axis])], keepdims=1)
    return Wire(name, FLOAT, tuple(1 if index == axis else dim for index, dim in enumerate(wire.shape)))


def normalise(step: Normalise, wiring: Wiring, wire: Wire) -> Wire:
    """Return (x * scale - mean) / std as x * factor + offset."""
    channels = max(len(step.mean), len(step.std))
    for name, values in (("mean", step.mean), ("std", step.std)):
        if len(values) not in {1, channels}:
            raise ModelRefused(f"step normalise: {name} has {len(values)} values, not 1 or {channels}")
    if 0.0 in step.std:
        raise ModelRefused("step normalise: std is 0")
    shape: list[int] = []
    if channels > 1:
        axis = channel_axis(wire, "normalise")
        if wire.shape[axis] != channels:
            raise ModelRefused(f"step normalise: {wire.name!r} has {wire.shape[axis]} channels, the step {channels}")
        shape = [channels if index == axis else 1 for index in range(4)]
    mean, std = (np.asarray(values, np.float64).reshape(-1 if channels > 1 else ()) for values in (step.mean, step.std))
    factor, offset = np.broadcast_to(step.scale / std, (channels,)), np.broadcast_to(-mean / std, (channels,))
    name = wiring.to_float(wire).name
    if np.any(factor != 1):
        name = wiring.node("Mul", [name, wiring.floats(factor.reshape(shape))])
    if np.any(offset != 0):
        name = wiring.node("Add", [name, wiring.floats(offset.reshape(shape))])
    return Wire(name, FLOAT, wire.shape)


def layout(step: Layout, wiring: Wiring, wire: Wire) -> Wire:
    """Return the picture with its channels first or last."""
    axis = channel_axis(wire, "layout")
    if (axis == 1) == (step.to == "nchw"):
        return wire
    perm = [0, 3, 1, 2] if step.to == "nchw" else [0, 2, 3, 1]
    name = wiring.node("Transpose", [wire.name], perm=perm)
    return Wire(name, wire.kind, tuple(wire.shape[index] for index in perm))
