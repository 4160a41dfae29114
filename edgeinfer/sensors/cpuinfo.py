"""Tell which instruction sets this CPU has, by the kernel's own names."""

from __future__ import annotations

from pathlib import Path


def cpu_flags(proc_root: Path = Path("/proc")) -> frozenset[str]:
    """Return the flags of the first CPU in cpuinfo: `flags` on x86, `Features` on ARM; empty when it can't be read."""
    try:
        text = (proc_root / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()
