"""A device that falls back to a real nearby service, and does without it when it has to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.client import Rejected
from edgeinfer.errors import EdgeInferError
from tests.system.broker import Broker
from tests.system.programs import ROOT, NearbyProgram, Program, give_bundles, wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow]

ROUNDS = 200_000
"""Of the slow loop: some 100 ms here."""


def link_to(broker: Broker) -> str:
    return f'[mqtt.site]\nhost = "127.0.0.1"\nport = {broker.port}\n'


def models(*names: str) -> str:
    return "".join(f'[[model]]\nname = "{name}"\n' for name in names)


@pytest.fixture
def hall(tmp_path: Path, store: Path, broker: Broker) -> Iterator[NearbyProgram]:
    """A nearby service that holds everything."""
    names = ("support-intent", "loop", "echo", "silero-vad")
    with NearbyProgram(tmp_path / "hall", link_to(broker) + models(*names)) as nearby:
        give_bundles(nearby, store)
        yield nearby.ready()


def device(tmp_path: Path, store: Path, broker: Broker, config: str, **options: Any) -> Program:
    program = Program(tmp_path / "cam1", link_to(broker) + config, **options)
    give_bundles(program, store)
    return program


def wait_for_peer(daemon: Program, name: str = "hall") -> None:
    wait_until(lambda: name in daemon.status()["state"]["offload"]["peers"], f"{name} is a usable peer")


def test_a_model_without_room_here_is_answered_next_door(
    tmp_path: Path, store: Path, broker: Broker, hall: NearbyProgram
) -> None:
    config = models("support-intent", "silero-vad") + '[memory]\nceiling = "40 MiB"\n'
    with device(tmp_path, store, broker, config) as daemon:
        daemon.ready()
        assert daemon.model_state() == "refused"
        wait_for_peer(daemon)
        answer = daemon.ask(scope="site")
        assert (answer.placement, answer.where, answer.label) == ("nearby", "hall", "support_request")
        with pytest.raises(Rejected) as caught:
            daemon.ask(scope="device")
        assert caught.value.reason in {"memory", "data_scope"}
        with daemon.client() as client:
            [audio] = client.model("silero-vad")["inputs"]
            with pytest.raises(Rejected) as caught:
                client.infer("silero-vad", {audio["name"]: [[0.0] * 512]}, deadline_ms=2000, scope="site")
        assert caught.value.reason == "memory", "what has state stays here, or isn't run"
        report = daemon.status()["report"]
        assert report["balanced"] is True
        assert daemon.stop()[0] == 0
        assert hall.stop()[0] == 0
        assert "Traceback" not in daemon.log() + hall.log()


def test_overload_goes_next_door_an_outage_does_not_stop_it_and_it_comes_back(
    tmp_path: Path, store: Path, broker: Broker, hall: NearbyProgram
) -> None:
    with device(tmp_path, store, broker, models("loop")) as daemon:
        daemon.ready()
        wait_for_peer(daemon)
        answers = flood(daemon)
        assert {answer.where for answer in answers} == {"cam1", "hall"}, "both work"
        assert all(answer["y"].elements() == [ROUNDS + 1.0] for answer in answers)
        assert daemon.status()["state"]["offload"]["open"] is True

        broker.stop()
        began = time.monotonic()
        alone = [ask(daemon) for _ in range(3)]
        assert {answer.placement for answer in alone} == {"local"}
        assert time.monotonic() - began < 5
        wait_until(lambda: not daemon.status()["state"]["offload"]["peers"], "nobody is offered who can't be reached")
        assert {answer.placement for answer in flood(daemon)} == {"local"}, "what can be done is done here"

        broker.start()
        wait_for_peer(daemon)
        assert "hall" in {answer.where for answer in flood(daemon)}
        report = daemon.status()["report"]
        assert report["balanced"] is True
        assert report["total"]["in_flight"] == 0
        assert daemon.stop()[0] == 0


def test_a_peer_that_dies_is_forgotten_and_the_work_goes_on_here(
    tmp_path: Path, store: Path, broker: Broker, hall: NearbyProgram
) -> None:
    with device(tmp_path, store, broker, models("loop")) as daemon:
        daemon.ready()
        wait_for_peer(daemon)
        hall.process.kill()
        hall.process.wait()
        wait_until(lambda: not daemon.status()["state"]["offload"]["peers"], "its will tells")
        assert {answer.where for answer in flood(daemon)} == {"cam1"}


def test_without_a_usable_runtime_everything_goes_next_door(
    tmp_path: Path, store: Path, broker: Broker, hall: NearbyProgram
) -> None:
    package = tmp_path / "python" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    environ = {"PYTHONPATH": f"{package.parent}:{ROOT}"}
    with device(tmp_path, store, broker, models("support-intent"), environ=environ) as daemon:
        daemon.ready()
        assert "runtime unusable" in daemon.log()
        assert "SIGILL" in daemon.log()
        wait_for_peer(daemon)
        answer = daemon.ask(scope="site")
        assert (answer.where, answer.label) == ("hall", "support_request")
        with pytest.raises(Rejected) as caught:
            daemon.ask(scope="device")
        assert caught.value.reason == "runtime_unusable"
        [model] = daemon.models().values()
        assert model["state"] == "refused"
        assert "SIGILL" in model["detail"]
        assert daemon.stop()[0] == 0


def test_a_nearby_service_loads_on_demand_too(tmp_path: Path, store: Path, broker: Broker) -> None:
    with NearbyProgram(tmp_path / "hall", link_to(broker) + models("support-intent") + "preload = false\n") as nearby:
        give_bundles(nearby, store)
        nearby.ready()
        assert len(nearby.children()) == 1, "only the zygote"
        with device(tmp_path, store, broker, models("support-intent") + '[memory]\nceiling = "1 MiB"\n') as daemon:
            daemon.ready()
            wait_for_peer(daemon)
            assert daemon.ask(scope="site", deadline_ms=10_000).where == "hall"
            assert len(nearby.children()) == 2
            assert daemon.ask(scope="site", deadline_ms=1000).where == "hall"


def test_a_nearby_service_says_what_is_wrong(tmp_path: Path, store: Path, broker: Broker) -> None:
    with NearbyProgram(tmp_path / "hall", models("support-intent")) as nearby:
        nearby.start()
        assert nearby.ended() == 78
        assert "mqtt: is required" in nearby.log()
        assert "Traceback" not in nearby.log()
    config = link_to(broker) + models("ghost", "support-intent")
    with NearbyProgram(tmp_path / "hall2", config) as nearby:
        give_bundles(nearby, store)
        nearby.start()
        assert "STATUS=1 models served" in nearby.told("READY=1")[-1]
        assert "no bundle 'ghost'" in nearby.log()
        status, took_s = nearby.stop()
        assert status == 0
        assert took_s < 5
        assert "Traceback" not in nearby.log()


def ask(daemon: Program, *, deadline_ms: float = 3000) -> Any:
    with daemon.client() as client:
        return client.infer("loop", {"n": [ROUNDS], "x": [1.0]}, deadline_ms=deadline_ms, scope="site")


def flood(daemon: Program, count: int = 10) -> list[Any]:
    """Ask for more at once than can be done here in time; return the answers that came."""
    answers: list[Any] = []

    def one() -> None:
        try:
            answers.append(ask(daemon, deadline_ms=700))
        except EdgeInferError:
            return  # refused or expired: what is promised is tested elsewhere

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
