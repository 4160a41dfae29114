"""Read the answers of one worker.

Daemon's side. A worker is believed no more than any peer: an answer's header is checked completely against its tensors.
A model's answers mostly have the same header, byte for byte, so what was found out about the last one holds for the
next; only tensors whose bytes have an inner structure are looked at again every time.
"""

from __future__ import annotations

from edgeinfer import oip
from edgeinfer.request import Payload


class Answers:
    """Turns header and tensors, as they lie in a slot, into payloads. Loop thread only."""

    def __init__(self) -> None:
        self._header = b""
        self._body_bytes = 0
        self._ends: list[int] = []
        """Where each tensor ends in the body."""

    def read(self, header: bytes, body: memoryview) -> Payload:
        """Return the answer; its tensors are views of `body`.

        Raises:
            ProtocolError: it isn't a valid answer.
        """
        if header != self._header or len(body) != self._body_bytes:
            parsed, payload = oip.decode_response(header, body)
            if all(tensor.datatype != "BYTES" for tensor in parsed.outputs) and header == payload.header:
                self._remember(payload, len(body))
            return payload
        views, begin = [], 0
        for end in self._ends:
            views.append(body[begin:end])
            begin = end
        return Payload(self._header, tuple(views))

    def _remember(self, payload: Payload, body_bytes: int) -> None:
        self._header, self._body_bytes, self._ends = payload.header, body_bytes, []
        end = 0
        for tensor in payload.tensors:
            end += memoryview(tensor).nbytes
            self._ends.append(end)
