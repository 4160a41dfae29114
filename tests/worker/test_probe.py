"""A probe accepts what answers as its golden files say, and turns anything else into a verdict with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from onnx import ModelProto

from edgeinfer import oip
from edgeinfer.artifact.bundle import encode_golden
from edgeinfer.artifact.manifest import File, Golden, Manifest, Runtime, StateSpec, TensorSpec, Variant
from edgeinfer.clock import NS_PER_MS
from edgeinfer.errors import ManifestInvalid, RuntimeUnusable
from edgeinfer.request import Payload
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.probe import probe
from tests.worker import graphs
from tests.worker.conftest import floats, request_of
from tests.worker.test_nursery import fake_runtime

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]


def response_of(*values: float) -> Payload:
    return oip.encode_response([("y", "FP32", [len(values)], floats(*values).tobytes())])


def bundle(folder: Path, graph: ModelProto | bytes, pairs: list[tuple[Payload, Payload]], **fields: Any) -> Manifest:
    raw = graph if isinstance(graph, bytes) else graph.SerializeToString()
    (folder / "model.onnx").write_bytes(raw)
    files = {"model.onnx": File("0" * 64, len(raw))}
    golden = []
    for number, (request, response) in enumerate(pairs):
        golden.append(Golden(f"{number}.request", f"{number}.response"))
        for name, payload in ((golden[-1].request, request), (golden[-1].response, response)):
            (folder / name).write_bytes(content := encode_golden(payload))
            files[name] = File("0" * 64, len(content))
    return Manifest(
        **{
            "schema": 1,
            "name": "test",
            "version": "1.0.0",
            "task": "test",
            "inputs": [TensorSpec("x", "FP32", [-1], [8])],
            "outputs": [TensorSpec("y", "FP32", [-1], [8])],
            "variants": [Variant("fp32", "model.onnx", 1.0, 64 << 20, 1 << 20, tolerance=1e-3)],
            "runtime": Runtime("1.32.0", 17, 8),
            "files": files,
            "golden": golden,
            **fields,
        }
    )


async def test_variant_that_answers_right_is_accepted_with_what_it_cost(nursery: Nursery, tmp_path: Path) -> None:
    pairs = [(request_of(x=floats(1, 2)), response_of(1, 2)), (request_of(x=floats(3)), response_of(3.0005))]
    verdict = await probe(nursery, bundle(tmp_path, graphs.identity(), pairs), tmp_path, "fp32", repeat=5)
    assert verdict.accepted, verdict
    assert verdict.max_difference == pytest.approx(0.0005, rel=0.01)
    assert len(verdict.durations_ns) == 5
    assert all(duration > 0 for duration in verdict.durations_ns)
    assert verdict.load_ns > 0
    assert verdict.cpu_ns > 0
    assert verdict.memory is not None
    assert verdict.memory.peak_anon_bytes >= verdict.memory.anon_bytes > 0


async def test_variant_that_answers_otherwise_is_rejected_with_the_numbers(nursery: Nursery, tmp_path: Path) -> None:
    manifest = bundle(tmp_path, graphs.identity(), [(request_of(x=floats(1)), response_of(1.5))])
    verdict = await probe(nursery, manifest, tmp_path, "fp32")
    assert (verdict.accepted, verdict.reason) == (False, "golden_mismatch")
    assert verdict.detail == "golden request 0: output 'y' differs by 0.5, tolerance is 0.001"


async def test_variant_is_judged_by_its_own_golden_answers_and_by_those_for_all(
    nursery: Nursery, tmp_path: Path
) -> None:
    made = bundle(tmp_path, graphs.identity(), [(request_of(x=floats(v)), response_of(v)) for v in (1, 2, 3)])
    (tmp_path / "1.response").write_bytes(encode_golden(response_of(2.5)))  # an answer that only int8 may give
    everyone, quantized, exact = made.golden
    variants = [structs.replace(made.variants[0], name=name) for name in ("fp32", "int8")]
    golden = [everyone, structs.replace(quantized, variant="int8"), structs.replace(exact, variant="fp32")]
    manifest = structs.replace(made, variants=variants, golden=golden)
    assert (await probe(nursery, manifest, tmp_path, "fp32")).accepted
    verdict = await probe(nursery, manifest, tmp_path, "int8")
    assert (verdict.accepted, verdict.reason) == (False, "golden_mismatch")
    assert verdict.detail.startswith("golden request 1: output 'y' differs by 0.5")


async def test_golden_requests_of_a_stateful_model_are_one_sequence(nursery: Nursery, tmp_path: Path) -> None:
    pairs = [(request_of(x=floats(value)), response_of(total)) for value, total in ((1, 1), (2, 3), (4, 7))]
    one = [TensorSpec("x", "FP32", [1])], [TensorSpec("y", "FP32", [1])]
    state = [StateSpec("total", "total_out", "FP32", [1])]
    manifest = bundle(tmp_path, graphs.accumulator(), pairs, inputs=one[0], outputs=one[1], state=state)
    assert (await probe(nursery, manifest, tmp_path, "fp32", repeat=2)).accepted


async def test_model_that_hangs_is_rejected_in_bounded_time(nursery: Nursery, tmp_path: Path) -> None:
    request = request_of(n=np.array([1 << 50], np.int64), x=floats(0))
    inputs = [TensorSpec("n", "INT64", [1]), TensorSpec("x", "FP32", [1])]
    manifest = bundle(tmp_path, graphs.slow_loop(), [(request, response_of(1))], inputs=inputs)
    verdict = await probe(nursery, manifest, tmp_path, "fp32", run_timeout_ns=100 * NS_PER_MS)
    assert (verdict.accepted, verdict.reason) == (False, "run_timeout")


@pytest.mark.parametrize(("content", "reason"), [(b"", "model_invalid"), (b"<html>", "model_invalid")])
async def test_file_that_is_no_model_is_rejected(nursery: Nursery, tmp_path: Path, content: bytes, reason: str) -> None:
    verdict = await probe(nursery, bundle(tmp_path, content, []), tmp_path, "fp32")
    assert (verdict.accepted, verdict.reason) == (False, reason)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0[1,2]", b"\x02\0\0\0\0\0\0\0{}"])
async def test_golden_file_that_is_none_is_rejected_before_anything_is_started(
    nursery: Nursery, tmp_path: Path, content: bytes
) -> None:
    manifest = bundle(tmp_path, graphs.identity(), [(request_of(x=floats(1)), response_of(1))])
    (tmp_path / "0.request").write_bytes(content)
    verdict = await probe(nursery, manifest, tmp_path, "fp32")
    assert (verdict.accepted, verdict.reason) == (False, "golden_invalid")
    assert "0.request" in verdict.detail


async def test_unknown_variant_and_unusable_runtime_are_no_verdicts(nursery: Nursery, tmp_path: Path) -> None:
    manifest = bundle(tmp_path, graphs.identity(), [])
    with pytest.raises(ManifestInvalid, match="no variant 'int2'"):
        await probe(nursery, manifest, tmp_path, "int2")
    broken = Nursery(environment=fake_runtime(tmp_path, "raise ImportError('no')"))
    await broken.start()
    with pytest.raises(RuntimeUnusable):
        await probe(broken, manifest, tmp_path, "fp32")
    await broken.close()
