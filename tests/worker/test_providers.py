"""Plug-in execution providers, proven with the one that is a pip extra: OpenVINO, on the CPU."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edgeinfer.artifact.manifest import File, Manifest, Runtime, TensorSpec, Variant
from edgeinfer.clock import NS_PER_MS
from edgeinfer.errors import SessionError
from edgeinfer.worker import providers
from edgeinfer.worker.fault import Fault
from edgeinfer.worker.messages import LoadSpec
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import WorkerLimits, bare_spec, load_spec
from edgeinfer.worker.worker import EndCause, RunResult, Worker
from tests.artifact.test_epcontext import PLACES, context, model
from tests.worker import graphs
from tests.worker.conftest import StartWorker, in_ms, output, process_is_gone, request_of

SMALL = Variant(name="v", file="v.onnx", quality=1.0, load_peak_bytes=2, steady_bytes=1)


def manifest_of(variant: Variant) -> Manifest:
    spec = TensorSpec("x", "FP32", [1])
    return Manifest(
        schema=1, name="m", version="1.0.0", task="test", inputs=[spec], outputs=[spec], variants=[variant],
        runtime=Runtime("1.32.0", 17, 8), files={"v.onnx": File("0" * 64, 1)},
    )  # fmt: skip


OPENVINO, CPU = "OpenVINOExecutionProvider", "CPUExecutionProvider"
CPUS = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]
needs_openvino = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_openvino") is None,
    reason="the extra is not installed: pip install -e '.[openvino]', or make test-openvino (53 MB, 158 MB unpacked)",
)


def conv_net(*, size: int = 64, layers: int = 4, odd_operator: bool = False) -> ModelProto:
    """Return a small float network that takes measurable time; optionally with an operator that OpenVINO lacks."""
    rng = np.random.default_rng(0)
    nodes, weights, at, channels = [], [], "x", 3
    for layer in range(layers):
        made = (rng.standard_normal((32, channels, 3, 3)) * 0.1).astype(np.float32)
        weights.append(numpy_helper.from_array(made, f"w{layer}"))
        nodes.append(helper.make_node("Conv", [at, f"w{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        at, channels = f"r{layer}", 32
    nodes.append(helper.make_node("GlobalAveragePool", [at], ["y"]))
    imports = [helper.make_opsetid("", 17)]
    if odd_operator:
        nodes[-1].output[0] = "p"
        nodes.append(helper.make_node("Binarizer", ["p"], ["y"], domain="ai.onnx.ml", threshold=0.0))
        imports.append(helper.make_opsetid("ai.onnx.ml", 1))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32, 1, 1])],
        weights,
    )
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def picture(size: int = 64) -> NDArray[np.float32]:
    return np.random.default_rng(1).random((1, 3, size, size)).astype(np.float32)


def masks(worker: Worker) -> set[tuple[int, ...]]:
    threads = [int(thread.name) for thread in Path(f"/proc/{worker.pid}/task").iterdir()]
    return {tuple(sorted(os.sched_getaffinity(thread))) for thread in threads}


def thread_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@needs_openvino
async def test_a_plugin_is_reported_and_the_zygote_stays_single_threaded(
    nursery: Nursery, start_worker: StartWorker
) -> None:
    worker = await start_worker(conv_net(), providers=[OPENVINO])
    snapshot = nursery.snapshot()
    assert OPENVINO in snapshot.providers
    assert snapshot.onnxruntime
    assert snapshot.zygote_pid is not None
    assert thread_count(snapshot.zygote_pid) == 1
    assert "openvino" not in Path(f"/proc/{snapshot.zygote_pid}/maps").read_text()
    assert "openvino" in Path(f"/proc/{worker.pid}/maps").read_text()


@needs_openvino
async def test_runs_in_a_forked_worker_with_the_cpus_answers_and_says_who_ran_it(start_worker: StartWorker) -> None:
    plain = await start_worker(conv_net())
    fast = await start_worker(conv_net(), providers=[OPENVINO])
    assert plain.loaded.providers == [CPU]
    assert fast.loaded.providers == [OPENVINO]
    assert set(fast.loaded.nodes) == {OPENVINO}
    request = request_of(x=picture())
    expected = output(await plain.run(request, deadline_ns=in_ms(5000)))
    found = output(await fast.run(request, deadline_ns=in_ms(5000)))
    assert np.abs(expected - found).max() < 1e-4  # float arithmetic: in bfloat16, its default here, it is off by 1e-2


@needs_openvino
async def test_an_operator_that_it_lacks_fails_the_load_unless_the_cpu_may_take_it(start_worker: StartWorker) -> None:
    with pytest.raises(SessionError, match=r"provider_incomplete: .*name CPUExecutionProvider last"):
        await start_worker(conv_net(odd_operator=True), providers=[OPENVINO])
    mixed = await start_worker(conv_net(odd_operator=True), providers=[OPENVINO, CPU])
    assert mixed.loaded.providers == [OPENVINO, CPU]
    assert mixed.loaded.nodes[OPENVINO] > mixed.loaded.nodes[CPU] > 0


@needs_openvino
@pytest.mark.skipif(Path("/dev/accel").exists(), reason="this machine may have an NPU")
async def test_a_device_that_is_not_here_is_refused_with_those_that_are(start_worker: StartWorker) -> None:
    with pytest.raises(SessionError, match=r"provider_unavailable: .*device NPU, it finds CPU"):
        await start_worker(conv_net(), providers=[OPENVINO], provider_options={OPENVINO: {"device": "NPU"}})


@needs_openvino
@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
async def test_every_thread_stays_inside_the_mask_also_after_it_moved(start_worker: StartWorker) -> None:
    worker = await start_worker(conv_net(), providers=[OPENVINO], intra_threads=2, cpus=CPUS[:2])
    request = request_of(x=picture())
    output(await worker.run(request, deadline_ns=in_ms(5000)))
    assert masks(worker) == {tuple(CPUS[:2])}
    for cpus in ([CPUS[1]], [CPUS[0]], CPUS[:2], [CPUS[1]]):  # the library would take the first mask back at each run
        worker.set_affinity(cpus)
        for _ in range(20):
            output(await worker.run(request, deadline_ns=in_ms(5000)))
        assert masks(worker) == {tuple(cpus)}


@needs_openvino
async def test_threads_are_those_granted_and_an_idle_model_costs_nothing(start_worker: StartWorker) -> None:
    one = await start_worker(conv_net(), providers=[OPENVINO], intra_threads=1, cpus=CPUS)
    two = await start_worker(conv_net(), providers=[OPENVINO], intra_threads=2, cpus=CPUS)
    plain = await start_worker(conv_net(), intra_threads=1, cpus=CPUS)
    request = request_of(x=picture())
    for worker in (one, two, plain):
        for _ in range(5):
            output(await worker.run(request, deadline_ns=in_ms(5000)))
    assert thread_count(two.pid) - thread_count(one.pid) <= 1
    assert thread_count(one.pid) - thread_count(plain.pid) <= 2  # OpenVINO's own: they wait, and compute nothing
    before_s, began = cpu_s(one.pid), time.monotonic()
    for _ in range(40):
        output(await one.run(request, deadline_ns=in_ms(5000)))
    assert cpu_s(one.pid) - before_s <= 1.05 * (time.monotonic() - began) + 0.05
    before_s = cpu_s(two.pid)
    time.sleep(1)
    assert cpu_s(two.pid) - before_s <= 0.01


@needs_openvino
async def test_a_deadline_holds_inside_it_by_killing(start_worker: StartWorker) -> None:
    """A graph that it has compiled is one operator, which no RunOptions stops."""
    limits = WorkerLimits(cancel_grace_ns=30 * NS_PER_MS, max_slot_bytes=64 << 20)
    worker = await start_worker(conv_net(size=768, layers=8), providers=[OPENVINO], limits=limits)
    request = request_of(x=picture(768))
    whole = await worker.run(request, deadline_ns=in_ms(60_000))
    assert isinstance(whole, RunResult)
    took_ns = whole.marks.finished_ns - whole.marks.started_ns
    whole.release()
    assert took_ns > 200 * NS_PER_MS, "the network is too small for this test"
    began = time.monotonic_ns()
    ending = await worker.run(request, deadline_ns=began + 50 * NS_PER_MS)
    answered_ns = time.monotonic_ns() - began
    assert not isinstance(ending, RunResult)
    assert answered_ns < took_ns
    end = await worker.died
    assert end.cause is not EndCause.CRASHED
    assert time.monotonic_ns() - began < took_ns
    assert process_is_gone(worker.pid)


@needs_openvino
async def test_a_large_request_is_answered_right_because_no_fence_is_put_around_it(start_worker: StartWorker) -> None:
    """At RLIMIT_DATA it reports success after 1 ms, with outputs that it never computed: so `spec` sets none."""
    graph = conv_net()
    for axis, name in ((2, "h"), (3, "w")):
        graph.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    fast = replace(SMALL, providers=[OPENVINO])
    assert load_spec(manifest_of(fast), Path("b"), "v", threads=1).data_limit_bytes is None
    assert load_spec(manifest_of(SMALL), Path("b"), "v", threads=1).data_limit_bytes is not None
    limits = WorkerLimits(max_slot_bytes=64 << 20)
    plain = await start_worker(graph, limits=limits)
    tried = await start_worker(graph, limits=limits, providers=[OPENVINO], arena_max_bytes=8 << 20)
    for size in (64, 768, 64):
        request = request_of(x=picture(size))
        expected = output(await plain.run(request, deadline_ns=in_ms(30_000)))
        found = output(await tried.run(request, deadline_ns=in_ms(30_000)))
        assert np.abs(expected - found).max() < 1e-4, size


@pytest.mark.parametrize("where", PLACES)
async def test_compiled_code_is_refused_before_a_runtime_sees_it(
    start_worker: StartWorker, tmp_path: Path, where: str
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model(where, context()))
    with pytest.raises(SessionError, match=r"context_unsigned: .*signed bundle"):
        await start_worker(path)


async def test_a_model_that_is_none_is_still_explained_by_the_runtime(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"EPContext, or so it says")
    with pytest.raises(SessionError, match="model_invalid"):
        await start_worker(path)


OLDER = """
import importlib.util, pathlib
__path__ = [{real!r}]
exec(compile(pathlib.Path({real!r}, "__init__.py").read_text(), "older", "exec"))
for name in ("set_default_logger_callback", "register_execution_provider_library", "get_ep_devices"):
    globals().pop(name)
