"""The device daemon as a process: it starts, answers, drains, dies completely, and says clearly what is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from edgeinfer.errors import EdgeInferError, SessionError
from tests.system.broker import Broker, free_port
from tests.system.programs import (
    BUNDLES,
    ROOT,
    SENTENCE,
    Program,
    edgeinfer,
    give_bundles,
    running_pids,
    wait_until,
)

pytestmark = [pytest.mark.system, pytest.mark.slow]

INTENT = '[[model]]\nname = "support-intent"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cam1"


def device(folder: Path, store: Path, config: str = INTENT, **options: Any) -> Program:
    program = Program(folder, config, **options)
    give_bundles(program, store)
    return program


# Life


def test_it_starts_answers_and_leaves(folder: Path, store: Path) -> None:
    with device(folder, store) as daemon:
        daemon.ready()
        answer = daemon.ask()
        assert (answer.label, round(answer.score, 4)) == ("support_request", 0.9427)
        assert (answer.placement, answer.where) == ("local", "cam1")
        asked = edgeinfer("infer", "support-intent", SENTENCE, "--socket", daemon.socket)
        assert asked.returncode == 0
        assert "support_request probability=0.9427" in asked.stdout
        children = daemon.children()
        assert len(children) == 2, "the zygote and one worker"
        status, _ = daemon.stop()
        assert status == 0
        assert daemon.told("STOPPING=1")
        assert running_pids(children) == []
        assert not daemon.socket.exists()
        log = daemon.log()
        assert "Traceback" not in log
        assert "stopping on SIGTERM" in log
        assert "stopped, 0 requests drained" in log
        assert len(log.splitlines()) < 15, log


def test_a_loop_without_frames_is_told_with_what_is_wrong_until_it_is_mended(folder: Path, store: Path) -> None:
    frames = folder.parent / "frames"
    config = f"""{INTENT}
