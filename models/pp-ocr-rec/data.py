"""Lines of text with what they say: of a photographed page, and printed onto photographs.

Texts, fonts and photographs of calibration, selection and evaluation are three different sets; the photographed page is
in the evaluation only. Everything is seeded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont

from edgeinfer_tools.samples import Array, Media, Stream

PAGE = {
    "Region-based segmentation": (2, 6, 290, 36),
    "Let us first determine markers of the coins and the": (2, 45, 382, 67),
    "background. These markers are pixels that we can label": (2, 64, 384, 85),
    "unambiguously as either object or background. Here,": (2, 80, 384, 104),
    "the markers are found at the two extreme parts of the": (2, 98, 384, 120),
    "histogram of grey values:": (2, 115, 190, 138),
    ">>> markers = np.zeros_like(coins)": (14, 165, 250, 191),
}
"""What stands where on page.png, as a reader reads it."""


@dataclass(frozen=True, slots=True)
class Print:
    """What printed lines are made of."""

    seed: int
    lines: int
    texts: list[str]
    fonts: list[str]
    scenes: list[str]


CALIBRATION = Print(
    1, 32, ["diabetes.rst", "california_housing.rst"],
    ["DejaVuSans.ttf", "DejaVuSerif-Bold.ttf", "STIXGeneral.ttf", "DejaVuSansMono-Bold.ttf"],
    ["china.jpg", "coffee.png", "astronaut.png", "brick.png"],
)  # fmt: skip
SELECTION = Print(
    2, 24, ["digits.rst"], ["DejaVuSans-Oblique.ttf", "STIXGeneralBol.ttf"], ["chelsea.png", "gravel.png"]
)
EVALUATION = Print(
    3, 48, ["iris.rst", "lfw.rst"],
    ["DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "STIXGeneralItalic.ttf", "DejaVuSansMono.ttf"],
    ["flower.jpg", "rocket.jpg", "camera.png", "grass.png"],
)  # fmt: skip


def calibration(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _printed(files, CALIBRATION)


def selection(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _printed(files, SELECTION)


def evaluation(files: Mapping[str, Path]) -> Iterator[Stream]:
    page = _open(files, "page.png")
    random = np.random.default_rng(EVALUATION.seed)
    for text, box in PAGE.items():
        line = page.crop(box)
        yield _stream(text, line)
        yield _stream(text, _shot(line, random))
    yield from _printed(files, EVALUATION)


def golden(files: Mapping[str, Path]) -> Iterator[Stream]:
    """Lossless, and read with certainty: texts are compared letter by letter on other CPUs."""
    page = _open(files, "page.png")
    for text in list(PAGE)[:2]:
        out = io.BytesIO()
        page.crop(PAGE[text]).save(out, "PNG")
        yield Stream(text, [{"image": Media(out.getvalue(), "image/png")}])


def answer(outputs: Mapping[str, Array]) -> str:
    """Return the text: the model has decoded it already."""
    return "".join(_text(item) for item in outputs["characters"].reshape(-1))


def samples(files: Mapping[str, Path]) -> Iterator[tuple[str, bytes]]:
    page = _open(files, "page.png")
    for index, box in enumerate(PAGE.values()):
        yield f"line-{index}.jpg", _jpeg(page.crop(box))


def _text(item: Any) -> str:
    return item.decode() if isinstance(item, bytes) else str(item)


def _printed(files: Mapping[str, Path], print_: Print) -> Iterator[Stream]:
    """Yield lines of the texts, each on a piece of a photograph, in a font, at a size and an exposure of its own."""
    random = np.random.default_rng(print_.seed)
    texts = [text for name in print_.texts for text in _lines(files[name])]
    for index in range(print_.lines):
        text = texts[index * len(texts) // print_.lines]
        size = int(random.integers(16, 44))
        font = ImageFont.truetype(str(files[print_.fonts[index % len(print_.fonts)]]), size)
        left, top, right, bottom = (int(edge) for edge in font.getbbox(text))
        margin = size // 4
        width, height = right - left + 2 * margin, bottom - top + 2 * margin
        scene = _open(files, print_.scenes[index // 2 % len(print_.scenes)])
        x, y = int(random.integers(0, scene.width // 2)), int(random.integers(0, scene.height // 2))
        ground = scene.crop((x, y, x + width // 4 + 1, y + height // 4 + 1))
        line = Image.blend(ground.resize((width, height)), Image.new("RGB", (width, height), (235, 232, 220)), 0.6)
        ink = tuple(int(value) for value in random.integers(0, 70, 3))
        ImageDraw.Draw(line).text((margin - left, margin - top), text, font=font, fill=ink)
        yield _stream(text, _shot(line, random))


def _lines(path: Path) -> list[str]:
    """Return the lines of a text that make a line of print: 12 to 64 characters, letters most of all."""
    lines = [" ".join(line.split()) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        line
        for line in lines
        if 12 <= len(line) <= 64 and line.isascii() and sum(map(str.isalpha, line)) > 0.7 * len(line)
    ]


def _shot(line: Image.Image, random: np.random.Generator) -> Image.Image:
    """Photograph it with a cheap camera: a little turned, exposed and blurred as it comes."""
    ground = tuple(int(value) for value in np.asarray(line).reshape(-1, 3).mean(axis=0))
    turned = line.rotate(float(random.uniform(-1.2, 1.2)), Image.Resampling.BICUBIC, fillcolor=ground)
    bright = ImageEnhance.Brightness(turned).enhance(float(random.uniform(0.6, 1.2)))
    return bright.filter(ImageFilter.GaussianBlur(float(random.uniform(0.0, 0.8))))


def _stream(text: str, line: Image.Image) -> Stream:
    return Stream(text, [{"image": Media(_jpeg(line), "image/jpeg")}], text)


def _open(files: Mapping[str, Path], name: str) -> Image.Image:
    with Image.open(files[name]) as image:
        return image.convert("RGB")


def _jpeg(line: Image.Image) -> bytes:
    out = io.BytesIO()
    line.save(out, "JPEG", quality=90)
    return out.getvalue()
