"""Own the zygote, and fork workers from it.

Daemon's side. Follows the zygote, restarts it when it dies (its workers live on: they are the daemon's children), and
turns a runtime that cannot be imported into a state and a typed error instead of a crash loop. How its process is
started is `hatch`'s; what a worker is asked to do is `worker`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from edgeinfer.clock import NS_PER_S, LoopClock
from edgeinfer.errors import InternalError, ProtocolError, RuntimeUnusable, SessionError
from edgeinfer.worker import lineage
from edgeinfer.worker.channel import DaemonEnd
from edgeinfer.worker.hatch import Hatched, hatch
from edgeinfer.worker.lineage import Child, ExitStatus
from edgeinfer.worker.messages import (
    PROTOCOL,
    Fork,
    Forked,
    ForkFailed,
    FromZygote,
    ZygoteFailed,
    ZygoteReady,
)
from edgeinfer.worker.pair import make_pair
from edgeinfer.worker.restart import FIRST_COOL_DOWN_S, Restarts

Awaited = TypeVar("Awaited")

_log = logging.getLogger(__name__)

_CLOSE_GRACE_S: Final = 1.0
_SWEEPS_S: Final = (0.1, 1.0, 5.0)
_FORK_PATIENCE_S: Final = 5.0
"""A zygote that has not answered a fork for so long is stuck or stopped (a fork takes 2 ms), and is replaced."""
_PASSING: Final = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Why a process may not be startable just now: too many processes or files, no memory."""


class NurseryState(StrEnum):
    """What can be had from the nursery right now."""

    CLOSED = "closed"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """The zygote died; the next one starts after a pause."""
    UNUSABLE = "unusable"
    """ONNX Runtime cannot be imported; tried again on demand after a cool-down (`restart`)."""


@dataclass(frozen=True, slots=True)
class NurserySnapshot:
    """For reports: what the nursery is doing, and with which runtime."""

    state: NurseryState
    zygote_pid: int | None
    onnxruntime: str
    providers: tuple[str, ...]
    restarts: int
    reason: str
    """Why it is unusable or restarting; empty otherwise."""


@dataclass(frozen=True, slots=True)
class Newborn:
    """A forked worker: the process, and the daemon's end of its channel (which the receiver owns)."""

    child: Child
    sock: socket.socket


@dataclass(slots=True)
class _Zygote:
    """One zygote process and what is asked of it."""

    child: Child
    channel: DaemonEnd[FromZygote, Fork]
    started_ns: int
    ready: asyncio.Future[ZygoteReady]
    forks: dict[int, asyncio.Future[Child]] = field(default_factory=dict)
    complaint: str = ""
    """Why it said that it cannot import the runtime, or why we killed it."""