[[loop]]
name = "door"
model = "support-intent"
source = {{ kind = "directory", path = "{frames}" }}
period = "100 ms"
deadline = "2 s"
"""
    with device(folder, store, config) as daemon:
        daemon.ready()

        def problem() -> str:
            return str(daemon.status()["state"]["loops"][0].get("problem", ""))

        wait_until(lambda: str(frames) in problem(), "the source's problem is in the status")
        page = edgeinfer("status", "--socket", daemon.socket).stdout
        assert [line for line in page.splitlines() if line.startswith("door ") and str(frames) in line], page
        wait_until(lambda: "event=source-fault" in daemon.log(), "it is an event")
        frames.mkdir()
        (frames / "a.txt").write_text(SENTENCE)
        wait_until(lambda: not problem(), "it goes away by itself")
        wait_until(lambda: daemon.status()["report"]["loops"][0]["taken"] > 0, "frames are counted")
        assert daemon.stop()[0] == 0


def test_interrupting_at_the_terminal_is_a_clean_end_too(folder: Path, store: Path) -> None:
    with device(folder, store) as daemon:
        daemon.ready()
        status, took_s = daemon.stop(signal.SIGINT)
        assert status == 0
        assert took_s < 3
        assert "stopping on SIGINT" in daemon.log()
        assert "Traceback" not in daemon.log()


def test_killing_it_leaves_no_process(folder: Path, store: Path) -> None:
    with device(folder, store) as daemon:
        daemon.ready()
        children = daemon.children()
        daemon.stop(signal.SIGKILL)
        wait_until(lambda: not running_pids(children), "its children end with it", 3)


def test_it_survives_its_zygote_and_its_workers(folder: Path, store: Path) -> None:
    with device(folder, store) as daemon:
        daemon.ready()
        zygote = daemon.zygote()
        os.kill(zygote, signal.SIGKILL)
        assert daemon.ask().label == "support_request", "the workers live on"
        wait_until(lambda: daemon.zygote() != zygote, "another zygote")
        [worker] = set(daemon.children()) - {daemon.zygote()}
        os.kill(worker, signal.SIGSEGV)
        wait_until(lambda: daemon.model_state() != "loaded", "the crash is seen")
        wait_until(lambda: daemon.model_state() == "loaded", "the worker is replaced")
        assert daemon.ask().label == "support_request"
        assert daemon.stop()[0] == 0


def test_a_caller_is_told_when_the_state_of_its_sequence_was_lost(folder: Path, store: Path) -> None:
    with device(folder, store, '[[model]]\nname = "silero-vad"\n') as daemon:
        daemon.ready()

        def ask(**options: Any) -> Any:
            with daemon.client() as client:
                [audio] = client.model("silero-vad")["inputs"]
                silence = {audio["name"]: [[0.0] * 512]}
                return client.infer("silero-vad", silence, deadline_ms=5000, sequence_id="mic", **options)

        assert "state_reset" not in ask(sequence_start=True).parameters
        assert "state_reset" not in ask().parameters
        [worker] = set(daemon.children()) - {daemon.zygote()}
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: worker not in daemon.children() and len(daemon.children()) == 2, "another worker")
        wait_until(lambda: daemon.model_state("silero-vad") == "loaded", "it is loaded again")
        assert ask().parameters["state_reset"] is True
        assert "state_reset" not in ask().parameters


# Draining


def test_a_stop_during_a_long_run_is_bounded_and_answered(folder: Path, store: Path) -> None:
    config = '[scheduler]\ndrain_timeout = "500 ms"\n[[model]]\nname = "loop"\n'
    with device(folder, store, config) as daemon:
        daemon.ready()
        endings: list[object] = []

        def ask() -> None:
            try:
                with daemon.client() as client:
                    endings.append(client.infer("loop", {"n": [1 << 40], "x": [1.0]}, deadline_ms=60_000))
            except EdgeInferError as error:
                endings.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: daemon.status()["report"]["running"] == 1, "it runs")
        status, took_s = daemon.stop()
        asking.join(5)
        assert status == 0
        assert 0.4 < took_s < 3
        assert isinstance(endings[0], SessionError), endings
        assert "stopped" in str(endings[0]), "whoever waits is told why"
        assert "drain timeout in_flight=1" in daemon.log()
        assert "Traceback" not in daemon.log()


def test_what_was_admitted_is_finished_before_it_leaves(folder: Path, store: Path) -> None:
    with device(folder, store, '[[model]]\nname = "loop"\n') as daemon:
        daemon.ready()
        answers: list[Any] = []

        def ask() -> None:
            with daemon.client() as client:
                answers.append(client.infer("loop", {"n": [400_000], "x": [1.0]}, deadline_ms=20_000))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: daemon.status()["report"]["running"] == 1, "it runs")
        assert daemon.stop()[0] == 0
        asking.join(5)
        assert answers[0]["y"].elements() == [400_001.0]


@pytest.mark.parametrize("broker_state", ["absent", "silent", "frozen", "no-password"])
def test_a_broker_that_is_not_there_holds_up_nothing(
    folder: Path, store: Path, tmp_path: Path, broker_state: str
) -> None:
    port = free_port()
    silent = socket.create_server(("127.0.0.1", port)) if broker_state == "silent" else None
    frozen = Broker(tmp_path, port=port) if broker_state == "frozen" else None
    if frozen is not None:
        frozen.start()
    config = f'{INTENT}[mqtt.site]\nhost = "127.0.0.1"\nport = {port}\n'
    if broker_state == "no-password":
        config += 'username = "cam1"\npassword_file = "/nowhere/password"\n'
    try:
        with device(folder, store, config) as daemon:
            daemon.ready()
            if frozen is not None:
                wait_until(lambda: _links(daemon) == {"site": "connected"}, "it is connected")
                frozen.freeze()
            assert daemon.ask().label == "support_request"
            status, took_s = daemon.stop()
            assert status == 0
            assert took_s < 8, "an unreachable broker must not hold up the end"
            log = daemon.log()
            assert "Traceback" not in log
            assert len(log.splitlines()) < 25, "an outage does not fill the log"
            if broker_state == "absent":
                assert f"127.0.0.1:{port}" in log, "it says which broker"
            if broker_state == "no-password":
                assert "/nowhere/password" in log
    finally:
        if silent is not None:
            silent.close()
        if frozen is not None:
            frozen.stop()


def _catches(pid: int, number: signal.Signals) -> bool:
    [mask] = [
        int(line.split()[1], 16)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    ]
    return bool(mask >> (number - 1) & 1)


def test_a_stop_while_the_runtime_is_being_imported(folder: Path, store: Path, tmp_path: Path) -> None:
    package = tmp_path / "python" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time\ntime.sleep(60)\n")
    with device(folder, store, environ={"PYTHONPATH": f"{package.parent}:{ROOT}"}) as daemon:
        daemon.start()
        wait_until(daemon.children, "the zygote imports")
        wait_until(
            lambda: _catches(daemon.process.pid, signal.SIGTERM), "the service runs: before that, a signal just ends it"
        )
        children = daemon.children()
        time.sleep(0.3)
        status, took_s = daemon.stop()
        assert status == 0
        assert took_s < 4
        assert running_pids(children) == []


# What is wrong is said, and the rest goes on


def test_what_cannot_be_loaded_is_told_and_the_rest_is_served(folder: Path, store: Path) -> None:
    config = "".join(f'[[model]]\nname = "{name}"\n' for name in ("ghost", "huge", "echo", "support-intent"))
    with device(folder, store, config) as daemon:
        [weights] = daemon.state_dir.glob("bundles/echo/*/model/fp32.onnx")
        raw = bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.chmod(0o644)
        weights.write_bytes(raw)
        daemon.ready()
        assert daemon.ask().label == "support_request"
        log = daemon.log()
        ghost, huge, echo = (
            next(line for line in log.splitlines() if f"not loaded model={name}" in line)
            for name in ("ghost", "huge", "echo")
        )
        assert "no bundle 'ghost'" in ghost
        assert "support-intent" in ghost, "it names what there is"
        assert "edgeinfer bundle add" in ghost
        assert "huge/fp32 needs 65536 MiB" in huge
        assert " free of " in huge
        assert "raise memory.ceiling" in huge
        assert "model/fp32.onnx" in echo
        assert "edgeinfer bundle add" in echo
        models = daemon.models()
        assert {name: models[name]["state"] for name in ("ghost", "huge", "echo")} == {
            "ghost": "missing", "huge": "refused", "echo": "refused",
        }  # fmt: skip
        told = edgeinfer("infer", "huge", "--inputs", "[0.5]", "--socket", daemon.socket)
        assert told.returncode == 75
        assert "Traceback" not in told.stderr
        assert "Traceback" not in log
        # Without a restart: heal one, install the other
        healed = edgeinfer("bundle", "add", BUNDLES / "silero-vad", "--state-dir", daemon.state_dir)
        assert healed.returncode == 0, "the store can be changed while the daemon runs"
        assert daemon.stop()[0] == 0


def test_on_demand_means_at_the_first_request(folder: Path, store: Path) -> None:
    with device(folder, store, INTENT + "preload = false\n") as daemon:
        daemon.ready()
        assert len(daemon.children()) == 1, "only the zygote"
        assert daemon.model_state() == "unloaded"
        told = edgeinfer("infer", "support-intent", SENTENCE, "--deadline-ms", "5", "--socket", daemon.socket)
        assert told.returncode == 75, "too soon for this one, which is tried all the same"
        assert "Traceback" not in told.stderr
        wait_until(lambda: daemon.model_state() == "loaded", "and in time for the next")
        assert daemon.ask(deadline_ms=1000).label == "support_request"


def test_every_problem_of_a_config_is_told_at_once(folder: Path) -> None:
    config = """
