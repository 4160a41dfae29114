"""The client against a real gateway on a real socket, in front of a scripted scheduler."""

from __future__ import annotations

import array
import asyncio
import errno
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer import oip
from edgeinfer.client import AsyncClient, Client, DeadlineExpired, Media, Rejected, SharedTensor, Tensor
from edgeinfer.client.options import OPTIONS
from edgeinfer.client.values import make_request
from edgeinfer.errors import LinkError, ProtocolError, SessionError
from edgeinfer.gateway.bounds import Bounds
from edgeinfer.request import DataScope, Ending, Expired, Failure, Reason, Refusal
from tests.gateway.serving import DIGEST, ScriptedSubmit, run_model, serving, serving_in_thread


@pytest.fixture
def submit() -> ScriptedSubmit:
    return ScriptedSubmit()


@pytest.fixture
def socket_path(submit: ScriptedSubmit) -> Iterator[Path]:
    with serving_in_thread(submit, status={"ready": True, "x": 1}) as (_, path):
        yield path


@pytest.fixture
def client(socket_path: Path) -> Iterator[Client]:
    with Client(socket_path) as client:
        yield client


def test_asks_about_a_text(client: Client) -> None:
    answer = client.infer_text("support-intent", "I was charged twice for my invoice", deadline_ms=1000)
    assert answer.label == "support_request"
    assert answer.score == pytest.approx(0.9427, abs=5e-5)
    assert (answer.placement, answer.where, answer.variant, answer.digest) == ("local", "dev-1", "fp32", DIGEST)
    assert (answer.model, answer.version, answer.late) == ("support-intent", "1.0.0", False)
    assert answer["probability"].elements() == [pytest.approx(answer.score)]
    assert client.infer("support-intent", "hello, thanks").label == "other"


VALUES: dict[str, Any] = {
    "nested lists": [[1, 2], [3, 4]],
    "numpy": np.array([[1, 2], [3, 4]], np.float32),
    "numpy, big-endian": np.array([[1, 2], [3, 4]], ">f4"),
    "numpy, not contiguous": np.array([[1, 3], [2, 4]], np.float32).T,
    "numpy's default floats": np.array([[1.0, 2.0], [3.0, 4.0]]),
    "numpy's default integers": np.array([[1, 2], [3, 4]]),
    "numpy's default floats, turned": np.array([[1.0, 3.0], [2.0, 4.0]], ">f8").T,
    "memoryview": memoryview(array.array("f", [1, 2, 3, 4])).cast("B").cast("f", (2, 2)),
    "tensor": Tensor("FP32", [2, 2], array.array("f", [1, 2, 3, 4]).tobytes()),
}


@pytest.mark.parametrize("what", VALUES)
def test_takes_an_input_as(client: Client, what: str) -> None:
    answer = client.infer("double", {"x": VALUES[what]})
    assert answer["y"].shape == (2, 2)
    assert answer["y"].elements() == [2, 4, 6, 8]
    assert answer["y"].as_numpy().tolist() == [[2, 4], [6, 8]]
    assert answer["n"].elements() == [4]


