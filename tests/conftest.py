"""Fixtures that every room's tests share."""

from __future__ import annotations
