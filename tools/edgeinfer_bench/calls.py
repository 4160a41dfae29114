"""What the way through the runtime costs one request: through the scheduler, and through the UNIX socket.

`raw` is `session.run` in a bare process. `local` is from `Scheduler.submit` to the outcome, in this process, with real
workers. `socket` is a call of `edgeinfer.Client` against a real daemon, which has its own workers; `shared` is the same
with the input in shared memory. One request at a time, one thread each; they take turns, in changing order, so that
they see the same machine.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer import oip
from edgeinfer.client import Client, SharedTensor, Tensor
from edgeinfer.config import ModelSection
from edgeinfer.request import Outcome, OutcomeKind
from edgeinfer_bench.bare import BareProcess
from edgeinfer_bench.models import LONG, SHORT, Chain, build_chain, digest_of, model_file
from edgeinfer_bench.quantile import percentile
from edgeinfer_bench.record import Figure
from edgeinfer_bench.rig import Rig, open_rig
from edgeinfer_bench.service import Service

RUNS = {SHORT.name: 2000, LONG.name: 700}
WARM_UP = 20
_DEADLINE_MS = 5000.0

_PEER = "raw session.run"


@dataclass(slots=True)
class Samples:
    """Nanoseconds of each request, side by side."""

    raw: list[int] = field(default_factory=list)
    pipe: list[int] = field(default_factory=list)
    """What asking the bare process over its pipe took beside the run: two wake-ups and two lines of text."""
    local: list[int] = field(default_factory=list)
    socket: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    timelines: list[dict[str, int]] = field(default_factory=list)
    """Phases of the local requests."""
    inside_ns: list[float] = field(default_factory=list)
    """Of a socket request, what passed in the daemon from reception to result."""

    def clear(self) -> None:
        """Forget the warm-up."""
        for kept in (self.raw, self.pipe, self.local, self.socket, self.shared, self.timelines, self.inside_ns):
            kept.clear()


def measure_calls() -> tuple[dict[str, str], list[Figure]]:
    """Return the models' digests and the figures; takes about half a minute."""
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(root: Path) -> tuple[dict[str, str], list[Figure]]:
    bundles = {chain.name: build_chain(chain, root / "made") for chain in (SHORT, LONG)}
    sections = [ModelSection(name=name) for name in bundles]
    (root / "daemon").mkdir()
    service = Service(root / "daemon", list(bundles.values()))
    figures: list[Figure] = []
    with service.running():
        async with open_rig(root / "state", list(bundles.values()), sections) as rig:
            for chain, short in ((SHORT, "1ms"), (LONG, "10ms")):
                with (
                    BareProcess.running(model_file(bundles[chain.name]), chain.feeds) as raw,
                    Client(service.socket) as client,
                ):
                    samples = await _take_turns(chain, raw, rig, client)
                figures += _figures(short, samples)
    return {name: digest_of(bundle) for name, bundle in bundles.items()}, figures


async def _take_turns(chain: Chain, raw: BareProcess, rig: Rig, client: Client) -> Samples:
    zeros = bytes(chain.input_bytes)
    shape = [chain.rows, chain.width]
    payload = oip.encode_request([("x", "FP32", shape, zeros)])
    tensor = {"x": Tensor("FP32", shape, zeros)}
    lying = SharedTensor("FP32", shape)
    samples = Samples()

    async def bare() -> None:
        begun_ns = time.monotonic_ns()
        ((decode_ns, run_ns),) = raw.run()
        samples.pipe.append(time.monotonic_ns() - begun_ns - decode_ns - run_ns)
        samples.raw.append(run_ns)

    async def local() -> None:
        begun_ns = time.monotonic_ns()
        outcome = await rig.ask(chain.name, payload, deadline_ns=rig.deadline_in(_DEADLINE_MS))
        samples.local.append(time.monotonic_ns() - begun_ns)
        samples.timelines.append(_phases(outcome))

    async def socket() -> None:
        begun_ns = time.monotonic_ns()
        answer = client.infer(chain.name, tensor, deadline_ms=_DEADLINE_MS)
        samples.socket.append(time.monotonic_ns() - begun_ns)
        samples.inside_ns.append(answer.latency_ms * 1e6)

    async def shared() -> None:
        begun_ns = time.monotonic_ns()
        client.infer(chain.name, {"x": lying}, deadline_ms=_DEADLINE_MS)
        samples.shared.append(time.monotonic_ns() - begun_ns)

    sides: list[Callable[[], Awaitable[None]]] = [bare, local, socket, shared]
    for number in range(WARM_UP + RUNS[chain.name]):
        if number == WARM_UP:
            samples.clear()
        for side in sides:
            await side()
        sides.append(sides.pop(0))
    return samples


def _phases(outcome: Outcome) -> dict[str, int]:
    timeline = outcome.request.timeline
    if outcome.kind is not OutcomeKind.OK:
        raise RuntimeError(f"a request ended {outcome.kind}: {outcome.detail}")
    marks = [
        ("queue", timeline.dispatched_ns),
        ("in", timeline.started_ns),
        ("run", timeline.finished_ns),
        ("write", timeline.postprocessed_ns),
        ("back", outcome.ended_ns),
    ]
    phases, before_ns = {}, timeline.received_ns
    for name, at_ns in marks:
        if at_ns is None:
            raise RuntimeError(f"the mark {name} is missing")
        phases[name], before_ns = at_ns - before_ns, at_ns
    return phases


def _figures(model: str, samples: Samples) -> list[Figure]:
    """Return one model's figures; goals are on ratios where runs are long, on differences where they are short."""
    runs = len(samples.raw)
    raw = {percent: percentile(samples.raw, percent) for percent in (50, 99)}
    median_us = {
        name: percentile([phases[name] for phases in samples.timelines], 50) / 1e3 for name in samples.timelines[0]
    }
    inside_us = percentile(samples.inside_ns, 50) / 1e3
    notes = {
        "local": "p50 of phases in us: " + ", ".join(f"{name} {value:.0f}" for name, value in median_us.items()),
        "socket": f"p50 from reception by the daemon to the result: {inside_us:.0f} us",
    }
    goals = {
        ("10ms", "local", "p50_ratio"): 1.03,
        ("10ms", "local", "p99_ratio"): 1.15,
        ("1ms", "local", "p50_us"): 200.0,
        ("1ms", "socket", "p50_us"): 400.0,
    }
    figures = []
    for side, values in (("local", samples.local), ("socket", samples.socket), ("shared", samples.shared)):
        p50, p99 = percentile(values, 50), percentile(values, 99)
        for name, value, unit in (
            ("p50_ratio", p50 / raw[50], "x"),
            ("p99_ratio", p99 / raw[99], "x"),
            ("p50_us", (p50 - raw[50]) / 1e3, "us"),
        ):
            note = notes.get(side, "") if name == "p50_us" else ""
            goal = goals.get((model, side, name))
            figures.append(Figure(f"overhead.{model}.{side}.{name}", value, unit, goal, "lower", _PEER, runs, note))
    pipe_us = percentile(samples.pipe, 50) / 1e3
    figures += [
        Figure(f"overhead.{model}.raw_p50_us", raw[50] / 1e3, "us", None, "lower", runs=runs),
        Figure(f"overhead.{model}.pipe_p50_us", pipe_us, "us", None, "lower", runs=runs,
               note="to ask the bare process over a pipe, without the run: what two wake-ups take here at least"),
    ]  # fmt: skip
    return figures
