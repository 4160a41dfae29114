"""Hold the requests that wait for this machine, earliest deadline first.

Owns the order and the bound, and decides nothing: `admission` says what comes in and what has to go. Whoever removes
a request from here owes its caller an outcome.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Generic, TypeVar

from edgeinfer.errors import InternalError
from edgeinfer.request import InferRequest
from edgeinfer.scheduling.forecast import Job, Rank

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One waiting request: what it costs, and whatever its owner keeps about it."""

    job: Job
    stream: str | None
    item: T


_rank = attrgetter("job.rank")


class DeadlineQueue(Generic[T]):
    """Bounded queue in the order of `Rank`: deadline, then priority, then arrival. Loop thread only.

    It never drops anything by itself: pushing into a full queue is a bug of the caller, who asks `full` first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: list[Entry[T]] = []
        self._jobs: list[Job] = []
        """Theirs, in the same order."""
        self._by_id: dict[int, Entry[T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        """Go through a copy, in order: removing while going round is fine."""
        return iter(self._entries.copy())

    @property
    def full(self) -> bool:
        """Whether there is no room."""
        return len(self._entries) >= self.limit

    def jobs(self) -> list[Job]:
        """Return what waits, in order."""
        return self._jobs.copy()

    def rank(self, request: InferRequest, *, spare: bool = False) -> Rank:
        """Return where `request` would stand.

        By its total deadline, with two exceptions for requests of one stream. A frame that supersedes an older one
        takes over its place, or a stream that always has a newer frame would never get its turn. And firm requests
        of a stream never overtake each other: a stateful model needs them in the order they came.
        """
        due_ns = request.deadlines.total_ns
        if request.stream is not None:
            for entry in self._entries:
                if entry.stream == request.stream and entry.job.spare == spare and entry.job.id != request.id:
                    if entry.job.firm:
                        due_ns = max(due_ns, entry.job.rank.due_ns) if request.firm else due_ns
                    elif not request.firm:
                        due_ns = min(due_ns, entry.job.rank.due_ns)
        return Rank(spare, due_ns, -request.priority, request.id)

    def push(self, job: Job, item: T, *, stream: str | None = None) -> None:
        """Let a request wait.

        Raises:
            InternalError: the queue is full, or the request waits already.
        """
        if self.full or job.id in self._by_id:
            raise InternalError(f"request {job.id} cannot be queued: {len(self)} of {self.limit} places are taken")
        entry = Entry(job, stream, item)
        place = bisect_left(self._entries, job.rank, key=_rank)
        self._entries.insert(place, entry)
        self._jobs.insert(place, job)
        self._by_id[job.id] = entry

    def remove(self, request_id: int) -> Entry[T] | None:
        """Take a request out, wherever it stands; None when it doesn't wait here."""
        entry = self._by_id.pop(request_id, None)
        if entry is not None:
            place = bisect_left(self._entries, entry.job.rank, key=_rank)
            del self._entries[place], self._jobs[place]
        return entry

    def rate(self, job: Job) -> None:
        """Let what waits with this id and rank cost what `job` says; nothing happens when it doesn't wait here."""
        entry = self._by_id.get(job.id)
        if entry is not None:
            self._by_id[job.id] = rated = replace(entry, job=job)
            place = bisect_left(self._entries, job.rank, key=_rank)
            self._entries[place], self._jobs[place] = rated, job

    def pop_expired(self, now_ns: int) -> list[Entry[T]]:
        """Take out everything whose latest start has come, in order: waiting is over at that very moment."""
        expired = [entry for entry in self._entries if entry.job.start_by_ns <= now_ns]
        for entry in expired:
            self.remove(entry.job.id)
        return expired

    def superseded_by(self, request: InferRequest) -> list[Entry[T]]:
        """Return the older frames of the same stream that `request` makes worthless; they stay until removed."""
        if request.stream is None or request.firm:
            return []
        return [
            entry
            for entry in self._entries
            if entry.stream == request.stream and not entry.job.firm and entry.job.id < request.id
        ]

    def has_newer(self, request: InferRequest) -> bool:
        """Return whether a newer frame of the same stream waits, so that `request` is worthless."""
        return (
            request.stream is not None
            and not request.firm
            and any(
                entry.stream == request.stream and not entry.job.firm and entry.job.id > request.id
                for entry in self._entries
            )
        )

    def work_ahead_ns(self, due_ns: int) -> int:
        """Return the core-nanoseconds (medians) that wait to be done before something due at `due_ns`."""
        return sum(
            entry.job.p50_ns * entry.job.cores
            for entry in self._entries
            if not entry.job.spare and entry.job.rank.due_ns <= due_ns
        )

    def next_expiry_ns(self) -> int | None:
        """Return when the first waiting request expires, None when none waits."""
        return min((entry.job.start_by_ns for entry in self._entries), default=None)
