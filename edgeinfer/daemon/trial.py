"""Run a bare ONNX model on this device, without a bundle and without a daemon: `edgeinfer try`.

The model is loaded in a worker of our own to learn its inputs and outputs, and again with the contract made of them, as
a device would hold it. What comes out is a report: shapes, latency inside ONNX Runtime, memory, whether the outputs are
finite, and what a recipe for a bundle would have to say. Nothing of it is verified, and nothing leaves the device.
How the model is fed is `trial_inputs`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import math
import shlex
import shutil
import time
import wave
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from edgeinfer import oip
from edgeinfer.clock import NS_PER_MS, NS_PER_S, MonotonicClock
from edgeinfer.config import (
    CameraSource,
    CommandSource,
    DirectorySource,
    MicrophoneSource,
    RtspSource,
    SourceSection,
    WavSource,
)
from edgeinfer.daemon import trial_inputs
from edgeinfer.daemon.compiling import available_memory
from edgeinfer.daemon.trial_inputs import Feeder
from edgeinfer.daemon.trial_report import recipe, unverified_manifest
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.errors import ArtifactError, ConfigError, Problem, RuntimeUnusable, SessionError
from edgeinfer.pipeline.frame import Source, SourceError
from edgeinfer.pipeline.sources import open_source
from edgeinfer.plain_file import open_plain
from edgeinfer.worker.messages import GraphTensor, LoadSpec
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import WorkerLimits, bare_spec
from edgeinfer.worker.worker import RunResult, Worker

RANDOM = "random"
_LOAD_NS = 300 * NS_PER_S
_RUN_NS = 60 * NS_PER_S
_MOST_SLOT_BYTES = 1 << 30
_ALWAYS_BYTES = 16 << 20
"""Inputs so small are tried however little memory is free."""
_COPIES = 4
"""An input as it is made, in the request, in its slot, and as much again for what the worker makes of it."""
_NO_MODEL = frozenset({"model_invalid", "model_unsupported", "context_unsigned"})
"""Why a load failed, where the file is at fault."""
_CHECKED_RUNS = 10
"""Outputs of so many runs are looked at for NaN and infinity, small ones of every run."""
_HOPELESS = 5
"""So many failed runs without one that did not fail, and there is nothing to measure."""
_SMALL_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Trial:
    """What to try."""

    model: Path
    source: str = RANDOM
    """`random`, a file, a directory, a WAV, `camera[:DEVICE]`, `microphone[:DEVICE]`, a URL, or a command."""
    seconds: float = 5.0
    threads: int = 1
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Shapes for inputs whose own leave something open."""
    fills: Mapping[str, float] = field(default_factory=dict)
    """Inputs that hold one value throughout."""


@dataclass(slots=True)
class _Tally:
    """What the runs so far have shown."""

    latencies_ns: list[int] = field(default_factory=list)
    first_ns: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    outputs: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    checked: int = 0
    non_finite: Counter[str] = field(default_factory=Counter)


def try_model(trial: Trial) -> dict[str, Any]:
    """Try a model for as long as the trial says; return the report, fit for JSON.

    Raises:
        ConfigError: the source or a shape is none.
        RuntimeUnusable: ONNX Runtime cannot be imported here.
        ArtifactError: the file is no model that this ONNX Runtime reads.
        InputsTooLarge: its inputs have more bytes than there is memory to try them.
        SessionError: the model cannot be loaded, or no frame can be made into its input.
    """
    return asyncio.run(_try(trial))


