"""One thread for what can block: a disk, a network file system.

A job that never ends costs this thread and what waits for it, never the process's end: the thread is a daemon thread,
which the interpreter doesn't join when it exits (it would one of a `ThreadPoolExecutor`). What is given up that way is
for `rest` to say.
"""

from __future__ import annotations

import asyncio
import errno
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from edgeinfer.clock import NS_PER_S, Clock

STUCK_NS = 120 * NS_PER_S
"""A job that takes longer is stuck: hashing a bundle of 2 GB from a slow card (20 MB/s) takes 100 s."""
_MOST_WAITING = 256

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    work: Callable[[], Any]


class OneThread(Executor):
    """An executor with one daemon thread, `name`, which starts with the first job; one job after the other.

    At most 256 jobs wait; one more fails with `OSError`, which is what a disk that does not answer amounts to.
    """

    def __init__(self, name: str, *, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._since_ns: int | None = None
        self._closed = False

    @property
    def is_stuck(self) -> bool:
        """Whether the job at work takes far too long."""
        since_ns = self._since_ns
        return since_ns is not None and self._clock.now_ns() - since_ns >= STUCK_NS

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job. After `shutdown` and when too many wait, its future fails.

        Loop thread only.
        """
        future: Future[T] = Future()
        if self._closed:
            raise RuntimeError(f"the {self.name} thread is closed")
        try:
            self._jobs.put_nowait(_Job(future, lambda: fn(*args, **kwargs)))
        except queue.Full:
            future.set_exception(OSError(errno.EBUSY, f"the {self.name} thread is stuck"))
            return future
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        return future

    async def rest(self, timeout_s: float) -> bool:
        """Wait until all jobs are done, for so long at most, then take no more; False when one is given up."""
        done = True
        if self._thread is not None and not self._closed:
            last = asyncio.get_running_loop().run_in_executor(self, lambda: None)
            finished, _ = await asyncio.wait({last}, timeout=timeout_s)
            done = bool(finished) and last.exception() is None
        self.shutdown()
        return done

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Take no more jobs; the thread ends when it can, and is not waited for."""
        if not self._closed:
            self._closed = True
            try:
                self._jobs.put_nowait(None)
            except queue.Full:
                return  # stuck: it ends with the process

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            self._since_ns = self._clock.now_ns()
            try:
                result = job.work()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            finally:
                self._since_ns = None
