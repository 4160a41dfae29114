"""Files become requests as the model takes them, one at a time, and a file that cannot is named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgeinfer.artifact.manifest import Decode, TensorSpec
from edgeinfer_tools.audio import write_wav
from edgeinfer_tools.datasets import read_streams
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.samples import Array, Stream, decode_inputs

PICTURE = TensorSpec(
    name="image", datatype="UINT8", shape=[1, -1, -1, 3], max_shape=[1, 64, 64, 3], decode=Decode(kind="image")
)
SOUND = TensorSpec(
    name="audio", datatype="FP32", shape=[1, -1], max_shape=[1, 999], decode=Decode(kind="audio", sample_rate_hz=8000)
)
VECTOR = TensorSpec(name="x", datatype="FP32", shape=[1, 4])
IDS = TensorSpec(name="ids", datatype="INT64", shape=[1, -1], max_shape=[1, 8])


def tensors(stream: Stream, *specs: TensorSpec) -> dict[str, Array]:
    (request,) = stream.requests
    return decode_inputs(request, list(specs))


def draw(path: Path, colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), colour).save(path)


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "webp"])
def test_pictures_in_folders_are_labelled_by_them(tmp_path: Path, ending: str) -> None:
    draw(tmp_path / "red" / f"a.{ending}", (255, 0, 0))
    draw(tmp_path / "blue" / f"b.{ending}", (0, 0, 255))
    (tmp_path / "notes.txt").write_text("not a sample")
    found = list(read_streams(tmp_path, [PICTURE]))
    assert [stream.label for stream in found] == ["blue", "red"]
    array = tensors(found[1], PICTURE)["image"]
    assert array.shape == (1, 6, 8, 3)
    assert array[..., 0].min() > 200
    assert array[..., 2].max() < 50


def test_a_picture_for_an_input_that_wants_numbers_says_what_to_do(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", (1, 2, 3))
    with pytest.raises(DataRefused, match=r"a\.png is a picture, and input 'x' is FP32 .*bake resizing"):
        list(read_streams(tmp_path, [VECTOR]))
    plain = TensorSpec(name="image", datatype="UINT8", shape=[1, 6, 8, 3])
    (stream,) = read_streams(tmp_path, [plain])
    assert tensors(stream, plain)["image"].shape == (1, 6, 8, 3)


def test_recordings(tmp_path: Path) -> None:
    samples = np.linspace(-0.5, 0.5, 100, dtype=np.float32)
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech" / "a.wav").write_bytes(write_wav(samples, sample_rate_hz=8000))
    (stream,) = read_streams(tmp_path, [SOUND])
    assert stream.label == "speech"
    assert np.allclose(tensors(stream, SOUND)["audio"][0], samples, atol=1e-4)
    raw = TensorSpec(name="audio", datatype="FP32", shape=[1, 100])
    (stream,) = read_streams(tmp_path, [raw])
    assert np.allclose(tensors(stream, raw)["audio"][0], samples, atol=1e-4)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["plain", "compressed"])
def test_rows_of_an_npz_get_their_batch_axis_back(tmp_path: Path, save: object) -> None:
    rows, ids = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(6).reshape(3, 2)
    save(tmp_path / "d.npz", x=rows, ids=ids, label=np.array(["a", "bb", "a"]))  # type: ignore[operator]
    found = list(read_streams(tmp_path / "d.npz", [VECTOR, IDS]))
    assert [stream.label for stream in found] == ["a", "bb", "a"]
    second = tensors(found[1], VECTOR, IDS)
    assert second["x"].tolist() == [[4, 5, 6, 7]]
    assert second["ids"].tolist() == [[2, 3]]


def test_an_npz_is_read_row_by_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "big.npz", x=np.ones((50_000, 64), np.float32))  # 12.8 MB
    wide = TensorSpec(name="x", datatype="FP32", shape=[1, 64])
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_streams(tmp_path / "big.npz", [wide]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 50_000
    assert peak < 2 << 20


def test_arrays_in_folders(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    np.save(tmp_path / "up" / "1.npy", np.ones((1, 4), np.float32))
    np.save(tmp_path / "2.npy", np.zeros((1, 4), np.float32))
    found = list(read_streams(tmp_path, [VECTOR]))
    assert sorted(stream.label for stream in found) == ["", "up"]
    with pytest.raises(DataRefused, match=r"2\.npy is one value, the model takes x, ids; use \.npz or \.jsonl"):
        list(read_streams(tmp_path, [VECTOR, IDS]))
    more = tmp_path / "more"
    more.mkdir()
    np.savez(more / "1.npz", x=np.ones((1, 4), np.float32), ids=np.array([[1]]), label="down")
    (stream,) = read_streams(more, [VECTOR, IDS])
    assert stream.label == "down"
    assert tensors(stream, VECTOR, IDS)["ids"].tolist() == [[1]]


def test_lines_of_json_hold_numbers_text_and_names_of_files(tmp_path: Path) -> None:
    words = TensorSpec(
        name="text", datatype="BYTES", shape=[-1], max_shape=[9], decode=Decode(kind="words", pattern="[a-z]+")
    )
    draw(tmp_path / "a.png", (9, 9, 9))
    lines = [{"x": [1, 2, 3, 4], "text": "hello edge", "image": "a.png", "label": "yes", "truth": [7, 8]}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (stream,) = read_streams(tmp_path / "d.jsonl", [VECTOR, words, PICTURE])
    found = tensors(stream, VECTOR, words, PICTURE)
    assert (stream.label, stream.truth) == ("yes", [7, 8])
    assert found["x"].tolist() == [[1, 2, 3, 4]]
    assert [bytes(item) if isinstance(item, bytes) else item.encode() for item in found["text"]] == [b"hello", b"edge"]
    assert found["image"].shape == (1, 6, 8, 3)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"d\.jsonl line 1: "),
        ("[1]", r"d\.jsonl line 1: is no object"),
        ('{"x": "gone.npy"}', r"d\.jsonl line 1: input 'x': no file"),
        ('{"x": ["a", "b"]}', r"d\.jsonl line 1: input 'x' is FP32"),
        ("\n", r"d\.jsonl holds no sample"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(DataRefused, match=words):
        list(read_streams(tmp_path / "d.jsonl", [VECTOR]))


def test_a_wrong_name_is_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", pixels=np.ones((2, 4), np.float32))
    (stream, *_) = read_streams(tmp_path / "d.npz", [VECTOR])
    with pytest.raises(DataRefused, match="inputs pixels; the contract has x"):
        tensors(stream, VECTOR)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match="is no folder, no"):
        list(read_streams(tmp_path / "gone", [VECTOR]))
    with pytest.raises(DataRefused, match="holds no pictures"):
        list(read_streams(tmp_path, [VECTOR]))
    (tmp_path / "a.npy").write_bytes(b"nonsense")
    with pytest.raises(DataRefused, match=r"a\.npy: "):
        list(read_streams(tmp_path, [VECTOR]))
    np.savez(tmp_path / "uneven.npz", x=np.ones((3, 4), np.float32), ids=np.ones((2, 1), np.int64))
    with pytest.raises(DataRefused, match="ids end after 2 samples, the others go on"):
        list(read_streams(tmp_path / "uneven.npz", [VECTOR, IDS]))
    with pytest.raises(DataRefused, match=r"mixes \.npy, \.npz files"):
        list(read_streams(tmp_path, [VECTOR]))
