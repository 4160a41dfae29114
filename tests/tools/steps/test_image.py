"""Each step on pictures gives what Pillow or plain arithmetic gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.samples import Array
from tests.tools.steps.joined import before

PILLOW = {"linear": Image.Resampling.BILINEAR, "cubic": Image.Resampling.BICUBIC, "nearest": Image.Resampling.NEAREST}


def photo(height: int, width: int) -> Image.Image:
    """A picture with slopes and edges, as photographs have them."""
    noise = np.random.default_rng(0).integers(0, 256, (max(height // 12, 2), max(width // 12, 2), 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def apart(found: Array, wanted: Array) -> tuple[float, float]:
    assert found.shape == wanted.shape
    difference = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
    return float(difference.max()), float(difference.mean())


def batch(image: Image.Image) -> Array:
    return np.asarray(image)[np.newaxis]


@pytest.mark.parametrize("size", [(100, 150), (96, 96), (500, 700), (40, 301)])
@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
def test_resizing_with_antialias_is_pillows(size: tuple[int, int], interpolation: str) -> None:
    image = photo(300, 450)
    step = {"step": "resize", "size": list(size), "antialias": True, "interpolation": interpolation}
    found = before([step], batch(image), [1, *size, 3])
    largest, mean = apart(found, batch(image.resize(size[::-1], PILLOW[interpolation])))
    assert (largest <= 4, mean < 0.05) == (True, True)  # whole steps of 255: both round between two passes


@pytest.mark.parametrize("size", [(100, 150), (128, 128), (600, 900)])
def test_nearest_is_pillows(size: tuple[int, int]) -> None:
    image = photo(300, 450)
    found = before([{"step": "resize", "size": list(size), "interpolation": "nearest"}], batch(image), [1, *size, 3])
    assert apart(found, batch(image.resize(size[::-1], PILLOW["nearest"])))[0] == 0


def sampled(image: Array, size: tuple[int, int]) -> Array:
    """Interpolate linearly at pixel centres, as OpenCV: the reference, one axis after the other."""
    for axis, target in enumerate(size):
        length = image.shape[axis]
        centre = (np.arange(target) + 0.5) * length / target - 0.5
        start = np.floor(centre).astype(int)
        total = np.zeros((*image.shape[:axis], target, *image.shape[axis + 1 :]))
        for tap in range(2):
            weight = np.clip(1 - np.abs(centre - (start + tap)), 0, None)
            taken = np.take(image.astype(np.float64), np.clip(start + tap, 0, length - 1), axis)
            total += taken * weight.reshape([-1 if index == axis else 1 for index in range(image.ndim)])
        image = total
    return image


@pytest.mark.parametrize("size", [(100, 150), (400, 500)])
def test_resizing_without_antialias_is_sampling(size: tuple[int, int]) -> None:
    image = batch(photo(200, 260))
    step = {"step": "resize", "size": list(size)}
    wanted = sampled(image[0], size)[np.newaxis]
    assert apart(before([step], image, [1, *size, 3]), wanted)[0] < 1.05  # fractions are cut off
    assert apart(before([step], image.astype(np.float32), [1, *size, 3]), wanted)[0] < 0.01


@pytest.mark.parametrize("shape", [(300, 450), (450, 300), (90, 1200), (224, 224), (3, 5)])
@pytest.mark.parametrize("place", ["centre", "corner"])
def test_a_letterbox_holds_the_whole_picture_and_fills_the_rest(shape: tuple[int, int], place: str) -> None:
    image = photo(*shape)
    step = {"step": "resize", "size": [128, 192], "fit": "letterbox", "antialias": True, "fill": 99, "place": place}
    scale = min(128 / shape[0], 192 / shape[1])
    height, width = (max(1, int(dim * scale + 0.5)) for dim in shape)
    wanted = np.full((128, 192, 3), 99, np.uint8)
    top, left = ((128 - height) // 2, (192 - width) // 2) if place == "centre" else (0, 0)
    wanted[top : top + height, left : left + width] = np.asarray(image.resize((width, height), PILLOW["linear"]))
    largest, mean = apart(before([step], batch(image), [1, 128, 192, 3]), wanted[np.newaxis])
    assert (largest <= 4, mean < 0.05) == (True, True)


def test_covering_and_cropping_is_what_classifiers_are_evaluated_with() -> None:
    image = photo(300, 450)
    resized = image.resize((384, 256), PILLOW["linear"])
    wanted = np.asarray(resized.crop((80, 16, 304, 240)))
    steps: list[dict[str, Any]] = [
        {"step": "resize", "size": [256, 256], "fit": "cover", "antialias": True},
        {"step": "crop", "size": [224, 224]},
        {"step": "layout", "to": "nchw"},
        {"step": "normalise", "scale": 1 / 255, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    ]
    reference = (wanted / 255.0 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    found = before(steps, batch(image), [1, 3, 224, 224])
    largest, mean = apart(found, reference.transpose(2, 0, 1)[np.newaxis])
    assert (largest < 4 / 255 / 0.22, mean < 0.001) == (True, True)


@pytest.mark.parametrize("channels_first", [False, True])
def test_normalising_and_colours_are_exact(channels_first: bool) -> None:
    image = batch(photo(20, 30))
    steps: list[dict[str, Any]] = [{"step": "layout", "to": "nchw"}] if channels_first else []
    steps += [{"step": "colour", "order": "bgr"}, {"step": "normalise", "mean": [127, 126, 125], "std": [128, 2, 4]}]
    wanted = (image[..., ::-1].astype(np.float64) - [127, 126, 125]) / [128, 2, 4]
    shape = [1, 3, 20, 30] if channels_first else [1, 20, 30, 3]
    found = before(steps, image, shape, dynamic=False)
    assert apart(found, wanted.transpose(0, 3, 1, 2) if channels_first else wanted)[0] < 1e-4


def test_grey_is_pillows() -> None:
    image = photo(20, 30)
    found = before([{"step": "colour", "order": "grey"}], batch(image), [1, 20, 30, 1], dynamic=False)
    assert apart(found[..., 0], np.asarray(image.convert("L"))[np.newaxis])[0] <= 1


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"step": "normalise", "mean": [1, 2]}, r"'image' has 3 channels, the step 2"),
        ({"step": "normalise", "std": [0]}, "std is 0"),
        ({"step": "resize", "size": [8, 8], "interpolation": "cubic"}, "cubic needs antialias = true"),
        ({"step": "crop", "size": [64, 64]}, r"\[64, 64\] cannot be cut out of a picture of \[1, 20, 30, 3\]"),
    ],
)
def test_what_does_not_fit_the_picture_is_refused(step: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelRefused, match=words):
        before([step], batch(photo(20, 30)), [1, 20, 30, 3], dynamic=False)


def test_what_is_no_picture_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"has shape \[1, 20, 30, 7\], which is no picture"):
        before([{"step": "resize", "size": [8, 8]}], np.zeros((1, 20, 30, 7), np.uint8), [1, 8, 8, 7], dynamic=False)
