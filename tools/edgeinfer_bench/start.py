"""How soon models serve: a cold start, one model more, and what a swap costs the others.

- *cold*: exec of `edgeinfer run` to the first answer over its socket, against a bare Python process from exec to its
  first result of the same model. The files are in the page cache for both; they take turns.
- *further model*: from asking the model cache of a running runtime to the model being ready, against making a session
  of the same file in a bare process that has imported everything.
- *swap*: one model of about 1 ms is asked at a steady rate, as a loop would (displaceable), while another one is
  replaced by its other version, twice a window; windows with and without swaps take turns. Misses are requests of the
  steady model that were not answered in time.
"""

from __future__ import annotations

import asyncio
import compileall
import contextlib
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import edgeinfer
from edgeinfer import oip
from edgeinfer.client import Client, Tensor
from edgeinfer.clock import NS_PER_MS, NS_PER_S, sleep_until
from edgeinfer.config import ModelSection
from edgeinfer.errors import EdgeInferError
from edgeinfer.request import Outcome, OutcomeKind
from edgeinfer_bench.bare import BareProcess
from edgeinfer_bench.models import LONG, SHORT, SWAPPED, Chain, build_chain, digest_of, model_file
from edgeinfer_bench.quantile import percentile
from edgeinfer_bench.record import Figure, Record
from edgeinfer_bench.rig import Rig, open_rig
from edgeinfer_bench.service import Service

COLD_STARTS = 7
FURTHER_LOADS = 15
WINDOWS = 8
"""Of each kind."""
WINDOW_S = 2.0
PERIOD_MS = 10.0
DEADLINE_MS = 20.0
SWAPS_AT_S = (0.4, 1.2)
_GIVE_UP_S = 30.0


def measure(bundles: Path) -> Record:  # noqa: ARG001 - every benchmark is called alike
    """Return the record; takes about a minute."""
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        root = Path(folder)
        made = [build_chain(chain, root / "made") for chain in (SHORT, LONG, *SWAPPED)]
        figures = [*_cold(root, made[0]), *asyncio.run(_in_process(root, made))]
        return Record(
            bench="start",
            workload={
                "models": {path.name: digest_of(path) for path in made},
                "threads": 1,
                "concurrency": 1,
                "swap": {"period_ms": PERIOD_MS, "deadline_ms": DEADLINE_MS, "window_s": WINDOW_S, "windows": WINDOWS},
                "clock": "cold: exec to the first answer, page cache warm; further model: asked for to ready",
            },
            figures=figures,
        )


def _cold(root: Path, bundle: Path) -> list[Figure]:
    package = Path(edgeinfer.__file__).parent
    compileall.compile_dir(package, quiet=1)  # as any installation does, and as onnxruntime and numpy have been
    (root / "daemon").mkdir()
    service = Service(root / "daemon", [bundle])
    service.install()
    ours: list[_Cold] = []
    theirs: list[int] = []
    for _ in range(COLD_STARTS):
        ours.append(_first_answer(service))
        with BareProcess.running(model_file(bundle), SHORT.feeds) as raw:
            theirs.append(raw.cold_ns)

    def ms(values: list[int]) -> float:
        return percentile(values, 50) / NS_PER_MS

    answer, bare = ms([cold.answer_ns for cold in ours]), ms(theirs)
    note = (
        f"p50 in ms: zygote started {ms([cold.zygote_ns for cold in ours]):.0f}, socket there "
        f"{ms([cold.socket_ns for cold in ours]):.0f}, answer {answer:.0f}; bare {bare:.0f}"
    )
    return [Figure("start.cold_ratio", answer / bare, "x", None, "lower", "bare onnxruntime", COLD_STARTS, note)]


@dataclass(frozen=True, slots=True)
class _Cold:
    """When the steps of one start were seen, in nanoseconds from exec."""

    zygote_ns: int
    socket_ns: int
    answer_ns: int


def _first_answer(service: Service) -> _Cold:
    inputs = {"x": Tensor("FP32", [SHORT.rows, SHORT.width], bytes(SHORT.input_bytes))}
    service.socket.unlink(missing_ok=True)
    zygote_ns = socket_ns = 0
    begun = time.monotonic_ns()
    with service.started(), Client(service.socket) as client:
        children = Path(f"/proc/{service.pid}/task/{service.pid}/children")
        while (now_ns := time.monotonic_ns() - begun) < _GIVE_UP_S * NS_PER_S:
            service.check_running()
            if not zygote_ns and children.read_text(encoding="ascii"):
                zygote_ns = now_ns
            if not socket_ns and service.socket.exists():
                socket_ns = now_ns
            if socket_ns:
                with contextlib.suppress(EdgeInferError):
                    client.infer(SHORT.name, inputs, deadline_ms=5000)
                    return _Cold(zygote_ns, socket_ns, time.monotonic_ns() - begun)
            time.sleep(0.002)
    raise RuntimeError(f"no answer within {_GIVE_UP_S:g} s of the start")


