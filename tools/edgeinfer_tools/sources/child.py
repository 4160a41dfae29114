"""The child that exports: the only process of the toolchain that imports torch, optimum or transformers.

Takes an order (JSON, see `sources.export`) and answers with one line of JSON: facts about what it made, or a reason and
a detail. It writes into the order's folder only. What the answer means to the user is the parent's business.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgeinfer_tools.sources.child_order import Declined, Order

for _name in ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "TOKENIZERS_PARALLELISM"):
    os.environ[_name] = "0" if _name == "TOKENIZERS_PARALLELISM" else "1"


def main(arguments: Sequence[str]) -> int:
    """Carry out the order in the named file and print the answer."""
    order: Order = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    sys.path[:0] = order["path"]
    answer = sys.stdout
    sys.stdout = sys.stderr  # libraries print as they like
    try:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(order["threads"])
        facts = ORDERS[order["kind"], order["verb"]](order)
    except Declined as declined:
        facts = {"reason": declined.reason, "detail": str(declined)}
    except ModuleNotFoundError as error:
        facts = {"reason": "module_missing", "detail": str(error), "module": error.name or ""}
    except MemoryError:
        facts = {"reason": "memory", "detail": "not enough memory"}
    except Exception as error:  # noqa: BLE001  exporters, and the models' own code, raise what they like
        facts = {"reason": "failed", "detail": f"{type(error).__name__}: {error}"}
    answer.write(json.dumps(facts) + "\n")
    return 0


def _export_huggingface(order: Order) -> dict[str, Any]:
    from edgeinfer_tools.sources import child_huggingface

    return child_huggingface.export(order)


def _run_huggingface(order: Order) -> dict[str, Any]:
    from edgeinfer_tools.sources import child_huggingface

    return child_huggingface.run(order)


def _export_pytorch(order: Order) -> dict[str, Any]:
    from edgeinfer_tools.sources import child_pytorch

    return child_pytorch.export(order)


def _run_pytorch(order: Order) -> dict[str, Any]:
    from edgeinfer_tools.sources import child_pytorch

    return child_pytorch.run(order)


def _find_huggingface(order: Order) -> dict[str, Any]:
    from edgeinfer_tools.sources import child_huggingface

    return child_huggingface.find(order)


ORDERS: dict[tuple[str, str], Callable[[Order], dict[str, Any]]] = {
    ("huggingface", "find"): _find_huggingface,
    ("huggingface", "export"): _export_huggingface,
    ("huggingface", "run"): _run_huggingface,
    ("pytorch", "export"): _export_pytorch,
    ("pytorch", "run"): _run_pytorch,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
