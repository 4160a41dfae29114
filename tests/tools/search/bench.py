"""A workbench whose candidates have the figures that a test gives them, and whose looks take virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgeinfer.artifact.profile import Latency, OperatingCost
from edgeinfer.clock import NS_PER_S
from edgeinfer.errors import SessionError
from edgeinfer_tools.scheme import Scheme
from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.search.explore import Artefact, Explored, Row, explore
from edgeinfer_tools.search.journal import GateScore, Journal, Scores
from edgeinfer_tools.search.space import Candidate
from edgeinfer_tools.sensitivity import Sensitivity

MIB = 1 << 20


class ManualClock:
    """Time that only moves when it is told to."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * NS_PER_S)


@dataclass
class Form:
    """What a candidate turns out to be."""

    quality: float = 1.0
    size_mib: float = 4
    p50_ms: float = 10
    first_look: float | None = None
    """Its quality on the first look; as on all data when None."""
    digest: str = ""
    fault: Exception | None = None
    unmeasurable: Exception | None = None


def cost(name: str, p50_ms: float, *, threads: int = 1, peak_mib: float = 50) -> OperatingCost:
    us = int(p50_ms * 1000)
    return OperatingCost(
        variant=name,
        provider="CPUExecutionProvider",
        threads=threads,
        latency=Latency(us, us, 2 * us, us, 50),
        load_ms=20.0,
        load_peak_bytes=int(peak_mib * MIB),
        steady_bytes=10 * MIB,
        cpu_us_per_run=us * threads,
    )


@dataclass
class FakeWorkbench:
    forms: dict[str, Form]
    clock: ManualClock = field(default_factory=ManualClock)
    looks: list[str] = field(default_factory=list)
    gate: float = 0.9
    ranking: list[Sensitivity] = field(default_factory=list)
    kept: Callable[[Scheme], Form] | None = None
    stop_at: str = ""
    """Ctrl-C is pressed at this look."""
    where: str = "here"
    look_s: float = 10.0

    def _look(self, what: str, candidate: Candidate) -> Form:
        self.looks.append(f"{what} {candidate.name}")
        if self.looks[-1] == self.stop_at:
            raise KeyboardInterrupt
        self.clock.pass_s(self.look_s)
        if self.kept is not None and candidate.scheme.exclude:
            return self.kept(candidate.scheme)
        return self.forms[candidate.name]

    def make(self, candidate: Candidate) -> Artefact:
        form = self._look("make", candidate)
        if form.fault is not None:
            raise form.fault
        return Artefact(int(form.size_mib * MIB), form.digest or candidate.key)

    def judge(self, candidate: Candidate, *, part: bool) -> Scores | None:
        form = self._look("part" if part else "all", candidate)
        quality = form.first_look if part and form.first_look is not None else form.quality
        return Scores(10 if part else 100, quality, [GateScore("label_agreement", "", quality, self.gate)])

    def measure(self, candidate: Candidate) -> list[OperatingCost]:
        form = self._look("time", candidate)
        if form.unmeasurable is not None:
            raise form.unmeasurable
        return [cost(candidate.name, form.p50_ms)]

    def rank(self, candidate: Candidate, tick: Callable[[], None]) -> list[Sensitivity]:
        for _ in self.ranking:
            self._look("rank", candidate)
            tick()
        return self.ranking


class Quiet:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int, float | None]] = []
        self.rows: list[Row] = []
        self.ended = False

    def end(self) -> None:
        self.ended = True

    def looking(self, what: str, done: int, total: int, remaining_s: float | None) -> None:
        self.lines.append((what, done, total, remaining_s))

    def found(self, row: Row) -> None:
        self.rows.append(row)


SCHEMES = {
    "fp32": Scheme(method="keep"),
    "static": Scheme(method="static", per_channel=True),
    "entropy": Scheme(method="static", per_channel=True, calibrator="entropy"),
    "tensor": Scheme(method="static"),
    "dynamic": Scheme(method="dynamic"),
    "w8": Scheme(method="weights"),
    "w4": Scheme(method="weights", weight_bits=4),
    "fp16": Scheme(method="fp16"),
}


def run(
    bench: FakeWorkbench,
    budget: Budget,
    *,
    journal: Journal | None = None,
    seconds: float = 1e6,
    progress: Quiet | None = None,
) -> Explored:
    return explore(
        bench,
        [Candidate(name, SCHEMES[name]) for name in bench.forms],
        budget,
        journal=journal or Journal(None),
        clock=bench.clock,
        deadline_ns=bench.clock.now_ns() + int(seconds * NS_PER_S),
        progress=progress or Quiet(),
    )


def refused(text: str) -> SessionError:
    return SessionError("load_failed", text)
