"""Photographs, whole and in cuts; no photograph serves two of calibration, selection and evaluation."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image

from edgeinfer_tools.samples import Media, Stream

CALIBRATION = [
    "cheetah2.jpg",
    "china.jpg",
    "grace_hopper.jpg",
    "motorcycle_left.png",
    "coins.png",
    "grass.png",
    "ihc.png",
]
SELECTION = {"cheetah1.jpg": "cheetah", "camera.png": "", "motorcycle_right.png": "", "hubble_deep_field.jpg": ""}
EVALUATION = {
    "cheetah.jpg": "cheetah",
    "lion.jpg": "lion",
    "chelsea.png": "tabby",
    "coffee.png": "espresso",
    "rocket.jpg": "missile",
    "astronaut.png": "",
    "flower.jpg": "",
    "tower.jpg": "",
}
"""Photographs and the class that a reader would give them, where the thousand have one."""
CUTS = {
    "whole": (0.0, 0.0, 1.0, 1.0),
    "middle": (0.15, 0.15, 0.85, 0.85),
    "upper left": (0.0, 0.0, 0.75, 0.75),
    "upper right": (0.25, 0.0, 1.0, 0.75),
    "lower left": (0.0, 0.25, 0.75, 1.0),
    "lower right": (0.25, 0.25, 1.0, 1.0),
}
LABELLED = ("whole", "middle")
"""Cuts that certainly show what the photograph shows."""


def calibration(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, dict.fromkeys(CALIBRATION, ""))


def selection(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, SELECTION)


def evaluation(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, EVALUATION)


def golden(files: Mapping[str, Path]) -> Iterator[Stream]:
    """Lossless and at the network's own size: neither JPEG's nor resizing's rounding blurs the comparison."""
    for name in ("cheetah.jpg", "lion.jpg", "coffee.png"):
        photo = _open(files, name)
        edge = min(photo.size)
        left, top = (photo.width - edge) // 2, (photo.height - edge) // 2
        out = io.BytesIO()
        photo.crop((left, top, left + edge, top + edge)).resize((256, 256)).save(out, "PNG")
        yield Stream(name, [{"image": Media(out.getvalue(), "image/png")}])


def samples(files: Mapping[str, Path]) -> Iterator[tuple[str, bytes]]:
    for index, name in enumerate(EVALUATION):
        yield f"photo-{index}.jpg", _jpeg(_open(files, name))


def _streams(files: Mapping[str, Path], photos: Mapping[str, str]) -> Iterator[Stream]:
    for name, label in photos.items():
        photo = _open(files, name)
        for cut, (left, top, right, bottom) in CUTS.items():
            piece = photo.crop(
                (int(left * photo.width), int(top * photo.height), int(right * photo.width), int(bottom * photo.height))
            )
            request = {"image": Media(_jpeg(piece), "image/jpeg")}
            yield Stream(f"{name} {cut}", [request], label if cut in LABELLED else "")


def _open(files: Mapping[str, Path], name: str) -> Image.Image:
    with Image.open(files[name]) as image:
        return image.convert("RGB")


def _jpeg(photo: Image.Image) -> bytes:
    out = io.BytesIO()
    photo.save(out, "JPEG", quality=92)
    return out.getvalue()
