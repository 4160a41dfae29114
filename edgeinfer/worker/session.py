"""Hold one model in ONNX Runtime: load it with everything explicit, run it, and translate what goes wrong.

Worker's side; the only module that calls onnxruntime. Threads are explicit and never spin, activations live in one
capped arena, memory freed by loading goes back to the kernel, and errors leave as `Fault`: a short word and a sentence
without source paths. Which thread runs what, and stopping, is `main`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnxruntime as ort

from edgeinfer.artifact.epcontext import UnsignedContext, refuse_compiled_contexts
from edgeinfer.artifact.provider import CPU_PROVIDER
from edgeinfer.errors import ManifestInvalid
from edgeinfer.worker import compile as compiled_form
from edgeinfer.worker import providers
from edgeinfer.worker.fault import INPUT_INVALID, OUT_OF_MEMORY, Fault
from edgeinfer.worker.messages import GraphTensor, LoadSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FROM_ONNX: Final = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "uint16": "UINT16", "int16": "INT16", "uint32": "UINT32",
    "int32": "INT32", "uint64": "UINT64", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float": "FP32",
    "double": "FP64", "string": "BYTES",
}  # fmt: skip

_REASONS: Final = {
    "NoSuchFile": "model_missing",
    "InvalidProtobuf": "model_invalid",
    "InvalidGraph": "model_invalid",
    "InvalidArgument": "model_invalid",
    "NoModel": "model_invalid",
    "NotImplemented": "model_unsupported",
    "EPFail": "provider_failed",
    "ModelRequiresCompilation": "model_unsupported",
}
"""Why a load failed, by ONNX Runtime's exception; others are `load_failed`."""

_OUT_OF_MEMORY: Final = re.compile(
    r"Available memory of \d+ is smaller|Failed to allocate memory|bad_alloc|std::bad_array_new_length|cannot allocate"
    r"|can't alloc|Resource temporarily unavailable",  # OpenVINO's words; the latter: no room for a thread's stack
    re.IGNORECASE,
)
_NOT_TAKEN: Final = "fallback to CPU EP has been explicitly disabled"
_TOO_NEW: Final = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_NOISE: Final = (
    re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : "),
    re.compile(r"\S*/onnxruntime\S*\.(?:cc|h|cpp):\d+ .*?\)(?: const)? "),  # file, line and signature of a C++ function
    re.compile(r"\b\w+\.(?:cc|h|cpp):\d+ \w+ "),
)

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BLOCK_BYTES: Final = 1 << 20
_RUN_BLOCK_BYTES: Final = 16 << 20
"""While requests run, buffers up to this size (a decoded image, say) are kept for the next one, as malloc would."""

_IDENTITY: Final = (
    b'\x08\x07\x12\x00:/\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01sZ\x0b\n\x01x\x12\x06\n\x04\x08\t\x12\x00'
    b"b\x0b\n\x01y\x12\x06\n\x04\x08\t\x12\x00B\x04\n\x00\x10\r"
)
"""An ONNX model that hands on one truth value, as it is: IR version 7, opset 13."""

Logger = Callable[[int, str], None]
"""Takes a level of `logging` and a line."""


class Model:
    """A loaded model. Main thread of the worker only, one run at a time."""

    def __init__(self, session: ort.InferenceSession, spec: LoadSpec) -> None:
        self._session = session
        self._output_names = [spec_.name for spec_ in spec.outputs] + [state.output for state in spec.state]
        self.nodes = providers.node_counts(session, spec)
        self.providers: list[str] = [n for n in session.get_providers() if not self.nodes or n in self.nodes]
        self.inputs = [_graph_tensor(node) for node in session.get_inputs()]
        self.outputs = [_graph_tensor(node) for node in session.get_outputs()]
        if not spec.outputs:
            self._output_names = [node.name for node in self.outputs]

    def run(self, feeds: dict[str, NDArray[Any]], options: ort.RunOptions) -> dict[str, NDArray[Any]]:
        """Run once and return the outputs by name, state outputs included. Releases the GIL meanwhile.

        `options` must be fresh: one that was terminated ends every later run.

        Raises:
            Fault: `input_invalid`, `out_of_memory` or `run_failed`.
        """
        try:
            values = self._session.run(self._output_names, feeds, options)
        except Exception as error:
            raise _run_fault(error) from error
        return dict(zip(self._output_names, values, strict=True))