[[model]]
name = "a"
threads = 0
[[loop]]
name = "x"
model = "b"
period = "soon"
deadline = "100 ms"
source = { kind = "directory", path = "/tmp" }
[scheduler]
queue_limit = 0
kill_grace = 5
[oddity]
"""
    with Program(folder, config) as daemon:
        daemon.start()
        assert daemon.ended() == 78
        log = daemon.log()
        assert str(daemon.config) in log
        for part in ("loop[0].period", "scheduler.kill_grace", "oddity"):
            assert part in log
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('board = "toaster"', ["board", "'toaster'", "generic-x86"]),
        ('board = "/nowhere/b.toml"', ["/nowhere/b.toml", "No such file"]),
        ("scheduler.cpus = [4000]", ["scheduler.cpus", "4000", "usable are"]),
    ],
)
def test_a_config_that_only_the_machine_can_refute(folder: Path, line: str, said: list[str]) -> None:
    with Program(folder, "") as daemon:
        text = daemon.config.read_text()
        if line.startswith("board"):
            text = text.replace('board = "generic-x86"', "")
        daemon.config.write_text(f"{line}\n{text}")
        daemon.start()
        assert daemon.ended() == 78, daemon.log()
        for part in said:
            assert part in daemon.log()
        assert "Traceback" not in daemon.log()


def test_a_socket_that_is_taken(folder: Path, store: Path, tmp_path: Path) -> None:
    with device(folder, store) as first:
        first.ready()
        with device(tmp_path / "cam2", store) as second:
            text = second.config.read_text().replace(str(second.socket), str(first.socket))
            second.config.write_text(text)
            second.start()
            assert second.ended() == 69
            assert f"another service listens on {first.socket}" in second.log()
            assert "Traceback" not in second.log()
            children = [line for line in second.log().splitlines() if "zygote ready" in line]
            assert len(children) == 1
        assert first.ask().label == "support_request", "the first is not disturbed"
    with device(tmp_path / "cam3", store) as third:
        third.socket.write_text("precious")
        third.start()
        assert third.ended() == 69
        assert "is no socket" in third.log()
        assert third.socket.read_text() == "precious"


def test_a_state_directory_that_cannot_be_written(folder: Path, store: Path) -> None:
    if os.getuid() == 0:
        state = folder / "state"
        script = f'mount --bind "{state}" "{state}" && mount -o remount,ro,bind "{state}" && exec "$@"'
        wrapper = ["unshare", "-m", "sh", "-c", script, "sh"]
        if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
            pytest.skip("neither an ordinary user nor one who may mount")
    else:
        wrapper = []
    with device(folder, store, wrapper=wrapper) as daemon:
        if not wrapper:
            daemon.state_dir.chmod(0o555)
        daemon.ready()
        assert daemon.ask().label == "support_request", "what is installed is served"
        log = daemon.log()
        assert str(daemon.state_dir) in log
        assert "Traceback" not in log
        assert daemon.stop()[0] == 0
        daemon.state_dir.chmod(0o755)


# Loops


def test_a_stateful_model_keeps_its_state_over_a_loop(folder: Path, store: Path, tmp_path: Path) -> None:
    chunks = 24
    audio = _speechlike(tmp_path / "a.wav", chunks)
    config = f"""