from onnxruntime.capi.onnxruntime_inference_collection import Session
del Session.get_provider_graph_assignment_info
__version__ = "1.18.0+vendor"
"""
"""The installed build without what came after 1.18; a real 1.23.2 was tried by hand."""


async def test_an_older_build_of_a_board_vendor_runs_models_too(tmp_path: Path) -> None:
    real = importlib.util.find_spec("onnxruntime")
    assert real is not None
    assert real.submodule_search_locations
    package = tmp_path / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").write_text(OLDER.format(real=real.submodule_search_locations[0]))
    nursery = Nursery(environment={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"})
    snapshot = await nursery.start()
    try:
        assert snapshot.onnxruntime == "1.18.0+vendor"
        assert OPENVINO not in snapshot.providers  # it is too old for plug-ins
        path = graphs.write(tmp_path / "m.onnx", conv_net())
        worker = await Worker.start(nursery, bare_spec(path, threads=1), deadline_ns=in_ms(10_000))
        output(await worker.run(request_of(x=picture()), deadline_ns=in_ms(5000)))
        await worker.stop(grace_ns=0)
    finally:
        await nursery.close()


VENDOR = ["TensorrtExecutionProvider", "CUDAExecutionProvider", CPU]


async def test_providers_of_the_build_are_handed_over_in_order_with_their_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a Jetson, whose onnxruntime has them built in; there is none here to run them."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: VENDOR)
    asked = {"TensorrtExecutionProvider": {"trt_fp16_enable": "1"}}
    order = LoadSpec(
        model="m", version="1.0.0", variant="v", path="m.onnx", intra_threads=2, providers=VENDOR, provider_options=asked
    )  # fmt: skip
    options = ort.SessionOptions()
    assert providers.choose(order, options) == [
        ("TensorrtExecutionProvider", {"trt_fp16_enable": "1"}), ("CUDAExecutionProvider", {}), (CPU, {}),
    ]  # fmt: skip
    with pytest.raises(RuntimeError):
        options.get_session_config_entry("session.disable_cpu_ep_fallback")
    alone = ort.SessionOptions()
    assert providers.choose(replace(order, providers=VENDOR[1:2]), alone) == [("CUDAExecutionProvider", {})]
    assert alone.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
    monkeypatch.setattr(ort, "get_available_providers", lambda: VENDOR[1:])
    with pytest.raises(Fault, match="TensorrtExecutionProvider is not installed here; install the board vendor's"):
        providers.choose(order, options)