def load(spec: LoadSpec, log: Logger) -> Model:
    """Load the model of `spec` into this process; the first and only one. What that frees is still to be given back.

    Raises:
        Fault: with what is wrong with the file, the contract or this runtime.
    """
    if hasattr(ort, "set_default_logger_callback"):  # a board vendor's older build (1.23) has none: it writes to stderr
        ort.set_default_logger_callback(lambda level, _category, _id, _at, text: log(_level(level), clean(text)), 2)
    _refuse_compiled_contexts(spec)
    if spec.form == "prepacked":
        _keep_freed_blocks(_LARGE_BLOCK_BYTES)
    try:
        options = _options(spec)
        session = ort.InferenceSession(spec.path, options, providers=providers.choose(spec, options))
    except Fault:
        raise
    except Exception as error:
        raise _load_fault(spec, error) from error
    session.disable_fallback()  # a provider that fails is a failure to report, not a reason to load again elsewhere
    model = Model(session, spec)
    _check_contract(spec, model)
    if model.nodes and set(model.nodes) == {CPU_PROVIDER}:
        log(logging.WARNING, f"{spec.providers[0]} takes no operator of {spec.title}: it runs on the CPU alone")
    if spec.compile is not None:
        compiled_form.settle(spec, spec.compile)
    gc.collect()
    gc.freeze()
    if spec.form == "prepacked":
        _keep_freed_blocks(_RUN_BLOCK_BYTES)
    return model


def _refuse_compiled_contexts(spec: LoadSpec) -> None:
    try:
        refuse_compiled_contexts(Path(spec.path))
    except UnsignedContext as error:
        raise Fault("context_unsigned", f"{spec.title}: {error}") from error
    except ManifestInvalid:
        return  # what it can't read, ONNX Runtime can't either, and has the better words for it


def _keep_freed_blocks(up_to_bytes: int) -> None:
    """Have malloc return blocks above a size to the kernel as soon as they are freed.

    It else learns from the first one to keep them, and a load that packs one tensor after the other to compare it with
    the packed one in the file then holds many at once ([measured] 129 MB instead of 45, with tensors of 16 MB).
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # musl has none
        set_option(_M_MMAP_THRESHOLD, up_to_bytes)
        set_option(_M_TRIM_THRESHOLD, 2 * up_to_bytes)


def give_back_freed_memory() -> None:
    """Return what malloc holds in reserve to the kernel ([measured] 120 MB to 24 MB after a load)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # musl has none, and needs none
        trim(ctypes.c_size_t(0))


