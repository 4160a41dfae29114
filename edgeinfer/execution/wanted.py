"""One model of the configuration: what is wanted, what is in memory for it, and why it isn't.

Owns no decision: `model_cache` writes these, everybody else reads `ModelStatus`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgeinfer.clock import NS_PER_S
from edgeinfer.config import ModelSection
from edgeinfer.errors import ArtifactError, BudgetExceeded, EdgeInferError, RuntimeUnusable
from edgeinfer.execution.resident import ResidentModel
from edgeinfer.request import Reason, Refusal
from edgeinfer.store.crashes import CrashRecord
from edgeinfer.store.store import Installed

_LOAD_GUESS_NS = 2 * NS_PER_S
"""What an on-demand load is taken to last of which not even the bundle is known."""
_AROUND_NS = NS_PER_S // 20
"""What a load takes beside the worker's own part, as long as it was not seen on demand."""
RETRY_NS = 10 * NS_PER_S
"""From a load that failed for want of memory, a bundle or a runtime to the next try."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """How a configured model stands, for reports."""

    name: str
    version: str
    digest: str
    variant: str
    state: str
    """`loaded`, `loading`, `recovering`, `quarantined`, `unloaded`, `missing` (no such bundle) or `refused`."""
    workers: int
    reserved_bytes: int
    leases: int
    state_resets: int
    load_ms: float
    detail: str
    wanted_version: str = ""
    """The version that should serve, while an earlier one does (`version`); `detail` says why. Else empty."""
    quarantined: tuple[str, ...] = ()
    """Version and variant of each of its variants that is left alone because it crashed too often."""
    providers: tuple[str, ...] = ()
    """Execution providers that really run it."""
    shrunk: int = 0
    recycled: int = 0
    """How often a worker that took more than was reserved was asked to shrink, and was replaced, since the load."""
    pids: tuple[int, ...] = ()
    """Processes of its workers."""


class Quarantined(ArtifactError):
    """Every variant that could run here crashed too often; only a command or another version changes that."""


@dataclass(slots=True)
class WantedModel:
    """A model of the configuration, resident or not. Written by the cache only."""

    section: ModelSection
    """As it is configured."""
    latest: ModelSection | None = None
    """As it was last in memory, when a command asked for another version."""
    installed: Installed | None = None
    """The bundle that its name means, known also while it isn't resident: next door the same one may run."""
    resident: ResidentModel | None = None
    refusal: Refusal | None = None
    """Why it is not resident, once there is a reason."""
    retry_ns: int | None = None
    """When loading it after a refusal makes sense again; None: only when somebody commands it."""
    instead_of: Installed | None = None
    """What should serve, while an earlier version does, and why it doesn't in `instead`."""
    instead: Refusal | None = None
    missing: bool = False
    unloaded: bool = False
    """By command: it stays out until a command brings it back."""
    evicted: bool = False
    """It gave way to others, and there has been no room for it since."""
    loading: bool = False
    load_guess_ns: int = _LOAD_GUESS_NS
    """What loading it on demand takes: a guess, or what the last load took."""
    is_load_guessed: bool = True
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless a load that requests wait for is under way."""

    def __post_init__(self) -> None:
        self.settled.set()

    def may_load(self, now_ns: int) -> bool:
        """Whether bringing it into memory without a command makes sense now."""
        if self.resident is not None or self.unloaded:
            return False
        return self.refusal is None or (self.retry_ns is not None and now_ns >= self.retry_ns)

    def is_due(self, now_ns: int) -> bool:
        """Whether it should be in memory all the time, was refused, and is to be tried again now."""
        return self.section.preload and self.refusal is not None and self.may_load(now_ns)

    def admit(self, resident: ResidentModel) -> None:
        """Note that it is in memory."""
        self.resident, self.latest, self.installed = resident, resident.section, resident.installed
        self.refusal, self.retry_ns, self.missing, self.unloaded, self.evicted = None, None, False, False, False
        self.instead_of, self.instead = None, None
        self.loads_in(resident.load_ns + _AROUND_NS)

    def loads_in(self, took_ns: int) -> None:
        """Note what a load took; the next one may take a bit longer."""
        self.load_guess_ns, self.is_load_guessed = took_ns * 5 // 4, False

    def serve_instead_of(self, wanted: Installed, why: Refusal | None) -> None:
        """Note that what was admitted is an earlier version than the one that is wanted, and why."""
        self.instead_of, self.instead = wanted, why

    def refuse(self, refusal: Refusal, *, retry_ns: int | None) -> None:
        """Note why it is not in memory."""
        self.refusal, self.retry_ns = refusal, retry_ns
        self.evicted = self.evicted and refusal.reason is Reason.MEMORY

    def evict(self, why: str, *, now_ns: int) -> None:
        """Note that it has to leave; whether it comes back by itself, or with the next request, is its section's."""
        retry_ns = now_ns + (RETRY_NS if self.section.preload else 0)
        self.refuse(Refusal(Reason.MEMORY, f"{self.section.name} was evicted {why}"), retry_ns=retry_ns)
        self.evicted = True

    def refusal_at(self, now_ns: int) -> Refusal | None:
        """Return why it is not in memory, for a request: with when an unusable runtime is tried again."""
        refusal = self.refusal
        if refusal is None or refusal.reason is not Reason.RUNTIME_UNUSABLE or self.retry_ns is None:
            return refusal
        left_s = -(-max(0, self.retry_ns - now_ns) // NS_PER_S)
        return Refusal(refusal.reason, f"{refusal.detail}; tried again in {left_s} s, or now by the load command")

    def fail(self, error: EdgeInferError, *, now_ns: int) -> None:
        """Note that it could not be loaded. What the runtime refused is not tried again by itself."""
        name = self.section.name
        match error:
            case BudgetExceeded():
                self.refuse(Refusal(Reason.MEMORY, str(error)), retry_ns=now_ns + RETRY_NS)
            case RuntimeUnusable(retry_ns=retry_ns):
                again_ns = now_ns + RETRY_NS if retry_ns is None else retry_ns
                self.refuse(Refusal(Reason.RUNTIME_UNUSABLE, str(error)), retry_ns=again_ns)
            case Quarantined():
                self.refuse(Refusal(Reason.QUARANTINED, str(error)), retry_ns=None)
            case ArtifactError():
                self.refuse(Refusal(Reason.MODEL_UNAVAILABLE, f"{name}: {error}"), retry_ns=now_ns + RETRY_NS)
            case _:
                self.refuse(Refusal(Reason.MODEL_UNAVAILABLE, f"{name}: {error}"), retry_ns=None)

    @property
    def state(self) -> str:
        """One word for reports; see `ModelStatus.state`."""
        if self.resident is not None:
            return self.resident.phase.value
        if self.loading:
            return "loading"
        if self.missing:
            return "missing"
        if self.unloaded or self.evicted or self.refusal is None:
            return "unloaded"
        return "quarantined" if self.refusal.reason is Reason.QUARANTINED else "refused"

    def status(self, quarantines: Iterable[CrashRecord] = ()) -> ModelStatus:
        """Return how it stands; `quarantines` may be anybody's."""
        resident, installed = self.resident, self.installed
        detail = resident.detail if resident else self.refusal.detail if self.refusal else ""
        if resident and self.instead_of and self.instead:
            detail = detail or f"instead of {self.instead_of.manifest.version}: {self.instead.detail}"
        return ModelStatus(
            name=self.section.name,
            version=installed.manifest.version if installed else self.section.version,
            digest=installed.digest if installed else "",
            variant=resident.variant.name if resident else "",
            state=self.state,
            workers=len(resident.workers) if resident else 0,
            reserved_bytes=resident.reserved_bytes if resident else 0,
            leases=resident.leases if resident else 0,
            state_resets=resident.state_resets if resident else 0,
            load_ms=resident.load_ns / 1e6 if resident else 0.0,
            detail=detail,
            wanted_version=self.instead_of.manifest.version if self.instead_of else "",
            quarantined=tuple(sorted(record.title for record in quarantines if record.model == self.section.name)),
            providers=tuple(resident.workers[0].loaded.providers) if resident and resident.workers else (),
            shrunk=resident.shrunk if resident else 0,
            recycled=resident.recycled if resident else 0,
            pids=tuple(worker.pid for worker in resident.workers) if resident else (),
        )
