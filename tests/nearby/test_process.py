"""The real `edgeinfer nearby`, with a real model in a real worker, is asked, frozen, thawed and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer import oip
from edgeinfer.artifact.manifest import read_manifest
from edgeinfer.execution.executor import Estimate
from edgeinfer.execution.offload import KnownModel
from edgeinfer.request import DataScope, Deadlines, Expired, InferRequest, Placement, Refusal, Result, Timeline
from tests.nearby.rig import MS, Site, open_site, until
from tests.system.broker import Broker

BUNDLE = Path(__file__).parents[2] / "build/bundles/support-intent"

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(not BUNDLE.exists(), reason="make bundles"),
]


@pytest.fixture
def process(tmp_path: Path, broker: Broker) -> Iterator[subprocess.Popen[bytes]]:
    state = tmp_path / "state"
    edgeinfer = [sys.executable, "-m", "edgeinfer"]
    add = [*edgeinfer, "bundle", "add", str(BUNDLE), "--state-dir", str(state)]
    subprocess.run(add, check=True, capture_output=True)
    config = tmp_path / "nearby.toml"
    config.write_text(
        f'name = "hall"\nsite = "plant"\nstate_dir = "{state}"\n'
        f'[mqtt.site]\nhost = "127.0.0.1"\nport = {broker.port}\n[[model]]\nname = "support-intent"\n'
    )
    process = subprocess.Popen([*edgeinfer, "nearby", "--config", str(config)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ask(site: Site, *, within_ms: int = 5000) -> InferRequest:
    now_ns = site.clock.now_ns()
    manifest, _ = read_manifest(BUNDLE)
    text = b"I was charged twice for my invoice"
    return InferRequest(
        "support-intent",
        oip.encode_media(manifest.inputs[0].name, text, "text/plain"),
        Deadlines(now_ns + within_ms * MS),
        Timeline(now_ns),
        scope=DataScope.SITE,
    )


async def test_a_real_service_answers_freezes_returns_and_leaves(
    broker: Broker, process: subprocess.Popen[bytes]
) -> None:
    async with open_site(broker.section()) as site:
        site.name = "plant"
        site.topics = type(site.topics)("edgeinfer", "plant", "device-1")
        manifest, digest = read_manifest(BUNDLE)
        site.known["support-intent"] = KnownModel(digest, manifest)
        await site.device()

        def ready() -> bool:
            return isinstance(site.executor.estimate(ask(site)), Estimate)

        await until(lambda: ready() or process.poll() is not None, within_s=30)
        assert process.poll() is None, "it ended"

        ending = await site.executor.execute(ask(site))
        assert isinstance(ending, Result), ending
        assert (ending.placement, ending.where, ending.version) == (Placement.NEARBY, "hall", manifest.version)
        assert oip.response_header(ending.payload).parameters["label"] == "support_request"

        os.kill(process.pid, signal.SIGSTOP)
        endings = [await site.executor.execute(ask(site, within_ms=100)) for _ in range(4)]
        assert [type(ending) for ending in endings] == [Expired, Expired, Expired, Refusal]
        os.kill(process.pid, signal.SIGCONT)
        await until(ready, within_s=10)
        assert isinstance(await site.executor.execute(ask(site)), Result)

        process.terminate()
        assert await asyncio.to_thread(process.wait, 10) == 0
        await until(lambda: isinstance(site.executor.estimate(ask(site)), Refusal))
        refusal = site.executor.estimate(ask(site))
        assert isinstance(refusal, Refusal)
        assert "hall: offline" in refusal.detail
