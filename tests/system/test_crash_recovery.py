"""After a crash, over a whole daemon: fallback, restarts, the way back, two loops on one hung worker, no runtime at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from edgeinfer.client import Rejected
from edgeinfer.errors import EdgeInferError
from edgeinfer.store.store import BundleStore
from tests.execution.local_rig import ECHO, variant, write_bundle
from tests.system.broker import Broker
from tests.system.programs import ROOT, SENTENCE, Program, edgeinfer, give_bundles, running_pids, wait_until
from tests.system.test_daemon_commands import TOPICS, Operator, until
from tests.worker import graphs

pytestmark = [pytest.mark.system, pytest.mark.slow]

ECHOING = '[[model]]\nname = "echo"\n'


def times(factor: float) -> ModelProto:
    """x[n] -> y = factor * x: an answer that tells its version."""
    return graphs.model(
        [graphs.node("Mul", ["x", "factor"], ["y"])],
        [graphs.value("x", graphs.FLOAT, ["n"])],
        [graphs.value("y", graphs.FLOAT, ["n"])],
        [numpy_helper.from_array(np.array([factor], np.float32), "factor")],
    )


def bundle(folder: Path, version: int, *names: str) -> Path:
    """Write version `version`.0.0 of `echo`, which answers with that number."""
    variants = [variant(name) for name in names]
    return write_bundle(
        folder / f"v{version}", "echo", times(version), ECHO, version=f"{version}.0.0", variants=variants
    )


@pytest.fixture
def daemon(tmp_path: Path) -> Program:
    """A device with versions 1 and 2 of `echo`, not started yet."""
    program = Program(tmp_path / "cam1", ECHOING)
    store = BundleStore(program.state_dir)
    for version in (1, 2):
        store.add(bundle(tmp_path, version), lambda *_: None)
    return program


def answer(daemon: Program) -> float:
    with daemon.client() as client:
        return float(client.infer("echo", {"x": [1.0]}, deadline_ms=3000)["y"].elements()[0])


def crash_worker(daemon: Program) -> None:
    """Kill the one worker, and wait until its end was seen."""

    def worker() -> list[int]:
        return running_pids([pid for pid in daemon.children() if pid != daemon.zygote()])

    wait_until(worker, "a worker")
    seen = daemon.log().count("worker ended model='echo")
    os.kill(worker()[0], signal.SIGSEGV)
    wait_until(lambda: daemon.log().count("worker ended model='echo") > seen, "its end is seen")


def kinds(daemon: Program) -> list[str]:
    return re.findall(r"event=(\S+)", daemon.log())


def test_a_version_that_keeps_crashing_is_rolled_back_told_and_remembered(daemon: Program, tmp_path: Path) -> None:
    with daemon:
        daemon.ready()
        assert answer(daemon) == 2.0
        for _ in range(3):
            crash_worker(daemon)
        wait_until(lambda: daemon.models()["echo"]["version"] == "1.0.0", "the version before serves")
        assert answer(daemon) == 1.0
        model = daemon.models()["echo"]
        assert (model["state"], model["wanted_version"], model["quarantined"]) == ("loaded", "2.0.0", ["2.0.0 fp32"])
        assert "SIGSEGV" in model["detail"]
        wait_until(lambda: {"worker-crash", "model-quarantined", "model-fallback"} <= set(kinds(daemon)), "events")
        page = edgeinfer("status", "--socket", daemon.socket).stdout
        assert [line for line in page.splitlines() if line.startswith("echo ") and "quarantined: 2.0.0 fp32" in line], (
            page
        )
        listed = edgeinfer("bundle", "list", "--state-dir", daemon.state_dir)
        assert re.search(r"\* echo 2\.0\.0 .*\[fp32 \(quarantined\)\]", listed.stdout), listed.stdout
        assert "killed by SIGSEGV" in listed.stdout
        rows = json.loads(edgeinfer("bundle", "list", "--json", "--state-dir", daemon.state_dir).stdout)
        assert [list(row["quarantined"]) for row in rows] == [[], ["fp32"]]
        assert daemon.stop()[0] == 0

        daemon.ready()  # as after any restart
        assert answer(daemon) == 1.0
        assert daemon.models()["echo"]["wanted_version"] == "2.0.0"
        assert daemon.stop()[0] == 0

        (daemon.state_dir / "crashes.json").write_bytes(b"\0" * 512)  # a power cut, a failing card
        daemon.ready()
        assert answer(daemon) == 2.0
        assert "crash records start empty" in daemon.log()
        assert "Traceback" not in daemon.log()
        assert daemon.stop()[0] == 0


def test_the_same_bundle_added_again_gets_another_chance(daemon: Program, tmp_path: Path) -> None:
    with daemon:
        daemon.ready()
        for _ in range(3):
            crash_worker(daemon)
        wait_until(lambda: daemon.models()["echo"]["version"] == "1.0.0", "the version before serves")
        assert daemon.stop()[0] == 0
        added = edgeinfer("bundle", "add", tmp_path / "v2", "--no-compile", "--state-dir", daemon.state_dir)
        assert added.returncode == 0, added.stderr
        daemon.ready()
        assert answer(daemon) == 2.0
        assert "quarantined" not in daemon.models()["echo"]
        assert daemon.stop()[0] == 0


def test_a_service_that_dies_with_a_new_version_three_times_leaves_it_alone(daemon: Program) -> None:
    with daemon:
        for _ in range(3):
            daemon.ready()
            assert answer(daemon) == 2.0
            daemon.stop(signal.SIGKILL)  # as the kernel does when memory is out
        daemon.ready()
        assert answer(daemon) == 1.0
        assert "the service itself ended" in daemon.models()["echo"]["detail"]
        assert daemon.stop()[0] == 0


def test_a_crashed_model_without_a_stand_in_is_refused_as_quarantined_also_after_a_restart(tmp_path: Path) -> None:
    with Program(tmp_path / "cam1", ECHOING) as daemon:
        BundleStore(daemon.state_dir).add(bundle(tmp_path, 1), lambda *_: None)
        daemon.ready()
        for _ in range(3):
            crash_worker(daemon)
        for restart in (False, True):
            if restart:
                assert daemon.stop()[0] == 0
                daemon.ready()
            wait_until(lambda: daemon.models()["echo"]["state"] == "quarantined", "it is left alone")
            with pytest.raises(Rejected) as caught:
                answer(daemon)
            assert caught.value.reason == "quarantined"
        assert daemon.children() == [daemon.zygote()]
        assert daemon.stop()[0] == 0


def test_two_loops_on_a_worker_that_hangs_are_both_back_at_full_speed(tmp_path: Path, store: Path) -> None:
    """C3: the hung worker is killed within its bound, the next one serves every source, and nobody is left behind."""
    config = '[[model]]\nname = "support-intent"\n'
    for name in ("door", "gate"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.txt").write_text(SENTENCE)
        config += f"""
