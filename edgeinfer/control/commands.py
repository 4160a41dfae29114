"""The closed set of commands: what each takes, what it may change, and how long it may take. One literal table.

A verb that isn't in `VERBS` doesn't exist. What a command does is `Actions`, which the daemon implements; how commands
come, are judged and answered is `plane`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer.errors import ArtifactError, BudgetExceeded, EdgeInferError, LinkError, SessionError

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Milliseconds = Annotated[float, msgspec.Meta(ge=1, le=86_400_000)]
"""From 1 ms, which the service config asks for too, to a day."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A command that was not carried out: nothing has changed. `reason` is a short stable word."""

    reason: str
    detail: str = ""


Answer = dict[str, Any] | Refused
"""What carrying out a command gives: the reply's `result`, or why nothing was done."""


class Actions(Protocol):
    """What the daemon does for commands. Loop thread only, one change at a time.

    Raises `EdgeInferError` when something went wrong on the way; `BudgetExceeded` counts as a refusal, because nothing
    was done. Cancelled when the command takes longer than its row in `VERBS` allows, or the service stops.
    """

    async def get_state(self) -> Answer:
        """Return the device's state and its newest report, as they are published."""
        ...

    async def set_loop(
        self, loop: str, *, enabled: bool | None, period_ns: int | None, deadline_ns: int | None
    ) -> Answer:
        """Change a loop until the next restart; None leaves a setting as it is. All or nothing."""
        ...

    async def load(self, model: str, *, version: str) -> Answer:
        """Load a configured model and return when it serves; `version` empty means the active one."""
        ...

    async def unload(self, model: str) -> Answer:
        """End a model's workers and return when their memory is free."""
        ...


class GetState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Report how the device stands. Takes nothing."""


class SetLoop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Switch a loop on or off, or change its pace."""

    loop: Name
    enabled: bool | None = None
    period_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None

    def __post_init__(self) -> None:
        if self.enabled is None and self.period_ms is None and self.deadline_ms is None:
            raise ValueError("changes nothing: give enabled, period_ms or deadline_ms")


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load a model."""

    model: Name
    version: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Unload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unload a model."""

    model: Name


Arguments = GetState | SetLoop | Load | Unload


async def _get_state(actions: Actions, _: GetState) -> Answer:
    return await actions.get_state()


async def _set_loop(actions: Actions, given: SetLoop) -> Answer:
    return await actions.set_loop(
        given.loop, enabled=given.enabled, period_ns=_ns(given.period_ms), deadline_ns=_ns(given.deadline_ms)
    )


async def _load(actions: Actions, given: Load) -> Answer:
    return await actions.load(given.model, version=given.version)


async def _unload(actions: Actions, given: Unload) -> Answer:
    return await actions.unload(given.model)


def _ns(value_ms: float | None) -> int | None:
    return None if value_ms is None else round(value_ms * NS_PER_MS)


@dataclass(frozen=True, slots=True)
class Verb:
    """One row of the table."""

    arguments: type[Any]
    carry_out: Callable[[Actions, Any], Awaitable[Answer]]
    changes: bool
    """A change waits for the change before it, and is remembered across restarts; a question doesn't and isn't."""
    limit_ns: int
    """Longest time it may take; it is cancelled then and answered `failed(timeout)`."""


VERBS: dict[str, Verb] = {
    # verb                arguments  carried out by  changes        at most
    "get-state": Verb(GetState, _get_state, changes=False, limit_ns=10 * NS_PER_S),
    "set-loop":  Verb(SetLoop,  _set_loop,  changes=True,  limit_ns=10 * NS_PER_S),
    "load":      Verb(Load,     _load,      changes=True,  limit_ns=300 * NS_PER_S),
    "unload":    Verb(Unload,   _unload,    changes=True,  limit_ns=30 * NS_PER_S),
}  # fmt: skip


def parse_arguments(verb: str, args: dict[str, Any]) -> Arguments | str:
    """Return the arguments of a known verb, or what is wrong with them, naming the field."""
    try:
        arguments: Arguments = msgspec.convert(args, VERBS[verb].arguments)
    except msgspec.ValidationError as error:
        return str(error).replace("`", "").replace("$.", "args.").replace("at $", "at args")
    return arguments


FAULTS: tuple[tuple[type[EdgeInferError], str, str], ...] = (
    # raised by an action    outcome      reason; the first row that fits counts
    (BudgetExceeded,         "refused",   "memory"),
    (ArtifactError,          "failed",    "artifact"),
    (SessionError,           "failed",    "session"),
    (LinkError,              "failed",    "unreachable"),
    (EdgeInferError,         "failed",    "error"),
)  # fmt: skip


def describe_fault(error: EdgeInferError) -> tuple[str, str]:
    """Return outcome and reason of a command whose action raised `error`."""
    return next((outcome, reason) for kind, outcome, reason in FAULTS if isinstance(error, kind))