UNWRITABLE: dict[str, tuple[Any, str]] = {
    "ragged lists": ([[1, 2], [3]], "not all of one length"),
    "a word": ([["a", "b"]], "not all elements are FP32"),
    "complex numbers": (np.zeros((1, 2), np.complex64), "'<c8' cannot be sent"),
    "floats that are too large": (
        np.array([[1.0, 1e300]]),
        r"the model takes FP32, .* float64 .*\.astype\('float32'\)",
    ),
    "characters": (memoryview(b"ab").cast("c"), "format 'c'"),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_says_which_input_cannot_be_written(client: Client, submit: ScriptedSubmit, what: str) -> None:
    value, text = UNWRITABLE[what]
    with pytest.raises(ProtocolError, match=f"input 'x'.*{text}"):
        client.infer("double", {"x": value})
    assert not submit.tickets


@pytest.mark.parametrize(
    ("value", "datatype", "expected"),
    [
        (np.array([1.5, np.nan, -np.inf]), "FP32", "[1.5, nan, -inf]"),
        (np.array([0.1]), "FP16", "[0.0999755859375]"),
        (np.array([0, 255]), "UINT8", "[0, 255]"),
        (np.array([-128, 127]), "INT8", "[-128, 127]"),
        (np.array([7]), "UINT64", "[7]"),
        (np.array([7]), "INT64", "[7]"),
        (np.array([7.0]), "FP64", "[7.0]"),
        (np.array([256]), "UINT8", None),
        (np.array([-1]), "UINT64", None),
        (np.array([7.0]), "INT64", None),
        (np.array([65520.0]), "FP16", None),
    ],
)
def test_default_arrays_become_what_the_model_takes_if_nothing_is_lost(
    value: Any, datatype: str, expected: str | None
) -> None:
    specs = [{"name": "x", "datatype": datatype, "shape": [-1]}]
    if expected is None:
        with pytest.raises(ProtocolError, match=r"input 'x': the model takes .*\.astype\('"):
            make_request("m", {"x": value}, specs, outputs=(), parameters={})
        return
    payload = make_request("m", {"x": value}, specs, outputs=(), parameters={})
    tensor = oip.request_header(payload).inputs[0]
    assert tensor.datatype == datatype
    assert str(oip.elements(tensor, payload.tensors[0])) == expected


def test_only_the_outputs_that_were_asked_for(client: Client) -> None:
    answer = client.infer("double", [[1, 2]], outputs=["n"])
    assert [output.name for output in answer.outputs] == ["n"]
    with pytest.raises(KeyError, match="no output 'y'; there are n"):
        answer["y"]


def test_options_reach_the_scheduler(client: Client, submit: ScriptedSubmit) -> None:
    client.infer(
        "double", [[1, 2]], version="1.0.0", deadline_ms=250, priority=2, firm=False, accept_late=True, scope="site",
        sequence_id="s", sequence_start=True,
    )  # fmt: skip
    request = submit.tickets[0].request
    assert request.deadlines.total_ns - request.timeline.received_ns == 250_000_000
    assert (request.version, request.priority, request.firm, request.accept_late) == ("1.0.0", 2, False, True)
    assert (request.scope, request.stream, request.sequence_start) == (DataScope.SITE, "client:double:s", True)


def test_media_reach_the_worker_as_they_are(client: Client, submit: ScriptedSubmit, tmp_path: Path) -> None:
    (tmp_path / "frame.jpg").write_bytes(b"\xff\xd8jpeg")
    client.infer_file("camera", tmp_path / "frame.jpg")
    client.infer("camera", {"image": Media(b"\xff\xd8jpeg", "image/jpeg")})
    for ticket in submit.tickets:
        header = oip.request_header(ticket.request.payload)
        assert header.inputs[0].parameters["content_type"] == "image/jpeg"
        assert bytes(oip.bytes_elements(ticket.request.payload.tensors[0])[0]) == b"\xff\xd8jpeg"
    with pytest.raises(Rejected, match=r"takes image/jpeg or image/png; application/pdf came"):
        client.infer_media("camera", b"%PDF", "application/pdf")


ENDINGS: dict[str, tuple[Ending, type[Exception], str]] = {
    "refused": (Refusal(Reason.THERMAL, "81 C"), Rejected, r"rejected \(thermal\): 81 C"),
    "expired": (Expired("500 ms"), DeadlineExpired, r"expired \(queued\): 500 ms"),
    "failed": (Failure("crashed", "SIGSEGV"), SessionError, "crashed: SIGSEGV"),
}


@pytest.mark.parametrize("what", ENDINGS)
def test_a_request_that_is_not_answered_raises_why(client: Client, submit: ScriptedSubmit, what: str) -> None:
    ending, error, text = ENDINGS[what]
    submit.script = lambda _: ending
    with pytest.raises(error, match=text) as caught:
        client.infer("double", [[1, 2]])
    assert getattr(caught.value, "reason", None) in {"thermal", "crashed", None}
    submit.script = run_model
    assert client.infer("double", [[1, 2]])["y"].elements() == [2, 4]


def test_names_what_there_is(client: Client) -> None:
    with pytest.raises(Rejected, match=r"there is no model 'nope'; there are: support-intent 1\.0\.0") as caught:
        client.infer_text("nope", "x")
    assert caught.value.reason == "model_unavailable"
    with pytest.raises(Rejected, match="no input 'z'; double takes x"):
        client.infer("double", {"z": [[1, 2]]})


def test_tells_about_models_and_itself(client: Client) -> None:
    assert [model["name"] for model in client.models()] == ["support-intent", "double", "camera", "listen"]
    assert client.model("listen")["parameters"]["stateful"] is True
    assert client.status() == {"ready": True, "x": 1}
    assert client.ready()


def test_an_answer_is_plain_data_for_json(client: Client) -> None:
    document = client.infer("double", [[math.nan, 2]]).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False))["outputs"][0] == {
        "name": "y", "datatype": "FP32", "shape": [1, 2], "data": [None, 4.0],
    }  # fmt: skip


