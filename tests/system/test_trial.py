"""`edgeinfer try`: real models in real workers, fed from what people have at hand."""

from __future__ import annotations

import array
import asyncio
import io
import json
import os
import subprocess
import sys
import tomllib
import wave
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto
from PIL import Image

from edgeinfer import oip
from edgeinfer.artifact.manifest import Manifest, check_manifest
from edgeinfer.daemon.trial_inputs import Feeder, InputsTooLarge, carried_state, concrete_shape, contract, require_room
from edgeinfer.errors import ConfigError, SessionError
from edgeinfer.pipeline.frame import Frame
from edgeinfer.worker.messages import GraphTensor
from tests.pipeline.cameras import needs_ffmpeg
from tests.system.programs import ROOT
from tests.worker import graphs

FLOAT, UINT8, INT64 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT64


def trial(model: Path, *arguments: str, seconds: float = 0.3) -> subprocess.CompletedProcess[str]:
    """Run `edgeinfer try` in a session of its own; nothing of it may be left afterwards."""
    with subprocess.Popen(
        [sys.executable, "-m", "edgeinfer", "try", str(model), "--seconds", str(seconds), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    ) as process:  # fmt: skip
        out, err = process.communicate(timeout=60)
    left = [stat.name for stat in Path("/proc").glob("[0-9]*") if session_of(stat) == process.pid]
    assert left == [], "processes were left behind"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def session_of(process: Path) -> int:
    try:
        return os.getsid(int(process.name))
    except OSError:
        return -1


def report(model: Path, *arguments: str, seconds: float = 0.3) -> dict[str, Any]:
    done = trial(model, *arguments, "--json", seconds=seconds)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def pictures(dims: list[int | str], kind: int = FLOAT) -> Any:
    """Return a model that takes images of these dimensions and gives their shape."""
    return graphs.model(
        [graphs.node("Shape", ["image"], ["shape"])],
        [graphs.value("image", kind, dims)],
        [graphs.value("shape", INT64, [4])],
    )


def frame(image: Image.Image) -> Frame:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Frame(buffer.getvalue(), "image/png", 0, "a.png")


system = [pytest.mark.system, pytest.mark.slow]


class TestTrying:
    pytestmark = system

    def test_a_bare_model_runs_and_is_described(self, tmp_path: Path) -> None:
        model = graphs.write(tmp_path / "My Model.onnx", graphs.linear(64, 4))
        seen = report(model, "--threads", "2")
        assert (seen["verified"], seen["placement"], seen["threads"]) == (False, "local", 2)
        assert seen["runs"] > 20
        assert seen["finite"] is True
        assert seen["failures"] == {}
        assert 0 < seen["latency_ms"]["p50"] <= seen["latency_ms"]["p99"] <= seen["latency_ms"]["max"]
        assert seen["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 64], "seen": [1, 64]}]
        assert 0 < seen["steady_bytes"] <= seen["peak_bytes"] < 64 << 20
        manifest = seen["manifest"]
        assert manifest["metadata"] == {"unverified": "true"}
        assert check_manifest(msgspec.convert(manifest, Manifest)) == []
        recipe = tomllib.loads(seen["recipe"])
        assert recipe["name"] == "my-model"
        assert recipe["source"] == {"file": "My Model.onnx"}
        assert recipe["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 64]}]

    def test_the_text_says_the_same(self, tmp_path: Path) -> None:
        done = trial(graphs.write(tmp_path / "m.onnx", graphs.identity()))
        assert done.returncode == 0
        for words in ("x  FP32 [-1] tried as [1], random", "run ms  p50", "outputs finite", "unverified", "[[inputs]]"):
            assert words in done.stdout

    def test_what_is_not_finite_is_told(self, tmp_path: Path) -> None:
        model = graphs.write(tmp_path / "log.onnx", graphs.logarithm())
        seen = report(model, "--fill", "x=-1", "--shape", "x=4")
        assert seen["finite"] is False
        assert seen["non_finite"]["y"] == seen["runs"] > 0
        assert report(model, "--fill", "x=1")["finite"] is True
        assert "NaN OR INFINITE: y in " in trial(model, "--fill", "x=-1").stdout

    def test_a_recording_is_cut_into_chunks(self, tmp_path: Path) -> None:
        with wave.open(str(tmp_path / "a.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(48000)
            file.writeframes(bytes(2 * 48000))
        model = graphs.model(
            [graphs.node("Add", ["sound", "sound"], ["y"])],
            [graphs.value("sound", FLOAT, [1, "n"])],
            [graphs.value("y", FLOAT, [1, "n"])],
        )
        seen = report(graphs.write(tmp_path / "m.onnx", model), "--source", str(tmp_path / "a.wav"), seconds=0.5)
        assert seen["inputs"][0]["tried"] == [1, 512]
        assert seen["inputs"][0]["from"] == "source"
        assert 30 <= seen["runs"] <= 47, "chunks of 10.7 ms come in real time"

    def test_images_for_a_model_that_takes_them_as_they_are_need_no_ffmpeg(self, tmp_path: Path) -> None:
        (tmp_path / "frames").mkdir()
        Image.new("RGB", (30, 20)).save(tmp_path / "frames" / "a.jpg")
        Image.new("RGB", (31, 21)).save(tmp_path / "frames" / "b.png")
        model = graphs.write(tmp_path / "m.onnx", pictures([1, "h", "w", 3], UINT8))
        seen = report(model, "--source", str(tmp_path / "frames"))
        assert seen["runs"] > 1
        assert seen["failures"] == {}
        assert tomllib.loads(seen["recipe"])["inputs"][0]["decode"] == {"kind": "image"}

    @needs_ffmpeg
    def test_a_commands_images_are_resized(self, tmp_path: Path) -> None:
        model = graphs.write(tmp_path / "m.onnx", pictures([1, 3, 32, 48]))
        command = "ffmpeg -loglevel error -re -f lavfi -i testsrc=size=64x64:rate=20 -f mjpeg -"
        seen = report(model, "--source", command, seconds=1.5)
        assert seen["runs"] >= 2
        assert seen["failures"] == {}
        assert "UINT8 [1, H, W, 3]" in seen["recipe"]

    @needs_ffmpeg
    def test_a_size_that_was_given_is_what_images_are_resized_to(self, tmp_path: Path) -> None:
        Image.new("RGB", (640, 480)).save(tmp_path / "a.jpg")
        model = graphs.write(tmp_path / "m.onnx", pictures([1, "h", "w", 3], UINT8))
        seen = report(model, "--source", str(tmp_path / "a.jpg"), "--shape", "image=1,64,64,3", seconds=1.0)
        assert seen["failures"] == {}
        assert seen["inputs"][0]["tried"] == [1, 64, 64, 3]

    def test_a_model_without_inputs_runs(self, tmp_path: Path) -> None:
        constant = onnx.helper.make_tensor("c", FLOAT, [2], [1.0, 2.0])
        node = graphs.node("Constant", [], ["y"], value=constant)
        model = graphs.write(tmp_path / "m.onnx", graphs.model([node], [], [graphs.value("y", FLOAT, [2])]))
        assert report(model)["inputs"] == []
        done = trial(model, "--source", "cat /dev/zero")
        assert (done.returncode, "which no input takes: the model has none" in done.stderr) == (78, True)

    def test_inputs_that_memory_has_no_room_for_are_refused_before_they_are_made(self, tmp_path: Path) -> None:
        side = 10**6
        model = graphs.model(
            [graphs.node("Add", ["x", "x"], ["y"])],
            [graphs.value("x", FLOAT, [side, side])],
            [graphs.value("y", FLOAT, [side, side])],
        )
        done = trial(graphs.write(tmp_path / "m.onnx", model))
        assert (done.returncode, done.stdout) == (75, "")
        assert "x FP32 [1000000, 1000000]; at most " in done.stderr

    def test_raw_tensors_of_a_file_and_of_a_command(self, tmp_path: Path) -> None:
        model = graphs.write(tmp_path / "m.onnx", graphs.linear(8))
        (tmp_path / "raw").write_bytes(bytes(32))
        assert report(model, "--source", f"sh -c 'while cat {tmp_path}/raw; do sleep 0.01; done'")["runs"] > 5
        (tmp_path / "short").write_bytes(bytes(31))
        done = trial(model, "--source", f"head -c 20 {tmp_path}/short")
        assert done.returncode == 70
        assert "problem" in done.stdout.splitlines()[-1]
        assert "recipe" not in done.stdout

    def test_state_is_found(self, tmp_path: Path) -> None:
        model = graphs.model(
            [graphs.node("Add", ["h", "x"], ["hn"]), graphs.node("ReduceSum", ["hn"], ["y"], keepdims=0)],
            [graphs.value("x", FLOAT, [1, 1]), graphs.value("h", FLOAT, [1, 5])],
            [graphs.value("y", FLOAT, []), graphs.value("hn", FLOAT, [1, 5])],
        )
        recipe = tomllib.loads(report(graphs.write(tmp_path / "m.onnx", model))["recipe"])
        assert recipe["state"] == [{"input": "h", "output": "hn", "datatype": "FP32", "shape": [1, 5]}]
        assert [tensor["name"] for tensor in recipe["inputs"]] == ["x"]

    def test_what_cannot_be_tried_is_told(self, tmp_path: Path) -> None:
        missing = trial(tmp_path / "none.onnx")
        assert (missing.returncode, missing.stderr) == (66, f"edgeinfer: {tmp_path}/none.onnx is no file\n")
        (tmp_path / "junk.onnx").write_bytes(b"junk" * 100)
        junk = trial(tmp_path / "junk.onnx")
        assert junk.returncode == 65
        assert "model_invalid" in junk.stderr
        model = graphs.write(tmp_path / "m.onnx", graphs.linear(8))
        for arguments, code, words in [
            (["--source", "no-such-thing"], 78, "is no file, directory or program"),
            (["--source", "rtsp://joe:pa@h/1"], 78, "holds credentials"),
            (["--source", str(tmp_path)], 78, "images"),
            (["--shape", "x=1,9"], 78, "[1, 9] does not fit the model's [1, 8]"),
            (["--fill", "z=1"], 78, "is no input; there are x"),
            (["--shape", "x=1,a"], 2, "is not a shape such as"),
        ]:
            done = trial(model, *arguments)
            assert done.returncode == code, done.stderr
            assert words in done.stderr
            assert "Traceback" not in done.stderr

    def test_a_model_that_crashes_is_a_report_not_a_crash(self, tmp_path: Path) -> None:
        model = graphs.write(tmp_path / "m.onnx", graphs.filled())
        done = trial(model, "--json", "--fill", f"shape={1 << 50}")
        assert done.returncode == 70
        assert json.loads(done.stdout)["problem"]


# What is fed


@needs_ffmpeg
@pytest.mark.slow
@pytest.mark.parametrize(
    ("datatype", "shape", "expected"),
    [
        ("FP32", [1, 3, 4, 6], np.stack([np.full((4, 6), v, np.float32) for v in (1.0, 0.2, 0.0)])[None]),
        ("FP32", [1, 4, 6, 3], np.tile(np.array([1.0, 0.2, 0.0], np.float32), (1, 4, 6, 1))),
        ("UINT8", [1, 4, 6, 3], np.tile(np.array([255, 51, 0], np.uint8), (1, 4, 6, 1))),
        ("FP16", [1, 3, 4, 6], np.stack([np.full((4, 6), v, np.float16) for v in (1.0, 0.2, 0.0)])[None]),
    ],
)
async def test_an_image_reaches_the_model_as_it_wants_it(datatype: str, shape: list[int], expected: Any) -> None:
    tensor = GraphTensor("image", datatype, shape)
    feeder = Feeder([tensor], {"image": shape}, main="image", fills={}, decoded=False)
    payload = await feeder.request(frame(Image.new("RGB", (64, 48), (255, 51, 0))))
    (raw,) = payload.tensors
    got = np.frombuffer(raw, expected.dtype).reshape(shape)
    assert np.allclose(got, expected, atol=2 / 255 if datatype != "UINT8" else 2)


@needs_ffmpeg
async def test_what_is_no_image_is_told() -> None:
    tensor = GraphTensor("image", "FP32", [1, 3, 4, 4])
    feeder = Feeder([tensor], {"image": [1, 3, 4, 4]}, main="image", fills={}, decoded=False)
    with pytest.raises(SessionError, match=r"b\.jpg is not a readable image"):
        await feeder.request(Frame(b"no image", "image/jpeg", 0, "b.jpg"))


def test_other_inputs_hold_what_was_said_else_zeros_else_anything() -> None:
    tensors = [GraphTensor("x", "FP32", [2]), GraphTensor("sr", "INT64", []), GraphTensor("s", "BYTES", [2])]
    shapes = {tensor.name: tensor.shape for tensor in tensors}

    def fed(main: str, fills: dict[str, float]) -> list[bytes]:
        feeder = Feeder(tensors, shapes, main=main, fills=fills, decoded=False)
        data = array.array("f", [1, 2]).tobytes()
        source = Frame(data, "", 0, "@0", False, "FP32", (2,)) if main else None
        return [bytes(raw) for raw in asyncio.run(feeder.request(source)).tensors]

    assert fed("x", {"sr": 16000})[0] == array.array("f", [1, 2]).tobytes()
    assert fed("x", {"sr": 16000})[1] == (16000).to_bytes(8, "little")
    assert fed("x", {})[1] == bytes(8)
    assert fed("x", {})[2] == 2 * oip.bytes_element(b"a")
    assert fed("", {})[0] not in {bytes(8), b""}
    assert fed("", {}) == fed("", {}), "the same every time"


@pytest.mark.parametrize(
    ("datatype", "shape", "tried"),
    [
        ("FP32", [-1, 3, -1, -1], [1, 3, 224, 224]),
        ("FP32", [-1, -1, -1, 3], [1, 224, 224, 3]),
        ("FP32", [-1, -1, -1, -1], [1, 3, 224, 224]),
        ("FP32", [-1, -1], [1, 512]),
        ("INT64", [-1, -1], [1, 32]),
        ("FP32", [2, -1, 128], [2, 1, 128]),
        ("INT64", [], []),
        ("FP32", [-1], [1]),
    ],
)
def test_open_dimensions_are_assumed(datatype: str, shape: list[int], tried: list[int]) -> None:
    assert concrete_shape(GraphTensor("x", datatype, shape), {}) == tried


def test_inputs_are_costed_by_their_shapes_alone() -> None:
    tensors = [GraphTensor("x", "FP32", [-1]), GraphTensor("s", "BYTES", [-1])]
    shapes = {"x": [1000], "s": [10]}
    require_room(tensors, shapes, 4050)
    with pytest.raises(InputsTooLarge, match=r"most of it x FP32 \[1000\]"):
        require_room(tensors, shapes, 4049)
    with pytest.raises(InputsTooLarge, match=r"at most 1048576 MiB"):
        require_room(tensors, {"x": [1 << 60], "s": [1]}, 1 << 40)


def test_a_value_that_the_type_does_not_have_is_told() -> None:
    for datatype, value in (("INT8", 300.0), ("INT64", float("nan")), ("FP16", 1e300), ("UINT8", -1.0)):
        tensor = GraphTensor("x", datatype, [2])
        with pytest.raises(ConfigError, match=f"--fill x: .* is no {datatype}"):
            Feeder([tensor], {"x": [2]}, main="", fills={"x": value}, decoded=False)


async def test_large_random_inputs_repeat_what_small_ones_hold() -> None:
    def made(count: int) -> bytes:
        tensor = GraphTensor("x", "FP32", [count])
        feeder = Feeder([tensor], {"x": [count]}, main="", fills={}, decoded=False)
        return bytes(asyncio.run(feeder.request(None)).tensors[0])

    small, large = await asyncio.to_thread(made, 1 << 16), await asyncio.to_thread(made, (1 << 17) + 3)
    assert large == small + small + small[:12]
    assert await asyncio.to_thread(made, 0) == b""


def test_a_shape_that_was_said_must_fit() -> None:
    tensor = GraphTensor("x", "FP32", [-1, 3])
    assert concrete_shape(tensor, {"x": [7, 3]}) == [7, 3]
    for shape in ([7, 4], [7], [7, 3, 1]):
        with pytest.raises(ConfigError, match="does not fit"):
            concrete_shape(tensor, {"x": shape})


def test_what_could_be_two_states_is_none() -> None:
    inputs = [contract(GraphTensor(name, "FP32", [1, 5]), [1, 5]) for name in ("x", "h", "c")]
    outputs = [contract(GraphTensor(name, "FP32", [1, 5]), [1, 5]) for name in ("hn", "cn")]
    assert carried_state(inputs, outputs, "x") == []
    assert carried_state(inputs[:2], outputs[:1], "x") == [(inputs[1], outputs[0])]
