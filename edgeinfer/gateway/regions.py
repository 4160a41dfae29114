"""Shared memory that callers have registered on a connection: read by the daemon, never written or mapped.

A caller passes a memfd with its registration (docs/decisions/shared-memory.md has the form). The daemon copies out of
it with preadv: whatever a caller does to its memory meanwhile (shrink it, punch holes into it, change the numbers), it
gets an error or its own wrong numbers, and the daemon no SIGBUS. Nothing is written there: pages that a write makes are
charged to the daemon's memory limit, for as long as the caller keeps them. Only memfds are taken: a read of anything
else (a pipe, a file of FUSE or NFS) could stop the loop.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import Final

from edgeinfer.errors import ProtocolError

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MAX_NAME: Final = 128


@dataclass(frozen=True, slots=True)
class Region:
    """One registered piece of a caller's shared memory."""

    fd: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a region."""

    region: str
    offset: int
    size_bytes: int


class Regions:
    """The regions of one connection. Loop thread only. Owns their descriptors."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_name: dict[str, Region] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def register(self, name: str, fd: int, offset: int, size_bytes: int) -> None:
        """Keep a memfd under a name, in place of what had it before; takes over `fd`, also when this raises.

        Raises:
            ProtocolError: it is no sealed memfd of that size, or there are too many.
        """
        try:
            self._admit(name)
            _check(fd, name, offset, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        self.unregister(name)
        self._by_name[name] = Region(fd, offset, size_bytes)

    def _admit(self, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME:
            raise ProtocolError(f"a region's name has 1 to {MAX_NAME} characters")
        if name not in self._by_name and len(self._by_name) >= self._limit:
            raise ProtocolError(f"{self._limit} regions are registered on this connection; unregister one")

    def unregister(self, name: str) -> None:
        """Forget a region; one that there is not is no error."""
        region = self._by_name.pop(name, None)
        if region is not None:
            os.close(region.fd)

    def names(self) -> dict[str, Region]:
        """Return every region by its name."""
        return dict(self._by_name)

    def read(self, place: Place, view: memoryview) -> None:
        """Copy a tensor out of a region into `view`, which has its size.

        Raises:
            ProtocolError: there is no such region, the tensor does not lie inside it, or it cannot be read.
        """
        region = self._inside(place)
        at = 0
        while at < len(view):
            try:
                got = os.preadv(region.fd, [view[at:]], region.offset + place.offset + at)
            except OSError as error:
                raise ProtocolError(f"region {place.region!r} cannot be read: {error.strerror}") from error
            if not got:
                raise ProtocolError(f"region {place.region!r} ends before its tensor does")
            at += got

    def _inside(self, place: Place) -> Region:
        region = self._by_name.get(place.region)
        if region is None:
            names = ", ".join(sorted(self._by_name)) or "none"
            raise ProtocolError(f"no region {place.region[:64]!r} on this connection; there are: {names}")
        if place.offset < 0 or place.size_bytes < 0 or place.offset + place.size_bytes > region.size_bytes:
            raise ProtocolError(
                f"{place.size_bytes} bytes at {place.offset} do not lie inside region {place.region!r} "
                f"of {region.size_bytes} bytes"
            )
        return region

    def close(self) -> None:
        """Forget all of them."""
        for name in list(self._by_name):
            self.unregister(name)


def _check(fd: int, name: str, offset: int, size_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError(f"region {name!r}: what was passed is no memfd") from None
    if seals & _SEALS != _SEALS:
        raise ProtocolError(f"region {name!r}: its memfd is not sealed against shrinking and growing")
    have = os.fstat(fd).st_size
    if offset < 0 or size_bytes <= 0 or offset + size_bytes > have:
        raise ProtocolError(f"region {name!r}: {size_bytes} bytes at {offset} do not lie inside its {have} bytes")


def place_of(parameters: dict[str, object]) -> Place | None:
    """Return where a tensor's parameters say that it lies, taken out of them; None when they name no region.

    Raises:
        ProtocolError: they say it wrongly.
    """
    name = parameters.pop("shared_memory_region", None)
    if name is None:
        return None
    size = parameters.pop("shared_memory_byte_size", None)
    offset = parameters.pop("shared_memory_offset", 0)
    if not isinstance(name, str) or type(size) is not int or type(offset) is not int or size < 0 or offset < 0:
        raise ProtocolError("shared_memory_region needs shared_memory_byte_size, and both numbers of bytes not below 0")
    return Place(name, offset, size)
