"""Make a graph smaller without changing what it computes, by other people's optimisers, and prove it on real requests.

Each pass is tried, run and compared with the graph before it. One that fails, or changes an answer, is dropped with a
note: a graph that is right beats one that is small.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.errors import EdgeInferError
from edgeinfer_tools import model_file
from edgeinfer_tools.faults import plain
from edgeinfer_tools.origin import Validation
from edgeinfer_tools.samples import Array
from edgeinfer_tools.session import Level, Runner
from edgeinfer_tools.validate import compare, problems

LIMITS = Validation(tolerance=1e-4, cosine=0.999999)
"""Passes reorder sums; what they do beyond that is a fault. A step of 8 bits is 40 times as much."""

Requests = Sequence[Mapping[str, Array]]
Pass = Callable[[onnx.ModelProto], onnx.ModelProto]


@dataclass(frozen=True, slots=True)
class Passed:
    """What became of one pass."""

    model: onnx.ModelProto
    note: str = ""
    """Why the model is still the one before; empty when the pass was taken."""


def answers(
    model: onnx.ModelProto, requests: Requests, state: list[StateSpec], level: Level = "all"
) -> list[dict[str, Array]]:
    """Return what the model answers, from a fresh state.

    Raises:
        SessionError: the runtime rejects it, or a run fails.
    """
    with model_file.loadable(model) as file:
        runner = Runner(file, state=state, level=level)
        return [runner.run(request) for request in requests]


def attempt(name: str, change: Pass, model: onnx.ModelProto, requests: Requests, state: list[StateSpec]) -> Passed:
    """Return the changed model, or the model itself and the reason."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    try:
        made = change(made)
        if wrong := problems(compare(answers(model, requests, state), answers(made, requests, state)), LIMITS):
            return Passed(model, f"{name} changed an answer, so it was left out: {'; '.join(wrong)}")
    except ModuleNotFoundError:
        raise  # an extra that is not installed, not a pass that failed
    except EdgeInferError as error:
        return Passed(model, f"{name} was left out: {error}")
    except Exception as error:  # noqa: BLE001  optimisers raise what they like
        return Passed(model, f"{name} was left out: {type(error).__name__}: {plain(str(error))}")
    return Passed(made)


def slim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model as onnxslim has it: constants folded, dead ends removed, equal subgraphs joined."""
    import onnxslim

    if model_file.is_large(model):
        raise ValueError("the model is too large for it")
    logging.getLogger("ONNXSLIM").setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        made = onnxslim.slim(model, model_check=False, verbose=False)
    if not isinstance(made, onnx.ModelProto):
        raise TypeError("it gives no model")
    wanted, got = ([[item.name for item in part] for part in (m.graph.input, m.graph.output)] for m in (model, made))
    if wanted != got:
        raise ValueError(f"its inputs and outputs are {got}, not {wanted}")
    return made
