"""The words that the daemon, its zygote and its workers exchange.

Owns the wire structs and their version; `channel` carries them. Both sides come from one installation, but a
package may be replaced under a running daemon and a later worker be newer than it: so each process says `PROTOCOL`
first, and a daemon that hears another number refuses it. Change any struct here, raise the number.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from edgeinfer.artifact.manifest import Classes, StateSpec, TensorSpec

PROTOCOL: Final = 4


# What the daemon asks of the zygote, and what that answers.


class Fork(msgspec.Struct, tag=True):
    """Fork a worker; its end of a channel comes with this message."""

    token: int


class ZygoteReady(msgspec.Struct, tag=True):
    """The runtime is imported and the zygote can fork."""

    protocol: int
    threads: int
    onnxruntime: str
    numpy: str
    providers: list[str]


class ZygoteFailed(msgspec.Struct, tag=True):
    """The runtime cannot be imported; the zygote exits after this."""

    detail: str


class Forked(msgspec.Struct, tag=True):
    """The worker for `token` runs and is, by now, a child of the daemon."""

    token: int
    pid: int


class ForkFailed(msgspec.Struct, tag=True):
    """No worker for `token`."""

    token: int
    detail: str


FromZygote = ZygoteReady | ZygoteFailed | Forked | ForkFailed


# What the daemon asks of a worker.


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Where in a slot an OIP body lies: the header at `offset`, the tensors at `body_offset` (64-byte aligned)."""

    slot: int
    offset: int
    header_bytes: int
    body_offset: int
    body_bytes: int


class Room(msgspec.Struct, frozen=True, array_like=True):
    """Where in a slot a response may be written."""

    slot: int
    offset: int
    capacity_bytes: int


Form = Literal["plain", "prepacked", "mapped"]
"""How a model's file holds its weights: as it came, ready packed beside it, or raw beside it (then nothing is packed).
The last two are made on the device (`compile`), and their weights are mapped instead of copied."""


class MappedFile(msgspec.Struct, frozen=True, array_like=True):
    """A weight file that sessions map: page cache, the same pages for all workers, charged once."""

    path: str
    size_bytes: int


