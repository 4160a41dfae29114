"""Play the overload benchmark's traces through the real scheduler on virtual time: what the policy alone loses.

Executors are scripted, so a machine's other programs, channels and wake-ups play no part; run times have the noise that
is asked for. `python -m tests.scheduling.simulation` prints a table (some seconds a row).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.clock import NS_PER_MS, LoopClock
from edgeinfer.execution.executor import Estimate
from edgeinfer.metrics import Accounting
from edgeinfer.request import Deadlines, InferRequest, Outcome, Payload, Timeline
from edgeinfer.scheduling.scheduler import Scheduler
from edgeinfer_bench.bound import Job, most_on_time
from edgeinfer_bench.overload import ARRIVALS, LOADS, SIZES, schedule
from edgeinfer_bench.player import CHAINS, Sent, Tally, count_all
from edgeinfer_bench.trace import LONG_US, SHORT_US, Sizes, read_trace
from tests.execution.fake import FakeExecutor, Script
from tests.virtual_time import run_virtual

SERVICE_NS = {SHORT_US: 1_000_000, LONG_US: 10_000_000}
QUEUE_LIMIT = 64
_WARM_UP = 24
_SEED = Estimate(2 * 10_000_000, 3 * 10_000_000)


@dataclass(frozen=True, slots=True)
class Noise:
    """How run times differ from the service time: a body, a tail, and what each run costs besides."""

    sigma: float = 0.0
    """Of a lognormal factor with median 1."""
    hiccups: float = 0.0
    """Share of runs that another program interrupts."""
    hiccup_ns: int = 0
    """Mean of the exponential time that this takes."""
    overhead_ns: int = 0
    """Of every run, beyond its service time: slot, message, wake-up. Work that is paid for by nobody."""

    def duration_ns(self, service_ns: int, dice: random.Random) -> int:
        """Draw how long a run takes."""
        hiccup_ns = dice.expovariate(1 / self.hiccup_ns) if dice.random() < self.hiccups else 0.0
        return round(service_ns * dice.lognormvariate(0.0, self.sigma) + self.overhead_ns + hiccup_ns)


QUIET = Noise()
REALISTIC = Noise(sigma=0.02, hiccups=0.02, hiccup_ns=1 * NS_PER_MS)
"""A machine with little else to do: p99 is a tenth above the median for 10 ms, twice the median for 1 ms."""
BUSY = Noise(sigma=0.05, hiccups=0.05, hiccup_ns=3 * NS_PER_MS, overhead_ns=200_000)
"""Another program has a core now and then; the runtime's own share is counted, too."""
COSTLY = Noise(sigma=0.03, hiccups=0.02, hiccup_ns=1 * NS_PER_MS, overhead_ns=400_000)
"""As realistic, but each run costs the runtime 0.4 ms besides."""
NOISES = {"quiet": QUIET, "realistic": REALISTIC, "busy": BUSY, "costly": COSTLY}


@dataclass(slots=True)
class Played:
    """What became of the traces of one kind at one load."""

    tally: Tally
    arrivals: int = 0
    submit_cpu_ns: int = 0
    """CPU time inside `Scheduler.submit`."""
    worst_submit_cpu_ns: int = 0

    @property
    def vs_bound(self) -> float:
        """Service time in time, as a share of the bound."""
        return self.tally.ours_ns / self.tally.bound_ns

    @property
    def broken(self) -> float:
        """Share of the firm promises that were broken."""
        return self.tally.broken / max(1, self.tally.promised)

    @property
    def wasted(self) -> float:
        """Share of the time that runs took whose answer was not in time."""
        return self.tally.wasted_ns / max(1, self.tally.ran_ns)


def play(sizes: Sizes, load: float, noise: Noise, *, seed: int = 1, begins: bool = True) -> Played:
    """Play both traces of that kind at that load, one after the other.

    With `begins` the executor takes requests without a task, as the local one does: at once, and one ahead.
    """
    played = Played(Tally())
    for number, arrivals in enumerate(ARRIVALS):
        trace, _ = read_trace(sizes, arrivals)
        run_virtual(
            _play(schedule(trace, load, SERVICE_NS), noise, random.Random(seed + number), played, begins=begins)
        )
    return played


