"""What the shipped recipes bake into their graphs equals what the models' own code does around them, on real data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgeinfer_tools.audio import read_wav
from edgeinfer_tools.evaluate import label_of
from edgeinfer_tools.fetch import fetch
from edgeinfer_tools.prepare import prepare, requests_of
from edgeinfer_tools.recipe import Recipe, load_recipe
from edgeinfer_tools.sample_files import write_samples
from edgeinfer_tools.samples import Array, Media, decode_inputs
from edgeinfer_tools.session import Runner
from edgeinfer_tools.sources.obtain import obtain
from tests.tools.conftest import MODELS

pytestmark = pytest.mark.slow


def prepared(name: str) -> tuple[Recipe, Path | None, Runner]:
    recipe = load_recipe(MODELS / name)
    source = obtain(recipe)
    made = prepare(recipe, source, requests_of(recipe, data_files(recipe), count=2))
    assert made.notes == []
    return recipe, source.path if source else None, Runner(made.model.SerializeToString(), state=recipe.state)


def data_files(recipe: Recipe) -> Mapping[str, Path]:
    return {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}


@pytest.mark.parametrize(
    ("text", "label", "probability"),
    [
        ("I was charged twice for my invoice", "support_request", 0.9427),
        ("", "other", 0.4013),
        ("Hello, THANKS!", "other", 0.1545),
        ("refund refund", "support_request", 0.9820),
        ("Zürich 2026", "other", 0.4013),
    ],
)
def test_support_intent_weighs_every_word(text: str, label: str, probability: float) -> None:
    recipe, _, runner = prepared("support-intent")
    outputs = runner.run(decode_inputs({"text": Media(text.encode(), "text/plain")}, recipe.inputs))
    assert outputs["probability"][0] == pytest.approx(probability, abs=5e-5)
    assert recipe.classes is not None
    assert label_of(outputs, recipe.classes) == label


def test_silero_gives_what_its_own_code_gives_chunk_by_chunk() -> None:
    recipe, source, runner = prepared("silero-vad")
    assert source is not None
    original = Runner(source)
    samples = read_wav(data_files(recipe)["Front_Center.wav"], sample_rate_hz=16000)
    context, state = np.zeros((1, 64), np.float32), np.zeros((2, 1, 128), np.float32)
    for begin in range(0, len(samples) - 511, 512):
        chunk = samples[np.newaxis, begin : begin + 512]
        joined = np.concatenate([context, chunk], axis=1)
        wanted = original.run({"input": joined, "state": state, "sr": np.array(16000)})
        context, state = chunk[:, -64:], wanted["stateN"]
        assert runner.run({"audio": chunk})["probability"][0] == pytest.approx(wanted["output"][0, 0], abs=1e-6)


def test_silero_tells_speech_from_noise() -> None:
    recipe, _, runner = prepared("silero-vad")

    def highest(name: str) -> float:
        runner.reset()
        samples = read_wav(data_files(recipe)[name], sample_rate_hz=16000)
        chunks = samples[: len(samples) // 512 * 512].reshape(-1, 1, 512)
        return max(float(runner.run({"audio": chunk})["probability"][0]) for chunk in chunks)

    assert highest("Side_Left.wav") > 0.9
    assert highest("Noise.wav") < 0.1


def test_the_text_detector_sees_what_the_bare_one_sees() -> None:
    recipe, source, runner = prepared("pp-ocr-det")
    assert source is not None
    with Image.open(data_files(recipe)["page.png"]) as page:
        frame = np.asarray(page.convert("RGB").resize((512, 384)), np.uint8)
    found = runner.run({"image": frame[np.newaxis]})
    bgr = frame[..., ::-1].astype(np.float32)
    bare: Array = Runner(source).run({"x": ((bgr / 255 - 0.5) / 0.5).transpose(2, 0, 1)[np.newaxis].copy()})[
        "fetch_name_0"
    ]
    np.testing.assert_allclose(found["text_map"][0], bare[0, 0].reshape(48, 8, 64, 8).mean(axis=(1, 3)), atol=1e-3)
    assert found["score"][0] == pytest.approx(bare.max(), abs=1e-3)
    assert found["coverage"][0] == pytest.approx(float((bare >= 0.3).mean()), abs=1e-3)


@pytest.mark.parametrize("size", [(1, 1), (64, 48), (1920, 1080)])
def test_the_text_detector_takes_frames_of_any_size(size: tuple[int, int]) -> None:
    _, _, runner = prepared("pp-ocr-det")
    frame = np.full((1, size[1], size[0], 3), 128, np.uint8)
    found = runner.run({"image": frame})
    assert found["text_map"].shape == (1, 48, 64)
    assert found["score"][0] < 0.3


def test_samples_are_what_the_device_takes(tmp_path: Path) -> None:
    frames = write_samples(MODELS / "pp-ocr-det", tmp_path / "frames")
    assert len(frames) == 48
    recipe = load_recipe(MODELS / "pp-ocr-det")
    decode_inputs({"image": Media(frames[0].read_bytes(), "image/jpeg")}, recipe.inputs)
    (recording,) = write_samples(MODELS / "silero-vad", tmp_path / "audio")
    assert len(read_wav(recording, sample_rate_hz=16000)) > 20 * 16000
