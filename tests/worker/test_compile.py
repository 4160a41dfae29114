"""Real forms of a real model of 32 MB: the same answers, mapped weights, and a throw-away worker that pays for trouble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from edgeinfer import oip
from edgeinfer.artifact.manifest import Manifest, TensorSpec, Variant
from edgeinfer.errors import SessionError
from edgeinfer.worker.largest import largest_request
from edgeinfer.worker.messages import Form, LoadSpec, MappedFile
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.probe import Verdict, probe
from edgeinfer.worker.side_by_side import time_side_by_side
from edgeinfer.worker.spec import FormFiles, compile_spec, limits_for, load_spec, with_files
from edgeinfer.worker.worker import Worker
from tests.worker import graphs
from tests.worker.conftest import in_ms, request_of
from tests.worker.test_probe import bundle

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MIB = 1 << 20
SIZE, LAYERS, ROWS = 1024, 8, 16


def chain() -> tuple[ModelProto, NDArray[np.float32], NDArray[np.float32]]:
    """x[n,1024] -> y through eight matrices, 32 MiB; with one input and the right answer."""
    graph = graphs.linear(SIZE, LAYERS)
    for tensor in (graph.graph.input[0], graph.graph.output[0]):
        tensor.type.tensor_type.shape.dim[0].dim_param = "n"
    x = np.random.default_rng(1).standard_normal((1, SIZE)).astype(np.float32)
    y = x
    for weight in graph.graph.initializer:
        y = y @ numpy_helper.to_array(weight)
    return graph, x, y.astype(np.float32)


def chain_bundle(folder: Path) -> Manifest:
    graph, x, y = chain()
    answer = oip.encode_response([("y", "FP32", list(y.shape), y.tobytes())])
    return bundle(
        folder,
        graph,
        [(request_of(x=x), answer)],
        inputs=[TensorSpec("x", "FP32", [-1, SIZE], [ROWS, SIZE])],
        outputs=[TensorSpec("y", "FP32", [-1, SIZE], [ROWS, SIZE])],
        variants=[Variant("fp32", "model.onnx", 1.0, 128 * MIB, MIB, tolerance=1e-3)],
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("chain")
    return folder, chain_bundle(folder)


async def write(nursery: Nursery, plain: LoadSpec, form: Form, folder: Path, **limits: Any) -> LoadSpec:
    """Have a form written and return the order to load it."""
    folder.mkdir()
    order = compile_spec(
        plain, form, folder / "model.onnx", **{"memory_bytes": 256 * MIB, "max_file_bytes": 128 * MIB, **limits}
    )
    worker = await Worker.start(nursery, order, deadline_ns=in_ms(30_000))
    assert Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip() == "1000"
    await worker.stop(grace_ns=0)
    weights = folder / "model.weights"
    return with_files(
        plain, FormFiles(form, folder / "model.onnx", (MappedFile(str(weights), weights.stat().st_size),))
    )


async def test_both_forms_answer_right_from_mapped_weights(
    nursery: Nursery, made: tuple[Path, Manifest], tmp_path: Path
) -> None:
    folder, manifest = made
    largest = largest_request(manifest)
    assert largest is not None
    plain = load_spec(manifest, folder, "fp32", threads=1)
    verdicts: dict[str, Verdict] = {"plain": await probe(nursery, manifest, folder, "fp32", further=[largest])}
    for form in ("prepacked", "mapped"):
        spec = await write(nursery, plain, form, tmp_path / form)
        verdicts[form] = await probe(nursery, manifest, folder, "fp32", spec=spec, further=[largest])
    for form, verdict in verdicts.items():
        assert verdict.accepted, (form, verdict)
        assert verdict.max_difference < 1e-3
        assert verdict.further_failed == 0
    anonymous = {form: verdict.memory.anon_bytes for form, verdict in verdicts.items() if verdict.memory}
    assert anonymous["plain"] - anonymous["prepacked"] > 28 * MIB
    assert anonymous["plain"] - anonymous["mapped"] > 28 * MIB
    assert verdicts["plain"].hot_bytes == 0
    for form in ("prepacked", "mapped"):
        assert 30 * MIB < verdicts[form].hot_bytes < 40 * MIB
        assert verdicts[form].load_peak_bytes < verdicts["plain"].load_peak_bytes - 20 * MIB
    assert verdicts["mapped"].load_ns < verdicts["plain"].load_ns


async def test_forms_are_timed_by_turns(nursery: Nursery, made: tuple[Path, Manifest], tmp_path: Path) -> None:
    folder, manifest = made
    plain = load_spec(manifest, folder, "fp32", threads=1)
    mapped = await write(nursery, plain, "mapped", tmp_path / "mapped")
    wrong = request_of(x=np.zeros((1, 3), np.float32))
    timed = await time_side_by_side(
        nursery,
        plain,
        mapped,
        [request_of(x=np.zeros((1, SIZE), np.float32)), wrong],
        limits=limits_for(manifest),
        each_ns=0,
        deadline_ns=in_ms(30_000),
    )
    assert timed.pairs[0] is not None
    assert min(timed.pairs[0].first_ns, timed.pairs[0].second_ns) > 0
    assert timed.pairs[1] is None
    assert timed.load_ns.second_ns < timed.load_ns.first_ns


async def test_form_larger_than_allowed_is_not_written(
    nursery: Nursery, made: tuple[Path, Manifest], tmp_path: Path
) -> None:
    folder, manifest = made
    plain = load_spec(manifest, folder, "fp32", threads=1)
    with pytest.raises(SessionError) as refused:
        await write(nursery, plain, "prepacked", tmp_path / "small", max_file_bytes=16 * MIB)
    assert refused.value.reason in {"load_failed", "compile_failed"}
    assert (tmp_path / "small" / "model.weights").stat().st_size <= 16 * MIB


async def test_making_a_form_obeys_its_memory_limit(
    nursery: Nursery, made: tuple[Path, Manifest], tmp_path: Path
) -> None:
    folder, manifest = made
    plain = structs.replace(load_spec(manifest, folder, "fp32", threads=1), data_limit_bytes=0)
    with pytest.raises(SessionError):
        await write(nursery, plain, "prepacked", tmp_path / "lean", memory_bytes=-60 * MIB)
    assert (await probe(nursery, manifest, folder, "fp32")).accepted, "others are not touched"


async def test_model_without_weights_has_no_other_form(nursery: Nursery, tmp_path: Path) -> None:
    manifest = bundle(tmp_path, graphs.identity(), [])
    with pytest.raises(SessionError, match="the weights were written to the model file itself") as refused:
        await write(nursery, load_spec(manifest, tmp_path, "fp32", threads=1), "mapped", tmp_path / "none")
    assert refused.value.reason == "compile_failed"