async def _play(jobs: Sequence[Sent], noise: Noise, dice: random.Random, played: Played, *, begins: bool) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    durations: dict[int, int] = {}
    ended: list[Outcome] = []

    def script(request: InferRequest) -> Script:
        return Script(durations[request.id], estimate=_SEED)

    def observe(outcome: Outcome) -> None:
        ended.append(outcome)
        if outcome.result is not None:
            outcome.result.release()

    def make(size_us: int, due_ns: int, *, firm: bool) -> InferRequest:
        request = InferRequest(
            CHAINS[size_us].name, Payload(b"{}"), Deadlines(due_ns), Timeline(clock.now_ns()), firm=firm
        )
        durations[request.id] = noise.duration_ns(SERVICE_NS[size_us], dice)
        return request

    local = FakeExecutor(clock, script, begins=begins)
    scheduler = Scheduler(
        local=local,
        nearby=None,
        clock=clock,
        accounting=Accounting(),
        queue_limit=QUEUE_LIMIT,
        cores=1,
        observe=observe,
    )
    task = asyncio.create_task(scheduler.run(), name="scheduler")
    for _ in range(_WARM_UP):
        for size_us in CHAINS:
            await scheduler.submit(make(size_us, clock.now_ns() + 5_000 * NS_PER_MS, firm=True)).outcome()
    ended.clear()
    sent: dict[int, Sent] = {}
    begun_ns = clock.now_ns()
    for job in jobs:
        await asyncio.sleep(max(0, begun_ns + job.at_ns - clock.now_ns()) / 1e9)
        request = make(job.size_us, begun_ns + job.due_ns, firm=job.firm)
        sent[request.id] = job
        before_ns = time.thread_time_ns()
        scheduler.submit(request)
        cpu_ns = time.thread_time_ns() - before_ns
        played.submit_cpu_ns += cpu_ns
        played.worst_submit_cpu_ns = max(played.worst_submit_cpu_ns, cpu_ns)
    await scheduler.drained()
    tally = Tally(
        offered_ns=sum(job.service_ns for job in jobs),
        bound_ns=most_on_time(Job(job.at_ns, job.due_ns, job.service_ns) for job in jobs),
        wall_ns=clock.now_ns() - begun_ns,
    )
    count_all(ended, sent, tally)
    assert len(ended) == len(jobs)
    played.tally.add(tally)
    played.arrivals += len(jobs)
    task.cancel()
    await asyncio.wait({task})


def main() -> None:
    """Print a row for each kind of trace and load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--noise", choices=NOISES, default="realistic")
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--begins", choices=("yes", "no", "both"), default="both", help="executors without tasks")
    args = parser.parse_args()
    for begins in {"yes": (True,), "no": (False,), "both": (True, False)}[args.begins]:
        print(f"executor {'begins, one ahead' if begins else 'needs a task for each request'}")
        table(NOISES[args.noise], args.loads, seeds=args.seeds, begins=begins)


def table(noise: Noise, loads: Sequence[float], *, seeds: int, begins: bool) -> None:
    """Print the rows of one kind of executor."""
    print("trace load  vs_bound  firm_broken  wasted  core_busy  offered  submit_us(mean,worst)  ended")
    for sizes in SIZES:
        for load in loads:
            total = Played(Tally())
            for seed in range(seeds):
                one = play(sizes, load, noise, seed=100 * seed, begins=begins)
                total.tally.add(one.tally)
                total.arrivals += one.arrivals
                total.submit_cpu_ns += one.submit_cpu_ns
                total.worst_submit_cpu_ns = max(total.worst_submit_cpu_ns, one.worst_submit_cpu_ns)
            tally = total.tally
            print(
                f"{sizes} {load:g}x  {total.vs_bound:.3f}  {tally.broken}/{tally.promised} {total.broken:.2%}  "
                f"{total.wasted:.2%}  {tally.ran_ns / tally.wall_ns:.0%}  {tally.offered_ns / tally.bound_ns:.2f}  "
                f"{total.submit_cpu_ns / total.arrivals / 1e3:.0f},{total.worst_submit_cpu_ns / 1e3:.0f}  "
                f"{dict(tally.reasons.most_common(5))} broken as {dict(+tally.broken_as)} "
                f"firm {tally.on_time_by_class[True] / max(1, tally.offered_by_class[True]):.2f} "
                f"frames {tally.on_time_by_class[False] / max(1, tally.offered_by_class[False]):.2f}"
            )


if __name__ == "__main__":
    main()
