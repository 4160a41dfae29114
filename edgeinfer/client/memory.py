"""Inputs that lie in memory which the daemon can read: an app writes into them, and no byte of them is sent.

A `SharedTensor` is one memfd, sealed against a change of its size. Each connection that sends one registers it with the
daemon once, and names it in its requests from then on (docs/decisions/shared-memory.md). Other inputs go through the
socket: copying them into shared memory first would cost as much as writing them there.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from edgeinfer import oip
from edgeinfer.client.wire import Buffer, request_head
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.errors import ProtocolError
from edgeinfer.request import Payload

MOST_REGISTERED: Final = 4
"""The daemon takes no more of one connection."""
_PATH: Final = "/v2/systemsharedmemory/region"
_numbers = itertools.count(1)


class SharedTensor:
    """An input in shared memory. Write into `raw` (little-endian, row-major) between calls, not during one.

    `numpy.frombuffer(tensor.raw, dtype).reshape(tensor.shape)` is an array of it. Its memory is given back by `close`,
    or with the object.
    """

    def __init__(self, datatype: str, shape: Sequence[int]) -> None:
        """Make one, all zeros.

        Raises:
            ProtocolError: tensors of that datatype have no fixed size, or the shape has no elements.
            OSError: the system has no memory for it.
        """
        self.datatype = datatype
        self.shape = tuple(shape)
        self.size_bytes = ITEM_BYTES.get(datatype, 0)
        for dim in self.shape:
            self.size_bytes *= dim
        if self.size_bytes <= 0:
            raise ProtocolError(f"{datatype} {list(shape)} has no size to share; send it as it is")
        self.name = f"{os.getpid()}-{next(_numbers)}"
        """Names its region."""
        self.fd = os.memfd_create("edgeinfer-tensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.raw = memoryview(mmap.mmap(self.fd, self.size_bytes))
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back, once no array or view of it is left; what is registered goes with its connection."""
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)
            with contextlib.suppress(BufferError, AttributeError):  # arrays of it go on, and hold it as long as they do
                self.raw.release()


class Registered:
    """What the daemon knows of one connection's shared memory. Says what to send; sending is the connection's."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def requests(self, tensors: Iterable[SharedTensor]) -> list[tuple[list[Buffer], list[int]]]:
        """Return the requests, with their descriptors, that make the daemon know the tensors; each is answered.

        The least recently used ones are forgotten for them.
        """
        wanted = {tensor.name: tensor for tensor in tensors}
        if len(wanted) > MOST_REGISTERED:
            raise ProtocolError(f"{len(wanted)} inputs in shared memory; the daemon takes {MOST_REGISTERED} at once")
        found: list[tuple[list[Buffer], list[int]]] = []
        for name in wanted:
            if name in self._names:
                self._names[name] = self._names.pop(name)
        missing = [tensor for name, tensor in wanted.items() if name not in self._names]
        while missing and len(self._names) + len(missing) > MOST_REGISTERED:
            oldest = next(iter(self._names))
            del self._names[oldest]
            found.append(([request_head("POST", f"{_PATH}/{oldest}/unregister", Payload(b""))], []))
        for tensor in missing:
            said = msgspec.json.encode({"key": "memfd", "offset": 0, "byte_size": tensor.size_bytes})
            head = request_head("POST", f"{_PATH}/{tensor.name}/register", Payload(said))
            found.append(([head, said], [tensor.fd]))
            self._names[tensor.name] = None
        return found


def shared_in(payload: Payload, inputs: Any) -> list[SharedTensor]:
    """Return those of an app's inputs that lie in shared memory."""
    if not payload.tensors:
        return []
    values = inputs.values() if isinstance(inputs, Mapping) else (inputs,)
    return [value for value in values if isinstance(value, SharedTensor)]


def in_place(payload: Payload, tensors: Sequence[SharedTensor]) -> Payload:
    """Return a request that names the tensors instead of carrying them."""
    header = oip.request_header(payload)
    carried = []
    for tensor, raw in zip(header.inputs, payload.tensors, strict=True):
        lies = next((shared for shared in tensors if shared.raw is raw), None)
        if lies is None:
            carried.append(raw)
            continue
        del tensor.parameters["binary_data_size"]
        tensor.parameters["shared_memory_region"] = lies.name
        tensor.parameters["shared_memory_byte_size"] = lies.size_bytes
    return Payload(msgspec.json.encode(header), tuple(carried))
