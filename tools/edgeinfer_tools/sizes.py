"""Write sizes for people."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.errors import mib


def human(size: int | Path) -> str:
    """Return `618 B`, `12 KiB` or `9.4 MiB`; of a path, its file's size."""
    size_bytes = size if isinstance(size, int) else size.stat().st_size
    if size_bytes < 1 << 10:
        return f"{size_bytes} B"
    return f"{size_bytes / 1024:.0f} KiB" if size_bytes < 1 << 20 else mib(size_bytes)