def test_a_large_tensor_comes_through_whole(client: Client) -> None:
    given = np.arange(1 << 18, dtype=np.float32).reshape(-1, 2)
    assert np.array_equal(client.infer("double", given)["y"].as_numpy(), 2 * given)


def test_a_body_that_is_refused_before_it_was_sent_is_explained(client: Client) -> None:
    with pytest.raises(Rejected, match=r"rejected \(input_invalid\): .* which no valid request has"):
        client.infer("support-intent", {"text": Tensor("BYTES", [1], oip.bytes_element(bytes(32 << 20)))})
    assert client.infer("double", [[1, 2]])["n"].elements() == [2]


def test_an_input_that_is_too_large_is_refused_by_name_shape_and_bound(client: Client, submit: ScriptedSubmit) -> None:
    with pytest.raises(
        Rejected, match=r"'image' takes UINT8 \[1, -1, -1, 3\] up to \[1, 64, 64, 3\].*UINT8 \[1, 2000, 2000, 3\] came"
    ):
        client.infer("camera", np.zeros((1, 2000, 2000, 3), np.uint8))
    with pytest.raises(Rejected, match=r"'x' takes FP32 .* up to \[1048576, 2\]; FP32 \[3000000, 2\] came"):
        client.infer("double", {"x": np.zeros((3_000_000, 2), np.float32)})
    assert not submit.tickets
    assert client.infer("double", [[1, 2]])["n"].elements() == [2]


@pytest.mark.parametrize("ask", ["infer", "infer_text", "infer_media", "infer_file"])
def test_an_option_that_there_is_not_is_named(client: Client, submit: ScriptedSubmit, tmp_path: Path, ask: str) -> None:
    (tmp_path / "a.txt").write_text("hello")
    given = {
        "infer": ("hello",), "infer_text": ("hello",), "infer_media": (b"hello", "text/plain"), "infer_file": (tmp_path / "a.txt",),
    }[ask]  # fmt: skip
    call = getattr(client, ask)
    with pytest.raises(
        TypeError, match=r"'deadlin_ms' \(did you mean 'deadline_ms'\?\), 'foo'; there are deadline_ms, .*mapping"
    ):
        call("support-intent", *given, deadlin_ms=3, foo="bar")
    assert not submit.tickets
    assert call("support-intent", *given, deadline_ms=3000, version="1.0.0", outputs=["probability"]).label == "other"


async def test_an_option_that_there_is_not_is_named_in_asyncio_too() -> None:
    with pytest.raises(TypeError, match="'deadlin_ms'"):
        await AsyncClient("none").infer("m", [1], deadlin_ms=3)
    with pytest.raises(TypeError, match="'deadlin_ms'"):
        await AsyncClient("none").infer_text("m", "x", deadlin_ms=3)
    with pytest.raises(TypeError, match="takes a str, not int"):
        await AsyncClient("none").infer_text("m", 42)  # type: ignore[arg-type]


