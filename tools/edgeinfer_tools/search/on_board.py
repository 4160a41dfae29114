"""Wrap a candidate as a bundle that a board can measure. The bundle only serves to measure: it claims no quality."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx

from edgeinfer.artifact.archive import pack_bundle
from edgeinfer.artifact.bundle import encode_golden
from edgeinfer.artifact.manifest import SCHEMA, Golden, Manifest, Runtime, Variant
from edgeinfer.artifact.profile import OperatingCost
from edgeinfer_tools import model_file
from edgeinfer_tools.golden import GoldenRequest, answer, response_payload
from edgeinfer_tools.measure import request_payload
from edgeinfer_tools.pack import file_table, write_manifest
from edgeinfer_tools.runtimes import opset_of
from edgeinfer_tools.search.remote import BoardUnusable, RemoteBoard
from edgeinfer_tools.search.space import Candidate
from edgeinfer_tools.variants import Job

UNKNOWN_BYTES = 1 << 30
"""What a candidate is said to take, as long as nobody has measured it."""
LEAST_RUNTIME = "1.0.0"
"""The board says itself whether its runtime can run it."""


@dataclass(frozen=True, slots=True)
class OnBoard:
    """Measures on a board (`workbench.Measure`)."""

    job: Job
    typical: GoldenRequest
    threads: Sequence[int]
    board: RemoteBoard

    @property
    def where(self) -> str:
        """The board, its edgeinfer, and how long is measured."""
        board = self.board
        return f"{board.address}, edgeinfer {board.version}, {self.job.seconds:g} s, threads {list(self.threads)}"

    def __call__(self, candidate: Candidate, model: Path) -> list[OperatingCost]:
        """See `workbench.Measure`.

        Raises:
            LinkError: the board is gone, or its edgeinfer is not fit.
            SessionError: it cannot run the candidate.
        """
        with tempfile.TemporaryDirectory(prefix="edgeinfer-candidate-") as scratch:
            folder, archive = Path(scratch) / "bundle", Path(scratch) / "candidate.tar"
            write_candidate(self.job, candidate, model, self.typical, folder)
            pack_bundle(folder, archive)
            profile = self.board.measure(archive, threads=self.threads, seconds=self.job.seconds)
        if missing := sorted(set(self.threads) - {cost.threads for cost in profile.costs}):
            text = f"{self.board.address}: edgeinfer may use fewer than {missing[-1]} CPUs there"
            raise BoardUnusable(f"{text}; ask for fewer threads in the budget")
        return [msgspec.structs.replace(cost, variant=candidate.name) for cost in profile.costs]


def write_candidate(job: Job, candidate: Candidate, model: Path, typical: GoldenRequest, folder: Path) -> None:
    """Write a bundle with this one candidate and one request."""
    file, variant = job.recipe.file, candidate.variant()
    (folder / "model").mkdir(parents=True)
    (folder / "golden").mkdir()
    for path in model_file.files_of(model):
        (folder / "model" / path.name).write_bytes(path.read_bytes())
    golden = Golden("golden/000.request", "golden/000.response")
    (folder / golden.request).write_bytes(encode_golden(request_payload(typical.inputs, job.recipe.inputs)))
    answered = answer([typical], job.runner(model, variant=variant))[0]
    response = response_payload(answered, job.recipe.outputs, model=file.name, version=file.version)
    (folder / golden.response).write_bytes(encode_golden(response))
    loaded = onnx.load(str(model), load_external_data=False)
    made = Variant(
        name=candidate.name,
        file=f"model/{model.name}",
        quality=0.0,
        load_peak_bytes=UNKNOWN_BYTES,
        steady_bytes=UNKNOWN_BYTES,
        providers=variant.providers,
        provider_options=variant.provider_options,
    )
    manifest = Manifest(
        schema=SCHEMA,
        name=file.name,
        version=file.version,
        task=file.task,
        inputs=job.recipe.inputs,
        outputs=job.recipe.outputs,
        state=job.recipe.state,
        classes=job.recipe.classes,
        variants=[made],
        runtime=Runtime(onnxruntime=LEAST_RUNTIME, opset=opset_of(loaded), ir_version=int(loaded.ir_version)),
        files=file_table(folder),
        golden=[golden],
        description="a candidate of a search, to be measured",
    )
    write_manifest(folder, manifest)
