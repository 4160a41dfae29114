"""`python -m edgeinfer_bench.toolchain [RECIPE ...]`: all recipes, or some; leaves OUT/tools.json."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.artifact.manifest import read_manifest
from edgeinfer_bench.record import Figure, Record, read_records, write_record
from edgeinfer_bench.show import show
from edgeinfer_bench.toolchain.figures import Row, figures_of, show_rows
from edgeinfer_bench.toolchain.judging import latencies, quality, value_of
from edgeinfer_bench.toolchain.make import Data
from edgeinfer_bench.toolchain.rivals import PEERS, ROOT, Attempt, run_maker
from edgeinfer_tools.evaluate import GateResult
from edgeinfer_tools.fetch import cache_dir
from edgeinfer_tools.model_file import files_of
from edgeinfer_tools.recipe import load_recipe

MEMORY_RECIPE, VISION_RECIPE = "pp-ocr-rec", "efficientnet-lite0"
SAMPLES = (8, 128)
MEMORY_GOAL, VISION_GOAL_S = 1.3, 300.0


def main() -> int:
    """Measure, print as it goes, write the record."""
    parser = argparse.ArgumentParser(prog="edgeinfer_bench.toolchain")
    parser.add_argument("recipes", nargs="*", help="folders' names below models/, `memory`, `vision`; default all")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    known = sorted(path.parent.name for path in (ROOT / "models").glob("*/recipe.toml"))
    names = args.recipes or [*known, "memory", "vision"]
    if unknown := set(names) - {*known, "memory", "vision"}:
        parser.error(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    scratch = ROOT / "build" / "bench-tools"
    scratch.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, Figure] = {item.id: item for record in _before(args.out) for item in record.figures}
    for count, name in enumerate(names, 1):
        print(f"[{count}/{len(names)}] {name}", flush=True)
        match name:
            case "memory":
                figures = [calibration_memory(scratch)]
            case "vision":
                figures = [vision(scratch)]
            case _:
                figures = one(name, scratch)
        found |= {item.id: item for item in figures}
        workload = {"measured_now": names[:count], "took_s": round(time.monotonic() - began, 1)}
        record = Record("tools", workload, list(found.values()))
        write_record(record, args.out)  # each time: what was measured stays when the rest is stopped
    show([record])
    print(f"took {time.monotonic() - began:.0f} s")
    return 0


def _before(out: Path) -> Iterator[Record]:
    """Yield the record of an earlier run, so that recipes can be measured one at a time."""
    if out.is_dir():
        yield from (record for record in read_records(out) if record.bench == "tools")


def one(name: str, scratch: Path) -> list[Figure]:
    """Return one recipe's figures, and print its table."""
    folder, bundle = ROOT / "models" / name, scratch / name
    made = run_maker("ours", folder, Path("-"), bundle)
    if made.path is None:
        print(f"{name}: {made.reason}")
        return figures_of(name, {"float": Row(made)}, "float", 0.0)
    manifest, _ = read_manifest(bundle)
    files = {variant.name: bundle / variant.file for variant in manifest.variants}
    keep = next(item.name for item in load_recipe(folder).file.variants if item.method == "keep")
    float_model = files[keep]
    attempts = {"float": Attempt("float", float_model)}
    for variant in files.keys() - {keep}:
        attempts[f"ours {variant}"] = Attempt("ours", files[variant], made.seconds, made.peak_bytes)
    for peer in PEERS:
        attempts[peer] = run_maker(peer, folder, float_model, scratch / f"{name}.{peer}.onnx")
    chosen = made.facts["preferred"]["variant"] if made.facts else keep
    preferred = "float" if chosen == keep else f"ours {chosen}"
    source = Data(load_recipe(folder))
    there = {key: item.path for key, item in attempts.items() if item.path is not None}
    judged = {key: quality(source, path, float_model) for key, path in there.items()}
    timed = latencies(source, there)
    rows = {
        key: Row(item, _size(item.path), judged.get(key), timed.get(key)) if item.path else Row(item)
        for key, item in attempts.items()
    }
    show_rows(name, rows)
    gate = source.recipe.file.gates[0]
    bar = gate.minimum if gate.minimum is not None else gate.maximum
    assert bar is not None
    limit = value_of(GateResult(gate.metric, gate.output, bar, gate.minimum, gate.maximum))
    return figures_of(name, rows, preferred, max(0.0, judged["float"].value - limit))


def _size(path: Path | None) -> int:
    assert path is not None
    return sum(part.stat().st_size for part in files_of(path))


def calibration_memory(scratch: Path) -> Figure:
    """Return what calibrating takes with many samples beside few."""
    name, goal = "tools.calibration_memory_ratio", MEMORY_GOAL
    folder, bundle = ROOT / "models" / MEMORY_RECIPE, scratch / MEMORY_RECIPE
    float_model = bundle / "model" / "fp32.onnx"
    if not float_model.is_file():
        built = run_maker("ours", folder, Path("-"), bundle)
        if built.path is None:
            return Figure(name, None, "ratio", goal, "lower", note=built.reason)
    made = [run_maker(f"repeated-{count}", folder, float_model, scratch / "memory.onnx") for count in SAMPLES]
    if reason := next((item.reason for item in made if item.path is None), ""):
        return Figure(name, None, "ratio", goal, "lower", note=reason)
    few, many = (item.peak_bytes or 0 for item in made)
    note = f"{MEMORY_RECIPE}, histograms: {few >> 20} and {many >> 20} MiB with {SAMPLES[0]} and {SAMPLES[1]} samples"
    return Figure(name, many / few, "ratio", goal, "lower", note=note)


def vision(scratch: Path) -> Figure:
    """Return how long it takes from PyTorch to a signed bundle, with nothing but downloads in the cache."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    from edgeinfer_tools.sign import sign

    name, bundle, key = "tools.vision_wall_s", scratch / "vision", scratch / "key.pem"
    secret = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with _only_downloads(scratch) as cache:
        began = time.monotonic()
        folder = ROOT / "models" / VISION_RECIPE
        made = run_maker("ours", folder, Path("-"), bundle, environ={"EDGEINFER_CACHE": str(cache)})
        if made.path is None:
            return Figure(name, None, "s", VISION_GOAL_S, "lower", note=made.reason)
        sign(bundle, key, replace=True)
        took_s = time.monotonic() - began
    note = f"{VISION_RECIPE}: export, validation, quantizing, evaluation, measuring, proof, signature"
    return Figure(name, took_s, "s", VISION_GOAL_S, "lower", note=note)


@contextmanager
def _only_downloads(scratch: Path) -> Iterator[Path]:
    """Yield a cache that has what was downloaded, and nothing that was computed."""
    own = scratch / "cache"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    for part in ("wheels", "files", "unpacked"):
        (cache_dir() / part).mkdir(parents=True, exist_ok=True)
        (own / part).symlink_to(cache_dir() / part)
    try:
        yield own
    finally:
        shutil.rmtree(own)


if __name__ == "__main__":
    raise SystemExit(main())
