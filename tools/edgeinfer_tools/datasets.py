"""Read data that already lie in files as streams: folders of pictures, recordings or arrays, npz and jsonl files.

One sample at a time, whatever the size of the whole. What a sample must look like is the contract's business
(`samples.decode_inputs`, `calibration`); here files become requests, and faults name the file.
"""

from __future__ import annotations

import io
import json
import mimetypes
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer_tools.audio import read_wav
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.samples import NUMPY_TYPES, Array, Inputs, Media, Stream

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
LABEL, TRUTH = "label", "truth"
"""Keys beside the inputs, in npz and jsonl."""


def read_streams(path: Path, inputs: list[TensorSpec]) -> Iterator[Stream]:
    """Yield one stream per sample, in the order of file names or lines.

    Raises:
        DataRefused: there is nothing to read, or a file cannot be read; it is named.
    """
    if path.suffix == ".npz" and path.is_file():
        yield from _npz_rows(path, inputs)
    elif path.suffix == ".jsonl" and path.is_file():
        yield from _lines(path, inputs)
    elif path.is_dir():
        yield from _folder(path, inputs)
    else:
        raise DataRefused(f"{path} is no folder, no .npz and no .jsonl file; one of these can be read")


def _folder(folder: Path, inputs: list[TensorSpec]) -> Iterator[Stream]:
    kinds = {*PICTURES, ".wav", ".npy", ".npz"}
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in kinds and path.is_file()]
    if not files:
        raise DataRefused(f"{folder} holds no pictures, no .wav, no .npy and no .npz files")
    found = {".picture" if path.suffix.lower() in PICTURES else path.suffix.lower() for path in files}
    if len(found) > 1:
        raise DataRefused(f"{folder} mixes {', '.join(sorted(found))} files; keep one kind in a folder")
    for path in files:
        label = path.parent.name if path.parent != folder else ""
        name = str(path.relative_to(folder))
        if path.suffix == ".npz":
            yield _npz_sample(path, inputs, name, label)
        else:
            spec = _only(inputs, path)
            yield Stream(name, [{spec.name: _value(path, spec)}], label)


def _only(inputs: list[TensorSpec], path: Path) -> TensorSpec:
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise DataRefused(f"{path.name} is one value, the model takes {names}; use .npz or .jsonl, which name inputs")
    return inputs[0]


def _value(path: Path, spec: TensorSpec) -> Array | Media:
    """Return a file's content as the input takes it: encoded where the device decodes it, else as an array.

    Raises:
        DataRefused: it cannot be read, or the input takes nothing like it.
    """
    kind = path.suffix.lower()
    try:
        if kind == ".npy":
            return np.asarray(np.load(path, allow_pickle=False))
        if spec.decode is not None and kind in {".bmp", ".webp"}:
            return _as_png(path)  # devices decode JPEG and PNG
        if spec.decode is not None:
            content_type = "audio/wav" if kind == ".wav" else mimetypes.guess_type(path.name)[0]
            return Media(path.read_bytes(), content_type or "application/octet-stream")
        if kind == ".wav":
            return _recording(path, spec)
        if kind in PICTURES:
            return _picture(path, spec)
    except (OSError, ValueError, EOFError) as error:
        raise DataRefused(f"{path}: {error}") from error
    raise DataRefused(f"{path}: input {spec.name!r} takes no {kind or 'such'} files")


def _as_png(path: Path) -> Media:
    from PIL import Image

    out = io.BytesIO()
    with Image.open(path) as image:
        image.convert("RGB").save(out, "PNG")
    return Media(out.getvalue(), "image/png")


def _recording(path: Path, spec: TensorSpec) -> Array:
    """Return samples at the file's own rate, in the input's shape."""
    import wave

    with wave.open(str(path), "rb") as file:
        rate = file.getframerate()
    samples = read_wav(path, sample_rate_hz=rate)
    return samples.reshape([1] * (len(spec.shape) - 1) + [-1])


def _picture(path: Path, spec: TensorSpec) -> Array:
    """Return a picture's pixels for an input that declares no decoding: [1, H, W, 3] of UINT8."""
    from PIL import Image

    if spec.datatype != "UINT8" or len(spec.shape) != 4:
        raise DataRefused(
            f"{path.name} is a picture, and input {spec.name!r} is {spec.datatype} {spec.shape}: bake resizing and "
            'normalisation into the graph and declare decode = { kind = "image" }, or prepare arrays'
        )
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))[np.newaxis]