async def _try(trial: Trial) -> dict[str, Any]:
    nursery = Nursery()
    runtime = await nursery.start()
    try:
        if not runtime.onnxruntime:
            raise RuntimeUnusable(runtime.reason)
        bare = bare_spec(trial.model, threads=trial.threads)
        probe = await _first_load(nursery, bare)
        loaded = probe.loaded
        await probe.stop(grace_ns=0)
        shapes = _shapes(trial, loaded.inputs)
        trial_inputs.require_room(loaded.inputs, shapes, _most_input_bytes())
        section = parse_source(trial.source, loaded.inputs, shapes)
        main, takes_any_size = _main_input(section, loaded.inputs, shapes)
        decoded = takes_any_size and main not in trial.shapes  # a size that was given is kept to: by resizing
        if decoded:
            shapes[main] = list(trial_inputs.LARGEST_PICTURE)
        feeder = Feeder(loaded.inputs, shapes, main=main, fills=trial.fills, decoded=decoded)
        inputs = [
            trial_inputs.contract(tensor, shapes[tensor.name], decoded=decoded and tensor.name == main)
            for tensor in loaded.inputs
        ]
        outputs = [trial_inputs.contract(tensor, tensor.shape) for tensor in loaded.outputs]
        worker = await _load(nursery, msgspec.structs.replace(bare, inputs=inputs, outputs=outputs))
        try:
            tally = await _measure(trial, section, feeder, worker)
            memory = worker.memory()
        finally:
            await worker.stop(grace_ns=0)
    finally:
        await nursery.close()
    before = worker.loaded.before.anon_bytes
    steady = max(1, (memory or worker.loaded.after).anon_bytes - before)
    peak = max(steady, memory.peak_anon_bytes - before if memory else 0, worker.loaded.after.peak_anon_bytes - before)
    seen = {name: shape for name, (_, shape) in tally.outputs.items()}
    outputs = [trial_inputs.contract(tensor, seen.get(tensor.name, tensor.shape)) for tensor in loaded.outputs]
    manifest = unverified_manifest(
        trial.model,
        [msgspec.structs.replace(spec, allow_non_finite=False) for spec in inputs],
        [msgspec.structs.replace(spec, allow_non_finite=False) for spec in outputs],
        onnxruntime=runtime.onnxruntime,
        peak_bytes=peak,
        steady_bytes=steady,
    )
    states = trial_inputs.carried_state(
        manifest.inputs, manifest.outputs, main or next((tensor.name for tensor in loaded.inputs), "")
    )
    return {
        "model": str(trial.model),
        "verified": False,
        "placement": "local",
        "onnxruntime": runtime.onnxruntime,
        "providers": loaded.providers,
        "threads": trial.threads,
        "source": trial.source,
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "tried": None if decoded and tensor.name == main else list(shapes[tensor.name]),
                "from": _origin(tensor, main, section, trial.fills),
            }
            for tensor in loaded.inputs
        ],
        "outputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "seen": seen.get(tensor.name),
            }
            for tensor in loaded.outputs
        ],
        "load_ms": round(loaded.load_ns / NS_PER_MS, 3),
        "file_bytes": manifest.files[trial.model.name].size_bytes,
        "steady_bytes": steady,
        "peak_bytes": peak,
        "runs": len(tally.latencies_ns),
        "first_run_ms": round(tally.first_ns / NS_PER_MS, 3) if tally.latencies_ns else None,
        "latency_ms": _percentiles(tally.latencies_ns),
        "finite": not tally.non_finite if tally.checked else None,
        "non_finite": dict(tally.non_finite),
        "failures": dict(tally.failures),
        "problem": tally.problem,
        "manifest": msgspec.to_builtins(manifest),
        "recipe": recipe(manifest, states, main),
    }


