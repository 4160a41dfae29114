"""What a profile says about the memory of one operating point."""

from __future__ import annotations

from edgeinfer.artifact.profile import Latency, OperatingCost, Profile


def cost(threads: int, peak: int, **more: object) -> OperatingCost:
    fields = {"variant": "fp32", "provider": "CPUExecutionProvider", "load_ms": 1.0, "steady_bytes": 1, **more}
    return OperatingCost(threads=threads, load_peak_bytes=peak, latency=Latency(1, 1, 1, 1, 1), **fields)  # type: ignore[arg-type]


def profile(*costs: OperatingCost) -> Profile:
    return Profile(
        schema=1, model="m", version="1", bundle_digest="d", board="", machine="", cpu_flags=[], onnxruntime="1",
        origin="measured", costs=list(costs),
    )  # fmt: skip


def test_the_peak_is_that_of_the_same_thread_count_else_the_highest_there_is() -> None:
    found = profile(cost(1, 100, covers_largest=True), cost(4, 130), cost(2, 120))
    assert found.peak_bytes("fp32", provider="CPUExecutionProvider", threads=1) == (100, True)
    assert found.peak_bytes("fp32", provider="CPUExecutionProvider", threads=3) == (130, False)


def test_another_form_variant_or_provider_says_nothing() -> None:
    found = profile(cost(1, 100, form="mapped"), cost(1, 100, variant="int8"))
    assert found.peak_bytes("fp32", provider="CPUExecutionProvider", threads=1) is None
    assert found.peak_bytes("int8", provider="OpenVINOExecutionProvider", threads=1) is None