class Nursery:
    """The daemon's one source of worker processes.

    Loop thread only, and the main one: a zygote dies with the *thread* that started it. `start` makes the daemon a
    child subreaper and never raises because of the runtime: an unusable one is a state. `environment` is added to
    what the zygote inherits. `hatched` is the first zygote, where somebody has started it already. `cool_down_ns` is
    how long an unusable runtime is left alone at first.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        import_timeout_ns: int = 60 * NS_PER_S,
        cool_down_ns: int = round(FIRST_COOL_DOWN_S * NS_PER_S),
        python: str = sys.executable,
        hatched: Hatched | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self._environment = dict(environment or {})
        self._import_timeout_ns = import_timeout_ns
        self._python = python
        self._hatched = hatched
        self._tokens = itertools.count(1)
        self._state = NurseryState.CLOSED
        self._reason = ""
        self._zygote: _Zygote | None = None
        self._runtime: ZygoteReady | None = None
        self._restarts = Restarts(first_cool_down_s=cool_down_ns / NS_PER_S)
        self._retry_at_ns = 0
        self._settled = asyncio.Event()
        """Set unless a zygote is about to be restarted."""
        self._known: set[int] = set()
        self._timers: set[asyncio.TimerHandle] = set()

    def snapshot(self) -> NurserySnapshot:
        """Return what is going on, for reports."""
        return NurserySnapshot(
            state=self._state,
            zygote_pid=self._zygote.child.pid if self._zygote else None,
            onnxruntime=self._runtime.onnxruntime if self._runtime else "",
            providers=tuple(self._runtime.providers) if self._runtime else (),
            restarts=self._restarts.count,
            reason=self._reason,
        )

    def pids(self) -> list[int]:
        """Return every process that lives: the zygote, and all workers, those that are still loading included."""
        return [*([self._zygote.child.pid] if self._zygote else []), *self._known]

    async def start(self) -> NurserySnapshot:
        """Start the zygote and wait until it is ready or has turned out unusable; say which."""
        if self._state is not NurseryState.CLOSED:
            raise InternalError("the nursery was started twice")
        lineage.become_subreaper()
        self._spawn()
        with contextlib.suppress(RuntimeUnusable, SessionError):
            await self._ready_zygote(self._clock.now_ns() + 2 * self._import_timeout_ns)
        return self.snapshot()

    async def fork(self, *, deadline_ns: int, write: Callable[[socket.socket], None] | None = None) -> Newborn:
        """Fork a worker; waits for a zygote that is starting or restarting.

        `write` puts into the channel what the worker finds there when it is born, so that it begins before anybody
        here knows that it is there. Called again with another channel when the zygote dies meanwhile: what it has
        written before may have reached an orphan.

        Raises:
            RuntimeUnusable: ONNX Runtime cannot be imported here; when it is tried again.
            SessionError: `fork_failed`: no memory, process ids or file descriptors, or no zygote until `deadline_ns`.
                And whatever `write` raises: nobody was asked then.
        """
        while True:
            zygote = await self._ready_zygote(deadline_ns)
            try:
                ours, theirs = make_pair()
            except OSError as error:
                raise SessionError("fork_failed", f"no channel for a worker: {error.strerror}") from error
            try:
                if write is not None:
                    write(ours)
            except BaseException:
                ours.close()
                theirs.close()
                raise
            token = next(self._tokens)
            answer: asyncio.Future[Child] = self._loop.create_future()
            zygote.forks[token] = answer
            self._later(_FORK_PATIENCE_S, functools.partial(self._give_up_fork, zygote, token))
            try:
                with theirs:
                    zygote.channel.send(Fork(token), [theirs.fileno()])
                child = await self._until(answer, deadline_ns, "the zygote did not fork in time")
            except ProtocolError:  # the zygote died: ask the next one
                ours.close()
                await asyncio.sleep(0)
            except OSError as error:  # no descriptor to queue the message with
                ours.close()
                zygote.forks.pop(token, None)
                raise SessionError("fork_failed", f"the zygote cannot be asked: {error.strerror}") from error
            except BaseException:
                ours.close()
                raise
            else:
                return Newborn(child, ours)
            finally:
                answer.cancel()  # nobody waits for it any more; it stays known until the zygote has answered

    def retry_now(self) -> None:
        """Let the next fork try an unusable runtime again, however short ago it failed: somebody asks for it."""
        self._retry_at_ns = 0

    async def close(self) -> None:
        """End the zygote and wait until it is reaped. Workers are their owners' to stop."""
        self._state = NurseryState.CLOSED
        self._settled.set()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        zygote, self._zygote = self._zygote, None
        if zygote is None:
            return
        zygote.channel.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(zygote.child.ended), _CLOSE_GRACE_S)
        await zygote.child.killed()
        self._fail_waiters(zygote, "the nursery is closed")

    async def _ready_zygote(self, deadline_ns: int) -> _Zygote:
        while True:
            if self._state is NurseryState.UNUSABLE:
                if self._clock.now_ns() < self._retry_at_ns:
                    raise RuntimeUnusable(self._reason, retry_ns=self._retry_at_ns)
                self._spawn()
            if self._state is NurseryState.CLOSED:
                raise SessionError("fork_failed", "the nursery is closed")
            zygote = self._zygote
            if zygote is None:  # between two zygotes
                left_s = (deadline_ns - self._clock.now_ns()) / NS_PER_S
                try:
                    await asyncio.wait_for(self._settled.wait(), left_s)
                except TimeoutError:
                    raise SessionError("fork_failed", f"no zygote in time: {self._reason}") from None
                continue
            with contextlib.suppress(ProtocolError):  # it died before it was ready; what follows is `_on_ended`'s
                await self._until(zygote.ready, deadline_ns, "the zygote was not ready in time")
                return zygote
            await asyncio.sleep(0)

    async def _until(self, future: asyncio.Future[Awaited], deadline_ns: int, complaint: str) -> Awaited:
        if not future.done():  # else this takes no turn of the loop
            left_s = (deadline_ns - self._clock.now_ns()) / NS_PER_S
            await asyncio.wait([future], timeout=max(0.0, left_s))
            if not future.done():
                raise SessionError("fork_failed", complaint)
        return future.result()

    def _spawn(self) -> None:
        """Start a zygote; when the system does not let us, that is a state, and it is tried again."""
        try:
            child, ours = self._start_process()
        except OSError as error:
            self._on_unstarted(error)
        else:
            self._adopt(child, ours)

    def _on_unstarted(self, error: OSError) -> None:
        self._reason = f"no process for the zygote: {error.strerror}"
        if error.errno in _PASSING:
            pause_s = self._restarts.unstarted()
            self._state = NurseryState.RESTARTING
            self._settled.clear()
            _log.warning("zygote not started reason=%r retry_in_s=%.1f", self._reason, pause_s)
            self._later(pause_s, self._spawn)
        else:
            self._give_up_runtime()
            self._settled.set()

    def _start_process(self) -> tuple[Child, socket.socket]:
        """Start the process, or take the one that was started before us; returned with our end of its channel.

        Raises:
            OSError: it cannot be started, or not be followed; nothing is left of it.
        """
        hatched, self._hatched = self._hatched, None
        if hatched is None:
            hatched = hatch(python=self._python, environment=self._environment)
        try:
            return self._follow(hatched.pid), hatched.sock
        except BaseException:
            hatched.sock.close()
            raise

    def _follow(self, pid: int) -> Child:
        """Return a child that was just started; one that cannot be followed is ended.

        Raises:
            OSError: no file descriptor for it.
        """
        try:
            return Child(pid, self._loop)
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so that it is nobody else
            self._later(_SWEEPS_S[0], functools.partial(_reap, pid))
            raise

    def _adopt(self, child: Child, ours: socket.socket) -> None:
        zygote: _Zygote

        def on_message(message: FromZygote) -> None:
            self._on_message(zygote, message)

        def on_closed(reason: str) -> None:
            zygote.complaint = zygote.complaint or reason
            child.kill()  # it closed its end because it ends, or it spoke nonsense

        channel: DaemonEnd[FromZygote, Fork] = DaemonEnd(
            ours, self._loop, FromZygote, on_message=on_message, on_closed=on_closed
        )
        zygote = _Zygote(child, channel, self._clock.now_ns(), self._loop.create_future())
        child.ended.add_done_callback(lambda ended: self._on_ended(zygote, ended.result()))
        self._zygote = zygote
        self._state = NurseryState.STARTING
        self._settled.set()
        self._later(self._import_timeout_ns / NS_PER_S, lambda: self._give_up_import(zygote))

    def _on_message(self, zygote: _Zygote, message: FromZygote) -> None:
        match message:
            case ZygoteReady():
                self._on_ready(zygote, message)
            case ZygoteFailed(detail):
                zygote.complaint = detail
            case Forked(token, pid):
                waiter = zygote.forks.pop(token, None)
                try:
                    child = self._know(self._follow(pid))
                except OSError as error:
                    if waiter is not None and not waiter.done():
                        detail = f"the worker cannot be followed: {error.strerror}"
                        waiter.set_exception(SessionError("fork_failed", detail))
                    return
                if waiter is None or waiter.done():  # nobody wants it any more
                    child.kill()
                else:
                    waiter.set_result(child)
            case ForkFailed(token, detail):
                waiter = zygote.forks.pop(token, None)
                if waiter is not None and not waiter.done():
                    waiter.set_exception(SessionError("fork_failed", detail))

    def _on_ready(self, zygote: _Zygote, ready: ZygoteReady) -> None:
        if ready.protocol != PROTOCOL:
            zygote.complaint = (
                f"the installed edgeinfer speaks worker protocol {ready.protocol}, this daemon {PROTOCOL}: restart it"
            )
        elif ready.threads != 1:
            zygote.complaint = (
                f"onnxruntime {ready.onnxruntime} started {ready.threads - 1} threads at import, "
                "so workers cannot be forked safely"
            )
        else:
            self._runtime, self._state, self._reason = ready, NurseryState.READY, ""
            self._restarts.ready()
            zygote.ready.set_result(ready)
            _log.info("zygote ready pid=%d onnxruntime=%s", zygote.child.pid, ready.onnxruntime)
            return
        zygote.child.kill()

    def _give_up_import(self, zygote: _Zygote) -> None:
        if not zygote.ready.done() and zygote.child.is_running:
            seconds = self._import_timeout_ns / NS_PER_S
            zygote.complaint = f"importing onnxruntime took more than {seconds:g} s"
            zygote.child.kill()

    def _give_up_fork(self, zygote: _Zygote, token: int) -> None:
        if token in zygote.forks and zygote.child.is_running:
            _log.warning("zygote stuck pid=%d unanswered_s=%g", zygote.child.pid, _FORK_PATIENCE_S)
            zygote.child.kill()

    def _on_ended(self, zygote: _Zygote, status: ExitStatus) -> None:
        zygote.channel.close()
        was_ready = zygote.ready.done() and not zygote.ready.cancelled()
        if self._state is NurseryState.CLOSED:
            return
        self._zygote = None
        for delay_s in _SWEEPS_S:
            self._later(delay_s, functools.partial(self._sweep, zygote.child.pid))
        if was_ready or not self._restarts.blames_import(status, zygote.complaint):
            self._restart(zygote, status)
        else:
            self._reason = zygote.complaint or f"the process that imports onnxruntime was {status}"
            self._give_up_runtime()
        self._fail_waiters(zygote, f"zygote {status}")

    def _give_up_runtime(self) -> None:
        """Leave the runtime alone for a while."""
        pause_s = self._restarts.cool_down()
        self._state = NurseryState.UNUSABLE
        self._retry_at_ns = self._clock.now_ns() + round(pause_s * NS_PER_S)
        _log.error("runtime unusable reason=%r retry_after_s=%g", self._reason, pause_s)

    def _know(self, child: Child) -> Child:
        """Remember whose exit status is somebody's to read."""
        self._known.add(child.pid)
        child.ended.add_done_callback(lambda _: self._known.discard(child.pid))
        return child

    def _sweep(self, zygote_pid: int) -> None:
        """Reap what a dead zygote had half born: orphans of its process group that nobody knows of.

        They end by themselves, because the daemon's end of their channel is closed.
        """
        lineage.reap_group(zygote_pid, self._known)

    def _restart(self, zygote: _Zygote, status: ExitStatus) -> None:
        pause_s = self._restarts.after(self._clock.now_ns() - zygote.started_ns)
        self._state, self._reason = NurseryState.RESTARTING, f"zygote {zygote.child.pid} {status}"
        self._settled.clear()
        _log.warning("zygote ended pid=%d status=%r restart_in_s=%.1f", zygote.child.pid, str(status), pause_s)
        self._later(pause_s, self._spawn)

    def _fail_waiters(self, zygote: _Zygote, why: str) -> None:
        waiters: list[asyncio.Future[Any]] = [zygote.ready, *zygote.forks.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(ProtocolError(why))
                waiter.exception()  # seen: nobody may be waiting
        zygote.forks.clear()

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        def fire() -> None:
            self._timers.discard(timer)
            act()

        timer = self._loop.call_later(delay_s, fire)
        self._timers.add(timer)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