def parse_source(text: str, inputs: Sequence[GraphTensor], shapes: Mapping[str, Sequence[int]]) -> SourceSection | None:
    """Return the source that a text on the command line names; None for random inputs.

    Raises:
        ConfigError: it names none.
    """
    kind, _, device = text.partition(":")
    path = Path(text)
    if text == RANDOM:
        return None
    if kind == "camera":
        return CameraSource(Path(device or "/dev/video0"))
    samples = next((shapes[tensor.name][-1] for tensor in inputs if trial_inputs.takes_sound(tensor)), 0)
    if kind == "microphone":
        return MicrophoneSource(max(1, samples), device=device or "default")
    if "://" in text:
        if urlsplit(text).username is not None:
            raise _no_source(kind, "holds credentials, which everybody would see; use a loop with credentials_file")
        if kind not in {"rtsp", "rtsps", "http", "https", "tcp", "udp"}:
            raise _no_source(text, "is no URL of a stream")
        return RtspSource(text)
    wavs = sorted(path.glob("*.wav")) if path.is_dir() else [path] if path.suffix == ".wav" and path.exists() else []
    if wavs:
        return WavSource(path, max(1, samples), _rate_hz(wavs[0]))
    if path.is_dir():
        return DirectorySource(path)
    if path.exists():
        return DirectorySource(path.parent, pattern=glob.escape(path.name))
    argv = shlex.split(text)
    if not argv or shutil.which(argv[0]) is None:
        raise _no_source(text, "is no file, directory or program, nor camera, microphone, URL or random")
    if any(trial_inputs.takes_pictures(tensor, shapes[tensor.name]) for tensor in inputs):
        return CommandSource(argv, framing="jpeg")
    size = math.prod(shapes[inputs[0].name]) * ITEM_BYTES.get(inputs[0].datatype, 0) if inputs else 0
    return CommandSource(argv, framing="fixed", frame_bytes=max(1, size))


def _no_source(text: str, problem: str) -> ConfigError:
    return ConfigError("edgeinfer try", (Problem("--source", f"{text} {problem}"),))


def _rate_hz(path: Path) -> int:
    try:
        with open(open_plain(path), "rb") as raw, wave.open(raw, "rb") as file:  # noqa: PTH123
            return file.getframerate()
    except (OSError, EOFError, wave.Error) as error:
        raise _no_source(str(path), f"is not a PCM WAV file: {error}") from error


def _shapes(trial: Trial, inputs: Sequence[GraphTensor]) -> dict[str, list[int]]:
    names = {tensor.name for tensor in inputs}
    unknown = sorted({*trial.shapes, *trial.fills} - names)
    if unknown:
        problems = tuple(Problem(name, f"is no input; there are {', '.join(sorted(names))}") for name in unknown)
        raise ConfigError("edgeinfer try", problems)
    return {tensor.name: trial_inputs.concrete_shape(tensor, trial.shapes) for tensor in inputs}


def _main_input(
    section: SourceSection | None, inputs: Sequence[GraphTensor], shapes: Mapping[str, Sequence[int]]
) -> tuple[str, bool]:
    """Return the input that frames are for, and whether the worker can decode images for it as they are.

    Raises:
        ConfigError: none of the inputs takes what this source gives.
    """
    if section is None:
        return "", False
    if isinstance(section, WavSource | MicrophoneSource):
        fitting = [tensor for tensor in inputs if trial_inputs.takes_sound(tensor)]
        what = "sound (FP32 [1, N])"
    elif isinstance(section, CommandSource) and section.framing == "fixed":
        fitting, what = list(inputs), "raw tensors"
    else:
        fitting = [tensor for tensor in inputs if trial_inputs.takes_pictures(tensor, shapes[tensor.name])]
        what = "images ([1, H, W, 3] or [1, 3, H, W])"
    if not fitting:
        shown = ", ".join(f"{tensor.name} {tensor.datatype} {list(shapes[tensor.name])}" for tensor in inputs)
        raise _no_source("it", f"gives {what}, which no input takes: {shown or 'the model has none'}")
    main = fitting[0]
    open_size = main.datatype == "UINT8" and len(main.shape) == 4 and main.shape[1] == main.shape[2] == -1
    return main.name, open_size and main.shape[3] == 3


async def _first_load(nursery: Nursery, spec: LoadSpec) -> Worker:
    try:
        return await _load(nursery, spec)
    except SessionError as error:
        if error.reason in _NO_MODEL:
            raise ArtifactError(str(error)) from error
        raise


