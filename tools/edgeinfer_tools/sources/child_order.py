"""What the exporting child's parts share: the order, the refusal, the samples.

Apart from `child`, which runs as the main module: a class that is defined there exists twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Order = dict[str, Any]


class Declined(Exception):
    """What the user must change, in words; `reason` tells the parent which of its own words to add."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def samples_of(order: Order) -> Iterator[dict[str, Any]]:
    """Yield the requests of the order's npz (`NUMBER.INPUT` arrays) as torch tensors by input name."""
    import numpy as np
    import torch

    with np.load(order["samples"], allow_pickle=False) as arrays:
        for index in range(order["count"]):
            start = f"{index}."
            yield {
                key.removeprefix(start): torch.from_numpy(arrays[key]) for key in arrays.files if key.startswith(start)
            }


def tied(module: Any) -> list[list[str]]:
    """Return the names of parameters that are one and the same tensor, in groups."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter.data_ptr(), []).append(name)
    return [group for group in names.values() if len(group) > 1]