class Compile(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker writes while it loads."""

    model_path: str
    """The ONNX file to write, in an empty folder; its weights go beside it, as `weights_file` says."""
    max_file_bytes: int
    """A larger file fails the load (RLIMIT_FSIZE)."""

    @property
    def weights_file(self) -> str:
        """Name of the file with the weights, in the folder of `model_path`."""
        return self.model_path.rpartition("/")[2].removesuffix(".onnx") + ".weights"


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a worker must know to hold one model. Travels as msgpack in a memfd: labels may be long."""

    model: str
    version: str
    variant: str
    path: str
    """The ONNX file."""
    providers: list[str]
    """In order of precedence; without the CPU's no operator may run on the CPU."""
    intra_threads: int
    provider_options: dict[str, dict[str, str]] = {}
    """By provider, of those that `artifact.provider` lists."""
    inter_threads: int = 1
    cpus: list[int] | None = None
    """CPUs that every thread of the worker may run on; None leaves the daemon's own mask."""
    arena_max_bytes: int | None = None
    """Activations beyond this fail their run; None: no cap."""
    data_limit_bytes: int | None = None
    """Anonymous memory beyond what the fork started with; more fails in malloc (RLIMIT_DATA). None: no limit."""
    session_config: dict[str, str] = {}
    """Further session config entries of ONNX Runtime."""
    form: Form = "plain"
    """The form of the file at `path`; with `compile`, the form to write."""
    mapped: list[MappedFile] = []
    """Weight files that belong to `path` and are mapped, not read: they are no anonymous memory of the worker."""
    compile: Compile | None = None
    """Write the model in `form`, once it is loaded from `path`. For throw-away workers."""
    inputs: list[TensorSpec] = []
    """The contract; empty for a bare model, whose own inputs and outputs are then taken as they are."""
    outputs: list[TensorSpec] = []
    state: list[StateSpec] = []
    classes: Classes | None = None
    max_streams: int = 16
    """Streams whose state is kept; the least recently used one loses it."""
    weighed: bool = False
    """Read its memory before and after loading, which takes 1 to 2 ms: for whoever measures."""

    @property
    def title(self) -> str:
        """Name for people and processes: `person-detect 1.4.0 int8`."""
        return f"{self.model} {self.version} {self.variant}"


class Load(msgspec.Struct, tag=True):
    """Load a model. First and once.

    Its `LoadSpec` is the memfd that comes with this message; a pipe comes too, for the numbers of runs to be stopped
    (`cancels`).
    """

    spec_bytes: int


class Attach(msgspec.Struct, tag=True):
    """Map the slot whose memfd comes with this message."""

    slot: int
    size_bytes: int


class Detach(msgspec.Struct, tag=True):
    """Unmap a slot: no run uses it any more."""

    slot: int


class Run(msgspec.Struct, tag=True, omit_defaults=True):
    """Run the request in `request` and write the answer to `response`.

    One that is stopped, before it begins or while it runs, is acknowledged like any other.
    """

    run: int
    request: Span
    response: Room
    stream: str | None = None
    sequence_start: bool = False
    expected: Span | None = None
    """A golden response to compare the outputs with."""
    tolerance: float = 0.0
    """Largest absolute difference from `expected` that is right."""


class Grant(msgspec.Struct, tag=True):
    """Answer to `Oversize`: write the response here, or give it up when None."""

    run: int
    response: Room | None


class ForgetStream(msgspec.Struct, tag=True):
    """Drop the state of a stream that ended."""

    stream: str


class Shrink(msgspec.Struct, tag=True):
    """Give memory that no run needs now back to the kernel, between two runs; answered with `Shrunk`."""


class Stop(msgspec.Struct, tag=True):
    """Exit after the run that is under way."""


ToWorker = Load | Attach | Detach | Run | Grant | ForgetStream | Shrink | Stop


# What a worker tells the daemon.


class Hello(msgspec.Struct, tag=True):
    """First message of a worker."""

    protocol: int
    pid: int


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """A process's memory in bytes, as `memory` defines it."""

    anon_bytes: int
    """Its share of anonymous resident memory: what it is charged for."""
    peak_anon_bytes: int
    """The highest that was since the worker began to load; with mapped weights, since it had loaded. An estimate: the
    kernel keeps only the peak of all resident memory, so mapped files as they are now are taken off."""
    rss_bytes: int
    """All resident memory, mapped files included."""


class GraphTensor(msgspec.Struct, frozen=True):
    """An input or output as the ONNX file declares it; dimensions are -1 where they may vary."""

    name: str
    datatype: str
    shape: list[int]


class Loaded(msgspec.Struct, tag=True):
    """The model is ready to run."""

    load_ns: int
    before: Memory
    after: Memory
    """After loading and giving freed memory back to the kernel. Both are zeros unless it was to be `weighed`."""
    providers: list[str]
    """Providers that the session really uses: with more than one to choose from, those that took an operator."""
    inputs: list[GraphTensor]
    outputs: list[GraphTensor]
    nodes: dict[str, int] = {}
    """How many of the graph's operators each provider took; empty when only the CPU was asked."""


class LoadFailed(msgspec.Struct, tag=True):
    """The model cannot be loaded; the worker exits after this."""

    reason: str
    detail: str


class Marks(msgspec.Struct, array_like=True):
    """Monotonic nanoseconds of a run's steps in the worker; 0 where it did not get that far."""

    received_ns: int = 0
    decoded_ns: int = 0
    started_ns: int = 0
    finished_ns: int = 0
    postprocessed_ns: int = 0
    cpu_ns: int = 0
    """CPU time of all the worker's threads from the first step to the last (a duration)."""


class Comparison(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the outputs of a run compare with the expected ones."""

    max_difference: float
    problem: str = ""
    """Why they do not agree, naming the output and the numbers; empty when they do."""


class Done(msgspec.Struct, tag=True, omit_defaults=True):
    """A run succeeded. Its request span is free again, the response holds the answer."""

    run: int
    response: Span
    marks: Marks
    state_reset: bool = False
    """The run began from zeros although its sequence had begun: the state was lost."""
    comparison: Comparison | None = None


class Failed(msgspec.Struct, tag=True, omit_defaults=True):
    """A run ended without an answer. Both its spans are free again."""

    run: int
    reason: str
    """`input_invalid` (refused before it ran), `cancelled`, or a failure's short word."""
    detail: str
    marks: Marks


class Oversize(msgspec.Struct, tag=True):
    """The answer needs more room than the run was given; the worker waits for a `Grant`."""

    run: int
    needed_bytes: int


class Shrunk(msgspec.Struct, tag=True):
    """Answer to `Shrink`: what could be given back was."""

    own_bytes: int
    """Anonymous memory that the worker then has for itself."""


class Log(msgspec.Struct, tag=True):
    """A line for the journal. `level` is logging's: 30 warning, 40 error."""

    level: int
    text: str


FromWorker = Hello | Loaded | LoadFailed | Done | Failed | Oversize | Shrunk | Log