def test_the_documented_options_are_the_real_ones() -> None:
    document = (Path(__file__).parents[1] / "docs/client.md").read_text(encoding="utf-8")
    table = document.partition("**Options**")[2].partition("**The answer**")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall("`([a-z_]+)`", " ".join(first))) == set(OPTIONS)


def test_what_is_no_text_and_what_is_no_input_is_told(client: Client) -> None:
    with pytest.raises(TypeError, match="infer_text takes a str, not int"):
        client.infer_text("support-intent", 42)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="input 'image': encoded media are bytes, not int"):
        client.infer_media("camera", 42, "image/jpeg")  # type: ignore[arg-type]
    with pytest.raises(Rejected, match=r"no input was given; double takes x FP32 \[-1, 2\]"):
        client.infer("double", {})


EXITS = {"input_invalid": 65, "model_unavailable": 69, "quarantined": 70, "runtime_unusable": 70}


@pytest.mark.parametrize("reason", [*Reason, "unheard_of"])
def test_only_what_may_change_by_itself_says_try_later(reason: str) -> None:
    assert Rejected(reason, "x").exit_code == EXITS.get(reason, 75)


def test_no_permission_says_which_group_to_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.sock"

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("edgeinfer.client.sync._Connection.__init__", refuse)  # whoever runs this may be root
    with pytest.raises(LinkError, match=rf"no permission to use {path}: join the group edgeinfer \(usermod -aG"):
        Client(path).status()
    path.touch()
    with pytest.raises(LinkError, match=rf"join the group {path.group()} "):
        Client(path).status()


def test_no_daemon_is_a_link_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_SOCKET", str(tmp_path / "none"))
    client = Client()
    assert not client.ready()
    with pytest.raises(LinkError, match=r"no edgeinfer on .*none: No such file or directory; start it"):
        client.infer("double", [[1, 2]])


def test_a_restarted_daemon_is_found_again(tmp_path: Path, submit: ScriptedSubmit) -> None:
    with serving_in_thread(submit) as (_, path):
        client = Client(path)
        client.infer("double", [[1, 2]])
    with pytest.raises(LinkError):
        client.infer("double", [[1, 2]])
    with serving_in_thread(submit) as (_, path):
        client.socket = path
        assert client.infer("double", [[1, 2]])["n"].elements() == [2]
    client.close()


def test_a_connection_that_was_closed_for_idling_is_replaced_without_a_word(submit: ScriptedSubmit) -> None:
    with serving_in_thread(submit, bounds=Bounds(idle_s=0.05)) as (gateway, path), Client(path) as client:
        client.infer("double", [[1, 2]])
        give_up = time.monotonic() + 5
        while gateway.snapshot().connections and time.monotonic() < give_up:
            time.sleep(0.01)
        client.infer("double", [[1, 2]])
        assert len(submit.tickets) == 2


def _served_once(answer: bytes, folder: Path) -> Path:
    """Return a socket on which somebody answers one request with these bytes, or keeps silent when there are none."""
    path = folder / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, listener:
            peer.recv(65536)
            peer.sendall(answer)
            while not answer and peer.recv(65536):
                pass  # silent until the caller hangs up

    threading.Thread(target=serve, daemon=True).start()
    return path


