"""Feed real data to the quantizer, one sample at a time, and refuse data that would make a garbage model.

The quantizer accepts all-zero data and writes a model that is wrong everywhere; with NaN it dies of a bare assertion.
So every sample is checked as it passes, and the whole once it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from edgeinfer.artifact.manifest import StateSpec, TensorSpec
from edgeinfer_tools.faults import DataRefused
from edgeinfer_tools.samples import Array, Inputs, Stream, decode_inputs
from edgeinfer_tools.session import Runner

_MASKS = ("BOOL", "INT32", "INT64", "UINT32", "UINT64")
"""Datatypes that no range is made of."""


class CheckedSamples:
    """What the quantizer reads calibration data from (`get_next`); streams, keeps one sample.

    For stateful models the state that belongs to each sample comes from the float model, so that the quantizer sees
    the states that occur and not only zeros.
    """

    def __init__(
        self,
        streams: Iterator[Stream],
        specs: list[TensorSpec],
        *,
        state: list[StateSpec],
        float_model: Callable[[], Runner],
        on_sample: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_sample` is told how many there were, as each one is taken."""
        self._specs = specs
        self._on_sample = on_sample
        self._runner = float_model() if state else None
        self._tensors = self._iterate(streams)
        self._low: dict[str, float] = {}
        self._high: dict[str, float] = {}
        self.count = 0

    def get_next(self) -> dict[str, Array] | None:
        """Return the next sample, or None at the end.

        Raises:
            DataRefused: a sample breaks the contract or is not finite; or, at the end, there was none, or only
                one constant.
        """
        tensors = next(self._tensors, None)
        if tensors is None:
            self._conclude()
            return None
        self.count += 1
        self._on_sample(self.count)
        return tensors

    def _iterate(self, streams: Iterator[Stream]) -> Iterator[dict[str, Array]]:
        for stream in streams:
            if self._runner is not None:
                self._runner.reset()
            for index, request in enumerate(stream.requests):
                tensors = self._checked(request, f"{stream.name}[{index}]")
                if self._runner is None:
                    yield tensors
                else:
                    yield {**tensors, **self._runner.state()}
                    self._runner.run(tensors)

    def _checked(self, request: Inputs, where: str) -> dict[str, Array]:
        tensors = decode_inputs(request, self._specs)
        for spec in self._specs:
            array = tensors[spec.name]
            if array.dtype == np.object_ or array.size == 0:
                continue
            low, high = float(array.min()), float(array.max())
            if not np.isfinite(low) or not np.isfinite(high):
                raise DataRefused(f"calibration sample {where}: input {spec.name!r} holds NaN or infinity")
            self._low[spec.name] = min(low, self._low.get(spec.name, low))
            self._high[spec.name] = max(high, self._high.get(spec.name, high))
        return tensors

    def _conclude(self) -> None:
        if self.count == 0:
            raise DataRefused("calibration() yields no sample; static quantization needs real data")
        varied = any(low < self._high[name] for name, low in self._low.items())
        for name, low in self._low.items():
            # Masks and segment numbers may well be the same in all samples, when something else is not.
            mask = next(spec.datatype for spec in self._specs if spec.name == name) in _MASKS
            if low == self._high[name] and not (mask and varied):
                raise DataRefused(
                    f"all {self.count} calibration samples are the constant {low:g} in input {name!r}; "
                    "ranges would mean nothing"
                )
