"""What a worker does from its birth to its end.

Worker's side, main thread: load the one model that it is told to, then run what comes, in order, and answer each run
with exactly one acknowledgement. It ends when it is told to, when the channel ends, or with the daemon (`lineage`).
Taking messages off the channel is `inbox`'s, ONNX Runtime is `session`'s, arrays are `feed`'s.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import onnxruntime as ort

from edgeinfer import oip
from edgeinfer.errors import ProtocolError
from edgeinfer.request import Payload
from edgeinfer.worker import feed, lineage, session
from edgeinfer.worker.channel import ChannelClosed, ProcessEnd
from edgeinfer.worker.fault import CANCELLED, OUT_OF_MEMORY, Fault
from edgeinfer.worker.inbox import Channel, Inbox, LogLines
from edgeinfer.worker.memory import data_bytes, forget_peak, own_bytes, read_memory
from edgeinfer.worker.messages import (
    PROTOCOL,
    Comparison,
    Done,
    Failed,
    ForgetStream,
    Hello,
    Loaded,
    LoadFailed,
    LoadSpec,
    Log,
    Marks,
    Memory,
    Oversize,
    Room,
    Run,
    Shrink,
    Shrunk,
    Span,
    Stop,
    ToWorker,
)
from edgeinfer.worker.sequence import SequenceStates
from edgeinfer.worker.slot import body_bytes, read_body, write_body

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

WORKER_OOM_SCORE_ADJ: Final = 500
"""Far above daemon and zygote: when memory runs out, a model goes and the service stays."""
_COMPILER_OOM_SCORE_ADJ: Final = 1000
"""Above every model in service: what is only being prepared goes first."""
_EXIT_LOAD_FAILED: Final = 65  # EX_DATAERR
_EXIT_PROTOCOL: Final = 76  # EX_PROTOCOL


def run_worker(sock: socket.socket, daemon_pid: int) -> int:
    """Live as a worker on this channel; return the exit code."""
    lineage.adopt_new_parent(daemon_pid)
    lineage.offer_to_oom_killer(WORKER_OOM_SCORE_ADJ)
    lineage.name_process("edgeinfer-worker")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # cores of crashing models would fill the card
    np.seterr(all="ignore")  # what is not finite is refused or allowed, and never printed
    channel: Channel = ProcessEnd(sock, ToWorker)
    try:
        channel.send(Hello(PROTOCOL, os.getpid()))
        return _serve(channel, Inbox(channel))
    except ChannelClosed:
        return 0
    except (ProtocolError, msgspec.MsgspecError, OSError) as error:
        channel.send(Log(logging.ERROR, f"worker ends on its channel: {type(error).__name__}: {error}"))
        return _EXIT_PROTOCOL


def _serve(channel: Channel, inbox: Inbox) -> int:
    """Load what the first message names, then run until told to stop."""
    runner: Runner | None = None
    while True:
        match inbox.next():
            case LoadSpec() as spec:
                try:
                    runner = _load(spec, channel, inbox)
                except Fault as fault:
                    channel.send(LoadFailed(fault.reason, fault.detail))
                    return _EXIT_LOAD_FAILED
            case (Run() as run, received_ns):
                assert runner is not None, "the daemon sends no run before the model is loaded"
                runner.run(run, Marks(received_ns=received_ns))
            case ForgetStream(stream):
                assert runner is not None, "the daemon forgets no stream before the model is loaded"
                runner.states.forget(stream)
            case Shrink():
                session.shrink()
                channel.send(Shrunk(own_bytes()))
            case Stop():
                return 0


def _load(spec: LoadSpec, channel: Channel, inbox: Inbox) -> Runner:
    """Load the model inside its limits and tell the daemon what that cost.

    Raises:
        Fault: it cannot be loaded.
    """
    lineage.name_process(f"ei:{spec.model}")
    _confine(spec)
    forget_peak()
    before = _weigh(spec)
    began_ns = time.monotonic_ns()
    try:
        with lineage.giving_way():
            model = session.load(spec, LogLines(channel))
    except MemoryError as error:
        raise Fault(OUT_OF_MEMORY, f"{spec.title} does not fit its memory limit while loading") from error
    loaded_ns = time.monotonic_ns()
    if spec.weighed:
        session.give_back_freed_memory()
    after = _weigh(spec)
    if spec.mapped:  # pages of the file that were looked at and let go while loading would count as anonymous
        forget_peak()
    channel.send(
        Loaded(
            load_ns=loaded_ns - began_ns,
            before=before,
            after=after,
            providers=model.providers,
            inputs=model.inputs,
            outputs=model.outputs,
            nodes=model.nodes,
        )
    )
    if not spec.weighed:  # requests may be on their way: those that come sooner wait no longer than they would have
        session.give_back_freed_memory()
    return Runner(spec, model, channel, inbox)


def _weigh(spec: LoadSpec) -> Memory:
    nothing = Memory(0, 0, 0)
    return (read_memory() or nothing) if spec.weighed else nothing


def _confine(spec: LoadSpec) -> None:
    """Put every present thread on the worker's CPUs (later ones inherit them) and set its memory fence.

    Raises:
        Fault: `affinity`: none of the CPUs may be used.
    """
    if spec.cpus is not None:
        try:
            for task in os.listdir("/proc/self/task"):  # noqa: PTH208
                os.sched_setaffinity(int(task), spec.cpus)
        except OSError as error:
            allowed = sorted(os.sched_getaffinity(0))
            raise Fault("affinity", f"{spec.title} cannot run on CPUs {spec.cpus}, allowed are {allowed}") from error
    if spec.data_limit_bytes is not None:
        limit = data_bytes() + spec.data_limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if spec.compile is not None:
        lineage.offer_to_oom_killer(_COMPILER_OOM_SCORE_ADJ)
        limit = spec.compile.max_file_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # Python ignores SIGXFSZ: a write fails instead


class Runner:
    """Runs one loaded model. Main thread of the worker only."""

    def __init__(self, spec: LoadSpec, model: session.Model, channel: Channel, inbox: Inbox) -> None:
        self.states = SequenceStates(spec.state, spec.max_streams)
        self._spec = spec
        self._inputs = feed.InputReader({tensor.name: tensor for tensor in spec.inputs})
        self._answers = feed.AnswerHeads(spec.model, spec.version)
        self._outputs = {tensor.name: tensor for tensor in spec.outputs}
        self._state_outputs = {state.output: state for state in spec.state}
        self._model = model
        self._channel = channel
        self._inbox = inbox

    def run(self, run: Run, marks: Marks) -> None:
        """Run a request and acknowledge it, once, in any case; its slot is the daemon's again after that."""
        try:
            answer: Done | Failed = self._answer(run, marks)
        except Fault as fault:
            answer = Failed(run.run, fault.reason, fault.detail, marks)
        except MemoryError:
            answer = Failed(run.run, OUT_OF_MEMORY, "the request needs more memory than the worker may take", marks)
        self._inbox.runs.finish(run.run)
        self._channel.send(answer)

    def _answer(self, run: Run, marks: Marks) -> Done:
        begun_cpu_ns = time.process_time_ns()
        options = self._begin(run)
        header_view, body = read_body(self._inbox.slots.view(run.request.slot), run.request)
        header, feeds = self._inputs.read(bytes(header_view), body)
        state, state_reset = self.states.begin(run.stream, sequence_start=run.sequence_start)
        marks.decoded_ns = marks.started_ns = time.monotonic_ns()
        outputs = self._run_model(run, feeds | state if state else feeds, options)
        marks.finished_ns = time.monotonic_ns()
        feed.check_outputs(outputs, self._outputs)
        public = outputs
        if self._state_outputs:
            public = {name: array for name, array in outputs.items() if name not in self._state_outputs}
        comparison = self._compare(run, public)
        response = self._write(run, header, public)
        self.states.keep(run.stream, outputs)  # last: a run that fails leaves the state as it was
        marks.postprocessed_ns = time.monotonic_ns()
        marks.cpu_ns = time.process_time_ns() - begun_cpu_ns
        return Done(run.run, response, marks, state_reset, comparison)

    def _begin(self, run: Run) -> ort.RunOptions:
        """Return the options of one go at a run, which the daemon can stop from now on."""
        options = ort.RunOptions()  # a fresh one each time: a terminated one ends every later run
        self._inbox.runs.begin(run.run, lambda: setattr(options, "terminate", True))
        return options

    def _run_model(self, run: Run, feeds: Arrays, options: ort.RunOptions) -> Arrays:
        """Run; when memory was short, once more with what the arena kept of earlier shapes given back.

        The arena holds on to extents of the sizes that others have asked for, and its cap counts them. So only what a
        lean arena has no room for either is too large. Nothing of the first go is left: state is kept only afterwards.

        Raises:
            Fault: as `session.Model.run`, or `cancelled`.
        """
        try:
            try:
                return self._model.run(feeds, options)
            except Fault as fault:
                if fault.reason != OUT_OF_MEMORY or self._inbox.runs.is_cancelled(run.run):
                    raise
            session.shrink()
            return self._model.run(feeds, self._begin(run))
        except Fault:
            if self._inbox.runs.is_cancelled(run.run):
                raise Fault(CANCELLED, "stopped while it ran") from None
            raise

    def _compare(self, run: Run, outputs: Arrays) -> Comparison | None:
        if run.expected is None:
            return None
        header_view, body = read_body(self._inbox.slots.view(run.expected.slot), run.expected)
        header = oip.response_header(Payload(bytes(header_view)))
        return Comparison(*feed.compare(outputs, header, body, run.tolerance))

    def _write(self, run: Run, header: oip.RequestHeader, outputs: Arrays) -> Span:
        parameters: dict[str, Any] = {}
        if self._spec.classes is not None:
            parameters.update(feed.label(self._spec.classes, outputs))
        wanted = feed.only(outputs, header.outputs)
        response = self._answers.answer(wanted, parameters, header.id)
        room = self._room_for(run, body_bytes(response))
        return write_body(self._inbox.slots.view(room.slot), room.slot, room.offset, response)

    def _room_for(self, run: Run, needed_bytes: int) -> Room:
        """Return where the answer goes, asking for more room when it is larger than was expected.

        Raises:
            Fault: `output_too_large`: the daemon has no more room for it.
        """
        if needed_bytes <= run.response.capacity_bytes:
            return run.response
        self._channel.send(Oversize(run.run, needed_bytes))
        room = self._inbox.next_grant().response
        if room is None or room.capacity_bytes < needed_bytes:
            raise Fault(
                "output_too_large",
                f"the answer has {needed_bytes} bytes, its slot has room for {run.response.capacity_bytes}",
            )
        return room
