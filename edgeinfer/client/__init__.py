"""Ask a running edgeinfer from a local app: a deadline on every call, an answer or the reason by then.

    from edgeinfer import Client

    with Client() as edge:
        answer = edge.infer_text("support-intent", "I was charged twice for my invoice", deadline_ms=50)
        print(answer.label, answer.score)

Speaks the Open Inference Protocol v2 over the daemon's UNIX socket, without any HTTP library. numpy arrays are taken
and given when the app uses numpy, which is never imported for apps that don't. docs/client.md has the whole of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeinfer.client.answer import DeadlineExpired, Inference, Output, Rejected
from edgeinfer.client.memory import SharedTensor
from edgeinfer.client.sync import Client
from edgeinfer.client.values import Media, Tensor

if TYPE_CHECKING:
    from edgeinfer.client.aio import AsyncClient

__all__ = [
    "AsyncClient",
    "Client",
    "DeadlineExpired",
    "Inference",
    "Media",
    "Output",
    "Rejected",
    "SharedTensor",
    "Tensor",
]


def __getattr__(name: str) -> object:
    """Import `AsyncClient` on first use: asyncio costs a blocking app 10 MB."""
    if name == "AsyncClient":
        from edgeinfer.client.aio import AsyncClient  # noqa: PLC0415

        return AsyncClient
    raise AttributeError(f"module 'edgeinfer.client' has no attribute {name!r}")
