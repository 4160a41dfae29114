"""An edge inference runtime for constrained devices.

Local apps use `edgeinfer.Client`; everything else is reached through the `edgeinfer` command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeinfer.client import Client

__version__ = "0.1.0"

__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> object:
    """Import `Client` on first use, so that `import edgeinfer` costs nothing."""
    if name == "Client":
        from edgeinfer.client import Client  # noqa: PLC0415

        return Client
    raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
