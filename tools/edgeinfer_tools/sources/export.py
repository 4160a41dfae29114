"""Have a child export a model, or run it in its own framework, and keep what comes out by its content.

Owns the child's process, its interpreter and the cache. Torch lives in the child alone. What was exported once is
taken from the cache, so that later builds need no torch: the key is made of everything that decides the result but the
versions of the exporters, which are recorded instead; delete `exports` in the cache to export anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeinfer_tools.faults import ExportFailed, ExtraMissing, FetchError
from edgeinfer_tools.fetch import cache_dir

REVISION = 1
"""Counts changes of the child that change what it makes."""
TIMEOUT_S = 3600
PYTHON = "EDGEINFER_EXPORT_PYTHON"
"""Environment variable: an interpreter with `edgeinfer[export]`, where this one has no torch."""
FACTS = "facts.json"
_FRAMEWORK = ("torch", "optimum", "transformers", "onnxscript", "huggingface_hub", "safetensors", "edgeinfer_tools")

Order = dict[str, Any]
Facts = dict[str, Any]


def digest_of(content: object) -> str:
    """Return a key for plain data."""
    return hashlib.sha256(json.dumps([REVISION, content], sort_keys=True).encode()).hexdigest()


def kept(key: str, make: Callable[[Path], Facts]) -> tuple[Path, Facts, bool]:
    """Return the folder that `make` filled for this key, its facts, and whether it was there already.

    A folder is in the cache completely or not at all.
    """
    folder = cache_dir() / "exports" / key
    if (folder / FACTS).is_file():
        return folder, json.loads((folder / FACTS).read_text(encoding="utf-8")), True
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{key[:12]}.", dir=folder.parent))
    try:
        facts = make(staging)
        (staging / FACTS).write_text(json.dumps(facts, indent=2, sort_keys=True), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        staging.replace(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder, facts, False


def run_child(order: Order, *, name: str, online: bool = False) -> Facts:
    """Return the child's facts.

    Raises:
        ExtraMissing: there is no torch.
        ExportFailed: the model cannot be exported or run; the text is for its author.
        FetchError: the hub cannot be reached.
    """
    python = os.environ.get(PYTHON) or sys.executable
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if not online:
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if PYTHON not in os.environ:
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-export-") as scratch:
        file = Path(scratch) / "order.json"
        file.write_text(json.dumps({"path": [], "threads": os.cpu_count() or 1, **order}), encoding="utf-8")
        command = [python, "-m", "edgeinfer_tools.sources.child", str(file)]
        try:
            done = subprocess.run(
                command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ExportFailed(f"{name}: not exported within {TIMEOUT_S} s") from error
        except OSError as error:
            raise ExtraMissing(f"{PYTHON}={python} cannot be started: {error.strerror}") from error
    try:
        facts: Facts = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        last = "".join(done.stderr.strip().splitlines()[-1:])
        if "No module named" in last:
            raise ExtraMissing(_missing(last, python)) from None
        raise ExportFailed(f"{name}: the exporting process ended with {how}: {last}") from None
    if "reason" in facts:
        raise _fault(facts, name, python)
    return facts


def _fault(facts: Facts, name: str, python: str) -> Exception:
    detail = facts["detail"]
    match facts["reason"]:
        case "module_missing":
            module = facts["module"].partition(".")[0]
            if module in _FRAMEWORK:
                return ExtraMissing(_missing(detail, python))
            return ExportFailed(f"{name}: its code imports {module}, which no wheel in [[source.packages]] holds")
        case "unreachable":
            return FetchError(
                f"{name}: the hub cannot be reached now ({detail}); connect once so that it is cached, or download the "
                "folder and name it by file"
            )
        case "opset":
            return ExportFailed(f"{name}: {detail}; leave source.opset out, and a fitting one is chosen")
        case "memory":
            return ExportFailed(f"{name}: this machine has not enough memory to export it")
        case _:
            lines = [line.strip() for line in detail.splitlines() if line.strip()]
            return ExportFailed(f"{name}: {' '.join(lines[:2])}")


def _missing(detail: str, python: str) -> str:
    return (
        f"exporting needs torch and its exporters, and {python} has none ({detail}): install the CPU build of torch "
        f"and then the extra edgeinfer[export], or name an interpreter that has them by {PYTHON} (docs/importing.md)"
    )
