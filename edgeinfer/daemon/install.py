"""Install a bundle: verified, vouched for, tried on this very CPU in a throw-away worker, committed, then compiled.

The probe runs every variant that this device can run on its golden vectors, on its own execution providers: a
quantized model can be right on one CPU and wrong on the next, and an accelerator computes in its own way. One that
isn't right refuses the whole bundle: nothing half-trusted is installed. One that cannot run here is left out, and said.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgeinfer.artifact.fitness import unfit
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.daemon.compiling import Compiler, available_memory, profile_of
from edgeinfer.errors import ArtifactError, EdgeInferError, UnsupportedSchema
from edgeinfer.sensors.cpuinfo import cpu_flags
from edgeinfer.store.compiled import CompiledStore
from edgeinfer.store.store import BundleStore, Installed
from edgeinfer.store.trust import anyone, voucher
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.probe import probe

_log = logging.getLogger(__name__)


def install_bundle(
    source: Path, state_dir: Path, *, keys: Path | None = None, keys_named: bool = True, compiled: bool = True
) -> Installed:
    """Add the bundle at `source` (a folder or a tar) to the store below `state_dir` and activate it.

    It must be signed by one of the public keys in the folder `keys`; without a folder none is asked for. One that
    nobody named, the default one, may be missing or empty (`keys_named`: see `edgeinfer.store.trust`).
    `compiled`: look for the form in which it loads best here, too, which takes some seconds for each variant.

    Raises:
        ArtifactError: it is not sound, not signed by a trusted key, or not right on this CPU.
        ConfigError: the trusted keys cannot be read, or there are none in a folder that was named.
        SignaturesUnchecked: there are keys, and nothing here that checks signatures.
        StorageError: the store cannot be written.
        RuntimeUnusable: ONNX Runtime cannot be imported here.
    """
    store = BundleStore(state_dir)
    installed = store.add(source, probe_bundle, vouch=anyone if keys is None else voucher(keys, named=keys_named))
    if not compiled:
        return installed
    try:
        asyncio.run(_compile(store, installed, cpu_flags()))
    except EdgeInferError as error:  # it is installed, and loads as it came
        _log.warning("not compiled bundle=%r why=%r", installed.title, str(error))
    return installed


async def _compile(store: BundleStore, installed: Installed, flags: frozenset[str]) -> None:
    """Find the form in which each variant loads best here, and keep what was measured as this device's profile."""
    compiled, nursery = CompiledStore(store.state_dir), Nursery()
    compiled.prune({item.digest for item in store.installed()})
    await nursery.start()
    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage") as storage:
            compiler = Compiler(
                nursery=nursery, store=compiled, cpu_flags=flags, storage=storage, memory_bytes=available_memory
            )
            providers = nursery.snapshot().providers
            able = [
                variant
                for variant in installed.manifest.variants
                if not unfit(variant, cpu_flags=flags, providers=providers)
            ]
            forms = [form for variant in able if (form := await compiler.compile(installed, variant)) is not None]
    finally:
        await nursery.close()
    if forms:
        store.write_profile(profile_of(installed, forms, flags))


def probe_bundle(bundle: Path, manifest: Manifest) -> None:
    """Try every variant that this CPU can run.

    Raises:
        ArtifactError: one fails, or none can run here; the text says why.
        UnsupportedSchema: it needs a newer runtime.
    """
    asyncio.run(_probe(bundle, manifest, cpu_flags()))


async def _probe(bundle: Path, manifest: Manifest, flags: frozenset[str]) -> None:
    title = f"{manifest.name} {manifest.version}"
    nursery = Nursery()
    runtime = await nursery.start()
    try:
        if runtime.onnxruntime and _older(runtime.onnxruntime, manifest.runtime.onnxruntime):
            raise UnsupportedSchema(
                f"{title} needs onnxruntime {manifest.runtime.onnxruntime} or newer, {runtime.onnxruntime} is installed"
                ": update it, or build the bundle for it (onnxruntime in the recipe)"
            )
        reasons = {item.name: unfit(item, cpu_flags=flags, providers=runtime.providers) for item in manifest.variants}
        if all(reasons.values()):
            every = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ArtifactError(f"no variant of {title} can run on this device ({every})")
        for variant in manifest.variants:
            if reasons[variant.name]:
                _log.warning("not probed bundle=%r variant=%s why=%r", title, variant.name, reasons[variant.name])
                continue
            verdict = await probe(nursery, manifest, bundle, variant.name)
            if not verdict.accepted:
                raise ArtifactError(
                    f"{title} {variant.name} failed its probe on this device ({verdict.reason}): {verdict.detail}; "
                    "rebuild it for this board with edgeinfer-tools build --board"
                )
    finally:
        await nursery.close()


def _older(have: str, need: str) -> bool:
    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())

    return numbers(have) < numbers(need)
