"""`edgeinfer bench` against a real daemon with a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.programs import SENTENCE, Program, edgeinfer, give_bundles

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_load_on_a_real_model_is_answered_and_told_by_phase(tmp_path: Path, store: Path) -> None:
    with Program(tmp_path / "cam1", '[[model]]\nname = "support-intent"\n') as daemon:
        give_bundles(daemon, store)
        daemon.ready()
        done = edgeinfer(
            "bench", "support-intent", "--text", SENTENCE, "--rate", "50", "--seconds", "2", "--deadline-ms", "1000",
            "--json", "--socket", daemon.socket,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert set(report["outcomes"]) == {"ok"}
        assert 60 <= report["requests"] <= 150
        assert report["phases_ms"].keys() == {"unsent", "transport", "wait", "decode", "run", "post"}
        assert sum(phase["p50"] for phase in report["phases_ms"].values()) <= 2 * report["latency_ms"]["p50"]
        (counted,) = daemon.status()["report"]["origins"]
        assert counted["received"] == report["requests"], "the daemon saw exactly these"
