"""The demo passes as it ships, and fails when the governor or the offload is switched off by configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "build" / "bundles"

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(240)]


def demo(out: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "edgeinfer_demo", "--bundles", str(BUNDLES), "--out", str(out), *flags]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    report = out / "report.json"
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads(report.read_bytes())


def failed(report: dict[str, Any]) -> set[str]:
    return {check["name"] for check in report["checks"] if not check["ok"]}


def test_the_demo_keeps_every_promise(tmp_path: Path) -> None:
    status, report = demo(tmp_path, "--speed", "2")
    assert failed(report) == set()
    assert status == 0
    assert report["identity"]["holds"]
    assert report["offloaded_share"] > 0


def test_without_the_governor_the_demo_fails(tmp_path: Path) -> None:
    status, report = demo(tmp_path, "--speed", "3", "--no-governor")
    assert status == 1
    assert "reports throttling and its end" in failed(report)


def test_without_offload_the_demo_fails(tmp_path: Path) -> None:
    status, report = demo(tmp_path, "--speed", "3", "--no-offload")
    assert status == 1
    assert "offloads under overload" in failed(report)
    assert report["offloaded_share"] == 0