[[loop]]
name = "{name}"
model = "support-intent"
source = {{ kind = "directory", path = "{folder}" }}
period = "50 ms"
deadline = "500 ms"
"""
    with Program(tmp_path / "cam1", config) as daemon:
        give_bundles(daemon, store)
        daemon.ready()
        wait_until(lambda: min(_answered(daemon).values(), default=0) > 5, "both are at work")
        before = _rates(daemon)
        [worker] = [pid for pid in daemon.children() if pid != daemon.zygote()]
        os.kill(worker, signal.SIGSTOP)
        hung = time.monotonic()
        wait_until(lambda: not running_pids([worker]), "the hung worker is killed")
        assert time.monotonic() - hung < 2, "one deadline, and the grace"
        at = _answered(daemon)
        wait_until(lambda: all(_answered(daemon)[name] > at[name] + 3 for name in at), "both have a worker again")
        after = _rates(daemon)
        assert set(before) == {"door", "gate"}
        again = _rates(daemon) if any(after[name] < 0.9 * before[name] for name in before) else after
        for name, rate in before.items():
            assert max(after[name], again[name]) >= 0.9 * rate, (before, after, again)
        assert "worker overdue" in daemon.log(), "it is told"
        assert "model-quarantined" not in kinds(daemon), "being slow is no crime"
        assert daemon.status()["report"]["balanced"] is True
        assert daemon.stop()[0] == 0


async def test_without_a_usable_runtime_the_daemon_stays_up_says_so_and_does_not_try_for_ever(
    tmp_path: Path, store: Path, broker: Broker
) -> None:
    """B15. That it still offloads is `test_nearby_offload`."""
    package = tmp_path / "python" / "onnxruntime"
    package.mkdir(parents=True)
    tries = tmp_path / "tries"
    (package / "__init__.py").write_text(
        f"import os, signal\nopen({str(tries)!r}, 'a').write('x')\nos.kill(os.getpid(), signal.SIGILL)\n"
    )
    config = f'[mqtt.fleet]\nhost = "127.0.0.1"\nport = {broker.port}\n[[model]]\nname = "support-intent"\n'
    environ = {"PYTHONPATH": f"{package.parent}:{ROOT}"}
    async with Operator(broker).listening() as operator:
        with Program(tmp_path / "cam1", config, environ=environ) as daemon:
            give_bundles(daemon, store)
            daemon.ready()

            def said() -> list[dict[str, Any]]:
                states = operator.contents(TOPICS.state)
                return [s for s in states if "SIGILL" in _problem(s) and s["models"][0]["state"] == "refused"]

            await until(said)
            assert "runtime_unusable" in said()[-1]["models"][0]["detail"]
            loaded = await operator.command("load", model="support-intent")
            assert (loaded["outcome"], loaded["reason"]) == ("failed", "session")
            with pytest.raises(EdgeInferError) as caught:
                daemon.ask()
            assert getattr(caught.value, "reason", "") == "runtime_unusable"
            time.sleep(2)
            assert len(tries.read_text()) <= 4, "no restart loop"
            assert daemon.process.poll() is None
            assert daemon.children() == []
            assert not (daemon.state_dir / "crashes.json").exists(), "that is no model's fault"
            assert daemon.stop()[0] == 0


def _problem(state: dict[str, Any]) -> str:
    return str(state.get("runtime", {}).get("problem", ""))


def _answered(daemon: Program) -> dict[str, int]:
    """Return how many answers each loop has had in time."""
    answered = {}
    with contextlib.suppress(EdgeInferError):
        for origin in daemon.status()["report"]["origins"]:
            answered[str(origin["origin"])] = int(origin["ok"])
    return answered


def _rates(daemon: Program, seconds: float = 2.0) -> dict[str, float]:
    """Return answers a second of each loop, over some seconds."""
    first, began = _answered(daemon), time.monotonic()
    time.sleep(seconds)
    last, took = _answered(daemon), time.monotonic() - began
    return {name: (last[name] - first[name]) / took for name in first}
