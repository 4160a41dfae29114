"""A gateway on a real socket in front of a scripted `submit`, for tests of the gateway and of the client."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer import oip
from edgeinfer.artifact.manifest import (
    Classes,
    Decode,
    File,
    Manifest,
    Runtime,
    StateSpec,
    TensorSpec,
    Variant,
    check_manifest,
)
from edgeinfer.clock import LoopClock
from edgeinfer.gateway.bounds import Bounds
from edgeinfer.gateway.catalog import ModelInfo
from edgeinfer.gateway.gateway import Gateway
from edgeinfer.request import Ending, InferRequest, Outcome, Placement, Result, conclude

DIGEST = "ab" * 32


def manifest(
    name: str,
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
    *,
    version: str = "1.0.0",
    classes: Classes | None = None,
    state: list[StateSpec] | None = None,
    deadline_ms: float | None = None,
) -> Manifest:
    made = Manifest(
        schema=1,
        name=name,
        version=version,
        task="test",
        inputs=inputs,
        outputs=outputs,
        variants=[Variant(name="fp32", file="m.onnx", quality=1.0, load_peak_bytes=2, steady_bytes=1)],
        runtime=Runtime(onnxruntime="1.32.0", opset=17, ir_version=8),
        files={"m.onnx": File(sha256="0" * 64, size_bytes=1)},
        classes=classes,
        state=state or [],
        deadline_ms=deadline_ms,
    )
    assert not check_manifest(made)
    return made


INTENT = manifest(
    "support-intent",
    [TensorSpec("text", "BYTES", [-1], [64], decode=Decode("words", pattern="[a-z]+", lowercase=True))],
    [TensorSpec("probability", "FP32", [1])],
    classes=Classes("probability", ["other", "support_request"], 0.5),
)
DOUBLE = manifest(
    "double",
    [TensorSpec("x", "FP32", [-1, 2], [1 << 20, 2], allow_non_finite=True)],
    [TensorSpec("y", "FP32", [-1, 2], [1 << 20, 2], allow_non_finite=True), TensorSpec("n", "INT64", [1])],
)
CAMERA = manifest(
    "camera",
    [TensorSpec("image", "UINT8", [1, -1, -1, 3], [1, 64, 64, 3], decode=Decode("image"))],
    [TensorSpec("boxes", "FP32", [4])],
)
LISTEN = manifest(
    "listen",
    [TensorSpec("audio", "FP32", [1, 512], decode=Decode("audio", sample_rate_hz=16000))],
    [TensorSpec("probability", "FP32", [1])],
    state=[StateSpec("s", "s2", "FP32", [1])],
    deadline_ms=32.0,
)

_WEIGHTS = {"refund": 2.2, "charged": 1.8, "invoice": 1.4, "error": 0.9, "hello": -0.8, "thanks": -0.5}


def run_model(request: InferRequest) -> Ending:
    """Answer like the models above would."""
    header, raws = oip.request_header(request.payload), request.payload.tensors
    outputs: list[tuple[str, str, list[int], bytes]]
    said: dict[str, Any] = {}
    if request.model == "support-intent":
        text = b" ".join(map(bytes, oip.bytes_elements(raws[0]))).decode()
        words = set(re.findall("[a-z]+", text.lower()))
        probability = 1 / (1 + math.exp(-(sum(w for word, w in _WEIGHTS.items() if word in words) - 0.4)))
        outputs = [("probability", "FP32", [1], oip.bytes_element(b"")[:0] + _floats([probability]))]
        said = {"label": "support_request" if probability >= 0.5 else "other", "score": probability}
    elif request.model == "double":
        values = [2 * value for value in oip.elements(header.inputs[0], raws[0])]
        outputs = [
            ("y", "FP32", header.inputs[0].shape, _floats(values)),
            ("n", "INT64", [1], len(values).to_bytes(8, "little")),
        ]
    else:
        outputs = [("probability", "FP32", [1], _floats([0.5]))]
    payload = oip.encode_response(outputs, model=request.model, version="1.0.0", parameters=said)
    return Result(payload, Placement.LOCAL, "dev-1", "1.0.0", "fp32", DIGEST)


def _floats(values: list[float]) -> bytes:
    import array

    return array.array("f", values).tobytes()


@dataclass
class ScriptedTicket:
    """Ends as its script says, after `delay_s`, at the deadline at the latest, or when cancelled."""

    request: InferRequest
    script: Callable[[InferRequest], Ending]
    delay_s: float
    clock: LoopClock
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    done: Outcome | None = None

    async def outcome(self) -> Outcome:
        ending: Ending = None
        try:
            async with asyncio.timeout(self.delay_s):
                await self.cancelled.wait()
        except TimeoutError:
            ending = self.script(self.request)
        self.done = conclude(self.request, ending, now_ns=self.clock.now_ns())
        return self.done

    def cancel(self) -> None:
        self.cancelled.set()


class ScriptedSubmit:
    """A `Submit` that keeps every ticket it gave."""

    def __init__(self, script: Callable[[InferRequest], Ending] = run_model, delay_s: float = 0.0) -> None:
        self.script = script
        self.delay_s = delay_s
        self.tickets: list[ScriptedTicket] = []

    def __call__(self, request: InferRequest) -> ScriptedTicket:
        clock = LoopClock(asyncio.get_running_loop())
        ticket = ScriptedTicket(request, self.script, self.delay_s, clock)
        self.tickets.append(ticket)
        return ticket


MODELS = tuple(ModelInfo(model, DIGEST, ready=True) for model in (INTENT, DOUBLE, CAMERA, LISTEN))


@contextlib.asynccontextmanager
async def serving(
    submit: ScriptedSubmit,
    *,
    bounds: Bounds | None = None,
    status: dict[str, Any] | None = None,
    decline: Callable[[InferRequest], ScriptedTicket | None] | None = None,
) -> AsyncIterator[tuple[Gateway, Path]]:
    """Run a gateway on a short socket path of its own."""
    with tempfile.TemporaryDirectory(prefix="gw") as folder:
        path = Path(folder) / "s"
        gateway = Gateway(
            socket_path=path,
            submit=submit,
            models=lambda: MODELS,
            status=lambda: {"ready": True} if status is None else status,
            clock=LoopClock(asyncio.get_running_loop()),
            bounds=bounds,
            decline=decline,
        )
        task = asyncio.create_task(gateway.run())
        waiting = asyncio.create_task(gateway.listening.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        try:
            yield gateway, path
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert not path.exists()


@contextlib.contextmanager
def serving_in_thread(submit: ScriptedSubmit, **options: Any) -> Iterator[tuple[Gateway, Path]]:
    """As `serving`, on a loop in a thread of its own, for blocking clients."""
    started: list[tuple[Gateway, Path]] = []
    up, stop = threading.Event(), []

    async def main() -> None:
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ending.set))
        async with serving(submit, **options) as pair:
            started.append(pair)
            up.set()
            await ending.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="gateway-under-test")
    thread.start()
    assert up.wait(10)
    try:
        yield started[0]
    finally:
        stop[0]()
        thread.join(10)
        assert not thread.is_alive()