[[model]]
name = "silero-vad"
variant = "fp32"
[[loop]]
name = "voice"
model = "silero-vad"
source = {{ kind = "wav", path = "{tmp_path / "a.wav"}", chunk_samples = 512 }}
period = "32 ms"
deadline = "2 s"
firm = true
sinks = [{{ kind = "jsonl", path = "{folder / "voice.jsonl"}" }}]
"""
    with device(folder, store, config) as daemon:
        daemon.ready()
        wait_until(lambda: len(_records(folder / "voice.jsonl")) >= chunks, "records")
        assert daemon.stop()[0] == 0
    records = _records(folder / "voice.jsonl")[:chunks]
    assert [record["outcome"] for record in records] == ["ok"] * chunks
    assert [record["frame"] for record in records] == [f"a.wav@{n * 512}" for n in range(chunks)]
    assert {record["where"] for record in records} == {"cam1"}
    seen = [record["outputs"]["probability"]["data"][0] for record in records]
    assert seen == pytest.approx(_silero(audio, stateful=True), abs=2e-3)
    assert seen != pytest.approx(_silero(audio, stateful=False), abs=2e-3), "the state matters for this audio"


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _links(daemon: Program) -> dict[str, str]:
    return {link["name"]: link["state"] for link in daemon.status()["report"]["links"]}


def _speechlike(path: Path, chunks: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Write a voice-like sound (a buzz with formants, switched on and off) and return its samples."""
    rng = np.random.default_rng(7)
    t = np.arange(chunks * 512) / 16000
    buzz = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 25))
    envelope = (np.sin(2 * np.pi * 3 * t) > -0.2).astype(float)
    samples = (0.2 * buzz * envelope + 0.003 * rng.standard_normal(len(t))) * 20_000
    audio = np.clip(samples, -32768, 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(audio.tobytes())
    return audio


def _silero(audio: np.ndarray[Any, np.dtype[np.int16]], *, stateful: bool) -> list[float]:
    """Return what ONNX Runtime says itself, chunk by chunk."""
    manifest = json.loads((BUNDLES / "silero-vad" / "manifest.json").read_text())
    session = ort.InferenceSession(str(BUNDLES / "silero-vad" / "model/fp32.onnx"))
    states = {spec["input"]: np.zeros(spec["shape"], np.float32) for spec in manifest["state"]}
    name = manifest["inputs"][0]["name"]
    outputs = [node.name for node in session.get_outputs()]
    seen = []
    for chunk in (audio.astype(np.float32) / 32768).reshape(-1, 1, 512):
        values = dict(zip(outputs, session.run(None, {name: chunk, **states}), strict=True))
        seen.append(float(values["probability"].ravel()[0]))
        if stateful:
            states = {spec["input"]: values[spec["output"]] for spec in manifest["state"]}
    return seen
