"""What compiling at installation gains: the form that was chosen here against the model as it came.

Two models with the same 112 MB of weights: one takes 16 rows at a time, for which kernels want their weights packed
(`load.*`), one a single row, for which raw ones are as fast (`load.row.*`). Both are installed as `bundle add` does it.
Two runtimes in this process, one with the chosen form and one without any, load, unload and run by turns.

Cold and tight: a real daemon lives in a memory group from its start on, whose limit is one and a half times the
weights, and room for daemon and zygote; the files are not in the page cache before. The median of its requests is
compared with that of the same daemon without limit. For comparison: with less than the weights, and as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from edgeinfer import oip
from edgeinfer.client import Client, Tensor
from edgeinfer.clock import NS_PER_MS
from edgeinfer.config import ModelSection
from edgeinfer.daemon.install import install_bundle
from edgeinfer.errors import EdgeInferError
from edgeinfer.execution.resident import ResidentModel
from edgeinfer.request import OutcomeKind
from edgeinfer.sensors.process import process_memory
from edgeinfer.store.compiled import CompiledForm, CompiledStore
from edgeinfer_bench.models import HEAVY, HEAVY_ROW, Chain, build_chain, digest_of, model_file
from edgeinfer_bench.quantile import percentile
from edgeinfer_bench.record import Figure, Record
from edgeinfer_bench.rig import Rig, open_rig
from edgeinfer_bench.service import Service
from edgeinfer_bench.tight import forget, limited, move

LOADS: Final = 7
RUNS: Final = 100
WARM_UP: Final = 5
TIGHT: Final = 1.5
"""Times the weights: they fit, a second copy of them does not."""
SCARCE: Final = 0.8
"""Times the weights: some of them are read from the disk in every run."""
_ROOM_BYTES: Final = 64 << 20
"""For daemon and zygote."""
_TIGHT_RUNS: Final = 60
_DEADLINE_MS: Final = 20_000.0
_MIB: Final = 1 << 20
_PROC: Final = Path("/proc")
_AS_IT_CAME: Final = "the model as it came"


@dataclass(slots=True)
class Side:
    """What was measured of one form: nanoseconds and bytes."""

    load_ns: list[int] = field(default_factory=list)
    """Of the session, in the worker."""
    run_ns: list[int] = field(default_factory=list)
    anonymous_bytes: dict[int, int] = field(default_factory=dict)
    """By the number of workers: of all of them."""

    @property
    def load_ms(self) -> float:
        """The median."""
        return percentile(self.load_ns, 50) / NS_PER_MS

    @property
    def run_ms(self) -> float:
        """The median."""
        return percentile(self.run_ns, 50) / NS_PER_MS


def measure(bundles: Path) -> Record:  # noqa: ARG001 - every benchmark is called alike
    """Return the record; takes about a minute and a half."""
    digests: dict[str, str] = {}
    figures: list[Figure] = []
    for chain, prefix, speedup in ((HEAVY, "load", 2.0), (HEAVY_ROW, "load.row", 10.0)):
        with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
            root = Path(folder)
            bundle = build_chain(chain, root / "made", golden=True)
            digests[bundle.name] = digest_of(bundle)
            installed = install_bundle(bundle, root / "chosen" / "state")
            form = next(iter(CompiledStore(root / "chosen" / "state").forms(installed.digest)), None)
            chosen, plain = asyncio.run(_side_by_side(root, bundle, chain))
            figures += figures_of(prefix, chosen, plain, form, speedup_goal=speedup)
            figures.append(_cold_and_tight(prefix, root, bundle, chain, form))
    return Record(
        bench="load",
        workload={
            "models": digests,
            "threads": 1,
            "concurrency": 1,
            "tight_limit": f"{TIGHT:g} times the weights",
            "clock": "load: making the session in the worker, page cache warm; runs: session.run in the worker",
        },
        figures=figures,
    )


async def _side_by_side(root: Path, bundle: Path, chain: Chain) -> tuple[Side, Side]:
    """Load, run and weigh both forms by turns."""
    sections = [ModelSection(chain.name)]
    async with contextlib.AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(open_rig(root / "chosen" / "state", [], sections)),
            await stack.enter_async_context(open_rig(root / "plain" / "state", [bundle], sections)),
        ]
        sides = [(rig, Side()) for rig in rigs]
        for number in range(LOADS):
            for rig, side in sides[:: 1 if number % 2 else -1]:
                await rig.host.cache.unload(chain.name)
                side.load_ns.append((await rig.host.cache.load(sections[0])).load_ns)
        for number in range(-WARM_UP, RUNS):
            for rig, side in sides[:: 1 if number % 2 else -1]:
                ran_ns = await _run(rig, chain)
                if number >= 0:
                    side.run_ns.append(ran_ns)
        for workers in (1, 2):
            for rig, side in sides:
                if workers > 1:
                    await rig.host.cache.unload(chain.name)
                    await rig.host.cache.load(ModelSection(chain.name, workers=workers))
                await asyncio.gather(*(_run(rig, chain) for _ in range(4 * workers)))
                side.anonymous_bytes[workers] = process_memory(_PROC, _worker_pids(rig, chain)).anonymous_bytes
    (_, chosen), (_, plain) = sides
    return chosen, plain


def _cold_and_tight(prefix: str, root: Path, bundle: Path, chain: Chain, form: CompiledForm | None) -> Figure:
    figure = f"{prefix}.cold_tight_p50_ratio"
    came = [model_file(bundle)]
    files = came if form is None or form.record.form == "plain" else [form.model_path, *(at for at, _ in form.weights)]
    weights = chain.layers * chain.width * chain.width * 4
    try:
        free = _requests(root / "chosen", chain, files, None)
        tight = _requests(root / "chosen", chain, files, round(TIGHT * weights))
    except (OSError, EdgeInferError) as error:
        return Figure(figure, None, "x", None, "lower", "no limit", note=f"not possible here: {error}")
    note = (
        f"{TIGHT * weights / _MIB:.0f} MiB for {weights / _MIB:.0f} of weights, {_ROOM_BYTES / _MIB:.0f} for the rest: "
        f"{_told(tight)}; without limit {_told(free)}; "
        f"with {SCARCE * weights / _MIB:.0f} MiB: {_tried(root / 'chosen', chain, files, round(SCARCE * weights))}; "
        f"as it came, with {TIGHT * weights / _MIB:.0f} MiB: "
        f"{_tried(root / 'plain', chain, came, round(TIGHT * weights))}"
    )
    value = percentile(tight, 50) / percentile(free, 50)
    return Figure(figure, value, "x", None, "lower", "no limit", len(tight), note)


def _tried(root: Path, chain: Chain, files: list[Path], limit_bytes: int) -> str:
    """Return in words how it goes under a limit, or that it does not."""
    try:
        return _told(_requests(root, chain, files, limit_bytes))
    except (OSError, EdgeInferError) as error:
        return f"fails ({str(error)[:200]})"


def _told(latencies_ms: list[float]) -> str:
    return f"first {latencies_ms[0]:.1f}, p50 {percentile(latencies_ms, 50):.1f} ms"


def _requests(root: Path, chain: Chain, files: list[Path], limit_bytes: int | None) -> list[float]:
    """Return the milliseconds of some requests to a daemon that starts with the files not in memory.

    Raises:
        OSError: a group with that limit may not be made here.
        EdgeInferError: the model does not load under it, or does not answer.
    """
    # A board of that size has such a ceiling; what is reserved follows from it.
    ceiling = "" if limit_bytes is None else f"ceiling = {limit_bytes + _ROOM_BYTES}\n"
    config = f'\n[memory]\nreserve = "0 MiB"\n{ceiling}\n[[model]]\nname = "{chain.name}"\n'
    service = Service(root, [], extra_config=config)
    service.install()
    zeros = {"x": Tensor("FP32", [chain.rows, chain.width], bytes(chain.input_bytes))}
    with contextlib.ExitStack() as stack:
        group = None if limit_bytes is None else stack.enter_context(limited(limit_bytes + _ROOM_BYTES))
        forget(files)
        stack.enter_context(service.started())
        if group is not None:
            move(group, [service.pid])  # before it has started anything
        service.wait_until_ready()
        client = stack.enter_context(Client(service.socket))
        answers = [client.infer(chain.name, zeros, deadline_ms=_DEADLINE_MS) for _ in range(_TIGHT_RUNS)]
    return [answer.latency_ms for answer in answers]


async def _run(rig: Rig, chain: Chain) -> int:
    """Return how long one run took in the worker.

    Raises:
        RuntimeError: it was not answered well.
    """
    payload = oip.encode_request([("x", "FP32", [chain.rows, chain.width], bytes(chain.input_bytes))])
    outcome = await rig.ask(chain.name, payload, deadline_ns=rig.deadline_in(_DEADLINE_MS))
    timeline = outcome.request.timeline
    if outcome.kind is not OutcomeKind.OK or timeline.started_ns is None or timeline.finished_ns is None:
        raise RuntimeError(f"{chain.name} ended {outcome.kind} ({outcome.reason}): {outcome.detail}")
    return timeline.finished_ns - timeline.started_ns


def _worker_pids(rig: Rig, chain: Chain) -> list[int]:
    resident = rig.host.cache.find(chain.name)
    assert isinstance(resident, ResidentModel)
    return [worker.pid for worker in resident.workers]


def figures_of(
    prefix: str, chosen: Side, plain: Side, form: CompiledForm | None, *, speedup_goal: float
) -> list[Figure]:
    """Return the figures of the two forms side by side."""
    name = "plain" if form is None else form.record.form
    why = "no form was kept" if form is None else form.record.why
    disk = "" if form is None or name == "plain" else f"; {form.disk_bytes / _MIB:.0f} MiB on the disk"
    anonymous = "; ".join(
        f"{workers} worker{'s' if workers > 1 else ''}: {chosen.anonymous_bytes[workers] / _MIB:.1f} instead of "
        f"{plain.anonymous_bytes[workers] / _MIB:.1f} MiB"
        for workers in sorted(plain.anonymous_bytes)
    )

    loads = len(chosen.load_ns)
    return [
        Figure(f"{prefix}.speedup", plain.load_ms / chosen.load_ms, "x", speedup_goal, "higher", _AS_IT_CAME, loads,
               f"{name}: {chosen.load_ms:.1f} instead of {plain.load_ms:.1f} ms{disk}; chosen because: {why}"),
        Figure(f"{prefix}.anon_ratio", chosen.anonymous_bytes[1] / plain.anonymous_bytes[1], "x", 0.2, "lower",
               _AS_IT_CAME, 1, anonymous),
        Figure(f"{prefix}.anon_ratio_two_workers", chosen.anonymous_bytes[2] / plain.anonymous_bytes[2], "x", None,
               "lower", _AS_IT_CAME, 1, "both workers together, as in the note of one"),
        Figure(f"{prefix}.latency_ratio", chosen.run_ms / plain.run_ms, "x", 1.1, "lower", _AS_IT_CAME,
               len(chosen.run_ns), f"p50 {chosen.run_ms:.2f} instead of {plain.run_ms:.2f} ms"),
    ]  # fmt: skip
