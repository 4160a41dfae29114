"""Measure on this device what a bundle's variants cost, without a daemon: `edgeinfer measure`.

The bundle is verified first; nothing is installed and nothing stays behind. What comes out is a profile, the same file
that the toolchain reads with `--profile-from`. How one model is measured is `worker.costing`'s.
"""

from __future__ import annotations

import asyncio
import platform
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from edgeinfer.artifact.archive import unpack_bundle
from edgeinfer.artifact.bundle import read_golden, verify_bundle
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.artifact.profile import SCHEMA, OperatingCost, Profile
from edgeinfer.errors import ManifestInvalid, RuntimeUnusable
from edgeinfer.request import Payload
from edgeinfer.sensors.cpu import cpu_clock, usable_cpus
from edgeinfer.sensors.cpuinfo import cpu_flags
from edgeinfer.worker.costing import ARENA_MAX_BYTES, measure_spec
from edgeinfer.worker.largest import largest_request
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.spec import limits_for, load_spec


def measure_bundle(bundle: Path, *, threads: Sequence[int], seconds: float, board: str) -> Profile:
    """Return what every variant of a bundle (a folder or one .tar) costs here, at each thread count.

    Latency is that of the first golden request, in `seconds` for each variant and thread count. `threads` beyond the
    CPUs that this process may use are left out. `board` is the name of the board file that describes this machine.

    Raises:
        ArtifactError: it is no sound bundle, or too small to hold a golden request.
        RuntimeUnusable: ONNX Runtime cannot be imported here.
        SessionError: a variant does not load or run.
    """
    with ExitStack() as stack:
        if bundle.is_file():
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeinfer-measure-"))
            folder = Path(scratch) / "bundle"
            unpack_bundle(bundle, folder)
            bundle = folder
        manifest, digest = verify_bundle(bundle)
        usable = len(usable_cpus(Path("/sys"), Path("/proc")))
        counts = sorted({count for count in threads if count <= usable}) or [usable]
        runtime, costs = asyncio.run(_measure_all(manifest, bundle, counts, seconds))
    return Profile(
        schema=SCHEMA,
        model=manifest.name,
        version=manifest.version,
        bundle_digest=digest,
        board=board,
        machine=platform.machine(),
        cpu_flags=sorted(cpu_flags()),
        onnxruntime=runtime,
        origin="measured",
        costs=costs,
    )


async def _measure_all(
    manifest: Manifest, bundle: Path, threads: Sequence[int], seconds: float
) -> tuple[str, list[OperatingCost]]:
    largest = largest_request(manifest)
    nursery = Nursery()
    runtime = await nursery.start()
    try:
        if not runtime.onnxruntime:
            raise RuntimeUnusable(runtime.reason)
        found = []
        for variant in manifest.variants:
            typical = _typical(manifest, bundle, variant.name)
            for count in threads:
                plain = load_spec(manifest, bundle, variant.name, threads=count)
                # Measured without the fences that the manifest's own figures would set.
                spec = msgspec.structs.replace(plain, arena_max_bytes=ARENA_MAX_BYTES, data_limit_bytes=None)
                limits = limits_for(manifest)
                cost = await measure_spec(nursery, spec, typical, largest, seconds=seconds, limits=limits)
                found.append(msgspec.structs.replace(cost, clock_hz=cpu_clock(Path("/sys")).max_hz))
        return runtime.onnxruntime, found
    finally:
        await nursery.close()


def _typical(manifest: Manifest, bundle: Path, variant: str) -> Payload:
    golden = manifest.golden_for(variant)
    if not golden:
        raise ManifestInvalid(f"{manifest.name}: variant {variant!r} has no golden request to measure with")
    return read_golden(bundle, golden[0])[0]
