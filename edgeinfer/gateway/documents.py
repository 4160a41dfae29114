"""Answer questions about the service and its models: everything that is no inference and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeinfer import __version__
from edgeinfer.gateway.catalog import ModelInfo, find_model, index, metadata, unknown_model
from edgeinfer.gateway.reply import Reply, error_reply, json_reply, refusal_reply

_EXTENSIONS = ("binary_tensor_data", "sequence", "system_shared_memory")


def document_reply(
    path: list[str], target: str, models: Callable[[], Sequence[ModelInfo]], status: Callable[[], Mapping[str, Any]]
) -> Reply:
    """Return the document at a path, or that there is none; `target` is the path as its caller wrote it."""
    match path:
        case ["v2"]:
            return json_reply({"name": "edgeinfer", "version": __version__, "extensions": _EXTENSIONS})
        case ["v2", "health", "live"]:
            return json_reply({"live": True})
        case ["v2", "health", "ready"]:
            ready = status().get("ready", True) is not False
            return json_reply({"ready": ready}, 200 if ready else 503)
        case ["v2", "models"]:
            return json_reply(index(models()))
        case ["v2", "models", name, *rest]:
            return _model_document(name, rest, target, models())
        case ["status"]:
            return json_reply(status())
    return error_reply(404, f"there is no {target[:200]}; GET /v2 tells what this is")


def _model_document(name: str, rest: list[str], target: str, models: Sequence[ModelInfo]) -> Reply:
    version = None
    if len(rest) >= 2 and rest[0] == "versions":
        version, rest = rest[1], rest[2:]
    model = find_model(models, name, version)
    if model is None:
        return refusal_reply(unknown_model(name, version, models))
    if rest == ["ready"]:
        return json_reply({"name": name, "ready": model.ready}, 200 if model.ready else 503)
    if rest:
        return error_reply(404, f"there is no {target[:200]}")
    return json_reply(metadata(model, models))
