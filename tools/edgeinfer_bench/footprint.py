"""What the device takes: memory of the whole service with the demo's models idle, and the size of the installation.

Memory is the proportional set size (PSS) of the daemon, the zygote and the workers together, so that pages which they
share count once; sampled after the models have answered once and the service has been idle for two seconds.
Beside it stands what the same models take in one bare Python process each, with onnxruntime alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edgeinfer.artifact.manifest import read_manifest
from edgeinfer.sensors.process import process_memory, process_tree
from edgeinfer_bench.record import Figure, Record
from edgeinfer_bench.service import MODELS, Service

_PROC = Path("/proc")
_MIB = 1 << 20

_BARE = """
import sys, numpy, onnxruntime as ort
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.inter_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print("ready", flush=True)
sys.stdin.read()
"""


def measure(bundles: Path) -> Record:
    """Return the record; takes about a minute, most of it for the installation."""
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        service = Service(Path(folder), bundles)
        with service.running():
            service.warm_up()
            time.sleep(2)
            pids = [process.pid for process in process_tree(_PROC, service.pid)]
            total = process_memory(_PROC, pids)
            daemon = process_memory(_PROC, [service.pid])
    bare = sum(_bare_pss(bundles / model) for model in MODELS)
    digests = {model: read_manifest(bundles / model)[1] for model in MODELS}
    return Record(
        bench="footprint",
        workload={"models": digests, "concurrency": 0, "clock": "sampled once, two seconds after the last request"},
        figures=[
            Figure("footprint.total_pss_mb", total.pss_bytes / _MIB, "MiB", None, "lower",
                   note=f"{len(pids)} processes: daemon, zygote, {len(pids) - 2} workers"),
            Figure("footprint.daemon_pss_mb", daemon.pss_bytes / _MIB, "MiB", None, "lower"),
            Figure("footprint.bare_pss_mb", bare / _MIB, "MiB", None, "lower", peer="bare onnxruntime",
                   note="one Python process per model, session made, not run"),
            Figure("footprint.install_mb", _install_bytes() / _MIB, "MiB", None, "lower",
                   note="site-packages of the base install, without pip"),
        ],
    )  # fmt: skip


def _bare_pss(bundle: Path) -> int:
    manifest, _ = read_manifest(bundle)
    argv = [sys.executable, "-c", _BARE, str(bundle / manifest.variants[0].file)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{argv[-1]} does not load in a bare process")
        pss = process_memory(_PROC, [process.pid]).pss_bytes
        process.stdin.close()
        process.wait(timeout=10)
    return pss


def _install_bytes() -> int:
    """Install the base into an empty environment, without any extra, and return its size on disk."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix="edgeinfer-install-") as folder:
        target = Path(folder) / "site"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), str(root)],
            check=True, timeout=600, cwd=folder,
        )  # fmt: skip
        return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
