"""Try candidates in their order, the cheap looks first, until all are known or the time is up.

Owns the order of the looks and what is not worth a look. How a candidate is made, judged and measured is the
workbench's; what is known already is the journal's; which one wins is `pareto`'s. The looks, from cheap to dear:
make it (its size), a part of the evaluation, the whole evaluation, the latency. What misses one gets no dearer one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from msgspec import structs

from edgeinfer.artifact.profile import OperatingCost
from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.errors import ConfigError, EdgeInferError, SessionError
from edgeinfer_tools.faults import GateFailed, ModelRefused
from edgeinfer_tools.scheme import Scheme
from edgeinfer_tools.search.bar import drop, failures, hopeless
from edgeinfer_tools.search.budget import Budget, Figures
from edgeinfer_tools.search.journal import Facts, Journal, Scores
from edgeinfer_tools.search.pareto import Point
from edgeinfer_tools.search.space import Candidate, coarser
from edgeinfer_tools.sensitivity import Sensitivity, rescue

Outcome = Literal["measured", "misses quality", "over size", "refused", "same", "coarser", "not tried"]
_PASSING: Final = {"timeout", "run_timeout", "crashed", "out_of_memory", "fork_failed"}
"""Reasons that another time or another machine may not have."""
_LOOKS: Final = {"make": "making", "screen": "first look at", "full": "evaluating", "measure": "measuring"}


@dataclass(frozen=True, slots=True)
class Artefact:
    """A candidate that was made."""

    size_bytes: int
    digest: str
    notes: tuple[str, ...] = ()
    integer_share: float = 0.0
    """Of the multiplications, those done in 8 bits."""


class Workbench(Protocol):
    """Makes, judges and measures candidates. Methods may take minutes; each raises an `EdgeInferError`."""

    @property
    def where(self) -> str:
        """Name of the machine on which `measure` measures."""
        ...

    def make(self, candidate: Candidate) -> Artefact:
        """Make the artefact, which the other methods then find."""
        ...

    def judge(self, candidate: Candidate, *, part: bool) -> Scores | None:
        """Return the scores on a part of the evaluation data, or all; None when there is no fit part."""
        ...

    def measure(self, candidate: Candidate) -> list[OperatingCost]:
        """Return the costs at `where`, at every thread count."""
        ...

    def rank(self, candidate: Candidate, tick: Callable[[], None]) -> list[Sensitivity]:
        """Return the groups of nodes that the candidate quantizes, the most sensitive first.

        `tick` is called after each of its measurements; what it raises ends the ranking.
        """
        ...


Reckon = Callable[[Candidate, Facts, list[OperatingCost]], list[OperatingCost]]
"""Turns measured costs into those that the budget is held against: of the board."""


class Progress(Protocol):
    """Is told how the search gets on."""

    def looking(self, what: str, done: int, total: int, remaining_s: float | None) -> None:
        """Say what is under way, the `done`-th of `total` candidates, with about so many seconds left."""
        ...

    def found(self, row: Row) -> None:
        """Say what became of a candidate."""
        ...

    def end(self) -> None:
        """Leave the terminal to others; the search is over, however it ended."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one candidate."""

    candidate: Candidate
    outcome: Outcome
    reason: str
    facts: Facts
    point: Point | None = None
    costs: tuple[OperatingCost, ...] = ()
    """As reckoned for the board."""
    known: bool = False
    """Whether everything came from the journal."""


@dataclass(frozen=True, slots=True)
class Explored:
    """What a search saw."""

    rows: tuple[Row, ...]
    out_of_time: bool
    notes: tuple[str, ...] = ()
    """What was not looked into, and why."""

    @property
    def points(self) -> list[Point]:
        """The candidates that were measured."""
        return [row.point for row in self.rows if row.point is not None]

    def row(self, name: str) -> Row:
        """Return what became of the candidate of that name."""
        return next(row for row in self.rows if row.candidate.name == name)


class _TimeUp(Exception):
    """Nothing more may be begun."""


