"""The zygote: has ONNX Runtime imported and tried once, holds no session, and forks a worker when asked.

Worker's side. Started as `python -m edgeinfer.worker.zygote FD DAEMON_PID` by `nursery`, which set the environment
that must be there before the import (telemetry off, one BLAS thread). It has exactly one thread, for ever: a fork
copies only the calling one, so a lock that another held would stay locked in the child. It reads `Fork` messages and
does nothing else; what a worker does is `main`'s.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from typing import Any, Final, NoReturn

import msgspec

from edgeinfer.worker import lineage
from edgeinfer.worker.channel import ChannelClosed, ProcessEnd
from edgeinfer.worker.memory import read_memory
from edgeinfer.worker.messages import (
    PROTOCOL,
    Fork,
    Forked,
    ForkFailed,
    FromWorker,
    FromZygote,
    LoadSpec,
    ToWorker,
    ZygoteFailed,
    ZygoteReady,
)
from edgeinfer.worker.pages import let_go_of_files
from edgeinfer.worker.pair import make_pair

ZYGOTE_OOM_SCORE_ADJ = 200
"""Above the daemon's (0 or less under systemd), below the workers': losing the zygote costs only a restart."""

_EXIT_RUNTIME_UNUSABLE = 3
_SETTLE_S: Final = 1.0
"""When nobody has asked for a worker for so long, the start is over."""

_SMALLEST_MODEL: Final = (
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
"""An ONNX model (opset 13) of one node: y = Identity(x), one float."""


def main(argv: list[str]) -> int:
    """Import the runtime, say so, and fork until the daemon closes the channel."""
    fd, daemon_pid = int(argv[1]), int(argv[2])
    lineage.die_with_parent(daemon_pid)
    lineage.name_process("edgeinfer-zygote")
    lineage.offer_to_oom_killer(ZYGOTE_OOM_SCORE_ADJ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to answer, by draining
    channel: ProcessEnd[Fork, FromZygote] = ProcessEnd(socket.socket(fileno=fd), Fork)
    try:
        try:
            ready = _import_runtime()
        except Exception as error:  # noqa: BLE001 - a broken native package raises whatever it likes at import
            channel.send(ZygoteFailed(f"importing onnxruntime failed: {type(error).__name__}: {error}"[:2000]))
            return _EXIT_RUNTIME_UNUSABLE
        gc.collect()
        gc.freeze()  # workers share these pages as long as nobody, the collector included, writes to them
        channel.send(ready)
        has_settled = False
        while True:
            if not has_settled and not select.select([channel.fileno()], [], [], _SETTLE_S)[0]:
                let_go_of_files()
                has_settled = True
            request, fds = channel.receive()
            with socket.socket(fileno=fds[0]) as worker_end:
                channel.send(_fork_worker(request.token, channel, worker_end, daemon_pid))
    except ChannelClosed:
        return 0


def _import_runtime() -> ZygoteReady:
    """Import all that a worker needs, so that a fork has it for nothing."""
    import numpy as np  # noqa: PLC0415
    import onnxruntime  # noqa: PLC0415

    import edgeinfer.worker.main  # noqa: F401, PLC0415
    from edgeinfer.worker import providers  # noqa: PLC0415

    _try_once(onnxruntime)
    _rehearse()
    return ZygoteReady(
        protocol=PROTOCOL,
        threads=len(os.listdir("/proc/self/task")),  # noqa: PTH208
        onnxruntime=str(onnxruntime.__version__),
        numpy=str(np.__version__),
        providers=providers.available(),
    )


def _try_once(onnxruntime: Any) -> None:
    """Make the smallest session there is, on this one thread, and drop it.

    The first session of a process fills the runtime's registries of kernels and optimizers; workers inherit them
    instead of each making its own ([measured] 3 ms here; 2 MB and 3 ms less in every worker). A runtime that cannot
    even do this says so better when it is given a real model.
    """
    with contextlib.suppress(Exception):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        onnxruntime.InferenceSession(_SMALLEST_MODEL, options, providers=["CPUExecutionProvider"])


def _rehearse() -> None:
    """Do once what every worker does first, so that what it makes on the way is made already, and shared.

    Decoders of messages above all, then what reading a file of /proc imports: 3 ms of each worker's start.
    """
    ours, theirs = make_pair()
    with ours, theirs:
        ProcessEnd[ToWorker, FromWorker](ours, ToWorker)
    spec = LoadSpec(
        model="m", version="1.0.0", variant="v", path="/m", providers=["CPUExecutionProvider"], intra_threads=1
    )
    msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=LoadSpec)
    read_memory()


def _fork_worker(
    token: int, channel: ProcessEnd[Fork, FromZygote], worker_end: socket.socket, daemon_pid: int
) -> Forked | ForkFailed:
    """Fork twice, so that the worker becomes the daemon's child; return its pid once it is."""
    read_fd, write_fd = os.pipe()
    try:
        first = os.fork()
    except OSError as error:
        os.close(read_fd)
        os.close(write_fd)
        return ForkFailed(token, f"fork: {error.strerror}")
    if first == 0:
        os.close(read_fd)
        _fork_again(write_fd, channel, worker_end, daemon_pid)
    os.close(write_fd)
    answer = os.read(read_fd, _PID.size)
    os.close(read_fd)
    os.waitpid(first, 0)  # from now on the worker is the daemon's child, dead or alive
    if len(answer) != _PID.size:
        return ForkFailed(token, "fork: the intermediate process could not fork")
    return Forked(token, _PID.unpack(answer)[0])


_PID = struct.Struct("=i")


def _fork_again(
    pid_pipe: int, channel: ProcessEnd[Fork, FromZygote], worker_end: socket.socket, daemon_pid: int
) -> NoReturn:
    """Fork the worker, tell the zygote its pid and end; in the worker, never come back."""
    status = 70  # EX_SOFTWARE
    try:
        second = os.fork()
        if second == 0:
            os.close(pid_pipe)
            channel.close()
            from edgeinfer.worker.main import run_worker  # noqa: PLC0415

            status = run_worker(worker_end, daemon_pid)
        else:
            os.write(pid_pipe, _PID.pack(second))
            status = 0
    except OSError:
        status = 71  # EX_OSERR
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        os._exit(status)  # never unwind into the zygote's own loop


if __name__ == "__main__":
    sys.exit(main(sys.argv))
