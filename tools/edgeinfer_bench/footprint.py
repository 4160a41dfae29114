"""What the device takes: memory of the whole service with idle models, and the size of the installation.

Memory is that of the daemon, the zygote and the workers together, pages which they share counted once (`alone`: PSS as
it would be if nothing else ran here); sampled after the models have answered and the service has been idle for two
seconds. Beside it stands what the same models take in one bare Python process each, after one run, all of them alive.
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
from edgeinfer.client import Client
from edgeinfer.sensors.process import process_memory, process_tree
from edgeinfer_bench import peer
from edgeinfer_bench.alone import alone_bytes
from edgeinfer_bench.bare import BareProcess, Feeds
from edgeinfer_bench.peer import PeerMissing
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

_SMALL, _VARIANT = "silero-vad", "int8"
_WORKERS = (1, 2, 4)
_REQUESTS = 8
"""To each worker before it is weighed."""


def measure(bundles: Path) -> Record:
    """Return the record; takes under a minute, most of it for the installation."""
    digests = {model: read_manifest(bundles / model)[1] for model in DEMO_MODELS}
    return Record(
        bench="footprint",
        workload={
            "models": digests,
            "concurrency": 0,
            "clock": "sampled once, two seconds after every model has answered once",
        },
        figures=[*_demo(bundles), *_small_model(bundles), _installed()],
    )


def _demo(bundles: Path) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        service = Service(Path(folder), [bundles / model for model in DEMO_MODELS])
        with service.running():
            warm_up_demo(service)
            time.sleep(_SETTLE_S)
            pids = [process.pid for process in process_tree(_PROC, service.pid)]
            total, daemon = alone_bytes(pids), alone_bytes([service.pid])
            held = process_memory(_PROC, pids).held_bytes
            variants = service.variants()
    files = {model: read_manifest(bundles / model)[0].variant(variants[model]).file for model in DEMO_MODELS}
    bare = _bare_pss_bytes([(bundles / model / file, _FEEDS[model]) for model, file in files.items()])
    chosen = ", ".join(f"{model} {variant}" for model, variant in variants.items())
    count = f"{len(pids)} processes: daemon, zygote, {len(pids) - 2} workers"
    return [
        _mib("footprint.total_pss_mb", total, note=f"{count}; {chosen}"),
        _mib("footprint.total_anonymous_mb", held, note="anonymous memory and slots"),
        _mib("footprint.daemon_pss_mb", daemon, note="alone: the zygote shares some of it"),
        _mib("footprint.bare_pss_mb", bare, note="one bare Python process per model, together"),
    ]


def _small_model(bundles: Path) -> list[Figure]:
    """Return what one small int8 model takes, and what each further worker of it adds."""
    file = bundles / _SMALL / read_manifest(bundles / _SMALL)[0].variant(_VARIANT).file
    measured = {workers: _workers_bytes(bundles / _SMALL, workers) for workers in _WORKERS}
    totals = {workers: total for workers, (total, _) in measured.items()}
    bare = _bare_pss_bytes([(file, _FEEDS[_SMALL])])
    first, last = _WORKERS[0], _WORKERS[-1]
    further = (totals[last] - totals[first]) // (last - first)
    weights = file.stat().st_size
    counts = ", ".join(f"{total / _MIB:.1f} MiB with {workers}" for workers, total in totals.items())
    return [
        _mib("footprint.one_model_pss_mb", totals[first], goal=80.0,
             note=f"{_SMALL} {_VARIANT}; {counts} workers; with one: {measured[first][1]}"),
        Figure("footprint.one_model_ratio", totals[first] / bare, "x", 1.6, "lower", "bare onnxruntime",
               note=f"the bare process takes {bare / _MIB:.1f} MiB"),
        _mib("footprint.further_model_mb", further - weights, goal=5.0,
             note=f"{further / _MIB:.2f} MiB a worker, less {weights / _MIB:.2f} of weights; activations included"),
        _versus_peer(totals[first], file),
    ]  # fmt: skip


def _workers_bytes(bundle: Path, workers: int) -> tuple[int, str]:
    """Return what a daemon with so many workers of one model takes, each having run, and where it is."""
    keys = {_SMALL: f'variant = "{_VARIANT}"\nworkers = {workers}\n'}
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        service = Service(Path(folder), [bundle], keys=keys)
        with service.running():
            with Client(service.socket) as client:
                for stream in range(_REQUESTS * workers):  # a stateful model's worker is chosen by its stream
                    client.infer(_SMALL, {"audio": [[0.0] * 512]}, deadline_ms=5000, sequence_id=stream + 1)
            time.sleep(_SETTLE_S)
            pids = [process.pid for process in process_tree(_PROC, service.pid)]
            if len(pids) != 2 + workers:
                raise RuntimeError(f"{len(pids)} processes instead of daemon, zygote and {workers} workers")
            total = alone_bytes(pids)
            own = [process_memory(_PROC, [pid]).anonymous_bytes / _MIB for pid in pids]
            files = total / _MIB - sum(own)
            return (
                total,
                f"files {files:.1f}, anonymous {', '.join(f'{each:.1f}' for each in own)} (daemon, zygote, workers)",
            )


def _versus_peer(ours: int, file: Path) -> Figure:
    """Return what the service with one model takes, as a share of what the peer with the same file takes."""
    name = "footprint.vs_peer_ratio"
    totals: dict[int, int] = {}
    told: list[str] = []
    for mode in peer.MODES:
        try:
            totals[mode] = _peer_bytes(file, mode)
        except PeerMissing as error:
            told.append(f"{mode} failed: {error}")
        else:
            told.append(f"{totals[mode] / _MIB:.1f} MiB with {mode}")
    tried = ", ".join(told)
    if not totals:
        return Figure(name, None, "x", None, "lower", peer.TITLE, note=tried)
    best = min(totals, key=totals.__getitem__)
    note = (
        f"{ours / _MIB:.1f} MiB, one worker of {_SMALL} {_VARIANT}; the peer with parallel_workers={best}, which "
        f"takes least: {tried}"
    )
    return Figure(name, ours / totals[best], "x", None, "lower", peer.TITLE, note=note)


def _peer_bytes(file: Path, mode: int) -> int:
    """Return what the peer takes, idle, after it has answered as often as ours.

    Raises:
        PeerMissing: it cannot be had here.
    """
    with peer.running({_SMALL: file}, parallel_workers=mode) as running:
        for _ in range(_REQUESTS):
            peer.ask(running, _SMALL, _FEEDS[_SMALL])
        time.sleep(_SETTLE_S)
        return alone_bytes(process.pid for process in process_tree(_PROC, running.pid))


def _bare_pss_bytes(models: list[tuple[Path, Feeds]]) -> int:
    """Return what bare processes, one per model and all alive, take together after one run each."""
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(BareProcess.running(path, feeds)).pid for path, feeds in models]
        time.sleep(_SETTLE_S)
        return alone_bytes(pids)


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