@dataclass(slots=True)
class _Search:
    bench: Workbench
    budget: Budget
    journal: Journal
    clock: Clock
    deadline_ns: int
    progress: Progress
    reckon: Reckon
    total: int
    rows: list[Row] = field(default_factory=list)
    base: Scores | None = None
    base_screen: Scores | None = None
    took_s: list[float] = field(default_factory=list)
    fresh: bool = False
    notes: list[str] = field(default_factory=list)
    passing: set[str] = field(default_factory=set)
    """Keys of candidates whose refusal is not written down."""

    def examine(self, candidate: Candidate, *, whatever_size: bool = False) -> Row:
        """Look at one candidate until something rules it out.

        Raises:
            _TimeUp: the next look would end after the deadline.
        """
        self.fresh, began_ns = False, self.clock.now_ns()
        row = self._examine(candidate, whatever_size=whatever_size)
        if self.fresh:
            took = (self.clock.now_ns() - began_ns) / NS_PER_S
            self.took_s.append(took)
            row = replace(row, facts=structs.replace(row.facts, seconds=round(row.facts.seconds + took, 3)))
            self._keep(row.facts)
        known = not self.fresh and bool(row.facts.refused or row.facts.size_bytes is not None)
        row = replace(row, known=known)
        self.rows = [old for old in self.rows if old.candidate.key != candidate.key] + [row]
        self.progress.found(row)
        return row

    def _examine(self, candidate: Candidate, *, whatever_size: bool) -> Row:
        facts = self.journal.find(candidate.key) or Facts(key=candidate.key, name=candidate.name)
        if facts.refused:
            return Row(candidate, "refused", facts.refused, facts)
        if finer := self._failed_finer(candidate):
            return Row(candidate, "coarser", f"{finer} already misses the quality bar, and this only loses more", facts)
        if facts.size_bytes is None:
            facts = self._look("make", candidate, facts)
            if facts.refused:
                return Row(candidate, "refused", facts.refused, facts)
        if twin := self._twin(candidate, facts):
            return Row(candidate, "same", f"comes out as the same bytes as {twin}", facts)
        if not whatever_size and (over := self.budget.misses(Figures(size_bytes=facts.size_bytes))) and self.base:
            return Row(candidate, "over size", str(over[0]), facts)
        facts, why = self._quality(candidate, facts)
        if why:
            return Row(candidate, "refused" if facts.refused else "misses quality", why, facts)
        if self.bench.where not in facts.costs:
            facts = self._look("measure", candidate, facts)
            if facts.refused:
                return Row(candidate, "refused", facts.refused, facts)
        costs = self.reckon(candidate, facts, facts.costs[self.bench.where])
        return Row(candidate, "measured", "", facts, self._point(candidate, facts, costs), tuple(costs))

    def _quality(self, candidate: Candidate, facts: Facts) -> tuple[Facts, str]:
        """Return why the bar is missed, empty when it is reached."""
        if self.base is not None and facts.full is None:
            if facts.screen is None and self.base_screen is not None:
                facts = self._look("screen", candidate, facts)
                if facts.refused:
                    return facts, facts.refused
            screens = facts.screen, self.base_screen
            if screens[0] is not None and screens[1] is not None:
                why = hopeless(screens[0], screens[1], self.base, self.budget)
                if why:
                    return facts, why
        if facts.full is None:
            facts = self._look("full", candidate, facts)
            if facts.refused:
                return facts, facts.refused
        assert facts.full is not None
        return facts, "; ".join(failures(facts.full, self.base or facts.full, self.budget))

    def _look(self, kind: str, candidate: Candidate, facts: Facts) -> Facts:
        """Take one look, and write down what it shows.

        Raises:
            _TimeUp: it would end after the deadline, by what earlier candidates took.
        """
        first = self.base is None
        if not first and self.clock.now_ns() + self._expected_s() * NS_PER_S > self.deadline_ns:
            raise _TimeUp
        left = max(0, self.total - len(self.rows))
        remaining = min(self._expected_s() * left, (self.deadline_ns - self.clock.now_ns()) / NS_PER_S)
        done = min(len(self.rows) + 1, self.total)
        self.progress.looking(f"{_LOOKS[kind]} {candidate.name}", done, self.total, remaining if self.took_s else None)
        self.fresh = True
        try:
            match kind:
                case "make":
                    made = self.bench.make(candidate)
                    changes = {
                        "size_bytes": made.size_bytes,
                        "digest": made.digest,
                        "notes": list(made.notes),
                        "integer_share": made.integer_share,
                    }
                case "screen":
                    changes = {"screen": self.bench.judge(candidate, part=True)}
                case "full":
                    changes = {"full": self.bench.judge(candidate, part=False)}
                case _:
                    changes = {"costs": {**facts.costs, self.bench.where: self.bench.measure(candidate)}}
        except (ModelRefused, SessionError, GateFailed, ConfigError) as error:
            if first:
                raise
            if kind == "measure" or (isinstance(error, SessionError) and error.reason in _PASSING):
                self.passing.add(candidate.key)
            changes = {"refused": _one_line(error)}
        facts = structs.replace(facts, **changes)
        self._keep(facts)
        return facts

    def _keep(self, facts: Facts) -> None:
        """Write facts down, but for a refusal that may be this machine's or this hour's."""
        self.journal.keep(structs.replace(facts, refused="") if facts.key in self.passing else facts)

    def _expected_s(self) -> float:
        """Return what the next candidate will take: the mean of those that were looked at."""
        return sum(self.took_s) / len(self.took_s) if self.took_s else 0.0

    def _failed_finer(self, candidate: Candidate) -> str:
        for row in self.rows:
            same = row.candidate.source == candidate.source and row.candidate.providers == candidate.providers
            if row.outcome == "misses quality" and same and coarser(candidate.scheme, row.candidate.scheme):
                return row.candidate.name
        return ""

    def _twin(self, candidate: Candidate, facts: Facts) -> str:
        for row in self.rows:
            same = row.facts.digest == facts.digest and row.candidate.providers == candidate.providers
            if (
                facts.digest
                and same
                and row.candidate.key != candidate.key
                and row.outcome not in {"same", "not tried"}
            ):
                return row.candidate.name
        return ""

    def _point(self, candidate: Candidate, facts: Facts, costs: Sequence[OperatingCost]) -> Point:
        assert facts.full is not None
        assert facts.size_bytes is not None
        asked = next((cost for cost in costs if cost.threads == self.budget.threads), costs[0])
        return Point(
            name=candidate.name,
            quality=facts.full.quality,
            drop=drop(facts.full, self.base or facts.full),
            size_bytes=facts.size_bytes,
            peak_bytes=max(cost.load_peak_bytes for cost in costs),
            p50_us=asked.latency.p50_us,
            p99_us=asked.latency.p99_us,
        )

    def run(self, candidates: Sequence[Candidate]) -> bool:
        """Look at all of them; return whether the time was up before."""
        self.look_at_base(candidates[0])
        out_of_time = False
        for candidate in candidates[1:]:
            try:
                self.examine(candidate)
            except _TimeUp:  # what the journal knows costs no time: go on with the others
                out_of_time = True
                facts = self.journal.find(candidate.key) or Facts(key=candidate.key, name=candidate.name)
                self.rows.append(Row(candidate, "not tried", "the time was up", facts))
        try:
            if not any(row.point and not self.budget.misses(row.point.figures) for row in self.rows):
                over = [row for row in self.rows if row.outcome == "over size"]
                for row in sorted(over, key=lambda item: item.facts.size_bytes or 0):
                    self.examine(row.candidate, whatever_size=True)
            self.rescue()
        except _TimeUp:
            out_of_time = True
        return out_of_time

    def look_at_base(self, candidate: Candidate) -> None:
        """Take every look at the float model, against which the others are held.

        Raises:
            GateFailed: it misses the recipe's own gates.
        """
        row = self.examine(candidate)
        if row.point is None:
            raise GateFailed(f"the float model itself misses the bar: {row.reason}; nothing was published")
        self.base = row.facts.full
        facts = row.facts
        if facts.screen is None:
            self.fresh = True
            facts = structs.replace(facts, screen=self.bench.judge(candidate, part=True))
            self.journal.keep(facts)
        self.base_screen = facts.screen

    def rescue(self) -> None:
        """Keep the sensitive nodes of the best form that misses the bar in float, where that may pay."""
        missed = [
            row
            for row in self.rows
            if row.outcome == "misses quality" and row.candidate.scheme.method in {"static", "dynamic"}
            if not row.candidate.scheme.exclude
        ]
        if not missed:
            return
        row = max(missed, key=lambda item: (_seen(item.facts), -self.rows.index(item)))
        quick = [item.point.p50_us for item in self.rows if item.point and not self.budget.misses(item.point.figures)]
        facts = row.facts
        if self.bench.where not in facts.costs:  # one measurement, to save the ranking's two dozen
            facts = self._look("measure", row.candidate, facts)
        if facts.refused:
            return
        costs = self.reckon(row.candidate, facts, facts.costs[self.bench.where])
        asked = next((cost for cost in costs if cost.threads == self.budget.threads), costs[0])
        if quick and asked.latency.p50_us >= min(quick):
            ours, best = asked.latency.p50_us / 1000, min(quick) / 1000
            self.notes.append(
                f"{row.candidate.name} misses the bar, and none of its nodes was put back to float: with {ours:.2f} ms "
                f"it is no faster than another form ({best:.2f} ms) as it is"
            )
            return
        if self.clock.now_ns() + 2 * self._expected_s() * NS_PER_S > self.deadline_ns:
            raise _TimeUp
        self.progress.looking(f"sensitivity of {row.candidate.name}", len(self.rows), self.total, None)

        def tick() -> None:
            if self.clock.now_ns() > self.deadline_ns:
                raise _TimeUp

        ranking = self.bench.rank(row.candidate, tick)

        def holds(scheme: Scheme) -> bool:
            self.total += 1
            return self.examine(row.candidate.with_scheme(scheme)).outcome in {"measured", "same"}

        rescue(row.candidate.scheme, ranking, holds)


def explore(
    bench: Workbench,
    candidates: Sequence[Candidate],
    budget: Budget,
    *,
    journal: Journal,
    clock: Clock,
    deadline_ns: int,
    progress: Progress,
    reckon: Reckon = lambda _, __, costs: costs,
) -> Explored:
    """Look at the candidates in their order; the first is the float model, and is looked at whatever the time.

    What an earlier search found out is not looked at again. No look is begun that would end after `deadline_ns`, as
    far as can be told; one that runs is not broken off.

    Raises:
        GateFailed: the float model itself misses the recipe's gates.
        EdgeInferError: the data, the recipe's code or the board's link is at fault; what is known by then is kept.
    """
    search = _Search(bench, budget, journal, clock, deadline_ns, progress, reckon, len(candidates))
    try:
        out_of_time = search.run(candidates)
    finally:
        progress.end()
    return Explored(tuple(search.rows), out_of_time, tuple(search.notes))


def _seen(facts: Facts) -> float:
    scores = facts.full or facts.screen
    return scores.quality if scores is not None else 0.0


def _one_line(error: EdgeInferError) -> str:
    return " ".join(str(error).split()) if isinstance(error, ConfigError) else str(error).partition("\n")[0]
