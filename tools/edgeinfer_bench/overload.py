"""What is still answered in time when more work comes than can be done.

The committed traces are played at 0.5 to 3 times what the workers' one core can do, against the runtime's scheduler and
its real workers in this process, and against a server without deadlines or admission on the same workers (first come,
first served), in turns; shorter windows of them go to a daemon and to the peer (`rivals`). The runtime's own loop has
another core, where there is one. Capacity is what `session.run` in a bare process on the workers' core does at that
moment, measured before each trace; so everything the runtime adds to a run counts against it.

A job's deadline counts from the moment at which the trace sends it, also when the sender is late. The value of a job
that is answered in time is its service time. `bound` says what no scheduler could have surpassed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections import Counter
from pathlib import Path

from edgeinfer.clock import NS_PER_S, NS_PER_US
from edgeinfer.config import ModelSection, SchedulerSection
from edgeinfer_bench.bare import BareProcess
from edgeinfer_bench.models import build_chain, digest_of, model_file
from edgeinfer_bench.player import CHAINS, Player, Sent, Tally
from edgeinfer_bench.quantile import percentile
from edgeinfer_bench.record import Figure, Record
from edgeinfer_bench.rig import open_rig, spare_cpus
from edgeinfer_bench.rivals import WINDOW_S as RIVALS_WINDOW_S
from edgeinfer_bench.rivals import open_rivals
from edgeinfer_bench.trace import LONG_US, SHORT_US, Arrivals, Sizes, Trace, read_trace

LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)
SIZES: tuple[Sizes, ...] = ("equal", "mixed")
ARRIVALS: tuple[Arrivals, ...] = ("poisson", "bursty")
WINDOW_S = 1.5
"""Of each trace at each load, for each of the two."""
CALIBRATION_RUNS = {SHORT_US: 60, LONG_US: 20}


def measure(bundles: Path) -> Record:  # noqa: ARG001 - every benchmark is called alike
    """Return the record; takes under three minutes."""
    traces = {(sizes, arrivals): read_trace(sizes, arrivals) for sizes in SIZES for arrivals in ARRIVALS}
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bench-") as folder:
        root = Path(folder)
        made = {size: build_chain(chain, root / "made") for size, chain in CHAINS.items()}
        played = {trace: found for trace, (found, _) in traces.items()}
        tallies, capacity_us, versus_peer = asyncio.run(_play_all(root, made, played))
        return Record(
            bench="overload",
            workload={
                "models": {path.name: digest_of(path) for path in made.values()},
                "traces": {trace.name: digest for trace, digest in traces.values()},
                "threads": 1,
                "worker_cores": 1,
                "window_s": WINDOW_S,
                "window_vs_peer_s": RIVALS_WINDOW_S,
                "service_us": capacity_us,
                "clock": "from the moment at which the trace sends a job to its outcome",
            },
            figures=[*_figures(tallies), versus_peer],
        )


async def _play_all(
    root: Path, made: dict[int, Path], traces: dict[tuple[Sizes, Arrivals], Trace]
) -> tuple[dict[tuple[Sizes, float], Tally], dict[int, float], Figure]:
    own, others = spare_cpus()
    cpus = sorted(others)[:1]
    settings = SchedulerSection(cpus=cpus)
    sections = [ModelSection(chain.name) for chain in CHAINS.values()]
    bundles = list(made.values())
    tallies = {(sizes, load): Tally() for sizes in SIZES for load in LOADS}
    seen: dict[int, list[float]] = {size: [] for size in CHAINS}
    (root / "daemon").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        rivals = await stack.enter_async_context(open_rivals(root / "daemon", made, cpus))
        bare = {
            size: stack.enter_context(BareProcess.running(model_file(path), CHAINS[size].feeds))
            for size, path in made.items()
        }
        for process in bare.values():
            os.sched_setaffinity(process.pid, cpus)
        player = Player()
        async with open_rig(root / "state", bundles, sections, settings=settings, observe=player.observe) as rig:
            os.sched_setaffinity(0, own)
            await player.warm_up(rig)
            number = 0
            service_ns = _service_ns(bare)
            await rivals.try_settings([schedule(trace, 1.0, service_ns, RIVALS_WINDOW_S) for trace in traces.values()])
            for load in LOADS:
                for (sizes, _), trace in traces.items():
                    service_ns = _service_ns(bare)
                    for size, value in service_ns.items():
                        seen[size].append(value / NS_PER_US)
                    jobs = schedule(trace, load, service_ns)
                    number += 1
                    tallies[sizes, load].add(await player.play(rig, jobs, fifo_first=bool(number % 2)))
                    jobs = schedule(trace, load, service_ns, RIVALS_WINDOW_S)
                    await rivals.play(jobs, ours_first=bool(number % 2))
            os.sched_setaffinity(0, own | others)
        return tallies, {size: percentile(values, 50) for size, values in seen.items()}, rivals.figure()


def _service_ns(bare: dict[int, BareProcess]) -> dict[int, int]:
    """Return what a run of each size takes at this moment."""
    return {
        size: round(percentile([run for _, run in process.run([0] * CALIBRATION_RUNS[size])], 50))
        for size, process in bare.items()
    }


def schedule(trace: Trace, load: float, service_ns: dict[int, int], window_s: float = WINDOW_S) -> list[Sent]:
    """Return the trace's jobs at that load in a window, by what jobs really take here; pure.

    Time is stretched so that at load 1 they bring as much work as there is time.
    """
    work_ns = sum(service_ns[size] for size in trace.size_us)
    stretch = work_ns / (trace.span_us * load)
    jobs = []
    for job in trace.until(window_s * NS_PER_S / stretch):
        at_ns = round(job.at_us * stretch)
        service = service_ns[job.size_us]
        jobs.append(Sent(at_ns, at_ns + service + job.slack_us * NS_PER_US, service, job.size_us, job.firm))
    return jobs


def _figures(tallies: dict[tuple[Sizes, float], Tally]) -> list[Figure]:
    total = Tally()
    figures = []
    for (sizes, load), tally in tallies.items():
        total.add(tally)
        goal = 0.95 if sizes == "equal" else 0.80 if load == 3.0 else None
        name = f"overload.{sizes}.{load:g}x.vs_bound"
        value = tally.ours_ns / tally.bound_ns
        figures.append(Figure(name, value, "share", goal, "higher", "clairvoyant", 1, _note(tally)))
    return [
        *figures,
        Figure("overload.wasted_pct", 100 * total.wasted_ns / total.ran_ns, "%", 2.0, "lower",
               note="time from dispatch to the end of runs that were not in time, of all runs'"),
        Figure("overload.firm_broken_pct", 100 * total.broken / max(1, total.promised), "%", 0.1, "lower",
               runs=total.promised, note=f"firm, admitted and then not answered in time: {_counts(total.broken_as)}"),
        Figure("overload.vs_fifo_ratio", total.ours_ns / max(1, total.fifo_ns), "x", None, "higher",
               "first come first served", note="service time in time, over all traces and loads"),
    ]  # fmt: skip


def _note(tally: Tally) -> str:
    """Return where the time went, for people."""
    parts = [
        f"fifo {tally.fifo_ns / tally.bound_ns:.3f}",
        f"offered {tally.offered_ns / tally.bound_ns:.2f}",
        f"core has a request {tally.ran_ns / tally.wall_ns:.0%}",
        f"core is in session.run {tally.inside_ns / tally.wall_ns:.0%}",
        f"loop and sender busy {tally.loop_cpu_ns / tally.wall_ns:.0%}",
        f"promises broken {tally.broken} of {tally.promised}",
        f"on time of the firm {_share(tally, firm=True):.0%}, of the displaceable {_share(tally, firm=False):.0%}",
        _counts(tally.reasons),
    ]
    return "; ".join(parts)


def _share(tally: Tally, *, firm: bool) -> float:
    return tally.on_time_by_class[firm] / max(1, tally.offered_by_class[firm])


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(4) if count) or "none"
