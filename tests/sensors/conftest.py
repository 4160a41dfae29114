from __future__ import annotations

from pathlib import Path

import pytest

from tests.sensors.tree import FakeClock, FakeTree


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
