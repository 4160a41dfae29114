"""The network as its package makes it; the export loads the checkpoint into it."""

from __future__ import annotations

from typing import Any

from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-not-found]  # unpacked while exporting


def make() -> Any:
    return EfficientNet.from_name("efficientnet-lite0")
