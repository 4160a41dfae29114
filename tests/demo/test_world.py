"""Logs and configuration outlive the run's temporary folder, also when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer_demo.world import KEPT, World, keeping


def test_logs_and_configuration_are_kept_when_a_run_fails(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "build" / "demo"
    root.mkdir()
    world = World(root, tmp_path / "bundles")
    world.write_files()
    world.log("daemon").write_text("what went wrong\n")
    world.log("nearby").write_text("nothing\n")
    with pytest.raises(RuntimeError), keeping(world, out):
        raise RuntimeError
    assert {path.name for path in out.iterdir()} == set(KEPT) - {"mosquitto.log"}, "what there is"
    assert (out / "daemon.log").read_text() == "what went wrong\n"
