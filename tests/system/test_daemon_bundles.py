"""`edgeinfer bundle` as an operator uses it: what is unsound or wrong on this CPU is refused, and a kill breaks nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgeinfer import oip
from edgeinfer.store.store import BundleStore
from tests.execution.local_rig import ECHO, request_of, write_bundle
from tests.system.programs import BUNDLES, ROOT, SENTENCE, Program, edgeinfer, running_pids, wait_until
from tests.worker import graphs

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "cam1" / "state"


@pytest.fixture
def intent(tmp_path: Path) -> Path:
    """A copy of a real bundle, to do harm to."""
    return Path(shutil.copytree(BUNDLES / "support-intent", tmp_path / "support-intent"))


def add(source: Path, state: Path) -> subprocess.CompletedProcess[str]:
    return edgeinfer("bundle", "add", source, "--state-dir", state)


def echo_bundle(folder: Path, version: str, *, answer: float = 2.0, weights: int = 0) -> Path:
    """Write a bundle whose golden request is 2.0, and what it should answer."""
    x = np.array([2.0], np.float32)
    golden = request_of(x=x), oip.encode_response([("y", "FP32", [1], np.float32(answer).tobytes())])
    graph = graphs.identity()
    if weights:
        graph.doc_string = "x" * weights
    return write_bundle(folder, "echo", graph, ECHO, version=version, golden=golden)


def test_from_nothing_to_an_answer(state: Path, tmp_path: Path, intent: Path) -> None:
    archive = tmp_path / "intent.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(intent, ".")
    added = add(archive, state)
    assert added.returncode == 0, added.stderr
    assert added.stdout.startswith("installed support-intent ")
    with Program(state.parent, '[[model]]\nname = "support-intent"\n') as daemon:
        daemon.ready()
        assert round(daemon.ask(SENTENCE).score, 4) == 0.9427
        removed = edgeinfer("bundle", "remove", "support-intent", "--state-dir", state)
        assert removed.returncode == 0
        assert daemon.ask(SENTENCE).label == "support_request", "what is loaded stays loaded"
        assert daemon.stop()[0] == 0
    assert BundleStore(state).installed() == []


def _flip(intent: Path) -> str:
    weights = intent / "model/fp32.onnx"
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    weights.write_bytes(raw)
    return "model/fp32.onnx has sha256"


def _hard_link(intent: Path) -> str:
    weights = intent / "model/fp32.onnx"
    os.link(weights, intent.parent / "other")
    return "model/fp32.onnx"


def _symlink(intent: Path) -> str:
    weights = intent / "model/fp32.onnx"
    weights.rename(intent.parent / "other")
    weights.symlink_to(intent.parent / "other")
    return "model/fp32.onnx"


def _extra(intent: Path) -> str:
    (intent / "run.sh").write_text("#!/bin/sh\n")
    return "run.sh"


def _missing(intent: Path) -> str:
    (intent / "model/fp32.onnx").unlink()
    return "model/fp32.onnx"


def _no_manifest(intent: Path) -> str:
    (intent / "manifest.json").unlink()
    return "manifest.json"


@pytest.mark.parametrize("harm", [_flip, _hard_link, _symlink, _extra, _missing, _no_manifest])
def test_an_unsound_bundle_is_refused_by_name(harm: Callable[[Path], str], state: Path, intent: Path) -> None:
    said = harm(intent)
    for done in (add(intent, state), edgeinfer("bundle", "verify", intent)):
        assert done.returncode == 65
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert BundleStore(state).installed() == []
    assert list((state / "staging").iterdir()) == []


def test_a_bundle_that_is_wrong_on_this_cpu_leaves_the_old_version_active(state: Path, tmp_path: Path) -> None:
    assert add(echo_bundle(tmp_path / "good", "1.0.0"), state).returncode == 0
    wrong = add(echo_bundle(tmp_path / "wrong", "1.1.0", answer=2.5), state)
    assert wrong.returncode == 65
    assert "echo 1.1.0 fp32 failed its probe on this device (golden_mismatch)" in wrong.stderr
    assert "0.5" in wrong.stderr, "by how much"
    assert "edgeinfer-tools build" in wrong.stderr
    broken = write_bundle(tmp_path / "broken", "echo", graphs.logarithm(), ECHO, version="1.2.0")
    (broken / "model/fp32.onnx").write_bytes(b"no model at all")
    manifest = json.loads((broken / "manifest.json").read_text())
    data = b"no model at all"
    manifest["files"]["model/fp32.onnx"] = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    (broken / "manifest.json").write_text(json.dumps(manifest))
    refused = add(broken, state)
    assert refused.returncode == 65
    assert "Traceback" not in wrong.stderr + refused.stderr
    store = BundleStore(state)
    assert [item.manifest.version for item in store.installed()] == ["1.0.0"]
    assert store.active("echo").manifest.version == "1.0.0"
    assert list((state / "staging").iterdir()) == []


def test_a_kill_at_any_moment_leaves_the_old_version_or_the_new_one(state: Path, tmp_path: Path) -> None:
    assert add(echo_bundle(tmp_path / "old", "1.0.0", weights=1 << 20), state).returncode == 0
    new = echo_bundle(tmp_path / "new", "1.1.0", weights=4 << 20)
    began = time.monotonic()
    assert add(new, tmp_path / "timing").returncode == 0
    whole_s = time.monotonic() - began
    seen = set()
    for step in range(9):
        process = subprocess.Popen(
            [sys.executable, "-m", "edgeinfer", "bundle", "add", str(new), "--state-dir", str(state)],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(whole_s * (0.25 + 0.09 * step))
        children = _descendants(process.pid)
        process.kill()
        process.wait()
        wait_until(partial(_none_runs, children), "the probe's processes end with it", 5)
        store = BundleStore(state)
        assert store.problems() == []
        active = store.active("echo").manifest.version
        store.verify("echo")
        seen.add(active)
        if active == "1.1.0":
            store.remove("echo", "1.1.0")
    assert "1.0.0" in seen
    done = add(new, state)
    assert done.returncode == 0, done.stderr
    assert BundleStore(state).active("echo").manifest.version == "1.1.0"
    assert list((state / "staging").iterdir()) == []


def test_a_runtime_that_cannot_be_imported_is_told(state: Path, tmp_path: Path, intent: Path) -> None:
    package = tmp_path / "python" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libfoo.so.1 is missing')\n")
    environ = {"PYTHONPATH": f"{package.parent}:{ROOT}"}
    done = edgeinfer("bundle", "add", intent, "--state-dir", state, environ=environ)
    assert done.returncode == 70
    assert "libfoo.so.1 is missing" in done.stderr
    assert "Traceback" not in done.stderr
    assert BundleStore(state).installed() == []


def _none_runs(pids: list[int]) -> bool:
    return not running_pids(pids)


def _descendants(pid: int) -> list[int]:
    try:
        pids = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*pids, *(below for child in pids for below in _descendants(child))]
