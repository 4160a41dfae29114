"""The traces of the overload benchmark: who comes when, how large, with how much slack. Committed, seeded data.

`python -m edgeinfer_bench.trace` writes them again; a test holds the files to that. At load 1 a trace brings as much
work as one core can do. Half of a mixed trace's work comes as jobs of nominally 1 ms, half as jobs of 10 ms; an equal
trace has jobs of 10 ms only. Arrivals are a Poisson process, or that in bursts: on a third of the time, three times as
dense. Slack, beyond the job's own time, is uniform between 5 and 100 ms; every second job, by chance, is firm.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).with_name("traces")

Sizes = Literal["equal", "mixed"]
Arrivals = Literal["poisson", "bursty"]

SHORT_US = 1_000
LONG_US = 10_000
SPAN_US = 4_500_000
"""Of a trace at load 1: a second and a half at load 3."""
SLACK_US = (5_000, 100_000)
BURST_US = 30_000
"""Mean length of a burst; the pause after it is twice as long in the mean."""
_SEEDS: dict[tuple[Sizes, Arrivals], int] = {
    ("equal", "poisson"): 11,
    ("equal", "bursty"): 12,
    ("mixed", "poisson"): 13,
    ("mixed", "bursty"): 14,
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One job of a trace."""

    at_us: int
    """From the trace's start, at load 1."""
    size_us: int
    """Nominal: `SHORT_US` or `LONG_US`."""
    slack_us: int
    firm: bool


class Trace(msgspec.Struct, frozen=True):
    """One file, by columns."""

    sizes: Sizes
    arrivals: Arrivals
    seed: int
    span_us: int
    at_us: list[int]
    size_us: list[int]
    slack_us: list[int]
    firm: list[int]

    @property
    def name(self) -> str:
        """The file's, without suffix."""
        return f"{self.sizes}-{self.arrivals}"

    def until(self, end_us: float) -> list[Arrival]:
        """Return the jobs that come before `end_us`, in order."""
        columns = zip(self.at_us, self.size_us, self.slack_us, self.firm, strict=True)
        return [Arrival(at, size, slack, bool(firm)) for at, size, slack, firm in columns if at < end_us]


def generate(sizes: Sizes, arrivals: Arrivals) -> Trace:
    """Return the trace of that kind; always the same."""
    seed = _SEEDS[sizes, arrivals]
    dice = random.Random(seed)  # noqa: S311 - repeatable on purpose
    # With half of the work each, there are as many more short jobs as they are shorter.
    short_share = 0.0 if sizes == "equal" else LONG_US / (LONG_US + SHORT_US)
    mean_us = short_share * SHORT_US + (1 - short_share) * LONG_US
    jobs = []
    for at_us in _poisson(dice, mean_us) if arrivals == "poisson" else _bursty(dice, mean_us):
        size_us = SHORT_US if dice.random() < short_share else LONG_US
        jobs.append(Arrival(at_us, size_us, dice.randint(*SLACK_US), dice.random() < 0.5))
    return Trace(
        sizes, arrivals, seed, SPAN_US,
        at_us=[job.at_us for job in jobs],
        size_us=[job.size_us for job in jobs],
        slack_us=[job.slack_us for job in jobs],
        firm=[int(job.firm) for job in jobs],
    )  # fmt: skip


def _poisson(dice: random.Random, mean_us: float) -> Iterator[int]:
    at = 0.0
    while (at := at + dice.expovariate(1 / mean_us)) < SPAN_US:
        yield int(at)


def _bursty(dice: random.Random, mean_us: float) -> Iterator[int]:
    begin = 0.0
    while begin < SPAN_US:
        end = begin + dice.expovariate(1 / BURST_US)
        at = begin
        while (at := at + dice.expovariate(3 / mean_us)) < min(end, SPAN_US):
            yield int(at)
        begin = end + dice.expovariate(1 / (2 * BURST_US))


def encode(trace: Trace) -> bytes:
    """Return the file's bytes."""
    return msgspec.json.encode(trace) + b"\n"


def read_trace(sizes: Sizes, arrivals: Arrivals) -> tuple[Trace, str]:
    """Return the committed trace and the sha256 of its file."""
    data = (FOLDER / f"{sizes}-{arrivals}.json").read_bytes()
    return msgspec.json.decode(data, type=Trace), hashlib.sha256(data).hexdigest()


def main() -> None:
    """Write every trace."""
    FOLDER.mkdir(exist_ok=True)
    for sizes, arrivals in _SEEDS:
        trace = generate(sizes, arrivals)
        (FOLDER / f"{trace.name}.json").write_bytes(encode(trace))
        load = sum(trace.size_us) / trace.span_us
        print(f"{trace.name}: {len(trace.at_us)} jobs, load {load:.3f}")


if __name__ == "__main__":
    main()
