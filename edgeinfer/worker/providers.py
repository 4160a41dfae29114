"""Give a session its execution providers: find them, register plug-in libraries, choose devices, say who took what.

Worker's side. A plug-in's library is registered in the worker, after the fork and inside its CPU mask and memory fence:
it starts threads and takes memory that belong to one model, and the zygote must have neither. What a variant may ask
for is `artifact.provider`'s; here it becomes what ONNX Runtime and the plug-in call it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import onnxruntime as ort

from edgeinfer.artifact.provider import CPU_PROVIDER, PROVIDERS, Provider, missing_providers
from edgeinfer.worker.fault import Fault
from edgeinfer.worker.messages import LoadSpec

UNAVAILABLE: Final = "provider_unavailable"
_FAILED: Final = "provider_failed"

Chosen = list[tuple[str, dict[str, str]]]
"""Providers with their options, as a session takes them."""


def available() -> list[str]:
    """Return the providers that this installation has: those of the onnxruntime build, and installed plug-ins.

    Loads and registers nothing: whether a plug-in finds its device is known once a worker has loaded it.
    """
    built_in = list(ort.get_available_providers())
    if not hasattr(ort, "register_execution_provider_library"):  # a vendor's build may be older than plug-ins
        return built_in
    plugins = [
        provider.name
        for provider in PROVIDERS.values()
        if provider.plugin and provider.name not in built_in and _is_installed(provider.plugin)
    ]
    return built_in + plugins


@functools.cache
def _is_installed(package: str) -> bool:
    """Look once: workers inherit what their zygote has found, and need not search the path again."""
    return importlib.util.find_spec(package) is not None


def choose(spec: LoadSpec, options: ort.SessionOptions) -> Chosen | None:
    """Prepare `options` for the providers of `spec`; return what the session takes besides, None for nothing.

    Registers the plug-ins among them in this process. Without the CPU's provider in the list, an operator that none of
    the others takes fails the load instead of running on the CPU unasked.

    Raises:
        Fault: `provider_unavailable` or `provider_failed`, with the remedy.
    """
    if missing := missing_providers(spec.providers, available()):
        raise Fault(UNAVAILABLE, f"{spec.title}: {missing[0]}; there are {', '.join(available())}")
    if spec.providers == [CPU_PROVIDER]:
        return [(CPU_PROVIDER, {})]
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if CPU_PROVIDER not in spec.providers:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.intra_op_num_threads = 1  # nothing is computed by threads of ONNX Runtime's own
    # A plug-in that is registered already is listed like one of the build (the toolchain loads several models).
    built_in = {name for name in ort.get_available_providers() if name not in PROVIDERS or not _offers(PROVIDERS[name])}
    built_in.add(CPU_PROVIDER)
    chosen = [(name, dict(spec.provider_options.get(name, {}))) for name in spec.providers]
    if built_in.issuperset(spec.providers):
        return chosen
    for name, asked in chosen:
        if name in built_in and name != CPU_PROVIDER:
            options.add_provider(name, asked)
        elif name not in built_in:
            _add_plugin(spec, PROVIDERS[name], asked, options)
    return None  # the CPU's comes last by itself


def node_counts(session: ort.InferenceSession, spec: LoadSpec) -> dict[str, int]:
    """Return how many operators of the graph each provider has taken; empty where there was no choice, or no record."""
    if spec.providers == [CPU_PROVIDER] or not hasattr(session, "get_provider_graph_assignment_info"):
        return {}
    counts: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        counts[subgraph.ep_name] += len(subgraph.get_nodes())
    return dict(counts)


def _add_plugin(spec: LoadSpec, provider: Provider, asked: Mapping[str, str], options: ort.SessionOptions) -> None:
    os.environ.update(_ENVIRONMENT.get(provider.name, {}))  # of this worker only, before the library looks
    try:
        if not _offers(provider):
            package: Any = importlib.import_module(provider.plugin)
            ort.register_execution_provider_library(provider.plugin, package.get_library_path())
    except Exception as error:  # whatever a foreign package and its library raise
        text = " ".join(str(error).split())[:400]
        raise Fault(_FAILED, f"{spec.title}: {provider.plugin} cannot be registered: {text}") from error
    device = asked.get("device", provider.devices[0])
    offered = _offers(provider)
    if not offered:  # its own libraries did not load
        raise Fault(_FAILED, f"{spec.title}: {provider.name} finds no device here at all")
    fitting = [offer for offer in offered if offer.device.type.name == device]
    if not fitting:
        has = ", ".join(sorted({offer.device.type.name for offer in offered}))
        raise Fault(
            UNAVAILABLE,
            f"{spec.title} asks {provider.name} for the device {device}, it finds {has} here; install the device's "
            "driver, or declare a variant for another device",
        )
    translate = _TRANSLATE.get(provider.name)
    options.add_provider_for_devices(fitting[:1], translate(spec, device, asked) if translate else {})


def _offers(provider: Provider) -> list[Any]:
    """Return the devices on which a registered plug-in offers to run."""
    if not provider.plugin or not hasattr(ort, "get_ep_devices"):
        return []
    return [offer for offer in ort.get_ep_devices() if offer.ep_name == provider.name]


def _openvino(spec: LoadSpec, device: str, asked: Mapping[str, str]) -> dict[str, str]:
    """Return OpenVINO's options: as many threads as were granted, and float arithmetic unless less was declared.

    By itself it takes every CPU, computes in bfloat16 where the CPU can, and pins threads to CPUs.
    """
    properties = {}
    if device == "CPU":
        properties = {
            "INFERENCE_NUM_THREADS": str(spec.intra_threads),
            "NUM_STREAMS": "1",
            "ENABLE_CPU_PINNING": "NO",
            "INFERENCE_PRECISION_HINT": "f32",
        }
    if "precision" in asked:
        properties["INFERENCE_PRECISION_HINT"] = asked["precision"]
    return {"load_config": json.dumps({device: properties})} if properties else {}


_ENVIRONMENT: Final = {"OpenVINOExecutionProvider": {"HWLOC_THISSYSTEM": "0"}}
"""OpenVINO's threads otherwise take back, at each run, the CPU mask that they were born with [measured: also without
pinning], and so undo what the governor has done to it since. hwloc, told that the topology is another system's, finds
the same CPUs and binds nothing."""
_TRANSLATE: Final = {"OpenVINOExecutionProvider": _openvino}
"""Provider name -> what our options are called by the plug-in; others take nothing but the device."""
