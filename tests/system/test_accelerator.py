"""A real model on a plug-in execution provider, from the installed bundle to the answer, and what that gains here."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import statistics
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from edgeinfer.artifact.manifest import File, encode_manifest, read_manifest
from edgeinfer.clock import NS_PER_S
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.probe import read_goldens
from edgeinfer.worker.spec import limits_for, load_spec
from edgeinfer.worker.worker import RunResult, Worker
from tests.artifact.test_epcontext import context, model
from tests.system.programs import BUNDLES, Program, edgeinfer

OPENVINO, CPU = "OpenVINOExecutionProvider", "CPUExecutionProvider"
FAST = "fp32-openvino"
MIB = 1 << 20
ROUNDS = 15

pytestmark = [pytest.mark.system, pytest.mark.slow]
needs_openvino = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_openvino") is None,
    reason="the extra is not installed: pip install -e '.[openvino]', or make test-openvino (53 MB, 158 MB unpacked)",
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The text detector with one more variant: the same float model on OpenVINO, held to the same golden answers."""
    folder = Path(shutil.copytree(BUNDLES / "pp-ocr-det", tmp_path / "pp-ocr-det"))
    manifest, _ = read_manifest(folder)
    plain = manifest.variant("fp32")
    fast = replace(
        plain, name=FAST, providers=[OPENVINO], tolerance=0.01, load_peak_bytes=256 * MIB, steady_bytes=192 * MIB
    )
    golden = [*manifest.golden, *(replace(golden, variant=FAST) for golden in manifest.golden_for("fp32"))]
    changed = replace(manifest, variants=[fast, *manifest.variants], golden=golden)
    (folder / "manifest.json").write_bytes(encode_manifest(changed))
    return folder


@needs_openvino
def test_a_device_runs_the_variant_on_its_provider_and_says_so(bundle: Path, tmp_path: Path) -> None:
    state = tmp_path / "cam1" / "state"
    added = edgeinfer("bundle", "add", bundle, "--state-dir", state, "--no-compile")
    assert added.returncode == 0, added.stderr
    with Program(state.parent, 'memory.ceiling = "1 GiB"\n[[model]]\nname = "pp-ocr-det"\n') as daemon:
        daemon.ready()
        found = daemon.models()["pp-ocr-det"]
        assert (found["state"], found["variant"], found["providers"]) == ("loaded", FAST, [OPENVINO])
        runtime = daemon.status()["state"]["runtime"]
        assert {OPENVINO, CPU} <= set(runtime["providers"])
        page = edgeinfer("status", "--socket", daemon.socket)
        assert f"{FAST} on OpenVINO" in page.stdout, page.stderr
        assert len(list(Path(f"/proc/{daemon.zygote()}/task").iterdir())) == 1
        assert daemon.stop()[0] == 0


@needs_openvino
async def test_what_it_gains_here(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By turns in one run, so that whatever else runs here slows both alike."""
    manifest, _ = read_manifest(bundle)
    request = read_goldens(manifest, bundle, "fp32")[0][0]
    nursery = Nursery()
    await nursery.start()
    workers: dict[str, Worker] = {}
    times: dict[str, list[float]] = {"fp32": [], FAST: []}
    try:
        for name in times:
            order = load_spec(manifest, bundle, name, threads=1)
            deadline_ns = time.monotonic_ns() + 60 * NS_PER_S
            workers[name] = await Worker.start(nursery, order, deadline_ns=deadline_ns, limits=limits_for(manifest))
        for turn in range(ROUNDS + 2):
            for name, worker in workers.items():
                ending = await worker.run(request, deadline_ns=time.monotonic_ns() + 30 * NS_PER_S)
                assert isinstance(ending, RunResult), ending
                if turn >= 2:
                    times[name].append((ending.marks.finished_ns - ending.marks.started_ns) / 1e6)
                ending.release()
        lines = ["", f"{'variant':<15}{'p50 ms':>8}{'least ms':>10}{'load ms':>9}{'anonymous MiB':>15}{'peak MiB':>10}"]
        for name, worker in workers.items():
            memory = worker.memory()
            assert memory is not None
            lines.append(
                f"{name:<15}{statistics.median(times[name]):>8.1f}{min(times[name]):>10.1f}"
                f"{worker.loaded.load_ns / 1e6:>9.0f}{memory.anon_bytes / MIB:>15.0f}{memory.peak_anon_bytes / MIB:>10.0f}"
            )
    finally:
        for worker in workers.values():
            await worker.stop(grace_ns=0)
        await nursery.close()
    with capsys.disabled():
        print("\n".join(lines))
    assert min(times[FAST]) < 0.8 * min(times["fp32"])  # [measured] 0.3


def test_edgeinfer_try_refuses_compiled_code(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model("subgraph", context(embedded=False)))
    done = edgeinfer("try", path)
    assert done.returncode != 0
    assert "context_unsigned" in done.stderr
    assert "signed bundle" in done.stderr
    assert "Traceback" not in done.stderr


def test_bundle_add_and_verify_refuse_compiled_code(bundle: Path, tmp_path: Path) -> None:

    data = model("function", context())
    manifest, _ = read_manifest(bundle)
    name = manifest.variant("fp32").file
    (bundle / name).write_bytes(data)
    files = {**manifest.files, name: File(hashlib.sha256(data).hexdigest(), len(data))}
    (bundle / "manifest.json").write_bytes(encode_manifest(replace(manifest, files=files)))
    for done in (
        edgeinfer("bundle", "add", bundle, "--state-dir", tmp_path / "state"),
        edgeinfer("bundle", "verify", bundle),
    ):
        assert done.returncode == 65
        assert "EPContext node 'compiled'" in done.stderr
        assert "signed bundle" in done.stderr