def _npz_sample(path: Path, inputs: list[TensorSpec], name: str, label: str) -> Stream:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            values = {key: _text(arrays[key]) for key in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataRefused(f"{path}: {error}") from error
    return _stream(name, values, inputs, label)


def _stream(name: str, values: Mapping[str, Any], inputs: list[TensorSpec], label: str) -> Stream:
    """Return a stream of one request; keys that are no inputs are refused later, by name."""
    truth = values.get(TRUTH)
    told = values.get(LABEL, label)
    told = told.item() if isinstance(told, np.ndarray) and told.size == 1 else told
    wanted = {spec.name for spec in inputs}
    request: Inputs = {key: value for key, value in values.items() if key in wanted or key not in {LABEL, TRUTH}}
    return Stream(name, [request], str(told), truth)


def _text(array: Array) -> Array:
    """Return text as the objects that BYTES inputs take."""
    return array.astype(object) if array.dtype.kind in "US" else array


def _npz_rows(path: Path, inputs: list[TensorSpec]) -> Iterator[Stream]:
    """Yield the rows of an npz file whose arrays count samples in their first axis, without loading an array.

    A row is given the batch axis back: row i of [N, 3, 8] is [1, 3, 8], unless the input has one axis less.
    """
    ranks = {spec.name: len(spec.shape) for spec in inputs}
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            rows = {name: _rows(archive.open(f"{name}.npy"), name) for name in names}
            count = 0
            while True:
                values = {name: next(row, None) for name, row in rows.items()}
                ended = sorted(name for name, value in values.items() if value is None)
                if ended:
                    if len(ended) < len(values):
                        raise DataRefused(f"{path}: {', '.join(ended)} end after {count} samples, the others go on")
                    break
                shaped = {
                    name: value[np.newaxis] if value is not None and value.ndim < ranks.get(name, 0) else value
                    for name, value in values.items()
                }
                yield _stream(f"{path.name}[{count}]", shaped, inputs, "")
                count += 1
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataRefused(f"{path}: {error}") from error
    if count == 0:
        raise DataRefused(f"{path} holds no sample")


def _rows(file: IO[bytes], name: str) -> Iterator[Array]:
    """Yield an .npy file's rows as they are read."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, in_columns, dtype = read(file)
    if not shape or dtype.hasobject or (in_columns and len(shape) > 1):
        raise DataRefused(f"array {name!r} of shape {shape} and type {dtype} has no rows that can be read one by one")
    size = int(np.prod(shape[1:])) * dtype.itemsize
    for _ in range(shape[0]):
        data = file.read(size)
        if len(data) < size:
            raise DataRefused(f"array {name!r} ends early")
        yield _text(np.frombuffer(data, dtype).reshape(shape[1:]).copy())


def _lines(path: Path, inputs: list[TensorSpec]) -> Iterator[Stream]:
    specs = {spec.name: spec for spec in inputs}
    count = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                raise DataRefused(f"{path} line {number}: {error}") from error
            if not isinstance(values, dict):
                raise DataRefused(f"{path} line {number}: is no object with inputs by name")
            for name in values.keys() & specs.keys():
                values[name] = _json_value(values[name], specs[name], path, number)
            count += 1
            yield _stream(f"{path.name}:{number}", values, inputs, "")
    if count == 0:
        raise DataRefused(f"{path} holds no sample")


def _json_value(value: Any, spec: TensorSpec, path: Path, number: int) -> Array | Media:
    """Return text for what is decoded from text, a file's content for a path, and an array for the rest."""
    if isinstance(value, str):
        if spec.decode is not None and spec.decode.kind == "words":
            return Media(value.encode(), "text/plain")
        file = path.parent / value
        if spec.datatype != "BYTES" and file.suffix:
            if not file.is_file():
                raise DataRefused(f"{path} line {number}: input {spec.name!r}: no file {file}")
            return _value(file, spec)
    try:
        array = np.asarray(value, dtype=NUMPY_TYPES[spec.datatype])
    except (TypeError, ValueError) as error:
        raise DataRefused(f"{path} line {number}: input {spec.name!r} is {spec.datatype}: {error}") from error
    return array[np.newaxis] if array.ndim == len(spec.shape) - 1 else array
