"""Camera frames with text in them: photographed pages and printed signs, held into photographed scenes.

Scenes, page halves and words of the evaluation are not those of the calibration. Everything is seeded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont

from edgeinfer_tools.samples import Media, Stream

SIZE = (640, 480)
CALIBRATION_SCENES = ["china.jpg", "coffee.png", "astronaut.png", "motorcycle_left.png", "chelsea.png", "brick.png"]
EVALUATION_SCENES = ["flower.jpg", "rocket.jpg", "camera.png", "gravel.png", "grass.png"]
CALIBRATION_SIGNS = ["PLATFORM 7", "Mind the gap", "Open 9-18", "EXIT"]
EVALUATION_SIGNS = ["Gate B12", "NO PARKING", "Hello Edge 2026", "Caution: wet floor"]
LEFT, RIGHT = (0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)


def calibration(files: Mapping[str, Path]) -> Iterator[Stream]:
    random = np.random.default_rng(1)
    for index in range(18):
        scene = _open(files, CALIBRATION_SCENES[index % len(CALIBRATION_SCENES)])
        sheet = _sheet(files, index, LEFT, CALIBRATION_SIGNS)
        yield _stream(f"calibration-{index}", _compose(scene, sheet, random, share=random.uniform(0.4, 0.9)))
    for name in CALIBRATION_SCENES:
        yield _stream(name, _cover(_open(files, name)))


def evaluation(files: Mapping[str, Path]) -> Iterator[Stream]:
    random = np.random.default_rng(2)
    for index in range(20):
        scene = _open(files, EVALUATION_SCENES[index % len(EVALUATION_SCENES)])
        sheet = _sheet(files, index, RIGHT, EVALUATION_SIGNS)
        yield _stream(f"evaluation-{index}", _compose(scene, sheet, random, share=random.uniform(0.4, 0.9)))
    for name in EVALUATION_SCENES:
        yield _stream(name, _cover(_open(files, name)))


def golden(files: Mapping[str, Path]) -> Iterator[Stream]:
    """Lossless and at the detector's own size: neither JPEG's nor resizing's rounding blurs the comparison."""
    for name, text in (("flower.jpg", "Gate B12"), ("rocket.jpg", "Hello Edge 2026")):
        sign = _sign(text).resize((480, 480 * 100 // 360))
        frame = _cover(_open(files, name))
        frame.paste(sign, (80, 180))
        out = io.BytesIO()
        frame.resize((512, 384), Image.Resampling.BILINEAR).save(out, "PNG")
        yield Stream(name, [{"image": Media(out.getvalue(), "image/png")}])


def samples(files: Mapping[str, Path]) -> Iterator[tuple[str, bytes]]:
    """Frames of a camera before which signs and pages come and go: six scenes, eight frames each."""
    scenes = [*EVALUATION_SCENES, "china.jpg"]
    for index in range(48):
        shot, step = divmod(index, 8)
        random = np.random.default_rng(100 + shot)  # the same place and exposure within a shot
        scene = _open(files, scenes[shot]).convert("RGB")
        margin = scene.width // 10
        scene = scene.crop((margin * step // 8, 0, scene.width - margin + margin * step // 8, scene.height))
        sheet = _sheet(files, shot, RIGHT, EVALUATION_SIGNS)
        frame = _cover(scene) if step in {0, 7} else _compose(scene, sheet, random, share=0.35 + 0.07 * step)
        yield f"frame-{index:03}.jpg", _jpeg(frame)


def _stream(name: str, frame: Image.Image) -> Stream:
    return Stream(name, [{"image": Media(_jpeg(frame), "image/jpeg")}])


def _open(files: Mapping[str, Path], name: str) -> Image.Image:
    with Image.open(files[name]) as image:
        return image.convert("RGB")


def _sheet(
    files: Mapping[str, Path], index: int, part: tuple[float, float, float, float], signs: list[str]
) -> Image.Image:
    """Return half of a photographed page, of photographed handwriting, or a printed sign, in turn."""
    if index % 3 == 2:
        return _sign(signs[index // 3 % len(signs)])
    page = _open(files, ("page.png", "text.png")[index % 3])
    left, top, right, bottom = part
    return page.crop(
        (int(left * page.width), int(top * page.height), int(right * page.width), int(bottom * page.height))
    )


def _sign(text: str) -> Image.Image:
    font = ImageFont.load_default(size=48)
    left, top, right, bottom = (int(edge) for edge in font.getbbox(text))
    sign = Image.new("RGB", (right - left + 60, bottom - top + 60), (236, 232, 214))
    ImageDraw.Draw(sign).text((30 - left, 30 - top), text, font=font, fill=(24, 32, 60))
    return sign


def _compose(scene: Image.Image, sheet: Image.Image, random: np.random.Generator, *, share: float) -> Image.Image:
    """Hold `sheet` into `scene`, a little turned, with the exposure and the blur of a cheap camera."""
    frame = _cover(scene)
    width = int(SIZE[0] * share)
    height = min(int(SIZE[1] * 0.95), max(40, width * sheet.height // sheet.width))
    turned = sheet.resize((width, height), Image.Resampling.BICUBIC).convert("RGBA")
    turned = turned.rotate(float(random.uniform(-8, 8)), Image.Resampling.BICUBIC, expand=True)
    place = tuple(int(random.uniform(0, max(1, SIZE[axis] - turned.size[axis]))) for axis in (0, 1))
    frame.paste(turned, (place[0], place[1]), turned)
    frame = ImageEnhance.Brightness(frame).enhance(float(random.uniform(0.7, 1.25)))
    return frame.filter(ImageFilter.GaussianBlur(float(random.uniform(0.0, 0.8))))


def _cover(scene: Image.Image) -> Image.Image:
    """Scale and crop to the frame's size."""
    scale = max(SIZE[0] / scene.width, SIZE[1] / scene.height)
    grown = scene.resize((round(scene.width * scale), round(scene.height * scale)), Image.Resampling.BILINEAR)
    left, top = (grown.width - SIZE[0]) // 2, (grown.height - SIZE[1]) // 2
    return grown.crop((left, top, left + SIZE[0], top + SIZE[1])).convert("RGB")


def _jpeg(frame: Image.Image) -> bytes:
    out = io.BytesIO()
    frame.save(out, "JPEG", quality=88)
    return out.getvalue()
