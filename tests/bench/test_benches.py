from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from edgeinfer_bench import BENCHES

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_can_be_run_by_its_name_and_is_described(name: str) -> None:
    module = importlib.import_module(f"edgeinfer_bench.{name}")
    assert list(inspect.signature(module.measure).parameters) == ["bundles"]
    assert f"## {name}\n" in DOCS.read_text(encoding="utf-8")
