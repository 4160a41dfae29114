"""Decide where a request runs: here, next door, or nowhere.

Pure: the answer depends only on what admission and the nearby executor said. Here is preferred whenever it costs
nothing: data stays where it is, and the network's weather doesn't matter. How well next door can do it, and whether
the data may go there at all, is the nearby executor's `estimate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.execution.executor import Estimate
from edgeinfer.request import InferRequest, Placement, Reason, Refusal
from edgeinfer.scheduling.admission import Admission


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the request goes."""

    placement: Placement
    certain: bool = True
    """In time at p99; False: a displaceable request takes its chance."""


def settled(local: Admission | Refusal) -> bool:
    """Return whether here is the answer whatever next door may say, so that it needn't be asked."""
    return isinstance(local, Admission) and local.certain and not local.costs


def place(
    request: InferRequest, local: Admission | Refusal, nearby: Estimate | Refusal | None, *, now_ns: int
) -> Placed | Refusal:
    """Return where `request` goes, or the most useful reason why nowhere.

    The first of these that holds: here for certain, at nobody's cost; next door for certain; here, at others' cost
    or on the median; next door on the median (displaceable requests), or late (where that is accepted); refused.

    Args:
        request: what is asked.
        local: what admission said.
        nearby: what the nearby executor said; None when there is none.
        now_ns: the present.
    """
    if settled(local):
        return Placed(Placement.LOCAL)
    remote = nearby if isinstance(nearby, Estimate) else None
    due_ns = request.deadlines.total_ns
    if remote is not None and now_ns + remote.finish_p99_ns <= due_ns:
        return Placed(Placement.NEARBY)
    if isinstance(local, Admission):
        return Placed(Placement.LOCAL, certain=local.certain)
    if remote is not None:
        likely = not request.firm and now_ns + remote.wait_ns + remote.p50_ns <= due_ns
        if likely or request.accept_late:
            return Placed(Placement.NEARBY, certain=False)
    return _most_useful(local, nearby, left_ns=due_ns - now_ns)


def _most_useful(local: Refusal, nearby: Estimate | Refusal | None, *, left_ns: int) -> Refusal:
    """Return one refusal out of two: the one that was closer to serving the request gives the reason."""
    if nearby is None:
        return local
    if isinstance(nearby, Estimate):
        late = f"would end {nearby.finish_p99_ns / 1e6:.1f} ms from now, {left_ns / 1e6:.1f} ms are left"
        nearby = Refusal(Reason.DEADLINE_UNREACHABLE, late)
    if nearby.reason is Reason.INPUT_INVALID:
        return nearby
    detail = f"here: {local.detail or local.reason.value}; nearby: {nearby.detail or nearby.reason.value}"
    # A model that isn't here could only have run next door, so what failed there is what can be mended.
    first = nearby.reason if local.reason is Reason.MODEL_UNAVAILABLE else local.reason
    return Refusal(first, detail)
