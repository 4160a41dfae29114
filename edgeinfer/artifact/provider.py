"""Which execution providers a variant may name, which options each takes, and how a device comes by one.

A catalogue, not a runtime: what is installed here and whether it can run is known to the workers' side only. Options
are a closed list with a pattern each, because a bundle comes from elsewhere, and ONNX Runtime's own options name
libraries to load, files to read and folders to write. The worker translates ours into the provider's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

CPU_PROVIDER: Final = "CPUExecutionProvider"
MAX_PROVIDERS: Final = 4

_NUMBER = r"[0-9]{1,15}"
_SMALL = r"[0-9]{1,2}"
_SWITCH = r"[01]"


@dataclass(frozen=True, slots=True)
class Provider:
    """One execution provider that a variant may name."""

    name: str
    """As ONNX Runtime calls it."""
    remedy: str
    """What to do where it is missing."""
    plugin: str = ""
    """Python package that brings it as a library of its own; empty: it is part of an onnxruntime build."""
    devices: tuple[str, ...] = ()
    """What the option `device` may say, the default first; plug-ins only."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options, each with the pattern that its value must match."""

    @property
    def patterns(self) -> dict[str, str]:
        """Every option with its pattern."""
        return {**({"device": "|".join(self.devices)} if self.devices else {}), **self.options}


_VENDOR = "install the board vendor's build of onnxruntime (docs/accelerators.md)"

PROVIDERS: Final = {
    provider.name: provider
    for provider in (
        Provider(CPU_PROVIDER, "it is part of every onnxruntime"),
        Provider(
            "OpenVINOExecutionProvider",
            "install edgeinfer with its extra `openvino` (docs/accelerators.md)",
            plugin="onnxruntime_ep_openvino",
            devices=("CPU", "GPU", "NPU"),
            options={"precision": "f32|f16|bf16"},
        ),
        Provider(
            "QNNExecutionProvider",
            "install it with: pip install onnxruntime-qnn",
            plugin="onnxruntime_qnn",
            devices=("NPU", "GPU", "CPU"),
        ),
        Provider(
            "CUDAExecutionProvider",
            _VENDOR,
            options={
                "device_id": _SMALL,
                "gpu_mem_limit": _NUMBER,
                "arena_extend_strategy": "kNextPowerOfTwo|kSameAsRequested",
                "cudnn_conv_algo_search": "EXHAUSTIVE|HEURISTIC|DEFAULT",
                "use_tf32": _SWITCH,
            },
        ),
        Provider(
            "TensorrtExecutionProvider",
            _VENDOR,
            options={
                "device_id": _SMALL,
                "trt_max_workspace_size": _NUMBER,
                "trt_min_subgraph_size": _NUMBER,
                "trt_fp16_enable": _SWITCH,
                "trt_int8_enable": _SWITCH,
            },
        ),
    )
}
"""By name. Proven with a test each: CPU and OpenVINO; the others are passed on as their makers describe them."""


def check_providers(providers: Sequence[str], options: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return what is wrong with a variant's providers and their options, as ends of sentences about the variant."""
    if not providers:
        return ["names no provider"]
    if len(providers) > MAX_PROVIDERS:
        return [f"names {len(providers)} providers, at most {MAX_PROVIDERS} are taken"]
    problems = [
        f"names provider {name[:64]!r}, which this edgeinfer does not know; it knows {', '.join(PROVIDERS)}"
        for name in providers
        if name not in PROVIDERS
    ]
    problems += [f"names provider {name!r} twice" for name in sorted(set(providers)) if providers.count(name) > 1]
    if CPU_PROVIDER in providers[:-1]:
        problems.append(f"names {CPU_PROVIDER} before others; it takes every node, so it must come last")
    for name, values in options.items():
        if name not in providers:
            problems.append(f"has options for {name[:64]!r}, which is not among its providers")
        elif name in PROVIDERS:
            problems += _check_options(PROVIDERS[name], values)
    return problems


def _check_options(provider: Provider, values: Mapping[str, str]) -> list[str]:
    patterns, problems = provider.patterns, []
    for key, value in values.items():
        if key not in patterns:
            takes = ", ".join(patterns) or "none"
            problems.append(f"has option {key[:64]!r} for {provider.name}, which takes {takes}")
        elif not re.fullmatch(patterns[key], value):
            problems.append(f"has {key} {value[:64]!r} for {provider.name}, which is not {patterns[key]}")
    return problems


def missing_providers(wanted: Sequence[str], available: Collection[str]) -> list[str]:
    """Return a reason with its remedy for every wanted provider that is not available here."""
    return [
        f"{name} is not installed here; {PROVIDERS[name].remedy if name in PROVIDERS else 'it is not known'}"
        for name in wanted
        if name not in available
    ]
