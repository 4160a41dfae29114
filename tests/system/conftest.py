"""Fixtures for this folder's tests: a broker, and a store with bundles that came in through the real command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.store.store import BundleStore
from tests.execution.local_rig import ECHO, LOOP, MIB, variant, write_bundle
from tests.system.broker import broker
from tests.system.programs import BUNDLES, edgeinfer
from tests.worker import graphs

__all__ = ["broker"]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with `support-intent`, `silero-vad` (both real), `echo`, and `loop` (as slow as it is told)."""
    folder = tmp_path_factory.mktemp("store")
    for name in ("support-intent", "silero-vad"):
        assert (BUNDLES / name).is_dir(), f"build/bundles/{name} is missing: run `make bundles`"
        done = edgeinfer("bundle", "add", BUNDLES / name, "--no-compile", "--state-dir", folder / "state")
        assert done.returncode == 0, done.stderr
    made = BundleStore(folder / "state")
    loop = [variant("fp32", latency_us={"1": 200_000})]
    made.add(write_bundle(folder / "loop", "loop", graphs.slow_loop(), LOOP, variants=loop), lambda *_: None)
    huge = [variant("fp32", 64 << 30)]
    made.add(write_bundle(folder / "huge", "huge", graphs.identity(), ECHO, variants=huge), lambda *_: None)
    made.add(write_bundle(folder / "echo", "echo", graphs.identity(), ECHO, peak_bytes=8 * MIB), lambda *_: None)
    return folder / "state"
