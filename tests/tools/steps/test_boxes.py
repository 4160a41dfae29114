"""Non-maximum suppression gives what the plain algorithm gives, in a shape that never changes."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.samples import Array
from tests.tools.steps.joined import after


def boxes_of(seed: int, count: int) -> tuple[Array, Array]:
    """Corners, crowded so that many overlap, and scores of 3 classes, all different."""
    random = np.random.default_rng(seed)
    corner, size = random.uniform(0, 60, (count, 2)), random.uniform(10, 40, (count, 2))
    scores = random.permutation(count * 3).reshape(count, 3) / (count * 3)
    return np.concatenate([corner, corner + size], 1).astype(np.float32), scores.astype(np.float32)


def overlap(a: Array, b: Array) -> float:
    sides = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None)
    common = float(sides.prod())
    return common / (float((a[2:] - a[:2]).prod()) + float((b[2:] - b[:2]).prod()) - common)


def reference(boxes: Array, scores: Array, *, limit: int, agnostic: bool) -> list[tuple[int, int]]:
    """Box and class of what is left, best first."""
    pairs = [(float(scores[b, c]), b, c) for b in range(len(boxes)) for c in range(scores.shape[1])]
    if agnostic:
        pairs = [(float(scores[b].max()), b, int(scores[b].argmax())) for b in range(len(boxes))]
    kept: list[tuple[int, int]] = []
    for score, box, kind in sorted(pairs, reverse=True):
        rivals = [b for b, k in kept if agnostic or k == kind]
        if score > 0.25 and all(overlap(boxes[box].astype(float), boxes[b].astype(float)) <= 0.5 for b in rivals):
            kept.append((box, kind))
    return kept[:limit]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("form", ["corners", "centre"])
@pytest.mark.parametrize(("limit", "first"), [(100, False), (5, True)])
def test_what_is_left_is_what_the_plain_algorithm_leaves(
    seed: int, agnostic: bool, form: str, limit: int, first: bool
) -> None:
    boxes, scores = boxes_of(seed, 40)
    given = (
        boxes
        if form == "corners"
        else np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)
    )
    step = {"step": "nms", "limit": limit, "boxes": form, "agnostic": agnostic, "takes": ["raw", "scores_in"]}
    step |= {"gives": ["boxes", "scores", "classes"], "scores": "classes_first" if first else "classes_last"}
    found = after(
        [step],
        {"raw": given[np.newaxis], "scores_in": (scores.T if first else scores)[np.newaxis].copy()},
        {"boxes": ("FP32", [limit, 4]), "scores": ("FP32", [limit]), "classes": ("INT64", [limit])},
    )
    wanted = reference(boxes, scores, limit=limit, agnostic=agnostic)
    count = len(wanted)
    assert count > 3
    np.testing.assert_array_equal(found["classes"][:count], [kind for _, kind in wanted])
    np.testing.assert_allclose(found["boxes"][:count], boxes[[box for box, _ in wanted]], atol=1e-4)
    np.testing.assert_allclose(found["scores"][:count], [scores[b, k] for b, k in wanted])
    assert (found["classes"][count:] == -1).all()
    assert not found["boxes"][count:].any()
    assert not found["scores"][count:].any()


def test_nothing_above_the_threshold_is_an_empty_list() -> None:
    boxes, scores = boxes_of(0, 10)
    step = {"step": "nms", "limit": 4, "score_threshold": 2.0, "takes": ["b", "s"], "gives": ["x", "y", "z"]}
    outputs = {"x": ("FP32", [4, 4]), "y": ("FP32", [4]), "z": ("INT64", [4])}
    found = after([step], {"b": boxes[np.newaxis], "s": scores[np.newaxis]}, outputs)
    assert list(found["z"]) == [-1] * 4


def test_boxes_of_another_shape_are_refused() -> None:
    step = {"step": "nms", "limit": 4, "takes": ["b", "s"], "gives": ["x", "y", "z"]}
    with pytest.raises(ModelRefused, match=r"boxes 'b' has shape \[1, 10, 5\], not \[1, n, 4\]"):
        after([step], {"b": np.zeros((1, 10, 5), np.float32), "s": np.zeros((1, 10, 3), np.float32)}, {})
