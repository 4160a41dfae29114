"""The broker fixture for this folder's tests."""

from __future__ import annotations

from tests.system.broker import broker

__all__ = ["broker"]
