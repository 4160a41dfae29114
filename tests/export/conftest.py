"""Real exporters, real models. Everything here needs torch: `make test-export` has it, `make test` leaves it out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from edgeinfer.artifact.board import Board, load_board, shipped_boards

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def board() -> Board:
    return load_board(shipped_boards() / "generic-x86.toml")


@pytest.fixture
def fresh_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without exports, which still has the packages that were downloaded before."""
    from edgeinfer_tools.fetch import cache_dir

    shared, own = cache_dir(), tmp_path / "cache"
    own.mkdir()
    for name in ("wheels", "files", "unpacked"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(shared / name)
    monkeypatch.setenv("EDGEINFER_CACHE", str(own))
    monkeypatch.delenv("EDGEINFER_EXPORT_PYTHON", raising=False)
    return own / "exports"
