"""Show what a bundle says about itself, for people or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.artifact.epcontext import refuse_compiled_contexts
from edgeinfer.artifact.manifest import SIGNATURE_FILE, Manifest, TensorSpec, read_manifest
from edgeinfer.artifact.provider import CPU_PROVIDER
from edgeinfer.errors import ManifestInvalid
from edgeinfer_tools.sizes import human


def as_json(bundle: Path, *, verified: bool = False, signer: str = "") -> dict[str, Any]:
    """Return manifest, digest and report of a bundle.

    `verified` and `signer` say what was found out just now: that it is whole and right, and by whose key it is signed.

    Raises:
        ArtifactError: it is no bundle.
    """
    manifest, digest = _read(bundle)
    shown: dict[str, Any] = {"digest": digest, "manifest": msgspec.to_builtins(manifest), "report": _report(bundle)}
    if verified:
        shown["verified"] = True
    if signer:
        shown["signed_by"] = signer
    return shown


def as_text(bundle: Path, *, verified: bool = False, signer: str = "") -> str:
    """Return the same for people.

    Raises:
        ArtifactError: it is no bundle.
    """
    manifest, digest = _read(bundle)
    size = sum(file.size_bytes for file in manifest.files.values())
    lines = [
        f"{manifest.name} {manifest.version}  {manifest.task}  {len(manifest.files)} files, {human(size)}",
        f"digest    {digest}",
        f"source    {manifest.provenance.source}  {manifest.provenance.license}".rstrip(),
        f"runtime   onnxruntime >= {manifest.runtime.onnxruntime}, opset {manifest.runtime.opset}",
    ]
    if manifest.deadline_ms is not None:
        lines.append(f"deadline  {manifest.deadline_ms:g} ms")
    lines += [f"input     {_spec(spec)}" for spec in manifest.inputs]
    lines += [f"output    {_spec(spec)}" for spec in manifest.outputs]
    lines += [f"state     {item.input} -> {item.output}  {item.datatype} {item.shape}" for item in manifest.state]
    if manifest.classes is not None:
        lines.append(f"labels    {', '.join(manifest.classes.labels)} from {manifest.classes.output}")
    lines += _variants(manifest)
    lines += [f"note      {note}" for note in _report(bundle).get("notes", [])]
    if signer:
        lines.append(f"signed    by key {signer}: ok")
    elif (bundle / SIGNATURE_FILE).exists():
        lines.append("signed    not checked: name the key that you trust with --key")
    if verified:
        requests = _count(len({golden.request for golden in manifest.golden}), "golden request")
        lines.append(f"verified  every byte; {requests}, {_count(len(manifest.variants), 'variant')}: ok")
    return "\n".join(lines)


def _read(bundle: Path) -> tuple[Manifest, str]:
    """Read the manifest, and refuse models with compiled code in them, as a device would."""
    manifest, digest = read_manifest(bundle)
    for name in sorted({variant.file for variant in manifest.variants}):
        if (bundle / name).is_file():  # what is missing is for --verify to say
            refuse_compiled_contexts(bundle / name)
    return manifest, digest


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _spec(spec: TensorSpec) -> str:
    text = f"{spec.name}  {spec.datatype} {spec.shape}"
    if spec.max_shape:
        text += f" up to {spec.max_shape}"
    return text + (f", or {spec.decode.kind}" if spec.decode else "")


def _variants(manifest: Manifest) -> list[str]:
    lines = [f"{'variant':<10}{'quality':>8}{'size':>10}{'peak':>10}{'tolerance':>11}  p99 by threads; needs"]
    for variant in manifest.variants:
        latency = ", ".join(
            f"{threads}: {micros / 1000:.2f} ms" for threads, micros in sorted(variant.latency_us.items())
        )
        wanted = [*variant.instruction_sets, *(name for name in variant.providers if name != CPU_PROVIDER)]
        needs = f"; {', '.join(wanted)}" if wanted else ""
        size = human(manifest.files[variant.file].size_bytes)
        lines.append(
            f"{variant.name:<10}{variant.quality:>8.4f}{size:>10}{human(variant.load_peak_bytes):>10}"
            f"{variant.tolerance:>11.3g}  {latency}{needs}"
        )
    return lines


def _report(bundle: Path) -> dict[str, Any]:
    path = bundle / "report.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ManifestInvalid(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
