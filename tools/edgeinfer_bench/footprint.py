"""What the device takes: memory of the whole service with idle models, and the size of the installation.

Memory is the proportional set size (PSS) of the daemon, the zygote and the workers together, so that pages which they
share count once; sampled after the models have answered once and the service has been idle for two seconds. Beside it
stands what the same models take in one bare Python process each, after one run, all of them alive at once.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edgeinfer.artifact.manifest import read_manifest
from edgeinfer.sensors.process import process_memory, process_tree
from edgeinfer_bench.bare import BareProcess, Feeds
from edgeinfer_bench.record import Figure, Record
from edgeinfer_bench.service import DEMO_MODELS, Service, warm_up_demo

_PROC = Path("/proc")
_MIB = 1 << 20
_SETTLE_S = 2.0
_ROOT = Path(__file__).resolve().parents[2]

_FEEDS: dict[str, Feeds] = {
    "pp-ocr-det": {"image": ("uint8", (1, 768, 1024, 3))},
    "silero-vad": {
        "audio": ("float32", (1, 512)),
        "context": ("float32", (1, 64)),
        "state": ("float32", (2, 1, 128)),
    },
    "support-intent": {"text": ("str", (1,))},
}


def measure(bundles: Path) -> Record:
    """Return the record; takes about half a minute, most of it for the installation."""
    digests = {model: read_manifest(bundles / model)[1] for model in DEMO_MODELS}
    return Record(
        bench="footprint",
        workload={
            "models": digests,
            "concurrency": 0,
            "clock": "sampled once, two seconds after every model has answered once",
        },
        figures=[*_demo(bundles), _installed()],
    )


def _demo(bundles: Path) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        service = Service(Path(folder), [bundles / model for model in DEMO_MODELS])
        with service.running():
            warm_up_demo(service)
            time.sleep(_SETTLE_S)
            pids = [process.pid for process in process_tree(_PROC, service.pid)]
            total, daemon = process_memory(_PROC, pids), process_memory(_PROC, [service.pid])
            variants = service.variants()
    files = {model: read_manifest(bundles / model)[0].variant(variants[model]).file for model in DEMO_MODELS}
    bare = _bare_pss_bytes([(bundles / model / file, _FEEDS[model]) for model, file in files.items()])
    chosen = ", ".join(f"{model} {variant}" for model, variant in variants.items())
    count = f"{len(pids)} processes: daemon, zygote, {len(pids) - 2} workers"
    return [
        _mib("footprint.total_pss_mb", total.pss_bytes, note=f"{count}; {chosen}"),
        _mib("footprint.total_anonymous_mb", total.held_bytes, note="anonymous memory and slots"),
        _mib("footprint.daemon_pss_mb", daemon.pss_bytes),
        _mib("footprint.bare_pss_mb", bare, note="one bare Python process per model, together"),
    ]


def _bare_pss_bytes(models: list[tuple[Path, Feeds]]) -> int:
    """Return what bare processes, one per model and all alive, take together after one run each."""
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(BareProcess.running(path, feeds)).pid for path, feeds in models]
        time.sleep(_SETTLE_S)
        return process_memory(_PROC, pids).pss_bytes


def _installed() -> Figure:
    """Install the base into an empty folder, without any extra, and take its size on disk."""
    name, note = "footprint.install_mb", "site-packages of the base install, without compiled files"
    with tempfile.TemporaryDirectory(prefix="edgeinfer-install-") as folder:
        source, target = Path(folder) / "source", Path(folder) / "site"
        # A copy, because building leaves its traces in the tree.
        shutil.copytree(_ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(target), str(source)]
        done = subprocess.run(argv, check=False, timeout=300, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            return Figure(name, None, "MiB", None, "lower", note=f"pip could not install: {why}")
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file() and not path.is_symlink())
    return _mib(name, size, note=note)


def _mib(name: str, size_bytes: int, *, goal: float | None = None, peer: str | None = None, note: str = "") -> Figure:
    return Figure(name, size_bytes / _MIB, "MiB", goal, "lower", peer=peer, note=note)
