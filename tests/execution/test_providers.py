"""Execution providers on the way from a bundle to an answer: probed, chosen, left out with a reason, reported."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from edgeinfer import oip
from edgeinfer.artifact.epcontext import UnsignedContext
from edgeinfer.artifact.manifest import TensorSpec, Variant
from edgeinfer.daemon.install import install_bundle
from edgeinfer.errors import ArtifactError
from edgeinfer.request import Result
from tests.artifact.making import make_bundle
from tests.artifact.test_epcontext import context, model
from tests.execution.local_rig import open_place, request_of, variant, write_bundle
from tests.worker import graphs

OPENVINO, QNN, CPU = "OpenVINOExecutionProvider", "QNNExecutionProvider", "CPUExecutionProvider"
MIB = 1 << 20

pytestmark = [pytest.mark.system, pytest.mark.slow]
needs_openvino = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_openvino") is None,
    reason="the extra is not installed: pip install -e '.[openvino]', or make test-openvino (53 MB, 158 MB unpacked)",
)
no_qnn = pytest.mark.skipif(importlib.util.find_spec("onnxruntime_qnn") is not None, reason="QNN is installed here")

VECTOR = [[1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0]]


def bundle(folder: Path, variants: list[Variant], *, right: bool = True, version: str = "1.0.0") -> Path:
    """Write a bundle of one small network; its golden answer is numpy's, or a wrong one."""

    graph = graphs.linear(8, layers=2)
    x = np.array(VECTOR, np.float32)
    y = x
    for weights in graph.graph.initializer:
        y = y @ numpy_helper.to_array(weights)
    golden = request_of(x=x), oip.encode_response([("y", "FP32", [1, 8], (y + (not right)).tobytes())])
    contract = [TensorSpec("x", "FP32", [1, 8])], [TensorSpec("y", "FP32", [1, 8])]
    return write_bundle(folder, "net", graph, contract, variants=variants, golden=golden, version=version)


def on(provider: str, *others: str, **more: Any) -> Variant:
    return variant(provider.removesuffix("ExecutionProvider").lower(), 96 * MIB, providers=[provider, *others], **more)


@needs_openvino
async def test_from_a_bundle_to_an_answer_on_a_plugin(tmp_path: Path) -> None:
    source = bundle(tmp_path / "a", [on(OPENVINO), on(CPU)])
    async with open_place(tmp_path) as place:
        place.store.add(source, lambda *_: None)
        model = await place.load("net")
        assert model.variant.name == "openvino"
        assert place.status("net").providers == (OPENVINO,)
        ending = await place.executor.execute(place.request("net", request_of(x=np.array(VECTOR, np.float32))))
        assert isinstance(ending, Result), ending
        ending.release()
        zygote = place.nursery.snapshot().zygote_pid
        assert len(list(Path(f"/proc/{zygote}/task").iterdir())) == 1


@needs_openvino
def test_the_golden_answers_are_asked_of_the_variants_own_provider(tmp_path: Path) -> None:
    installed = install_bundle(bundle(tmp_path / "a", [on(OPENVINO, CPU), on(CPU)]), tmp_path / "state", compiled=False)
    assert installed.active
    wrong = bundle(tmp_path / "b", [on(OPENVINO)], right=False, version="1.1.0")
    with pytest.raises(ArtifactError, match=r"net 1\.1\.0 openvino failed its probe .*golden_mismatch"):
        install_bundle(wrong, tmp_path / "state")


@no_qnn
async def test_a_variant_whose_provider_is_missing_is_left_out_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    source = bundle(tmp_path / "a", [on(QNN), on(CPU)])
    async with open_place(tmp_path) as place:
        place.store.add(source, lambda *_: None)
        for _ in range(2):
            model = await place.load("net")
            assert model.variant.name == "cpu"
            await place.cache.unload("net")
        assert place.status("net").providers == ()
    told = [record.getMessage() for record in caplog.records if "variant left out" in record.getMessage()]
    assert len(told) == 1  # once, not at every load
    assert "pip install onnxruntime-qnn" in told[0]


@no_qnn
async def test_a_variant_asked_for_by_name_whose_provider_is_missing_is_refused(tmp_path: Path) -> None:
    source = bundle(tmp_path / "a", [on(QNN), on(CPU)])
    async with open_place(tmp_path) as place:
        place.store.add(source, lambda *_: None)
        with pytest.raises(
            ArtifactError, match=r"cannot run here \(qnn: QNNExecutionProvider is not installed here; .*"
        ):
            await place.load("net", variant="qnn")


@no_qnn
def test_at_installation_a_missing_provider_is_said_and_the_rest_is_probed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_bundle(bundle(tmp_path / "a", [on(QNN), on(CPU)]), tmp_path / "state", compiled=False)
    assert any("not probed" in record.getMessage() and "qnn" in record.getMessage() for record in caplog.records)
    only = bundle(tmp_path / "b", [on(QNN)], version="1.1.0")
    with pytest.raises(ArtifactError, match=r"no variant of net 1\.1\.0 can run on this device .*pip install"):
        install_bundle(only, tmp_path / "state")


@needs_openvino
async def test_a_device_that_the_plugin_does_not_find_leaves_the_next_variant(tmp_path: Path) -> None:
    if Path("/dev/accel").exists():
        pytest.skip("this machine may have an NPU")
    away = on(OPENVINO, provider_options={OPENVINO: {"device": "NPU"}})
    source = bundle(tmp_path / "a", [away, on(CPU)])
    async with open_place(tmp_path) as place:
        place.store.add(source, lambda *_: None)
        assert (await place.load("net")).variant.name == "cpu"
        assert place.status("net").providers == (CPU,)


def test_a_bundle_with_compiled_code_is_not_installed(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", model=model("subgraph", context()))
    with pytest.raises(UnsignedContext, match="signed bundle"):
        install_bundle(tmp_path / "b", tmp_path / "state")
    assert not list((tmp_path / "state" / "bundles").rglob("*.onnx"))
