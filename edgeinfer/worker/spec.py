"""Make the load order of a worker from a manifest and what the ledger and the governor allow.

Daemon's side, pure. The fences are derived here, in one place: the arena's cap, the data limit, the slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import structs

from edgeinfer.artifact.manifest import Manifest, Variant
from edgeinfer.artifact.provider import CPU_PROVIDER
from edgeinfer.clock import NS_PER_MS
from edgeinfer.worker.messages import Compile, Form, LoadSpec, MappedFile
from edgeinfer.worker.slot import aligned

_MIB: Final = 1 << 20
_THREAD_STACK_BYTES: Final = 8 * _MIB
"""Address space of a thread's stack: hardly touched, but RLIMIT_DATA counts it."""
_DATA_SLACK_BYTES: Final = 64 * _MIB
"""Malloc arenas and Python's own; RLIMIT_DATA is the second fence, the arena's cap is the first."""
_SLOTS: Final = 4
"""One that runs, one that waits, and two answers whose readers are not done."""
_HEADER_ROOM_BYTES: Final = 16 << 10
"""Room for a JSON header in a slot."""
_MIN_RESPONSE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How a worker is handled by the daemon."""

    cancel_grace_ns: int = 100 * NS_PER_MS
    """From a cancel to SIGKILL. ONNX Runtime obeys in 1 to 9 ms, except inside one long operator [measured]."""
    run_ahead: int = 1
    """Runs sent to the worker beyond the one that is under way, so that it is not idle between two."""
    max_waiting: int = 16
    """Callers of `run` that wait for a place; more are refused `queue_full`."""
    max_slots: int = _SLOTS
    max_slot_bytes: int = 256 * _MIB
    """All slots together."""
    response_bytes: int = _MIB
    """Room for an answer; larger ones are granted more, up to `max_slot_bytes`, one at a time."""


@dataclass(frozen=True, slots=True)
class FormFiles:
    """The files of a variant's compiled form."""

    form: Form
    model_path: Path
    mapped: tuple[MappedFile, ...]


def load_spec(
    manifest: Manifest,
    bundle: Path,
    variant_name: str,
    *,
    threads: int,
    reservation_bytes: int | None = None,
    cpus: Iterable[int] | None = None,
    files: FormFiles | None = None,
) -> LoadSpec:
    """Return the order to load a variant of the bundle at `bundle`, from a compiled form's `files` where given.

    `reservation_bytes` is what the ledger has set aside for it (the manifest's peak when None): activations are
    capped by it. Weights mapped from the file are added to the second fence.

    Raises:
        ManifestInvalid: there is no such variant.
    """
    variant = manifest.variant(variant_name)
    reserved = variant.load_peak_bytes if reservation_bytes is None else reservation_bytes
    stacks = threads * _THREAD_STACK_BYTES
    plain = LoadSpec(
        model=manifest.name,
        version=manifest.version,
        variant=variant.name,
        path=str(bundle / variant.file),
        providers=list(variant.providers),
        provider_options=variant.provider_options,
        intra_threads=threads,
        cpus=None if cpus is None else sorted(cpus),
        arena_max_bytes=reserved,
        data_limit_bytes=_data_limit(variant, reserved + manifest.files[variant.file].size_bytes + stacks),
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        state=manifest.state,
        classes=manifest.classes,
    )
    return plain if files is None else with_files(plain, files)


def _data_limit(variant: Variant, needed_bytes: int) -> int | None:
    """Return the second fence; none around a variant that others than the CPU's provider run.

    A provider's library may take an allocation that fails for no reason to stop: [measured] OpenVINO 2026.4, at the
    fence in a run, reports success after 1 ms with outputs that it never computed. Better too much memory than that:
    such a worker is watched and replaced when it outgrows its reservation, and the kernel kills it first.
    """
    return needed_bytes + _DATA_SLACK_BYTES if variant.providers == [CPU_PROVIDER] else None


def with_files(plain: LoadSpec, files: FormFiles) -> LoadSpec:
    """Return the order to load what `plain` loads, from the files of a compiled form of it."""
    assert plain.data_limit_bytes is not None, "made by load_spec"
    return structs.replace(
        plain,
        path=str(files.model_path),
        form=files.form,
        mapped=list(files.mapped),
        data_limit_bytes=plain.data_limit_bytes + sum(file.size_bytes for file in files.mapped),  # private mappings
    )


def compile_spec(plain: LoadSpec, form: Form, model_path: Path, *, memory_bytes: int, max_file_bytes: int) -> LoadSpec:
    """Return the order to load what `plain` loads and write it in `form` at `model_path`, in an empty folder.

    `memory_bytes` is the anonymous memory that this may take: the weights as they came, and packed as well.
    """
    return structs.replace(
        plain,
        form=form,
        data_limit_bytes=memory_bytes + plain.intra_threads * _THREAD_STACK_BYTES + _DATA_SLACK_BYTES,
        compile=Compile(model_path=str(model_path), max_file_bytes=max_file_bytes),
    )


def bare_spec(path: Path, *, threads: int, cpus: Iterable[int] | None = None) -> LoadSpec:
    """Return the order to load an ONNX file without a bundle: no contract, no caps."""
    return LoadSpec(
        model=path.stem,
        version="0.0.0",
        variant="bare",
        path=str(path),
        providers=["CPUExecutionProvider"],
        intra_threads=threads,
        cpus=None if cpus is None else sorted(cpus),
        weighed=True,
    )


def limits_for(manifest: Manifest, *, cancel_grace_ns: int = 100 * NS_PER_MS) -> WorkerLimits:
    """Return limits with slots just large enough for the manifest's largest request and response."""
    response = max(_MIN_RESPONSE_BYTES, aligned(manifest.max_response_bytes) + _HEADER_ROOM_BYTES)
    request = aligned(manifest.max_request_bytes) + _HEADER_ROOM_BYTES
    return WorkerLimits(
        cancel_grace_ns=cancel_grace_ns,
        max_slots=_SLOTS,
        max_slot_bytes=_SLOTS * aligned(request + response, 1 << 16),
        response_bytes=response,
    )
