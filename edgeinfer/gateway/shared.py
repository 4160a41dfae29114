"""Triton's system shared memory extension, for one connection and with descriptors instead of names of files.

    POST /v2/systemsharedmemory/region/NAME/register    {"key": …, "byte_size": N, "offset": 0}, with a memfd
    POST /v2/systemsharedmemory[/region/NAME]/unregister
    GET  /v2/systemsharedmemory[/region/NAME]/status

The memfd comes beside the registration's first byte (SCM_RIGHTS) and `key` names it for people only. A region belongs
to its connection and goes with it. Inputs then say `shared_memory_region`, `shared_memory_byte_size` and
`shared_memory_offset` in their parameters; outputs come with the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from edgeinfer.errors import ProtocolError
from edgeinfer.gateway.connection import Connection
from edgeinfer.gateway.head import Head
from edgeinfer.gateway.regions import Place
from edgeinfer.gateway.reply import Reply, error_reply, json_reply

_MOST_SAID_BYTES: Final = 1 << 12


class _Registration(msgspec.Struct):
    byte_size: int
    key: str = ""
    offset: int = 0


_registration = msgspec.json.Decoder(_Registration)


async def answer_shared_memory(connection: Connection, head: Head, path: list[str]) -> Reply:
    """Do what a request for a path below `/v2/systemsharedmemory` asks for, and return the reply.

    Raises:
        BadRequest: its body is too long or does not come.
    """
    body = await connection.read_body(_MOST_SAID_BYTES)
    regions = connection.regions
    match head.method, path:
        case "POST", ["region", name, "register"]:
            try:
                _register(connection, name, body)
            except ProtocolError as error:
                return error_reply(400, str(error))
            return json_reply({})
        case "POST", ["region", name, "unregister"]:
            regions.unregister(name)
            return json_reply({})
        case "POST", ["unregister"]:
            regions.close()
            return json_reply({})
        case "GET", ["status"] | ["region", _, "status"]:
            wanted = path[1] if len(path) > 1 else None
            return json_reply(
                [
                    {"name": name, "key": "", "offset": region.offset, "byte_size": region.size_bytes}
                    for name, region in regions.names().items()
                    if wanted in {None, name}
                ]
            )
    return error_reply(404, f"there is no {head.target[:200]}; regions are registered, unregistered and listed")


def _register(connection: Connection, name: str, body: bytearray) -> None:
    try:
        said = _registration.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"region {name[:64]!r}: not a registration: {error}") from error
    passed = connection.stream.descriptors
    if len(passed) != 1:
        raise ProtocolError(f"region {name[:64]!r}: {len(passed)} descriptors came along, pass one memfd (SCM_RIGHTS)")
    connection.regions.register(name, passed.pop(), said.offset, said.byte_size)


def read_shared(connection: Connection, places: Mapping[str, Place], most_bytes: int) -> dict[str, memoryview]:
    """Return copies of the inputs that lie in shared memory, by name; they count as in flight until `finish`.

    Raises:
        BadRequest: too much in flight.
        ProtocolError: they do not lie there, or have more than `most_bytes` together.
    """
    if not places:
        return {}
    size_bytes = sum(place.size_bytes for place in places.values())
    if size_bytes > most_bytes:
        raise ProtocolError(f"the inputs in shared memory have {size_bytes} bytes, which no valid request has")
    connection.hold(size_bytes)
    copies = {}
    for name, place in places.items():
        view = memoryview(bytearray(place.size_bytes))
        connection.regions.read(place, view)
        copies[name] = view
    return copies
