"""Keep the family of processes together: nobody outlives the daemon, and the daemon reaps everybody.

Owns the few system calls that say who dies with whom (prctl, pidfd) and who gives way to whom, and the decoding of how
a child ended. Who is started, and when, is `nursery`'s. Used on both sides; imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio  # zygote and workers never import it: 10 MB that they do not need

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

KILL_PATIENCE_S: Final = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    value = argument if isinstance(argument, ctypes.c_char_p) else ctypes.c_ulong(argument)
    zero = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(option), value, zero, zero, zero) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def become_subreaper() -> None:
    """Make this process the parent of every orphan below it; it must then reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Show `name` (15 bytes of it) in `ps` and `top` for the calling thread."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when `parent_pid`, its parent, ends.

    The parent may have ended before the request was made, so it is checked again afterwards;
    this process then exits at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def adopt_new_parent(parent_pid: int, *, timeout_ns: int = 2_000_000_000) -> None:
    """Wait until the kernel made `parent_pid` our parent, then die with it.

    For the grandchild of a double fork: its first parent exits at once, and the kernel hands it to the
    nearest subreaper. Exits when that is somebody else, that is, when `parent_pid` is gone.
    """
    give_up_ns = time.monotonic_ns() + timeout_ns
    while os.getppid() != parent_pid:
        if time.monotonic_ns() > give_up_ns:
            os._exit(0)
        time.sleep(0.0001)
    die_with_parent(parent_pid)


def offer_to_oom_killer(score_adj: int) -> None:
    """Make this process a better victim of the out-of-memory killer than its parent (raising needs no right)."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+b", buffering=0) as file:  # noqa: PTH123
        if int(file.read()) < score_adj:
            file.write(str(score_adj).encode())


_CAP_SYS_NICE: Final = 23
_GIVES_WAY_BY: Final = 5
"""Steps of nice: beside a process of normal priority a third of its share, and it is preempted at once."""


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Let processes of normal priority go first while the body runs, if we may come back from that.

    An unprivileged process may only with RLIMIT_NICE (LimitNICE= in a systemd unit). Threads that the body has started
    come back, too.
    """
    normal = os.getpriority(os.PRIO_PROCESS, 0)
    if not _may_return_to(normal):
        yield
        return
    with contextlib.suppress(OSError):  # a sandbox may forbid the call
        os.setpriority(os.PRIO_PROCESS, 0, normal + _GIVES_WAY_BY)
    try:
        yield
    finally:
        for task in os.listdir("/proc/self/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(task), normal)


def _may_return_to(nice: int) -> bool:
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= 20 - nice:
        return True
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(b"CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False


def reap_group(group: int, known: Collection[int] = ()) -> None:
    """Reap the children of ours that have ended in a process group and that nobody else waits for.

    A subreaper inherits what its children leave behind, and nobody else will read how that ended. `known` are the
    pids that somebody follows.
    """
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (info := os.waitid(os.P_PGID, group, peek)) is not None and info.si_pid not in known:
            os.waitid(os.P_PID, info.si_pid, os.WEXITED | os.WNOHANG)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: with an exit code, or by a signal; neither when it is not known."""

    code: int | None = None
    signal: int | None = None

    @property
    def signal_name(self) -> str | None:
        """The signal's name, such as `SIGSEGV`, or None for a process that exited by itself."""
        if self.signal is None:
            return None
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {self.signal_name}"
        return "gone" if self.code is None else f"exited with code {self.code}"


class Child:
    """A child process, followed by its pidfd on the event loop and reaped as soon as it ends.

    Loop thread only. `ended` resolves exactly once, with the `ExitStatus`; the process is reaped by then, and
    later signals do nothing. The process must already be our child (a grandchild: after it was reparented).
    """

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = pid
        self.ended: asyncio.Future[ExitStatus] = loop.create_future()
        self._loop = loop
        self._pidfd = os.pidfd_open(pid)
        loop.add_reader(self._pidfd, self._reap)

    @property
    def is_running(self) -> bool:
        """Whether the process has not been reaped yet."""
        return not self.ended.done()

    def signal(self, number: int) -> None:
        """Send a signal; the pidfd makes sure that it reaches this very process, or nobody."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL; `ended` resolves once the process is gone."""
        self.signal(signal.SIGKILL)

    async def killed(self) -> bool:
        """Send SIGKILL and wait until the process is reaped, but not for ever.

        False when it is still there after `KILL_PATIENCE_S`: then it is stuck in the kernel, on a dying SD card say.
        """
        import asyncio  # noqa: PLC0415 - see above

        self.kill()
        await asyncio.wait([self.ended], timeout=KILL_PATIENCE_S)
        return not self.is_running

    def _reap(self) -> None:
        status = ExitStatus()
        with contextlib.suppress(ChildProcessError):  # somebody else reaped it, so nobody knows how it ended
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if info is None:
                return
            exited = info.si_code == os.CLD_EXITED
            status = ExitStatus(code=info.si_status) if exited else ExitStatus(signal=info.si_status)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set_result(status)
