"""What every room's tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A deadline per example would fail on a busy machine, not on slow code; the seed is fixed so that CI repeats itself.
settings.register_profile("edgeinfer", deadline=None, derandomize=True)
settings.load_profile("edgeinfer")


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    """A command that is called within the test's process sets the log's level, as it may in a process of its own."""
    log = logging.getLogger("edgeinfer")
    before = log.level
    yield
    log.setLevel(before)
