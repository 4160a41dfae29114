"""Do what commands ask: the daemon's side of `control`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from edgeinfer.control.commands import Answer, Refused
from edgeinfer.execution.model_cache import ModelCache
from edgeinfer.pipeline.loop import InferenceLoop
from edgeinfer.telemetry.publisher import Publisher


class DeviceActions:
    """The commands of a device, over its rooms. Loop thread only."""

    def __init__(self, cache: ModelCache, loops: Mapping[str, InferenceLoop], publisher: Publisher) -> None:
        self._cache = cache
        self._loops = loops
        self._publisher = publisher

    async def get_state(self) -> Answer:
        """Return the newest state and report."""
        return self._publisher.status()

    async def set_loop(
        self, loop: str, *, enabled: bool | None, period_ns: int | None, deadline_ns: int | None
    ) -> Answer:
        """Change a loop until the next restart."""
        found = self._loops.get(loop)
        if found is None:
            return Refused("unknown_loop", f"no loop {loop!r}; there are: {', '.join(self._loops) or 'none'}")
        found.configure(enabled=enabled, period_ns=period_ns, deadline_ns=deadline_ns)
        self._publisher.wake()
        now = found.snapshot()
        return {
            "loop": loop,
            "enabled": now.enabled,
            "period_ms": now.period_ns / 1e6,
            "deadline_ms": now.deadline_ns / 1e6,
        }

    async def load(self, model: str, *, version: str) -> Answer:
        """Load a configured model, in the version asked for."""
        section = self._cache.section(model)
        if section is None:
            return Refused("unknown_model", f"{model!r} is not a [[model]] of this device")
        try:
            resident = await self._cache.load(dataclasses.replace(section, version=version or section.version))
        finally:
            self._publisher.wake()
        return {"model": model, "version": resident.manifest.version, "variant": resident.variant.name}

    async def unload(self, model: str) -> Answer:
        """End a model's workers and return when their memory is free."""
        if not await self._cache.unload(model):
            return Refused("unknown_model", f"{model!r} is not a [[model]] of this device")
        self._publisher.wake()
        return {"model": model}