STRANGERS: dict[str, tuple[bytes, type[Exception]]] = {
    "another protocol": (b"220 mail ready\r\n", ProtocolError),
    "a web server": (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", ProtocolError),
    "one that hangs up": (b"HTTP/1.1 200 OK\r\ncontent-length: 60\r\n\r\n[", ProtocolError),
    "a list for a document": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", ProtocolError),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_somebody_else_on_the_socket_is_told_apart(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer, error = STRANGERS[what]
    with pytest.raises(error):
        Client(_served_once(answer, Path())).status()


def test_a_hung_daemon_is_given_up_soon_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("edgeinfer.client.route.PATIENCE_S", 0.1)
    with pytest.raises(LinkError, match=r"did not answer within 0\.2 s"):
        Client(_served_once(b"", Path())).infer("m", {"x": Tensor("FP32", [1], bytes(4))}, deadline_ms=100)


class _Interrupted:
    """A socket that is interrupted while it waits for the reply."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def recv_into(self, *_: object) -> int:
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_an_interrupted_call_never_gives_its_answer_to_the_next(client: Client, submit: ScriptedSubmit) -> None:
    client.infer("double", [[1, 2]])
    connection = client._connection
    assert connection is not None
    connection._sock = _Interrupted(connection._sock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        client.infer("double", [[5, 6]])
    assert client.infer("double", [[1, 2]])["y"].elements() == [2, 4]


def test_asking_needs_neither_numpy_nor_onnxruntime_nor_asyncio(socket_path: Path) -> None:
    code = (
        "import sys; from edgeinfer import Client; c = Client(sys.argv[1]);"
        "a = c.infer('double', [[1, 2]]); print(a['y'].elements(), *[name in sys.modules for name in ('numpy', 'onnxruntime', 'asyncio')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(socket_path)], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == ["[2.0,", "4.0]", "False", "False", "False"]


# --- asyncio


async def test_many_calls_at_once_from_one_event_loop() -> None:
    submit = ScriptedSubmit(delay_s=0.05)
    async with serving(submit) as (_, path):
        client = AsyncClient(path)
        answers = await asyncio.gather(*(client.infer("double", [[number, 2]]) for number in range(20)))
        assert [answer["y"].elements()[0] for answer in answers] == [2 * number for number in range(20)]
        answer = await client.infer_text("support-intent", "I was charged twice for my invoice", deadline_ms=1000)
        assert answer.label == "support_request"
        assert (await client.infer_media("camera", b"\xff\xd8", "image/jpeg")).model == "camera"
        assert (await client.models())[0]["name"] == "support-intent"
        assert await client.status() == {"ready": True}
        assert await client.ready()
        with pytest.raises(Rejected, match="there is no model 'nope'"):
            await client.infer("nope", [1])
        submit.script = lambda _: Expired("x")
        with pytest.raises(DeadlineExpired):
            await client.infer("double", np.ones((1, 2), np.float32))


async def test_the_client_for_event_loops_has_every_call_of_the_other(tmp_path: Path) -> None:
    calls = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    assert {name for name in calls if hasattr(AsyncClient, name)} == calls
    (tmp_path / "frame.jpg").write_bytes(b"\xff\xd8jpeg")
    submit = ScriptedSubmit()
    async with serving(submit) as (_, path), AsyncClient(path) as edge:
        await edge.infer_file("camera", tmp_path / "frame.jpg")
    header = oip.request_header(submit.tickets[0].request.payload)
    assert header.inputs[0].parameters["content_type"] == "image/jpeg"


async def test_a_call_that_is_cancelled_cancels_its_request_in_the_daemon() -> None:
    submit = ScriptedSubmit(delay_s=30)
    async with serving(submit) as (_, path), asyncio.timeout(5):
        call = asyncio.create_task(AsyncClient(path).infer("double", [[1, 2]]))
        while not submit.tickets:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while submit.tickets[0].done is None:
            await asyncio.sleep(0.005)
        assert submit.tickets[0].cancelled.is_set()


@pytest.mark.parametrize("what", STRANGERS)
async def test_somebody_else_on_the_socket_is_told_apart_by_both_clients(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer, error = STRANGERS[what]
    with pytest.raises(error):
        await AsyncClient(_served_once(answer, Path())).status()


async def test_both_clients_say_the_same_about_a_daemon_that_is_not_there_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("edgeinfer.client.route.PATIENCE_S", 0.1)
    assert not await AsyncClient("none").ready()
    with pytest.raises(LinkError, match=r"no edgeinfer on none: .*No such file or directory; start it"):
        await AsyncClient("none").status()
    with pytest.raises(LinkError, match=r"did not answer within 0\.2 s"):
        await AsyncClient(_served_once(b"", Path())).infer("m", {"x": Tensor("FP32", [1], bytes(4))}, deadline_ms=100)


# --- shared memory


def test_inputs_in_shared_memory_are_read_where_they_lie(client: Client, submit: ScriptedSubmit) -> None:
    with SharedTensor("FP32", [1 << 16, 2]) as shared:
        view = np.frombuffer(shared.raw, np.float32).reshape(shared.shape)
        for factor in (1, 3):
            view[:] = factor * np.arange(1 << 17, dtype=np.float32).reshape(-1, 2)
            assert np.array_equal(client.infer("double", {"x": shared})["y"].as_numpy(), 2 * view)
        assert np.array_equal(client.infer("double", shared)["y"].as_numpy(), 2 * view)
        assert client.infer("double", [[1, 2]])["y"].elements() == [2, 4]
    assert [len(ticket.request.payload.tensors) for ticket in submit.tickets] == [1, 1, 1, 1]


def test_more_shared_tensors_than_the_daemon_keeps_take_turns(client: Client) -> None:
    tensors = [SharedTensor("FP32", [1, 2]) for _ in range(7)]
    for number, tensor in enumerate(tensors):
        tensor.raw[:] = np.array([number, 1], np.float32).tobytes()
    for _ in range(2):
        for number, tensor in enumerate(tensors):
            assert client.infer("double", {"x": tensor})["y"].elements() == [2 * number, 2]


def test_a_shared_tensor_goes_over_a_new_connection_as_well(tmp_path: Path, submit: ScriptedSubmit) -> None:
    shared = SharedTensor("FP32", [1, 2])
    for _ in range(2):
        with serving_in_thread(submit) as (_, path):
            client = Client(path)
            assert client.infer("double", {"x": shared})["n"].elements() == [2]
            client.close()
            assert client.infer("double", {"x": shared})["n"].elements() == [2]


def test_a_daemon_that_shares_nothing_gets_the_tensor_through_the_socket(submit: ScriptedSubmit) -> None:
    shared = SharedTensor("FP32", [1, 2])
    with serving_in_thread(submit, bounds=Bounds(regions=0)) as (_, path), Client(path) as client:
        assert client.infer("double", {"x": shared})["n"].elements() == [2]
        assert client.infer("double", {"x": shared})["n"].elements() == [2]


@pytest.mark.parametrize(("datatype", "shape"), [("BYTES", [1]), ("FP32", [0, 2]), ("FP32", [-1, 2])])
def test_only_what_has_a_size_can_be_shared(datatype: str, shape: list[int]) -> None:
    with pytest.raises(ProtocolError, match="has no size to share"):
        SharedTensor(datatype, shape)


def test_a_closed_shared_tensor_is_told_apart(client: Client) -> None:
    shared = SharedTensor("FP32", [1, 2])
    assert client.infer("double", {"x": shared})["n"].elements() == [2]
    view = np.frombuffer(shared.raw, np.float32)
    shared.close()
    shared.close()
    assert view.sum() == 0, "an array of it outlives it"
    with pytest.raises(ProtocolError, match="'x': the shared tensor was closed"):
        client.infer("double", {"x": shared})


async def test_many_calls_at_once_share_their_inputs() -> None:
    submit = ScriptedSubmit(delay_s=0.01)
    tensors = [SharedTensor("FP32", [1, 2]) for _ in range(12)]
    for number, tensor in enumerate(tensors):
        tensor.raw[:4] = np.array([number], np.float32).tobytes()
    async with serving(submit) as (gateway, path), AsyncClient(path) as edge:
        for _ in range(2):
            answers = await asyncio.gather(*(edge.infer("double", {"x": tensor}) for tensor in tensors))
            assert [answer["y"].elements()[0] for answer in answers] == [2 * number for number in range(12)]
        assert gateway.snapshot().connections <= 12
