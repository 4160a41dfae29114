"""Keep OpenSSL out of a service that encrypts nothing.

`asyncio`, `hashlib` and paho each load it when it is there and do without it when it is not: 5 MB of libraries and
modules that a device without TLS has no use for. Digests then come from Python's own implementation; whole bundles are
hashed in a process of their own anyway (`edgeinfer.artifact.hashing`).
"""

from __future__ import annotations

import importlib.util
import sys

_WITH_OPENSSL = ("_ssl", "_hashlib")
_OWN_SHA256 = ("_sha256", "_sha2")
"""Before and since Python 3.12."""


def keep_out() -> None:
    """Have `import ssl` fail from now on, and `hashlib` use Python's own digests, unless they are loaded already."""
    has_own = any(importlib.util.find_spec(name) is not None for name in _OWN_SHA256)
    for name in _WITH_OPENSSL:
        if name not in sys.modules and (has_own or name != "_hashlib"):  # a build may leave its own digests out
            sys.modules[name] = None  # type: ignore[assignment]  # documented: the import raises


def let_in() -> None:
    """Have `import ssl` work again: what is imported from now on finds it."""
    for name in _WITH_OPENSSL:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]
