"""What every room's tests share."""

from __future__ import annotations

from hypothesis import settings

# A deadline per example would fail on a busy machine, not on slow code; the seed is fixed so that CI repeats itself.
settings.register_profile("edgeinfer", deadline=None, derandomize=True)
settings.load_profile("edgeinfer")
