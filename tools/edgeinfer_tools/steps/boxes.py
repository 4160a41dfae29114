"""Non-maximum suppression with a result of fixed size, so that a contract can state it."""

from __future__ import annotations

import numpy as np

from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.samples import Array
from edgeinfer_tools.steps.schema import Nms
from edgeinfer_tools.steps.wiring import FLOAT, INT64, Wire, Wiring


def nms(step: Nms, wiring: Wiring, boxes: Wire, scores: Wire) -> list[Wire]:
    """Return boxes, scores and classes of what is left, best first, filled up to the limit."""
    for role, wire, last in (("boxes", boxes, 4), ("scores", scores, None)):
        wrong = len(wire.shape) != 3 or (last is not None and wire.shape[2] not in {last, -1})
        if wrong or wire.shape[0] not in {1, -1}:
            shape = "[1, n, 4]" if role == "boxes" else "[1, n, classes] or [1, classes, n]"
            raise ModelRefused(f"step nms: {role} {wire.name!r} has shape {list(wire.shape)}, not {shape}")
    by_class = scores.name
    if step.scores == "classes_last":
        by_class = wiring.node("Transpose", [by_class], perm=[0, 2, 1])
    best_class = ""
    if step.agnostic:
        best_class = wiring.node("ArgMax", [by_class], axis=1, keepdims=0)  # [1, n]
        by_class = wiring.node("ReduceMax", [by_class, wiring.ints([1])], keepdims=1)  # [1, 1, n]
    chosen = wiring.node(
        "NonMaxSuppression",
        [
            boxes.name,
            by_class,
            wiring.ints([step.limit]),
            wiring.floats([step.iou_threshold]),
            wiring.floats([step.score_threshold]),
        ],
        center_point_box=1 if step.boxes == "centre" else 0,
    )  # [m, 3]: batch, class, box
    index = wiring.node("Gather", [chosen, wiring.ints(2)], axis=1)
    kinds = wiring.node("Gather", [chosen, wiring.ints(1)], axis=1)
    values = wiring.node("GatherND", [by_class, chosen])
    if step.agnostic:
        flat = wiring.node("Squeeze", [best_class, wiring.ints([0])])
        kinds = wiring.node("Gather", [flat, index], axis=0)
    corners = wiring.node("Squeeze", [boxes.name, wiring.ints([0])])
    if step.boxes == "centre":
        corners = _corners(wiring, corners)
    kept = wiring.node("Gather", [corners, index], axis=0)
    return _filled(step.limit, wiring, kept, values, kinds)


def _corners(wiring: Wiring, boxes: str) -> str:
    middle, size = wiring.split("Split", [boxes, wiring.ints([2, 2])], 2, axis=1)
    half = wiring.node("Mul", [size, wiring.floats(0.5)])
    return wiring.node("Concat", [wiring.node("Sub", [middle, half]), wiring.node("Add", [middle, half])], axis=1)


def _filled(limit: int, wiring: Wiring, boxes: str, scores: str, classes: str) -> list[Wire]:
    """Append `limit` empty rows and take the `limit` best."""
    rows: dict[str, Array] = {
        boxes: np.zeros((limit, 4), np.float32),
        scores: np.zeros(limit, np.float32),
        classes: np.full(limit, -1, np.int64),
    }
    full = [wiring.node("Concat", [name, wiring.constant(empty)], axis=0) for name, empty in rows.items()]
    values, order = wiring.split("TopK", [full[1], wiring.ints([limit])], 2, axis=0, largest=1, sorted=1)
    return [
        Wire(wiring.node("Gather", [full[0], order], axis=0), FLOAT, (limit, 4)),
        Wire(values, FLOAT, (limit,)),
        Wire(wiring.node("Gather", [full[2], order], axis=0), INT64, (limit,)),
    ]
