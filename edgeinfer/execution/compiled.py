"""Choose the form in which a variant is loaded on this device, from what was measured here.

Pure; also what a form means to those who load it: its key, its files, its charge. The rule, in this order:

1. A form is eligible when its golden answers are right, and no timed request takes more than `LATENCY_MARGIN` longer
   than in the plain form. Where shapes may vary, the largest must have been among them: raw weights can be as fast as
   packed ones for one row and much slower for sixteen.
2. Of those, the one with the least anonymous memory; within `MEMORY_GRAIN_BYTES` of the least they are equal.
3. Of these, the one that loads fastest.
4. Plain stays when the winner saves neither `MIN_SAVED_BYTES` of memory nor `MIN_SAVED_LOAD` of the load time: files
   on the disk have to earn their place.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgeinfer.artifact.manifest import Variant
from edgeinfer.errors import mib
from edgeinfer.store.compiled import CompiledForm, FormCost, FormKey
from edgeinfer.worker.messages import MappedFile
from edgeinfer.worker.spec import FormFiles

LATENCY_MARGIN: Final = 0.10
"""How much slower counts as equal: two workers with the same form differ by less than that, most of the time."""
MEMORY_GRAIN_BYTES: Final = 4 << 20
MIN_SAVED_BYTES: Final = 4 << 20
MIN_SAVED_LOAD: Final = 0.3
"""As a share of the plain form's load time."""


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The form to load, and why."""

    cost: FormCost
    why: str


def choose_form(plain: FormCost, others: Sequence[FormCost], *, margin: float = LATENCY_MARGIN) -> FormChoice:
    """Return the best form; `plain` itself when nothing is better."""
    judged = [(cost, _objection(plain, cost, margin)) for cost in others]
    eligible = [cost for cost, objection in judged if not objection]
    told = "; ".join(f"{cost.form}: {objection}" for cost, objection in judged if objection)
    if plain.problem or not eligible:
        return FormChoice(plain, told or plain.problem or "no other form was made")
    least = min(cost.steady_bytes for cost in (plain, *eligible))
    lean = [cost for cost in (plain, *eligible) if cost.steady_bytes <= least + MEMORY_GRAIN_BYTES]
    best = min(lean, key=lambda cost: (cost.load_ms, cost.disk_bytes))
    saved_bytes, saved_ms = plain.steady_bytes - best.steady_bytes, plain.load_ms - best.load_ms
    if best is plain or (saved_bytes < MIN_SAVED_BYTES and saved_ms < MIN_SAVED_LOAD * plain.load_ms):
        return FormChoice(plain, told or "the other forms save too little")
    why = (
        f"{mib(best.steady_bytes)} anonymous instead of {mib(plain.steady_bytes)}, "
        f"loads in {best.load_ms:.0f} ms instead of {plain.load_ms:.0f}"
    )
    return FormChoice(best, f"{why}; {told}" if told else why)


def form_key(digest: str, variant: Variant, *, onnxruntime: str, cpu_flags: frozenset[str]) -> FormKey:
    """Return what a compiled form of the variant holds for on this device, with this runtime."""
    return FormKey(digest, variant.name, onnxruntime, platform.machine(), cpu_flags, tuple(variant.providers))


def form_files(form: CompiledForm | None) -> FormFiles | None:
    """Return the load order's part of a form, None when the variant is loaded as it came."""
    if form is None or form.record.form == "plain":
        return None
    mapped = tuple(MappedFile(str(path), size_bytes) for path, size_bytes in form.weights)
    return FormFiles(form.record.form, form.model_path, mapped)


def peak_bytes(form: CompiledForm | None, variant: Variant, measured: tuple[int, bool] | None = None) -> int:
    """Return the anonymous memory to reserve for each worker of a variant in that form, mapped weights not included.

    `measured` is the peak of the plain form in this device's profile, and whether the largest shape was among what was
    run; without, the toolchain's figure is all there is to go by.
    """
    if form is not None and form.record.form != "plain":
        return charged_bytes(form.record.cost_of("plain"), form.record.cost, variant.load_peak_bytes)
    if measured is None:
        return variant.load_peak_bytes
    bytes_here, covers_largest = measured
    return _with_margin(bytes_here) if covers_largest else max(bytes_here, variant.load_peak_bytes)


def _with_margin(measured_bytes: int) -> int:
    """Return a measured peak and a quarter more: what the allocator does differs from run to run."""
    return measured_bytes + measured_bytes // 4


def mapped_weights(form: CompiledForm | None) -> tuple[str, int] | None:
    """Return whose weights a form maps, and the bytes to charge once for all workers; None when it maps none."""
    if form is None or form.record.form == "plain":
        return None
    return f"weights {form.record.bundle_digest[:12]}/{form.record.variant}", form.record.cost.hot_bytes


def charged_bytes(plain: FormCost, chosen: FormCost, declared_peak_bytes: int) -> int:
    """Return the anonymous memory to reserve for a worker of the chosen form, mapped weights not included.

    With the largest shape measured it is the measured peak and a quarter more. Else what the manifest declares for the
    plain form is all that is known about the largest shape, so only the weights' own memory is taken off it.
    """
    if chosen.form == "plain":
        return declared_peak_bytes
    measured = _with_margin(chosen.peak_bytes)
    if chosen.covers_largest:  # measured here beats declared elsewhere, where it is more
        return max(chosen.peak_bytes, min(measured, declared_peak_bytes))
    saved = max(0, plain.steady_bytes - chosen.steady_bytes)
    return min(max(measured, declared_peak_bytes - saved), declared_peak_bytes)


def _objection(plain: FormCost, cost: FormCost, margin: float) -> str:
    """Return why a form is not eligible, empty when it is."""
    if cost.problem:
        return cost.problem
    if cost.form == "mapped" and not cost.covers_largest:
        return "not timed at the largest shape"
    if not any(cost.latencies_us):
        return "not timed"
    if plain.covers_largest and not all(cost.latencies_us):
        return "a request failed that the plain form answers"
    for plain_us, now_us in zip(cost.plain_latencies_us, cost.latencies_us, strict=True):
        if now_us > plain_us * (1 + margin):
            return f"{now_us / 1000:.2f} ms a run instead of {plain_us / 1000:.2f}"
    return ""
