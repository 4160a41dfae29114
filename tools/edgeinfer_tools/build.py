"""Build a bundle: obtain, prepare, quantize, evaluate, measure, pack, prove, publish. The whole pipeline is here.

Each step is another module's; this one owns their order. Nothing is published before the staged bundle was read back
and ran in the device's own worker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.bundle import encode_golden
from edgeinfer.artifact.manifest import Golden, Manifest
from edgeinfer.artifact.profile import Profile, encode_profile
from edgeinfer_tools import describe
from edgeinfer_tools.fetch import fetch
from edgeinfer_tools.golden import GoldenRequest, response_payload
from edgeinfer_tools.machine import this_machine
from edgeinfer_tools.measure import request_payload
from edgeinfer_tools.model_file import save, size_bytes
from edgeinfer_tools.pack import staging, write_json, write_manifest
from edgeinfer_tools.prepare import prepare, requests_of
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.reference import reference
from edgeinfer_tools.runtimes import opset_of
from edgeinfer_tools.search.run import SearchOptions, search
from edgeinfer_tools.sizes import human
from edgeinfer_tools.sources.obtain import obtain
from edgeinfer_tools.variants import Built, Job, make_variants, network_key
from edgeinfer_tools.verify import prove

Say = Callable[[str], None]
"""Takes one line of progress for people."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to build, beyond what recipe and board say."""

    seconds: float = 2.0
    """Time for the latency of one variant at one thread count."""
    replace: bool = False
    costs_from: Profile | None = None
    """Take these costs instead of measuring: the same inputs then give the same bundle digest."""
    search: SearchOptions | None = None
    """Search for the variants within a budget, instead of building those that the recipe names."""


@dataclass(frozen=True, slots=True)
class Result:
    """What was published."""

    bundle: Path
    digest: str
    manifest: Manifest
    report: dict[str, Any]
    shortfall: str = ""
    """Which bound of the budget failed by how much; empty when it is met, or none was given."""


def build(recipe: Recipe, board: Board, output: Path, options: Options, say: Say) -> Result:
    """Build the recipe for the board and publish it as the folder `output`.

    The costs go into `OUTPUT.profile.json` too, beside the bundle.

    Raises:
        EdgeInferError: whatever is wrong, named; nothing was published.
    """
    with staging(output, replace=options.replace) as folder, _scratch(output) as scratch:
        say(f"{recipe.file.name} {recipe.file.version} for {board.name}")
        files = {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}
        source = obtain(recipe)
        if recipe.file.source is not None and source is not None:
            how = f", exported by {source.facts['exporter']}" if source.facts else ""
            kept = " (as before)" if source.reused else ""
            say(f"source    {recipe.file.source.origin}, {human(source.size_bytes)}{how}{kept}")
        prepared = prepare(recipe, source, requests_of(recipe, files), say)
        model = prepared.model
        (folder / "model").mkdir()
        float_model = scratch / "float.onnx"
        save(model, float_model)
        say(f"prepared  {len(model.graph.node)} nodes, opset {opset_of(model)}, {human(size_bytes(float_model))}")
        job = Job(recipe, board, this_machine(), files, folder, float_model, options.seconds, options.costs_from, say)
        job = replace(job, networks=_networks(recipe, files, scratch, say))
        requests = job.golden()
        found = None
        if options.search is not None:
            found = search(job, requests, options.search, scratch)
            job = replace(job, recipe=found.recipe, costs_from=found.profile)
        built, notes = make_variants(job, requests)
        golden = _write_golden(job, requests, built)
        best = built[0]
        write_json(folder / "reference.json", reference(best.evaluation.distributions, variant=best.recipe.name))
        notes = prepared.notes + notes
        report = describe.report(job, built, notes, source_sha256=source.digest if source else "", prepared=prepared)
        if found is not None:
            report["search"] = found.summary()
        write_json(folder / "report.json", report)
        write_manifest(folder, describe.manifest(job, built, golden, model))
        manifest, digest = prove(folder)
        for note in notes:
            say(f"note      {note}")
        say(f"proved    {len(requests)} golden requests, {len(built)} variants, each in a worker of its own")
    output.with_name(f"{output.name}.profile.json").write_bytes(
        encode_profile(describe.profile(job, built, bundle_digest=digest))
    )
    if found is not None:
        found.write_beside(output)
        for line in found.text.splitlines():
            say(line)
    say(f"published {output}, {human(sum(f.size_bytes for f in manifest.files.values()))}, digest {digest[:12]}")
    return Result(output, digest, manifest, report, found.shortfall if found is not None else "")


def _networks(recipe: Recipe, files: dict[str, Path], scratch: Path, say: Say) -> dict[str, Path]:
    """Prepare the networks of variants that have a source of their own, as the recipe's own one is."""
    found: dict[str, Path] = {}
    for variant in recipe.file.variants:
        if variant.source is None or network_key(variant.source) in found:
            continue
        alone = replace(recipe, file=replace(recipe.file, source=variant.source))
        prepared = prepare(alone, obtain(alone), requests_of(recipe, files), say)
        path = scratch / f"float-{variant.name}.onnx"
        save(prepared.model, path)
        say(f"prepared  {variant.source.origin} for {variant.name}, {human(size_bytes(path))}")
        found[network_key(variant.source)] = path
    return found


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """Yield a folder beside the output for what no bundle holds."""
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.float-") as folder:
        yield Path(folder)


def _write_golden(job: Job, requests: list[GoldenRequest], built: list[Built]) -> list[Golden]:
    """Write the golden files: the requests once, and every variant's own answers to them."""
    (job.folder / "golden").mkdir()
    name, version = job.recipe.file.name, job.recipe.file.version
    for index, item in enumerate(requests):
        request = request_payload(item.inputs, job.recipe.inputs)
        (job.folder / f"golden/{index:03}.request").write_bytes(encode_golden(request))
    found = []
    for made in built:
        variant = made.recipe.name
        for index, answered in enumerate(made.golden.answers):
            entry = Golden(f"golden/{index:03}.request", f"golden/{index:03}.{variant}.response", variant)
            response = response_payload(answered, job.recipe.outputs, model=name, version=version)
            (job.folder / entry.response).write_bytes(encode_golden(response))
            found.append(entry)
    return found