def _most_input_bytes() -> int:
    """Return what the inputs of one request may have altogether."""
    return max(_ALWAYS_BYTES, min(_MOST_SLOT_BYTES, available_memory() // _COPIES))


async def _load(nursery: Nursery, spec: LoadSpec) -> Worker:
    limits = WorkerLimits(max_slot_bytes=_MOST_SLOT_BYTES)
    return await Worker.start(nursery, spec, deadline_ns=time.monotonic_ns() + _LOAD_NS, limits=limits)


async def _measure(trial: Trial, section: SourceSection | None, feeder: Feeder, worker: Worker) -> _Tally:
    """Run the model on whatever comes until the time is over, or the worker is gone."""
    tally = _Tally()
    end_ns = time.monotonic_ns() + round(trial.seconds * NS_PER_S)
    async with _opened(section) as source:
        while (left_ns := end_ns - time.monotonic_ns()) > 0 and worker.is_alive:
            frame = None
            if source is not None:
                try:
                    async with asyncio.timeout(left_ns / NS_PER_S):
                        frame = await source.next_frame()
                except (TimeoutError, SourceError) as error:
                    tally.problem = tally.problem or source.snapshot().problem or str(error)
                    break
            request = await feeder.request(frame)
            ending = await worker.run(request, deadline_ns=time.monotonic_ns() + _RUN_NS)
            if isinstance(ending, RunResult):
                _note(tally, ending)
            else:
                reason = str(getattr(ending, "reason", "run_timeout"))
                tally.failures[reason] += 1
                tally.problem = tally.problem or f"{reason}: {ending.detail}"
                if not tally.latencies_ns and tally.failures.total() >= _HOPELESS:
                    break
    return tally


@contextlib.asynccontextmanager
async def _opened(section: SourceSection | None) -> AsyncIterator[Source | None]:
    if section is None:
        yield None
        return
    with ThreadPoolExecutor(1, thread_name_prefix="storage") as storage:
        source = open_source(section, name="try", clock=MonotonicClock(), storage=storage)
        running = asyncio.create_task(source.run(), name="source[try]")
        try:
            yield source
        finally:
            running.cancel()
            await asyncio.wait([running])


def _note(tally: _Tally, result: RunResult) -> None:
    took_ns = result.marks.finished_ns - result.marks.started_ns
    tally.first_ns = tally.first_ns or took_ns
    tally.latencies_ns.append(took_ns)
    header = oip.response_header(result.payload)
    for tensor, raw in zip(header.outputs, result.payload.tensors, strict=True):
        tally.outputs[tensor.name] = (tensor.datatype, list(tensor.shape))
        small = math.prod(tensor.shape) <= _SMALL_ELEMENTS
        if tensor.datatype in {"FP16", "BF16", "FP32", "FP64"} and (small or tally.checked < _CHECKED_RUNS):
            values = oip.elements(tensor, raw)
            if not math.isfinite(math.fsum(values) if len(values) < 1000 else sum(values)):
                tally.non_finite[tensor.name] += 1
    tally.checked += 1
    result.release()


def _percentiles(latencies_ns: list[int]) -> dict[str, float] | None:
    """Return percentiles by nearest rank in milliseconds, the first run left out where there are others."""
    ordered = sorted(latencies_ns[1:] or latencies_ns)
    if not ordered:
        return None
    ranks = {f"p{percent}": ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] for percent in (50, 90, 99)}
    return {name: round(value / NS_PER_MS, 3) for name, value in {**ranks, "max": ordered[-1]}.items()}


def _origin(tensor: GraphTensor, main: str, section: SourceSection | None, fills: Mapping[str, float]) -> str:
    if tensor.name == main:
        return "source"
    return str(fills[tensor.name]) if tensor.name in fills else "random" if section is None else "zeros"
