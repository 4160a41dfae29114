"""Deadlines inside an operator that nothing can interrupt: when the caller is told, and when the model serves again.

Each trial asks for one matrix product that takes far longer than its deadline and the grace after it. The caller must
be answered at the deadline; the worker is told to stop, does not, and is killed after the grace; another one takes its
place. `answer` is how long after the deadline the outcome was there, less how late an idle process woke up that slept
until the very same moments (the machine's own part). `respawn` is from the kill, which is the answer plus the grace,
to the first good answer of the same model, asked for again and again.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer import oip
from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer.config import ModelSection, SchedulerSection
from edgeinfer.execution.resident import ResidentModel
from edgeinfer.quantity import Nanoseconds
from edgeinfer.request import OutcomeKind, Payload
from edgeinfer.worker.worker import EndCause
from edgeinfer_bench.models import ONE_OPERATOR, build_one_operator, digest_of
from edgeinfer_bench.quantile import percentile
from edgeinfer_bench.record import Figure, Record
from edgeinfer_bench.rig import Rig, open_rig

TRIALS = 150
LARGEST = 3072
"""A product of two such matrices takes half a second here, ten times deadline and grace."""
DEADLINE_MS = 30.0
GRACE_MS = 20.0
"""Shorter than the default, so that a trial takes a tenth of a second; the answer does not depend on it."""
_QUICK_RUNS = 3
"""Before each trial, so that the model is known as a quick one and the long request is taken on its median."""
_GIVE_UP_NS = 5 * NS_PER_S
_RETRY_S = 0.0005

_CONTROL = """
import sys, time
for line in sys.stdin:
    until = int(line)
    while (left := until - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
    print(time.monotonic_ns() - until, flush=True)
"""


@dataclass(slots=True)
class Samples:
    """Nanoseconds of each trial."""

    answer: list[int] = field(default_factory=list)
    control: list[int] = field(default_factory=list)
    respawn: list[int] = field(default_factory=list)
    died: list[int] = field(default_factory=list)
    """From the kill to the reaped process."""
    load: list[int] = field(default_factory=list)
    """Loading in the new worker."""


def measure(bundles: Path) -> Record:  # noqa: ARG001 - every benchmark is called alike
    """Return the record; takes about half a minute."""
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        bundle = build_one_operator(Path(folder) / "made", LARGEST)
        samples = asyncio.run(_measure(Path(folder), bundle))
        return Record(
            bench="kill",
            workload={
                "models": {ONE_OPERATOR: digest_of(bundle)},
                "threads": 1,
                "concurrency": 1,
                "deadline_ms": DEADLINE_MS,
                "grace_ms": GRACE_MS,
                "clock": "answer: deadline to outcome; respawn: kill to the next good answer",
            },
            figures=_figures(samples),
        )


async def _measure(root: Path, bundle: Path) -> Samples:
    settings = SchedulerSection(kill_grace=Nanoseconds(round(GRACE_MS * NS_PER_MS)))
    samples = Samples()
    argv = [sys.executable, "-c", _CONTROL]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as control:  # noqa: ASYNC220
        async with open_rig(root / "state", [bundle], [ModelSection(ONE_OPERATOR)], settings=settings) as rig:
            for _ in range(TRIALS):
                await _trial(rig, control, samples)
        assert control.stdin is not None
        control.stdin.close()
    return samples


async def _trial(rig: Rig, control: subprocess.Popen[str], samples: Samples) -> None:
    for _ in range(_QUICK_RUNS):
        await _serve(rig, rig.clock.now_ns())
    resident = rig.host.cache.find(ONE_OPERATOR)
    assert isinstance(resident, ResidentModel)
    died: list[tuple[EndCause, int]] = []
    resident.workers[0].died.add_done_callback(lambda end: died.append((end.result().cause, time.monotonic_ns())))
    deadline_ns = rig.deadline_in(DEADLINE_MS)
    assert control.stdin is not None
    assert control.stdout is not None
    control.stdin.write(f"{deadline_ns}\n")
    control.stdin.flush()
    outcome = await rig.ask(ONE_OPERATOR, _request(LARGEST), deadline_ns=deadline_ns, firm=False)
    answered_ns = rig.clock.now_ns()
    if outcome.kind is not OutcomeKind.EXPIRED or outcome.reason != "running":
        raise RuntimeError(f"the long request ended {outcome.kind} ({outcome.reason}): {outcome.detail}")
    samples.answer.append(answered_ns - deadline_ns)
    samples.control.append(int(control.stdout.readline()))
    kill_ns = outcome.ended_ns + round(GRACE_MS * NS_PER_MS)
    await asyncio.sleep(max(0.0, (kill_ns - rig.clock.now_ns()) / NS_PER_S))
    samples.respawn.append(await _serve(rig, kill_ns))
    cause, died_ns = died[0]
    if cause is not EndCause.OVERDUE:
        raise RuntimeError(f"the worker was not killed, it is {cause}: the operator was not long enough")
    samples.died.append(died_ns - kill_ns)
    samples.load.append(resident.load_ns)


async def _serve(rig: Rig, since_ns: int) -> int:
    """Ask until there is a good answer; return the nanoseconds from `since_ns` to it.

    Raises:
        RuntimeError: there is none for too long.
    """
    said = ""
    while rig.clock.now_ns() < since_ns + _GIVE_UP_NS:
        outcome = await rig.ask(ONE_OPERATOR, _request(16), deadline_ns=rig.deadline_in(2000), firm=False)
        if outcome.kind is OutcomeKind.OK:
            return outcome.ended_ns - since_ns
        said = f"{outcome.kind} {outcome.reason}: {outcome.detail}"
        await asyncio.sleep(_RETRY_S)
    raise RuntimeError(f"{ONE_OPERATOR} does not serve again after {_GIVE_UP_NS / NS_PER_S:g} s: {said}")


def _request(size: int) -> Payload:
    return oip.encode_request([("n", "INT64", [2], array("q", [size, size]).tobytes())])


def _figures(samples: Samples) -> list[Figure]:
    runs = len(samples.answer)

    def ms(values: list[int], percent: float) -> float:
        return percentile(values, percent) / NS_PER_MS

    control = ms(samples.control, 99)
    phases = (
        f"p50 in ms: process gone {ms(samples.died, 50):.1f}, model loaded by its successor {ms(samples.load, 50):.1f}"
    )
    return [
        Figure("kill.answer_ms_p99", ms(samples.answer, 99) - control, "ms", 20.0, "lower", "idle process", runs,
               note=f"answer p99 {ms(samples.answer, 99):.2f}, less the idle process's {control:.2f}"),
        Figure("kill.answer_ms_p50", ms(samples.answer, 50) - ms(samples.control, 50), "ms", None, "lower",
               "idle process", runs),
        Figure("kill.respawn_ms_p50", ms(samples.respawn, 50), "ms", None, "lower", runs=runs, note=phases),
        Figure("kill.respawn_ms_p99", ms(samples.respawn, 99), "ms", None, "lower", runs=runs),
    ]  # fmt: skip
