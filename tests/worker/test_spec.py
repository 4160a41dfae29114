"""What a worker is told to load follows from manifest and reservation; each side imports only what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.artifact.manifest import File, Manifest, Runtime, TensorSpec, Variant
from edgeinfer.errors import ManifestInvalid
from edgeinfer.worker.spec import limits_for, load_spec

MIB = 1 << 20


def manifest(*, output_floats: int = 1000) -> Manifest:
    return Manifest(
        schema=1,
        name="person-detect",
        version="1.4.0",
        task="detection",
        inputs=[TensorSpec("frame", "UINT8", [1, -1, -1, 3], [1, 1080, 1920, 3])],
        outputs=[TensorSpec("boxes", "FP32", [-1], [output_floats])],
        variants=[Variant("int8", "int8/model.onnx", 0.99, 90 * MIB, 30 * MIB)],
        runtime=Runtime("1.32.0", 17, 8),
        files={"int8/model.onnx": File("0" * 64, 12 * MIB)},
    )


def test_activations_are_capped_by_the_reservation_and_the_process_by_it_and_the_file() -> None:
    spec = load_spec(manifest(), Path("/bundle"), "int8", threads=2, reservation_bytes=100 * MIB, cpus={3, 1})
    assert spec.title == "person-detect 1.4.0 int8"
    assert spec.path == "/bundle/int8/model.onnx"
    assert spec.arena_max_bytes == 100 * MIB
    assert spec.data_limit_bytes is not None
    assert 112 * MIB < spec.data_limit_bytes < 220 * MIB
    assert (spec.intra_threads, spec.inter_threads, spec.cpus) == (2, 1, [1, 3])
    assert load_spec(manifest(), Path("/bundle"), "int8", threads=1).arena_max_bytes == 90 * MIB
    with pytest.raises(ManifestInvalid, match="no variant 'fp16'; it has int8"):
        load_spec(manifest(), Path("/bundle"), "fp16", threads=1)


def test_slots_hold_the_largest_request_and_answer_and_not_much_more() -> None:
    limits = limits_for(manifest(output_floats=MIB))
    assert limits.response_bytes > 4 * MIB
    frame = 1080 * 1920 * 3
    assert frame + 4 * MIB < limits.max_slot_bytes / limits.max_slots < frame + 5 * MIB


def imported_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    return set(run.stdout.split())


@pytest.mark.slow
def test_each_side_imports_only_what_it_needs() -> None:
    daemon = imported_by("edgeinfer.worker.probe")
    assert not daemon & {"numpy", "onnxruntime", "PIL", "edgeinfer.worker.session", "edgeinfer.worker.feed"}
    worker = imported_by("edgeinfer.worker.main")
    assert {"numpy", "onnxruntime"} <= worker
    assert not worker & {"asyncio", "ssl", "PIL", "edgeinfer.worker.nursery", "onnx"}
