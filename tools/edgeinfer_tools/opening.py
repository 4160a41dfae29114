"""Open a bundle that is named as a folder or as one .tar of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.artifact.archive import unpack_bundle


@contextmanager
def opened(bundle: Path) -> Iterator[Path]:
    """Yield the bundle's folder: the one that was named, or what an archive holds, for as long as the block lasts.

    Raises:
        ArtifactError: an archive that is no sound one.
    """
    if not bundle.is_file():
        yield bundle
        return
    with tempfile.TemporaryDirectory(prefix="edgeinfer-bundle-") as scratch:
        folder = Path(scratch) / bundle.stem
        unpack_bundle(bundle, folder)
        yield folder
