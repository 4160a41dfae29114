"""Tell a worker to stop a run while its main thread is inside it.

A pipe of run numbers beside the channel: the worker's main thread reads the channel itself, so that no run is handed
from thread to thread, and a second thread sleeps on this pipe until somebody is to be stopped. What stopping means is
`inbox`'s.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Final

from edgeinfer.worker.channel import ChannelClosed, ChannelFull

_RUN: Final = struct.Struct("=Q")
_READ_BYTES: Final = 64 * _RUN.size


class CancelPipe:
    """The daemon's end. Bounded by the kernel's pipe (thousands of numbers); not open until `open`."""

    def __init__(self) -> None:
        self._fd = -1

    def open(self) -> int:
        """Open the pipe, which must be closed, and return the worker's end, which the caller passes on and closes.

        Raises:
            OSError: the system has no file descriptors for it now.
        """
        worker_end, self._fd = os.pipe()
        os.set_blocking(self._fd, False)
        return worker_end

    def send(self, run: int) -> None:
        """Have `run` stopped.

        Raises:
            ChannelClosed: the worker is gone.
            ChannelFull: it has not read for too long.
        """
        if self._fd < 0:
            raise ChannelClosed("the worker's cancel pipe is closed")
        try:
            os.write(self._fd, _RUN.pack(run))  # so few bytes are written whole or not at all
        except BlockingIOError:
            raise ChannelFull("the worker does not read what it is to cancel") from None
        except OSError as error:
            raise ChannelClosed(f"the worker's cancel pipe broke: {error.strerror}") from error

    def close(self) -> None:
        """Close our end. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_cancels(fd: int, cancel: Callable[[int], None]) -> None:
    """Call `cancel` with every run number that comes, until the daemon is gone. Blocks: for a thread of its own."""
    while data := os.read(fd, _READ_BYTES):
        for (run,) in _RUN.iter_unpack(data):
            cancel(run)
