"""The steps that a recipe can declare, with their parameters, as recipe.toml has them.

What a step computes is in `image`, `answers` and `boxes`; how steps are joined to the model is in `chain`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from edgeinfer.errors import Problem

STEPS_OPSET = 18
"""Resize with antialias came with it, and reductions that take their axes as an input."""
Size = Annotated[list[Annotated[int, Meta(ge=1, le=1 << 14)]], Meta(min_length=2, max_length=2)]
"""Height and width, in pixels."""


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="step"):
    """What all steps have."""

    takes: list[str] = []
    """Tensors by name; empty: what the step before gives, or the only one there is."""
    gives: list[str] = []
    """Names of the results; empty: for the last step the model's open input, or the recipe's open outputs."""


class Resize(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="resize"):
    """Resize a picture."""

    size: Size
    fit: Literal["stretch", "letterbox", "cover"] = "stretch"
    """`letterbox`: inside `size`, the rest filled; `cover`: the shorter side as `size` says, the longer one longer."""
    interpolation: Literal["linear", "cubic", "nearest"] = "linear"
    antialias: bool = False
    """Average over what shrinks, as Pillow and torchvision do; OpenCV does not."""
    fill: float = 114
    place: Literal["centre", "corner"] = "centre"
    """Where the picture lies in a letterbox: in the middle, or at the upper left."""


class Crop(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="crop"):
    """Cut the middle out of a picture."""

    size: Size


class Colour(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="colour"):
    """Change the order of colours: devices decode RGB."""

    order: Literal["bgr", "grey"] = "bgr"
    """`grey`: one channel, by ITU-R 601 (as Pillow's L)."""


class Normalise(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="normalise"):
    """(x * scale - mean) / std in float32, per channel or for all."""

    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


class Layout(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="layout"):
    """Move the channels."""

    to: Literal["nchw", "nhwc"]


class Cast(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cast"):
    """Change the datatype."""

    datatype: Literal["FP32", "FP16", "INT32", "INT64", "UINT8", "BOOL"]


class Reshape(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="reshape"):
    """Change the shape; one dimension may be -1, and 0 keeps what is there."""

    shape: list[int]


class Rename(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rename"):
    """Give a tensor the name that the recipe has for it."""


class Softmax(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="softmax"):
    """Turn scores into shares that sum to 1."""

    axis: int = -1


class Sigmoid(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sigmoid"):
    """Turn each score into a probability."""


class TopK(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="top_k"):
    """The k highest, in order: gives values and indices (INT64)."""

    k: Annotated[int, Meta(ge=1)]
    axis: int = -1


class Pool(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pool"):
    """One embedding of the tokens: takes [batch, tokens, width] and, but for `cls`, the mask [batch, tokens]."""

    method: Literal["mean", "cls", "max"] = "mean"
    normalise: bool = False
    """Divide by its length."""


class L2Normalise(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="l2_normalise"):
    """Divide by the length along an axis."""

    axis: int = -1


class Nms(Step, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="nms"):
    """Non-maximum suppression: takes boxes [1, n, 4] and scores; gives boxes [limit, 4] (left, top, right, bottom),
    scores [limit] and classes [limit] (INT64), best first, filled up with 0, 0 and -1.
    """  # noqa: D205

    limit: Annotated[int, Meta(ge=1, le=1 << 14)]
    iou_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    score_threshold: Annotated[float, Meta(ge=0)] = 0.25
    boxes: Literal["corners", "centre"] = "corners"
    """`corners`: left, top, right, bottom; `centre`: middle x, middle y, width, height."""
    scores: Literal["classes_last", "classes_first"] = "classes_last"
    """[1, n, classes] or [1, classes, n]."""
    agnostic: bool = False
    """Boxes of different classes suppress each other, and each box counts with its best class only."""


AnyStep: TypeAlias = (
    Resize | Crop | Colour | Normalise | Layout | Cast | Reshape | Rename
    | Softmax | Sigmoid | TopK | Pool | L2Normalise | Nms
)  # fmt: skip

STEPS: tuple[type[Step], ...] = AnyStep.__args__


def step_names() -> list[str]:
    """Return what `step` can say."""
    return [str(kind.__struct_config__.tag) for kind in STEPS]


def parse_steps(tables: list[dict[str, Any]], where: str, problems: list[Problem]) -> list[AnyStep]:
    """Return the steps of one list of the recipe; what is wrong is added to `problems`."""
    found: list[AnyStep] = []
    for index, table in enumerate(tables):
        try:
            found.append(msgspec.convert(table, AnyStep))
        except msgspec.ValidationError as error:
            known = f": one of {', '.join(step_names())}" if table.get("step") not in step_names() else ""
            problems.append(Problem(f"{where}[{index}]", f"{error}{known}"))
    return found
