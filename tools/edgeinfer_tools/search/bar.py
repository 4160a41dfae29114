"""Judge by the figures of an evaluation: whether the bar is reached, and whether a part of it settles that already.

Pure. The bar is the recipe's gates and the budget's bound on the drop, both.
"""

from __future__ import annotations

from edgeinfer_tools.metrics import LOWER_IS_BETTER
from edgeinfer_tools.search.budget import Budget, Figures
from edgeinfer_tools.search.journal import GateScore, Scores

DOUBT = 2.0
"""A part of the evaluation settles it when the loss seen is so many times what is allowed, and two requests more."""


def drop(scores: Scores, base: Scores) -> float:
    """Return the quality lost against the float model on the same requests."""
    return round(max(0.0, base.quality - scores.quality), 6)


def failures(scores: Scores, base: Scores, budget: Budget) -> list[str]:
    """Return what these scores miss, in words; `base` are the float model's on the same requests."""
    found = [_told(gate) for gate in scores.gates if not _passes(gate)]
    return found + [str(miss) for miss in budget.misses(Figures(drop=drop(scores, base)))]


def hopeless(screen: Scores, base_screen: Scores, base_full: Scores, budget: Budget) -> str:
    """Return why the whole evaluation need not be run, in words; empty when it must be.

    A largest error only grows with more requests: over the gate, it stays there. Of the others, what the form loses on
    these requests against the float model is held against what the float model has to lose on all of them.
    """
    slack = 2.0 / screen.requests
    for gate, first, whole in zip(screen.gates, base_screen.gates, base_full.gates, strict=True):
        if gate.metric == "max_abs_error":
            if not _passes(gate):
                return _on_part(_told(gate), screen)
        elif gate.metric in LOWER_IS_BETTER:
            if gate.maximum is not None and gate.value - first.value > DOUBT * max(0.0, gate.maximum - whole.value):
                return _on_part(_told(gate), screen)
        elif gate.minimum is not None and (
            first.value - gate.value > DOUBT * max(0.0, whole.value - gate.minimum) + slack
        ):
            return _on_part(_told(gate), screen)
    if budget.drop is not None and (lost := drop(screen, base_screen)) > DOUBT * budget.drop + slack:
        return _on_part(f"quality drops by {lost:.4f}, {budget.drop:g} is allowed", screen)
    return ""


def _passes(gate: GateScore) -> bool:
    return (gate.minimum is None or gate.value >= gate.minimum) and (gate.maximum is None or gate.value <= gate.maximum)


def _told(gate: GateScore) -> str:
    name = f"{gate.metric}({gate.output})" if gate.output else gate.metric
    bound = f">= {gate.minimum:g}" if gate.minimum is not None else f"<= {gate.maximum:g}"
    return f"{name} is {gate.value:.4f}, the gate is {bound}"


def _on_part(text: str, screen: Scores) -> str:
    return f"{text} (on the first look, {screen.requests} requests)"
