"""Find out how a bare model could be fed: a concrete shape for each input, and tensors from whatever a source gives.

A bare model has no contract, so all of this is a guess that is told. Images are resized to the model's size and
scaled to 0..1 where it takes floats; normalisation is the model's own affair. Nothing here is fast: only what happens
inside the worker is measured.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import math
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeinfer import oip
from edgeinfer.artifact.manifest import Decode, TensorSpec
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.errors import ConfigError, EdgeInferError, Problem, SessionError, mib
from edgeinfer.pipeline.frame import Frame
from edgeinfer.request import Payload
from edgeinfer.worker.messages import GraphTensor

LARGEST_PICTURE = (1, 2160, 3840, 3)
"""For images that the worker decodes as they are."""
ASSUMED_SIDE = 224
ASSUMED_SAMPLES = 512
ASSUMED_TOKENS = 32
ASSUMED_OTHER = 1
"""For dimensions that the model leaves open and nobody said."""
_PACK = {"FP16": "e", "FP32": "f", "FP64": "d", "BOOL": "?", "INT8": "b", "UINT8": "B", "INT16": "h", "UINT16": "H",
         "INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q"}  # fmt: skip
_RANDOM_ELEMENTS = 1 << 16
"""So many are made; larger inputs repeat them."""
_FLOATS = frozenset({"FP16", "FP32", "FP64"})
_TEXT = oip.bytes_element(b"a")
_KNOWN_PICTURES = 4
"""Kept as tensors, for files that come again and again; 640 x 640 in floats has 5 MB."""


class InputsTooLarge(EdgeInferError):
    """The inputs would take more memory than there is for a trial; nothing was made."""

    exit_code = 75  # EX_TEMPFAIL


@dataclass(frozen=True, slots=True)
class Picture:
    """How an input takes images."""

    height: int
    width: int
    channels: int
    channels_first: bool


def concrete_shape(tensor: GraphTensor, given: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the shape to try an input with: as given, else the model's own with its open dimensions assumed.

    Raises:
        ConfigError: what was given does not fit the model.
    """
    asked = given.get(tensor.name)
    if asked is not None:
        fits = len(asked) == len(tensor.shape) and all(
            want in {-1, dim} for dim, want in zip(asked, tensor.shape, strict=True)
        )
        if not fits:
            problem = Problem(f"--shape {tensor.name}", f"{list(asked)} does not fit the model's {tensor.shape}")
            raise ConfigError("edgeinfer try", (problem,))
        return list(asked)
    rank, assumed = len(tensor.shape), ASSUMED_OTHER
    if rank == 4:
        assumed = ASSUMED_SIDE
    elif rank == 2:
        assumed = ASSUMED_SAMPLES if tensor.datatype in _FLOATS else ASSUMED_TOKENS
    shape = [assumed if dim == -1 else dim for dim in tensor.shape]
    if tensor.shape[:1] == [-1] and rank > 1:
        shape[0] = 1  # the batch
    if rank == 4 and tensor.shape[1] == -1 and tensor.shape[3] != 3:
        shape[1] = 3
    return shape


def require_room(tensors: Sequence[GraphTensor], shapes: Mapping[str, Sequence[int]], most_bytes: int) -> None:
    """Refuse inputs that have more than `most_bytes` altogether, before any of them is made.

    Raises:
        InputsTooLarge: with the largest of them.
    """
    sizes = {
        tensor.name: math.prod(shapes[tensor.name]) * ITEM_BYTES.get(tensor.datatype, len(_TEXT)) for tensor in tensors
    }
    if (needed_bytes := sum(sizes.values())) <= most_bytes:
        return
    largest = max(tensors, key=lambda tensor: sizes[tensor.name])
    raise InputsTooLarge(
        f"one request has {mib(needed_bytes)} of inputs, most of it {largest.name} {largest.datatype} "
        f"{list(shapes[largest.name])}; at most {mib(most_bytes)} are tried here, by the memory that is free: give "
        f"open dimensions by --shape {largest.name}=…, or free memory"
    )


def picture_of(shape: Sequence[int]) -> Picture | None:
    """Return how an input of this shape takes one image, None when it takes none."""
    if len(shape) != 4 or shape[0] != 1:
        return None
    if shape[3] in {1, 3}:
        return Picture(shape[1], shape[2], shape[3], channels_first=False)
    if shape[1] in {1, 3}:
        return Picture(shape[2], shape[3], shape[1], channels_first=True)
    return None


def takes_pictures(tensor: GraphTensor, shape: Sequence[int]) -> bool:
    """Return whether an input of this shape can be an image."""
    return tensor.datatype in {"UINT8", *_FLOATS} and picture_of(shape) is not None


def takes_sound(tensor: GraphTensor) -> bool:
    """Return whether an input can be a chunk of samples."""
    return tensor.datatype == "FP32" and len(tensor.shape) in {1, 2} and tensor.shape[-1] not in range(1, 17)


def contract(tensor: GraphTensor, shape: Sequence[int], *, decoded: bool = False) -> TensorSpec:
    """Return the contract of an input or output that is at most of this shape.

    `decoded`: images for it may stay encoded, the worker decodes them. NaN and infinity pass: finding them is our part.
    """
    return TensorSpec(
        name=tensor.name,
        datatype=tensor.datatype,
        shape=list(tensor.shape),
        max_shape=list(shape) if -1 in tensor.shape else [],
        decode=Decode("image") if decoded else None,
        allow_non_finite=True,
    )


