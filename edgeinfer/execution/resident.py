"""One model held in memory: its worker processes, what they cost, and what happens when one dies.

Owns the workers and their crash history. When a model is loaded, and which gives way, is `model_cache`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

from edgeinfer.artifact.manifest import Manifest, Variant
from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.config import ModelSection
from edgeinfer.errors import BudgetExceeded, EdgeInferError, SessionError
from edgeinfer.execution.crashes import CrashPolicy, judge_crash
from edgeinfer.execution.growth import GrowthWatch, Remedy, WorkerSize
from edgeinfer.execution.ledger import Reservation, SharedReservation
from edgeinfer.execution.seed import UNKNOWN, Seed
from edgeinfer.store.compiled import CompiledForm
from edgeinfer.store.store import Installed
from edgeinfer.worker.worker import EndCause, Worker, WorkerEnd

_log = logging.getLogger(__name__)

_NO_PROCESS = frozenset({"fork_failed", "runtime_unusable"})
"""Why there is no worker although the model has done nothing wrong."""
_NO_PROCESS_PAUSE_NS = 2 * NS_PER_S
_IDLE_LOOK_S = 0.005
"""How often a worker that is being replaced is looked at, whether it has finished what it had."""


class Phase(StrEnum):
    """What a model can be asked right now."""

    LOADING = "loading"
    READY = "loaded"
    RECOVERING = "recovering"
    """Its last worker died; another one is being started."""
    QUARANTINED = "quarantined"
    """Its workers died too often; left alone until it is loaded again by hand."""
    CLOSED = "unloaded"


@dataclass(frozen=True, slots=True)
class CrashNote:
    """One worker that died by itself, for events and reports."""

    model: str
    variant: str
    detail: str
    quarantined: bool
    crashes: int = 1
    """In a row, this one included: none was followed by a quiet time."""


StartWorker = Callable[[], Coroutine[Any, Any, Worker]]
"""Starts one more worker of the model; raises `EdgeInferError`."""


class ResidentModel:
    """A model in memory. Loop thread only.

    `later` runs a coroutine after a delay, in the cache's task group; `on_crash` hears of each worker that died
    by itself.
    """

    def __init__(
        self,
        *,
        section: ModelSection,
        installed: Installed,
        variant: Variant,
        reservation: Reservation,
        start_worker: StartWorker,
        later: Callable[[int, Callable[[], Awaitable[None]], str], None],
        on_crash: Callable[[CrashNote], None],
        clock: Clock,
        policy: CrashPolicy | None = None,
        form: CompiledForm | None = None,
        mapped: SharedReservation | None = None,
        seed: Seed = UNKNOWN,
    ) -> None:
        """`form` is what its workers load instead of the bundle's file, `mapped` the charge of what they share.

        `seed` is how long a run is taken to last before one was seen.
        """
        self.section = section
        self.installed = installed
        self.variant = variant
        self.reservation = reservation
        self.form = form
        self.mapped = mapped
        self.seed = seed
        self.phase = Phase.LOADING
        self.detail = ""
        self.leases = 0
        """Requests that are running on it: it is not evicted before they are done."""
        self.last_used_ns = clock.now_ns()
        self.state_resets = 0
        """Runs of a stateful model whose earlier state was lost."""
        self.shrunk = 0
        self.recycled = 0
        """How often a worker that had outgrown its reservation was asked to shrink, and was replaced."""
        self.load_ns = 0
        self._start_worker = start_worker
        self._later = later
        self._on_crash = on_crash
        self._clock = clock
        self._policy = policy or CrashPolicy()
        self._workers: list[Worker | None] = [None] * section.workers
        self._starting: set[asyncio.Future[Worker]] = set()
        self._opened_ns = clock.now_ns()
        self._crashes_ns: tuple[int, ...] = ()
        self._worker_bytes = reservation.size_bytes // section.workers
        self._growth = GrowthWatch(self._worker_bytes)
        self._leaving: set[Worker] = set()
        """Workers that finish what they have begun and then end."""
        self._awaited_ns: dict[int, int] = {}
        """Seats whose worker is being replaced, and when the next one is expected there."""
        self._seats_changed = asyncio.Event()

    @property
    def is_replacing(self) -> bool:
        """Whether a worker is being replaced: requests wait for the next one instead of being refused.

        From the moment in which it can't be used any more: its process is reaped, and its end noted, a while later.
        """
        return bool(self._awaited_ns) or self._is_losing_a_worker

    @property
    def _is_losing_a_worker(self) -> bool:
        """Whether a seat's worker is dead or dying, and `_on_died` has not heard of it."""
        if self.phase in {Phase.CLOSED, Phase.QUARANTINED}:
            return False
        return any(worker is not None and not worker.is_alive for worker in self._workers)

    @property
    def seats_wait_ns(self) -> int:
        """In how many nanoseconds the first of the workers that are being replaced is expected; 0 when it is late."""
        expected = list(self._awaited_ns.values())
        now_ns = self._clock.now_ns()
        if self._is_losing_a_worker:
            crashes_ns = (*self._crashes_ns, now_ns)[-self._policy.max_crashes :]
            expected.append(now_ns + judge_crash(crashes_ns, self._policy, now_ns=now_ns).pause_ns + self.load_ns)
        return max(0, min(expected, default=0) - now_ns)

    @property
    def manifest(self) -> Manifest:
        """What it says about itself."""
        return self.installed.manifest

    @property
    def reserved_bytes(self) -> int:
        """What is charged for it: its workers, and the weights that they map."""
        mapped = 0 if self.form is None or self.mapped is None else self.form.record.cost.hot_bytes
        return self.reservation.size_bytes + mapped

    @property
    def workers(self) -> list[Worker]:
        """The workers that can take requests."""
        return [worker for worker in self._workers if worker is not None and worker.is_alive]

    @property
    def alive(self) -> int:
        """How many workers can take requests."""
        return len(self.workers)

    async def open(self) -> None:
        """Start every worker.

        Raises:
            SessionError: one could not load the model; none is left.
        """
        try:
            for index in range(len(self._workers)):
                await self._start(index)
        except BaseException:
            await self.close()
            raise
        self.phase = Phase.READY if self.workers else Phase.RECOVERING

    async def close(self) -> None:
        """End every worker, letting it finish what it has begun, and give the memory back once they are gone."""
        self.phase = Phase.CLOSED
        self._expect_nobody(*self._awaited_ns)
        workers, self._workers = [*(worker for worker in self._workers if worker is not None), *self._leaving], []
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        await asyncio.gather(*(worker.stop() for worker in workers))
        self.reservation.release()
        if self.mapped is not None:
            self.mapped.release()
            self.mapped = None

    def recall(self, crashes: int) -> None:
        """Count crashes from before a restart, as if they had just been."""
        self._crashes_ns = (self._clock.now_ns(),) * min(crashes, self._policy.max_crashes)

    @property
    def is_quiet(self) -> bool:
        """Whether it has served for the policy's whole window without a crash."""
        since_ns = max((self._opened_ns, *self._crashes_ns))
        return self.phase is Phase.READY and self._clock.now_ns() - since_ns > self._policy.window_ns

    async def drain(self, *, timeout_ns: int) -> None:
        """Wait until no request runs on it, for so long at most. Nobody may send it new ones meanwhile."""
        end_ns = self._clock.now_ns() + timeout_ns
        while self.leases and self._clock.now_ns() < end_ns:
            await asyncio.sleep(_IDLE_LOOK_S)

    def pick(self, stream: str | None) -> Worker | None:
        """Return the worker that should take the next request, None when none is alive.

        The one with the least to do; with state, always the same one for the same stream.
        """
        if self.manifest.stateful and self._workers:
            pinned = self._workers[zlib.crc32((stream or "").encode()) % len(self._workers)]
            return pinned if pinned is not None and pinned.is_alive else None
        workers = self.workers
        if len(workers) > 1:
            return min(workers, key=attrgetter("in_flight"))
        return workers[0] if workers else None

    async def pick_soon(self, stream: str | None, *, deadline_ns: int) -> Worker | None:
        """As `pick`, but waits for the successor of a worker that is being replaced, until the deadline."""
        while (worker := self.pick(stream)) is None and self.is_replacing:
            try:
                async with asyncio.timeout_at(deadline_ns / NS_PER_S):
                    await self._seats_changed.wait()
            except TimeoutError:
                return None
        return worker

    def look(self, own_bytes: Mapping[int, int]) -> int:
        """Do something about workers that take more than was reserved; return by how much they do, all together.

        `own_bytes` tells the anonymous memory that a process has for itself, by its id.
        """
        if self.phase is not Phase.READY:
            return 0
        beyond_bytes = 0
        for index, worker in enumerate(self._workers):
            if worker is None or not worker.is_alive or worker.pid not in own_bytes:
                continue
            held_bytes = own_bytes[worker.pid] + worker.slot_bytes
            beyond_bytes += max(0, held_bytes - self._worker_bytes)
            size = WorkerSize(worker.pid, held_bytes, worker.shrinks, worker.shrunk_bytes + worker.slot_bytes)
            remedy = self._growth.remedy(size, self._clock.now_ns())
            if remedy is Remedy.NOTHING:
                continue
            _log.warning(
                "outgrown model=%s pid=%d held_bytes=%d reserved_bytes=%d remedy=%s",
                self.section.name, worker.pid, held_bytes, self._worker_bytes, remedy,
            )  # fmt: skip
            if remedy is Remedy.SHRINK:
                self.shrunk += 1
                worker.shrink()
            else:
                recycle = functools.partial(self._recycle, index, worker)
                self._later(0, recycle, f"recycle[{self.section.name}]")
        return beyond_bytes

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the model in memory while a request runs on it."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def hold(self) -> None:
        """Keep the model in memory until `let_go`, which is owed once for each call."""
        self.leases += 1
        self.last_used_ns = self._clock.now_ns()

    def let_go(self) -> None:
        """End one `hold`."""
        self.leases -= 1
        self.last_used_ns = self._clock.now_ns()

    def set_cpus(self, cpus: frozenset[int]) -> None:
        """Move every thread of every worker onto these CPUs."""
        for worker in self.workers:
            try:
                worker.set_affinity(cpus)
            except SessionError as error:
                _log.warning("affinity model=%s error=%r", self.section.name, str(error))

    async def _start(self, index: int) -> None:
        task = asyncio.ensure_future(self._start_worker())
        self._starting.add(task)
        try:
            worker = await task
        finally:
            self._starting.discard(task)
        if self.phase in {Phase.CLOSED, Phase.QUARANTINED}:  # it was given up in the very moment
            await worker.stop()
            return
        self._workers[index] = worker
        self._expect_nobody(index)
        self.load_ns = worker.loaded.load_ns
        worker.died.add_done_callback(lambda died: self._on_died(index, worker, died.result()))

    async def _recycle(self, index: int, old: Worker) -> None:
        """Replace a worker by a fresh one between two requests: beside it where the budget allows, else after it."""
        if self.phase is not Phase.READY or self._workers[index] is not old:
            return
        self.recycled += 1
        size_bytes = self.reservation.size_bytes
        try:
            self.reservation.resize(size_bytes + self._worker_bytes)
        except BudgetExceeded:
            await self._recycle_in_place(index, old)
            return
        try:
            await self._start(index)  # takes the seat: from now on requests go to the fresh one
            await self._dismiss(old)
        except EdgeInferError as error:
            _log.warning("not replaced model=%s pid=%d why=%r", self.section.name, old.pid, str(error))
        finally:
            if self.reservation.size_bytes:  # else the model was closed meanwhile
                self.reservation.resize(size_bytes)

    async def _recycle_in_place(self, index: int, old: Worker) -> None:
        self._workers[index] = None
        self._awaited_ns[index] = self._clock.now_ns() + self.load_ns
        await self._dismiss(old)
        await self._restart(index)

    async def _dismiss(self, worker: Worker) -> None:
        """End a worker that has no seat any more, once it has finished what it has; deadlines bound that."""
        self._leaving.add(worker)
        try:
            while worker.is_alive and not (worker.in_flight == 0 and worker.can_accept):
                await asyncio.sleep(_IDLE_LOOK_S)
            await worker.stop()
        finally:
            if not worker.is_alive:  # else it is `close` that ends it
                self._leaving.discard(worker)

    def _on_died(self, index: int, worker: Worker, end: WorkerEnd) -> None:
        self._growth.forget(worker.pid)
        if self.phase in {Phase.CLOSED, Phase.QUARANTINED} or end.cause is EndCause.STOPPED:
            return
        if self._workers[index] is not worker:
            return  # it had given up its seat already
        self._workers[index] = None
        if end.cause in {EndCause.CRASHED, EndCause.BROKEN}:
            self._crashed(index, end.detail)
        else:
            self._replace(index, end.detail, pause_ns=0)

    def _crashed(self, index: int, detail: str) -> None:
        """Count a worker that died by itself or could not be replaced, and act on the verdict."""
        if self.phase in {Phase.CLOSED, Phase.QUARANTINED}:
            return
        now_ns = self._clock.now_ns()
        self._crashes_ns = (*self._crashes_ns, now_ns)[-self._policy.max_crashes :]
        verdict = judge_crash(self._crashes_ns, self._policy, now_ns=now_ns)
        if verdict.quarantine:
            self._quarantine(detail)
        else:
            self._replace(index, detail, pause_ns=verdict.pause_ns)
        note = CrashNote(self.section.name, self.variant.name, detail, verdict.quarantine, verdict.crashes)
        self._on_crash(note)

    def _replace(self, index: int, why: str, *, pause_ns: int) -> None:
        if not self.workers and self.phase is not Phase.LOADING:
            self.phase = Phase.RECOVERING
        self.detail = why
        self._awaited_ns[index] = self._clock.now_ns() + pause_ns + self.load_ns
        _log.warning("worker ended model=%s detail=%r restart_in_ms=%.0f", self.section.name, why, pause_ns / 1e6)
        self._later(pause_ns, lambda: self._restart(index), f"restart[{self.section.name}]")

    async def _restart(self, index: int) -> None:
        if self.phase in {Phase.CLOSED, Phase.QUARANTINED}:
            return
        try:
            await self._start(index)
        except SessionError as error:
            if error.reason in _NO_PROCESS:  # nothing that the model has done
                self._replace(index, str(error), pause_ns=_NO_PROCESS_PAUSE_NS)
            else:
                self._crashed(index, str(error))
            return
        except EdgeInferError as error:
            self._crashed(index, str(error))
            return
        if self.phase is Phase.RECOVERING and self.workers:
            self.phase, self.detail = Phase.READY, ""

    def _expect_nobody(self, *seats: int) -> None:
        """Somebody took these seats, or nobody ever will: let whoever waits for them look again."""
        for index in seats:
            self._awaited_ns.pop(index, None)
        changed, self._seats_changed = self._seats_changed, asyncio.Event()
        changed.set()

    def _quarantine(self, why: str) -> None:
        """Take nothing more. The memory stays charged until `close`, when the processes are gone."""
        self.phase, self.detail = Phase.QUARANTINED, why
        self._expect_nobody(*self._awaited_ns)
        _log.error("quarantined model=%s variant=%s detail=%r", self.section.name, self.variant.name, why)
        for worker in self.workers:
            worker.kill("quarantined")