def shrink() -> None:
    """Give the arena's free regions, and what malloc holds, back to the kernel. Takes about 10 ms; for between runs.

    ONNX Runtime shrinks an arena only at the end of a run, and of the loaded model no run is possible without inputs.
    So a model that does nothing is run: it shares the one arena of this process. Its answer goes to a place of ours: in
    the arena it would lie in a free region at that moment, and a region of any size with a byte in it is kept.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.use_env_allocators", "1")
    run_options = ort.RunOptions()
    run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with contextlib.suppress(Exception):  # without an arena there is none to shrink; its errors share no other base
        idle = ort.InferenceSession(_IDENTITY, options, providers=["CPUExecutionProvider"])
        nothing, answer = np.ones((), np.bool_), np.zeros((), np.bool_)
        bound = idle.io_binding()
        bound.bind_cpu_input("x", nothing)
        bound.bind_output("y", "cpu", 0, np.bool_, (), answer.ctypes.data)
        idle.run_with_iobinding(bound, run_options)
    give_back_freed_memory()


def _options(spec: LoadSpec) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = spec.intra_threads
    options.inter_op_num_threads = spec.inter_threads
    parallel = spec.inter_threads > 1
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_mem_pattern = False  # see `docs/decisions/memory-patterns.md`
    options.log_severity_level = 2
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    entries |= compiled_form.prepare(spec, options)
    if spec.arena_max_bytes is not None:
        _register_capped_arena(spec.arena_max_bytes)
        entries["session.use_env_allocators"] = "1"
    for key, value in {**entries, **spec.session_config}.items():
        options.add_session_config_entry(key, value)
    return options


def _register_capped_arena(max_bytes: int) -> None:
    """Make one arena for all activations of this process; a run that would pass the cap fails alone."""
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    same_as_requested = 1  # doubling would hold up to twice what the model needs
    ort.create_and_register_allocator(
        info,
        ort.OrtArenaCfg(
            {
                "max_mem": max_bytes,
                "arena_extend_strategy": same_as_requested,
                "initial_chunk_size_bytes": 1 << 20,
                "max_dead_bytes_per_chunk": -1,
            }
        ),
    )


def _check_contract(spec: LoadSpec, model: Model) -> None:
    """Hold the manifest's inputs, outputs and state against the graph's.

    Raises:
        Fault: `contract_mismatch`, naming the tensor.
    """
    declared_inputs = [(s.name, s.datatype) for s in spec.inputs] + [(s.input, s.datatype) for s in spec.state]
    declared_outputs = [(s.name, s.datatype) for s in spec.outputs] + [(s.output, s.datatype) for s in spec.state]
    sides = (("input", declared_inputs, model.inputs), ("output", declared_outputs, model.outputs))
    for role, declared, tensors in sides:
        graph = {tensor.name: tensor.datatype for tensor in tensors}
        for name, datatype in declared:
            if name not in graph:
                has = ", ".join(graph)
                raise Fault("contract_mismatch", f"{spec.title}: the graph has no {role} {name!r}; it has {has}")
            if graph[name] != datatype:
                raise Fault("contract_mismatch", f"{spec.title}: {role} {name!r} is {graph[name]}, declared {datatype}")
    undeclared = [tensor.name for tensor in model.inputs if tensor.name not in dict(declared_inputs)]
    if spec.inputs and undeclared:
        raise Fault("contract_mismatch", f"{spec.title}: the graph's input {undeclared[0]!r} is not declared")


def _graph_tensor(node: ort.NodeArg) -> GraphTensor:
    kind = re.fullmatch(r"tensor\((\w+)\)", node.type)
    shape = [dim if isinstance(dim, int) and dim >= 0 else -1 for dim in (node.shape or [])]
    return GraphTensor(node.name, _FROM_ONNX.get(kind.group(1), "") if kind else "", shape)


def _load_fault(spec: LoadSpec, error: Exception) -> Fault:
    text = clean(str(error))
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return Fault(OUT_OF_MEMORY, f"{spec.title} does not fit its memory limit while loading: {text}")
    if newer := _TOO_NEW.search(text):
        return Fault(
            "model_unsupported",
            f"{spec.title} has ONNX IR version {newer.group(1)}, onnxruntime {ort.__version__} reads up to "
            f"{newer.group(2)}: update onnxruntime or export with a lower version",
        )
    if _NOT_TAKEN in text:
        return Fault(
            "provider_incomplete",
            f"{spec.title}: {' and '.join(spec.providers)} cannot run every operator of it; name {CPU_PROVIDER} last "
            "among the variant's providers to let the CPU run the rest",
        )
    reason = _REASONS.get(type(error).__name__, "load_failed")
    return Fault(reason, f"{spec.title} ({Path(spec.path).name}) cannot be loaded: {text}")


def _run_fault(error: Exception) -> Fault:
    text = clean(str(error))
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return Fault(OUT_OF_MEMORY, f"the run needs more memory than the model's cap: {text}")
    if type(error).__name__ == "InvalidArgument" or isinstance(error, (ValueError, TypeError)):
        return Fault(INPUT_INVALID, text)
    return Fault("run_failed", text)


def clean(text: str) -> str:
    """Return ONNX Runtime's words without its source paths, C++ signatures and line breaks; at most 400 characters."""
    for noise in _NOISE:
        text = noise.sub("", text)
    return " ".join(text.split())[:400]


def _level(severity: int) -> int:
    """Return `logging`'s level for ONNX Runtime's (0 verbose to 4 fatal)."""
    return (10, 20, 30, 40, 50)[min(max(severity, 0), 4)]