class Feeder:
    """Makes requests: frames of a source for the main input, and fixed values for all others."""

    def __init__(
        self,
        tensors: Sequence[GraphTensor],
        shapes: Mapping[str, Sequence[int]],
        *,
        main: str,
        fills: Mapping[str, float],
        decoded: bool,
    ) -> None:
        self._main = next((tensor for tensor in tensors if tensor.name == main), None)
        self._shapes = shapes
        self._decoded = decoded
        dice = random.Random(0)  # noqa: S311 - the same inputs each time
        self._others = [
            (
                tensor.name,
                tensor.datatype,
                list(shapes[tensor.name]),
                _raw(tensor, shapes[tensor.name], dice, fills.get(tensor.name), zeros=bool(main)),
            )
            for tensor in tensors
            if tensor.name != main
        ]
        self._known: dict[str, bytes] = {}

    async def request(self, frame: Frame | None) -> Payload:
        """Return the request for a frame; None when every input has its value already.

        Raises:
            SessionError: `input_invalid`: the frame cannot be made into the model's input.
        """
        if self._main is None or frame is None:
            return oip.encode_request(self._others)
        name, shape = self._main.name, list(self._shapes[self._main.name])
        if self._decoded:
            raw = oip.bytes_element(frame.data)
            inputs = [(name, "BYTES", [1], raw), *self._others]
            return oip.encode_request(inputs, content_types={name: frame.content_type})
        return oip.encode_request([(name, self._main.datatype, shape, await self._tensor(frame, shape)), *self._others])

    async def _tensor(self, frame: Frame, shape: list[int]) -> bytes:
        assert self._main is not None
        needed = math.prod(shape) * ITEM_BYTES[self._main.datatype]
        if not frame.content_type.startswith("image/"):
            if len(frame.data) != needed:
                raise SessionError(
                    "input_invalid",
                    f"{frame.name} has {len(frame.data)} bytes; input {self._main.name!r}, "
                    f"{self._main.datatype} {shape}, takes {needed}",
                )
            return frame.data
        picture = picture_of(shape)
        assert picture is not None, "images are only taken for inputs that take some"
        if frame.name not in self._known:
            if len(self._known) >= _KNOWN_PICTURES:
                self._known.clear()
            pixels = await _pixels(frame, picture)
            self._known[frame.name] = _as_input(pixels, picture, self._main.datatype)
        return self._known[frame.name]


async def _pixels(frame: Frame, picture: Picture) -> bytes:
    """Return an encoded image as 8-bit pixels of the model's size, by ffmpeg."""
    kind = "rgb24" if picture.channels == 3 else "gray"
    argv = ["ffmpeg", "-hide_banner", "-loglevel", "error", "-i", "pipe:0", "-frames:v", "1"]
    argv += ["-vf", f"scale={picture.width}:{picture.height}", "-pix_fmt", kind, "-f", "rawvideo", "pipe:1"]
    try:
        child = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except FileNotFoundError as error:
        raise SessionError(
            "input_invalid", "images for this model have to be resized by ffmpeg: apt-get install ffmpeg"
        ) from error
    pixels, said = await child.communicate(frame.data)
    if len(pixels) != picture.width * picture.height * picture.channels:
        words = said.decode("utf-8", "replace").strip().splitlines() or ["nothing came out"]
        raise SessionError("input_invalid", f"{frame.name} is not a readable image: {words[-1]}")
    return pixels


def _as_input(pixels: bytes, picture: Picture, datatype: str) -> bytes:
    if picture.channels_first and picture.channels == 3:
        pixels = b"".join(pixels[channel::3] for channel in range(3))
    if datatype == "UINT8":
        return pixels
    scale = [value / 255 for value in range(256)] if datatype in _FLOATS else list(range(256))
    return _packed(datatype, [scale[value] for value in pixels])


def _raw(tensor: GraphTensor, shape: Sequence[int], dice: random.Random, fill: float | None, *, zeros: bool) -> bytes:
    """Return the bytes of an input that no frame is for: filled, zeros beside a frame, else random."""
    count = math.prod(shape)
    if tensor.datatype == "BYTES":
        return _TEXT * count
    if tensor.datatype not in _PACK:
        raise SessionError("model_unsupported", f"input {tensor.name!r} is {tensor.datatype or 'no tensor'}")
    if fill is not None:
        try:
            return _packed(tensor.datatype, [fill if tensor.datatype in _FLOATS else int(fill)]) * count
        except (ValueError, OverflowError, struct.error) as error:
            problem = Problem(f"--fill {tensor.name}", f"{fill:g} is no {tensor.datatype}")
            raise ConfigError("edgeinfer try", (problem,)) from error
    if zeros:
        return bytes(count * ITEM_BYTES[tensor.datatype])
    made = min(count, _RANDOM_ELEMENTS)
    if tensor.datatype in _FLOATS:
        block = _packed(tensor.datatype, [dice.random() for _ in range(made)])
    else:  # as indices, they are small enough
        block = _packed(tensor.datatype, [dice.randrange(2) for _ in range(made)])
    needed_bytes = count * ITEM_BYTES[tensor.datatype]
    return (block * math.ceil(count / max(1, made)))[:needed_bytes]


def _packed(datatype: str, values: Sequence[float]) -> bytes:
    code = _PACK[datatype]
    if code in "e?" or sys.byteorder == "big":
        return struct.pack(f"<{len(values)}{code}", *values)
    return array.array(code, values).tobytes()


def carried_state(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], main: str
) -> list[tuple[TensorSpec, TensorSpec]]:
    """Return pairs of input and output that look like a state: the same type and shape, and only one such pair."""
    pairs = [
        (given, kept)
        for given, kept in itertools.product(inputs, outputs)
        if given.name != main and (given.datatype, given.bound) == (kept.datatype, kept.bound) and len(given.shape) > 1
    ]
    names = [spec.name for pair in pairs for spec in pair]
    return [pair for pair in pairs if names.count(pair[0].name) == names.count(pair[1].name) == 1]
