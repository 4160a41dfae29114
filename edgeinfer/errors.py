"""Name every fault, by what the one who catches it does next.

A refusal is not a fault: it is a value (`edgeinfer.request.Refusal`). Exceptions here mean that
something is wrong and somebody has to act: edit a file, replace a bundle, free memory, wait for a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_MOST_NAMED = 6
"""Holders of memory that a message names one by one."""


class EdgeInferError(Exception):
    """Root of all faults that edgeinfer raises on purpose."""

    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file, at a dotted key path such as `loop.camera.period_ms`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(EdgeInferError):
    """An operator's file is wrong; carries every problem of the file, not only the first."""

    exit_code = 78  # EX_CONFIG

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        lines = "\n".join(f"  {problem}" for problem in problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{source}: {count}\n{lines}")


class ArtifactError(EdgeInferError):
    """A bundle is wrong: replace it, nothing on the device can mend it."""

    exit_code = 65  # EX_DATAERR


class ManifestInvalid(ArtifactError):
    """The manifest cannot be read, or contradicts itself or the files beside it."""


class DigestMismatch(ArtifactError):
    """A file's bytes are not what the manifest declares."""


class UnsupportedSchema(ArtifactError):
    """The bundle was made for another version of the format or of the runtime."""


class BudgetExceeded(EdgeInferError):
    """Bytes were asked for that the memory budget does not have. Nothing was reserved."""

    exit_code = 75  # EX_TEMPFAIL

    def __init__(
        self,
        what: str,
        *,
        needed_bytes: int,
        free_bytes: int,
        ceiling_bytes: int,
        held_bytes: Mapping[str, int] | None = None,
        why_lowered: str = "",
        unloadable_bytes: int | None = None,
    ) -> None:
        """`held_bytes` says who has what of the budget, where that is known; `why_lowered`, why it is so small.

        `unloadable_bytes` is what unloading every model would give back: the message names the remedy that helps.
        """
        self.what = what
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.ceiling_bytes = ceiling_bytes
        self.held_bytes = dict(held_bytes or {})
        largest = sorted(self.held_bytes.items(), key=lambda item: -item[1])
        named = [f"{owner} {mib(size)}" for owner, size in largest[:_MOST_NAMED]]
        if rest := largest[_MOST_NAMED:]:
            named.append(f"{len(rest)} others {mib(sum(size for _, size in rest))}")
        held = f" ({', '.join(named)})" if named else ""
        overdrawn_bytes = max(0, sum(self.held_bytes.values()) - ceiling_bytes)
        super().__init__(
            f"{what} needs {mib(needed_bytes)}, {mib(free_bytes)} free of {mib(ceiling_bytes)}{held}; "
            + _remedy(needed_bytes - free_bytes + overdrawn_bytes, why_lowered, unloadable_bytes)
        )


def _remedy(missing_bytes: int, why_lowered: str, unloadable_bytes: int | None) -> str:
    """Return what brings so many bytes back, and why they are not there where the ceiling is not the reason."""
    unloading_helps = unloadable_bytes is None or missing_bytes <= unloadable_bytes
    if why_lowered:
        return f"{why_lowered}; " + ("unload a model" if unloading_helps else "unloading models is not enough")
    if unloading_helps:
        return "unload a model or raise memory.ceiling"
    others = " (unloading the other models is not enough)" if unloadable_bytes else ""
    return f"raise memory.ceiling by {mib(missing_bytes)}, or use a smaller variant{others}"


class SessionError(EdgeInferError):
    """The runtime rejected or failed a model; `reason` is a short, stable word for counters."""

    exit_code = 70  # EX_SOFTWARE

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


class RuntimeUnusable(SessionError):
    """ONNX Runtime cannot even be imported on this machine."""

    def __init__(self, detail: str, *, retry_ns: int | None = None) -> None:
        """`retry_ns` is the monotonic time from which on trying again makes sense, where that is known."""
        self.retry_ns = retry_ns
        super().__init__("runtime_unusable", detail)


class LinkError(EdgeInferError):
    """A broker, peer or daemon cannot be reached: waiting and retrying may help."""

    exit_code = 69  # EX_UNAVAILABLE


class ProtocolError(EdgeInferError):
    """The other side sent what the protocol does not allow: retrying does not help."""

    exit_code = 76  # EX_PROTOCOL


class InternalError(EdgeInferError):
    """An invariant of our own is broken. This is a bug: crash, and let systemd restart."""

    exit_code = 70


def mib(size_bytes: int) -> str:
    """Format a byte count for people: `212 MiB`, with one decimal below 10 MiB."""
    value = size_bytes / (1 << 20)
    return f"{value:.1f} MiB" if abs(value) < 10 else f"{value:.0f} MiB"
