from __future__ import annotations

import pytest
from msgspec.structs import replace

from edgeinfer.artifact.fitness import unfit
from edgeinfer.artifact.manifest import Variant

PLAIN = Variant(name="v", file="v.onnx", quality=1.0, load_peak_bytes=2, steady_bytes=1)
FAST = replace(PLAIN, providers=["OpenVINOExecutionProvider", "CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("variant", "flags", "providers", "reason"),
    [
        (PLAIN, set(), ["CPUExecutionProvider"], ""),
        (replace(PLAIN, instruction_sets=["avx2", "fma"]), {"avx2", "fma", "sse"}, ["CPUExecutionProvider"], ""),
        (replace(PLAIN, instruction_sets=["avx2", "fma"]), {"fma"}, ["CPUExecutionProvider"], "lacks (avx2); rebuild"),
        (FAST, set(), ["CPUExecutionProvider"], "its extra `openvino`"),
        (FAST, set(), ["CPUExecutionProvider", "OpenVINOExecutionProvider"], ""),
        (FAST, set(), [], ""),  # no zygote was ready yet: nobody knows
    ],
)
def test_a_variant_runs_here_or_the_reason_names_the_remedy(
    variant: Variant, flags: set[str], providers: list[str], reason: str
) -> None:
    found = unfit(variant, cpu_flags=flags, providers=providers)
    assert reason in found
    assert bool(found) == bool(reason)
