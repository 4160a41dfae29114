"""Let JSON have the loop only a little at a time: how much of it there may be, and who reads or writes it when.

Tensors in JSON become objects and come of objects, on the loop, at some 25 ns a byte: one caller's large ones would
make everybody else's small requests late. So they are bounded, and after each piece of work as much time is left to
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from edgeinfer.errors import ProtocolError

MAX_JSON_BYTES: Final = 128 << 10
"""Most bytes of a request's JSON, and of outputs (together) that are written as JSON: 2 to 4 ms."""
LEAST_ELEMENT_BYTES: Final = 4
"""What an element of an output counts at least: short ones take as long to write as long ones."""
_LIGHT_BYTES: Final = 8 << 10
"""So little waits for nobody."""

_T = TypeVar("_T")


def check_json_bytes(size_bytes: int) -> None:
    """Refuse a request whose JSON is too large, before it is read.

    Raises:
        ProtocolError: it is.
    """
    if size_bytes > MAX_JSON_BYTES:
        raise ProtocolError(
            f"the JSON of the request has {size_bytes} bytes, at most {MAX_JSON_BYTES} are read; send tensors as "
            "binary data behind it (parameters.binary_data_size), as edgeinfer's Client does by itself"
        )


class Turns:
    """Lets one piece of work have the loop at a time. Loop thread only."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._free_at_s = 0.0

    def would_wait(self, size_bytes: int) -> bool:
        """Return whether work on so much JSON could not begin at once."""
        resting = self._free_at_s > asyncio.get_running_loop().time()
        return size_bytes > _LIGHT_BYTES and (self._one.locked() or resting)

    async def run(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """Do some work on so much JSON and return what comes of it; raises what the work raises.

        A small one is done at once. A larger one waits for those before it, and until the loop had as much time for
        others as the last one took.
        """
        if size_bytes <= _LIGHT_BYTES:
            return work()
        loop = asyncio.get_running_loop()
        async with self._one:
            while (rest_s := self._free_at_s - loop.time()) > 0:
                await asyncio.sleep(rest_s)
            began_s = loop.time()
            try:
                return work()
            finally:
                ended_s = loop.time()
                self._free_at_s = ended_s + (ended_s - began_s)
