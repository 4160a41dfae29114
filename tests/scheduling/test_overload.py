"""At three times the capacity the core is never idle, never works for nothing, and no promise is broken."""

from __future__ import annotations

import random

import pytest

from edgeinfer.request import OutcomeKind
from tests.scheduling.world import MS, World, busy_ns, on_virtual_time

SECONDS = 3
LOAD = 3.0


def _arrivals(sizes_ms: tuple[int, ...], seed: int) -> list[tuple[float, int, float, bool]]:
    """Return Poisson arrivals as (at_ms, size_ms, within_ms, firm); each size has the same share of the work."""
    rng = random.Random(seed)
    weights = [1 / size for size in sizes_ms]
    mean_ms = len(sizes_ms) / sum(weights)
    at_ms, arrivals = 0.0, []
    while at_ms < SECONDS * 1000:
        at_ms += rng.expovariate(LOAD / mean_ms)
        (size,) = rng.choices(sizes_ms, weights)
        arrivals.append((at_ms, size, size + rng.uniform(5, 100), rng.random() < 0.5))
    return arrivals


@pytest.mark.slow
@pytest.mark.parametrize("sizes_ms", [(10,), (1, 10)], ids=["equal", "mixed"])
def test_overload_is_shed_without_wasting_time_or_breaking_promises(sizes_ms: tuple[int, ...]) -> None:
    @on_virtual_time()
    async def scenario(w: World) -> None:
        began_ns = w.clock.now_ns()
        for at_ms, size, within_ms, firm in _arrivals(sizes_ms, seed=7):
            await w.sleep(max(0.0, at_ms - (w.clock.now_ns() - began_ns) / MS))
            w.submit(f"{size}ms", within_ms, firm=firm)
        end_ns = w.clock.now_ns()
        await w.scheduler.drained()
        on_time = sum(int(o.request.model.removesuffix("ms")) for o in w.outcomes if o.kind is OutcomeKind.OK)
        worked_ms = sum(run.ended_ns - run.started_ns for run in w.local.runs) / MS
        assert busy_ns(w.local, began_ns, end_ns) >= 0.99 * (end_ns - began_ns)
        assert on_time >= 0.999 * worked_ms, "work was done for nothing"
        broken = [o for o in w.outcomes if o.request.firm and o.request.timeline.admitted_ns and not o.in_time]
        assert not broken

    scenario()
