"""Keep the state tensors of a stateful model, for each stream that it serves.

Worker's side. A stream's state starts as zeros, is replaced after every successful run and dropped with the least
recently used stream. It never leaves the worker here; losing it is told with every run that noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.worker.feed import NUMPY_TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgeinfer.artifact.manifest import StateSpec


class SequenceStates:
    """The state of up to `max_streams` streams. Main thread of the worker only."""

    def __init__(self, specs: Sequence[StateSpec], max_streams: int) -> None:
        self._specs = tuple(specs)
        self._max_streams = max_streams
        self._streams: OrderedDict[str, dict[str, NDArray[Any]]] = OrderedDict()

    def begin(self, stream: str | None, *, sequence_start: bool) -> tuple[dict[str, NDArray[Any]], bool]:
        """Return the state inputs of a run, and whether they are zeros although the sequence had begun.

        Without a stream the run stands alone: zeros, and nothing is kept.
        """
        if stream is None:
            return self._zeros(), False
        if sequence_start:
            self.forget(stream)  # should this run fail, the next one must not see the sequence before
            return self._zeros(), False
        kept = self._streams.get(stream)
        if kept is None:
            return self._zeros(), bool(self._specs)
        return kept, False

    def keep(self, stream: str | None, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Keep a copy of what a successful run left, for the stream's next one.

        What the runtime returns lies in its arena: a few bytes of it would keep a whole region from being given back.
        """
        if stream is None or not self._specs:
            return
        self._streams[stream] = {spec.input: outputs[spec.output].copy() for spec in self._specs}
        self._streams.move_to_end(stream)
        while len(self._streams) > self._max_streams:
            self._streams.popitem(last=False)

    def forget(self, stream: str) -> None:
        """Drop a stream that ended."""
        self._streams.pop(stream, None)

    def _zeros(self) -> dict[str, NDArray[Any]]:
        return {spec.input: np.zeros(spec.shape, NUMPY_TYPES[spec.datatype]) for spec in self._specs}
