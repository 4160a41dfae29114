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
from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.profile import SCHEMA, Profile
from edgeinfer.sensors.cpu import cpu_clock, usable_cpus
from edgeinfer.sensors.cpuinfo import cpu_flags
from edgeinfer.worker.costing import measure_variants


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
        runtime, costs = asyncio.run(measure_variants(manifest, bundle, threads=counts, seconds=seconds))
        max_hz = cpu_clock(Path("/sys")).max_hz
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
        costs=[msgspec.structs.replace(cost, clock_hz=max_hz) for cost in costs],
    )
