"""Inside the exporting child: Hugging Face folders, by optimum."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from edgeinfer_tools.sources.child_order import Declined, Order, samples_of, tied

HIGHEST_OPSET = 21


def find(order: Order) -> dict[str, Any]:
    """Download a model of the hub at its revision, or find it in the hub's own cache; return its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    patterns = ["*.json", "*.txt", "*.safetensors", "*.model"]
    try:
        return {"folder": snapshot_download(order["hub"], revision=order["revision"], allow_patterns=patterns)}
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise Declined("unreachable", str(error).strip().splitlines()[0]) from error


def export(order: Order) -> dict[str, Any]:
    """Write `model.onnx` into the order's folder."""
    import torch
    import transformers
    from optimum.exporters.onnx import main_export

    opset = asked = order["opset"]
    while True:
        try:
            main_export(
                order["model"],
                output=order["out"],
                task=order["task"],
                opset=opset,
                framework="pt",
                library_name="transformers",
                do_validation=False,  # the parent's, on real inputs
                local_files_only=True,
                trust_remote_code=False,
                no_post_process=True,
            )
            break
        except Exception as error:  # torch's and optimum's own say only in words which opset would do
            least = _least_opset(str(error), opset)
            if least is None or not opset < least <= HIGHEST_OPSET:
                raise
            opset = least
    if order["opset_fixed"] and opset > asked:
        raise Declined("opset", f"opset {asked} is too low for this model, it needs {opset}")
    model = _load(order)
    return {
        "files": sorted(path.name for path in Path(order["out"]).glob("*.onnx")),
        "tied": tied(model),
        "exporter": f"optimum-onnx {_version('optimum-onnx')}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}",
    }


def run(order: Order) -> dict[str, Any]:
    """Run the model in its own framework on the samples; write `NUMBER.OUTPUT` arrays."""
    import numpy as np
    import torch

    model = _load(order)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for index, inputs in enumerate(samples_of(order)):
            answer = model(**inputs)
            for name in order["outputs"]:
                value = answer.get(name)
                if value is None:
                    names = ", ".join(answer.keys())
                    raise Declined("outputs", f"the graph has output {name!r}, the model itself gives {names}")
                found[f"{index}.{name}"] = value.float().numpy() if value.is_floating_point() else value.numpy()
    with Path(order["answers"]).open("wb") as file:
        np.savez(file, **found)
    return {"count": order["count"]}


def _load(order: Order) -> Any:
    from optimum.exporters.tasks import TasksManager

    model = TasksManager.get_model_from_task(
        order["task"], order["model"], framework="pt", library_name="transformers", local_files_only=True
    )
    return model.float().eval()


def _least_opset(text: str, opset: int) -> int | None:
    """Return the opset that an exporter's complaint asks for; the next one where it only asks for a higher one."""
    found = re.search(r"added in version (\d+)|[Aa]t least +(\d+)|opset version (\d+) or (?:higher|above)", text)
    if found:
        return int(next(group for group in found.groups() if group))
    return opset + 1 if "higher opset" in text or "opset version" in text else None


def _version(distribution: str) -> str:
    from importlib.metadata import version

    return version(distribution)