async def _in_process(root: Path, made: list[Path]) -> list[Figure]:
    sections = [ModelSection(SHORT.name), ModelSection(LONG.name), ModelSection(SWAPPED[0].name, preload=False)]
    async with open_rig(root / "state", made, sections) as rig:
        further = await _further_model(rig, model_file(made[1]))
        return [*further, *await _swap(rig)]


async def _further_model(rig: Rig, file: Path) -> list[Figure]:
    section = ModelSection(LONG.name)
    ready: list[int] = []
    load: list[int] = []
    bare: list[int] = []
    check: list[int] = []
    for _ in range(FURTHER_LOADS):
        await rig.host.cache.unload(LONG.name)
        begun_ns = rig.clock.now_ns()
        resident = await rig.host.cache.load(section)
        ready.append(rig.clock.now_ns() - begun_ns)
        load.append(resident.load_ns)
        with BareProcess.running(file, LONG.feeds) as raw:
            bare.append(raw.session_ns)
        begun_ns = rig.clock.now_ns()
        rig.host.store.verify(LONG.name, LONG.version)
        check.append(rig.clock.now_ns() - begun_ns)

    def ms(values: list[int]) -> float:
        return percentile(values, 50) / NS_PER_MS

    note = (
        f"p50 in ms: ready {ms(ready):.1f}, of that checking the bundle's bytes {ms(check):.1f} "
        f"and loading in the worker {ms(load):.1f}; bare session {ms(bare):.1f}"
    )
    return [
        Figure("start.further_model_extra_ms", ms(ready) - ms(bare), "ms", 10.0, "lower", "bare onnxruntime",
               FURTHER_LOADS, note),
        Figure("start.further_model_around_load_ms", ms([all_ - own for all_, own in zip(ready, load, strict=True)]),
               "ms", None, "lower", None, FURTHER_LOADS, "ready, without loading in the worker"),
    ]  # fmt: skip


async def _swap(rig: Rig) -> list[Figure]:
    outcomes: dict[bool, list[Outcome]] = {False: [], True: []}
    gaps: list[int] = []
    version = 0
    await rig.host.cache.load(ModelSection(SWAPPED[0].name, version=SWAPPED[0].version))
    for number in range(2 * WINDOWS):
        swapping = bool(number % 2)
        window = asyncio.create_task(_steady(rig, SHORT), name="steady")
        if swapping:
            begun_ns = rig.clock.now_ns()
            for at_s in SWAPS_AT_S:
                await sleep_until(begun_ns + round(at_s * NS_PER_S), rig.clock)
                version = 1 - version
                asked_ns = rig.clock.now_ns()
                await rig.host.cache.load(ModelSection(SWAPPED[0].name, version=SWAPPED[version].version))
                gaps.append(rig.clock.now_ns() - asked_ns)
        outcomes[swapping] += await window
    misses = {kind: sum(outcome.kind is not OutcomeKind.OK for outcome in found) for kind, found in outcomes.items()}
    latency = {
        kind: percentile([outcome.latency_ns for outcome in found if outcome.kind is OutcomeKind.OK], 99) / NS_PER_MS
        for kind, found in outcomes.items()
    }
    note = (
        f"{misses[True]} of {len(outcomes[True])} with {len(gaps)} swaps, {misses[False]} of {len(outcomes[False])} "
        f"without; p99 {latency[True]:.1f} and {latency[False]:.1f} ms; "
        f"a swap took {percentile(gaps, 50) / NS_PER_MS:.0f} ms; "
        f"missed with swaps: {_reasons(outcomes[True])}; without: {_reasons(outcomes[False])}"
    )
    value = misses[True] - misses[False]
    return [
        Figure("start.swap_misses_minus_control", value, "requests", 0.0, "lower", "no swap", 2 * WINDOWS, note),
        Figure("start.swap_p99_ratio", latency[True] / latency[False], "x", None, "lower", "no swap", 2 * WINDOWS),
    ]


def _reasons(outcomes: list[Outcome]) -> str:
    counts = Counter(f"{outcome.kind} {outcome.reason}" for outcome in outcomes if outcome.kind is not OutcomeKind.OK)
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common()) or "none"


async def _steady(rig: Rig, chain: Chain) -> list[Outcome]:
    """Ask at a steady rate for one window; each deadline counts from when its request was to be sent."""
    payload = oip.encode_request([("x", "FP32", [chain.rows, chain.width], bytes(chain.input_bytes))])
    period_ns = round(PERIOD_MS * NS_PER_MS)
    begun_ns = rig.clock.now_ns()
    asked = []
    async with asyncio.TaskGroup() as group:
        for number in range(int(WINDOW_S * NS_PER_S) // period_ns):
            due_ns = begun_ns + number * period_ns
            await sleep_until(due_ns, rig.clock)
            deadline_ns = due_ns + round(DEADLINE_MS * NS_PER_MS)
            asked.append(
                group.create_task(
                    rig.ask(chain.name, payload, deadline_ns=deadline_ns, firm=False), name=f"ask[{number}]"
                )
            )
    return [task.result() for task in asked]
