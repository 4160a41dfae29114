"""What device and nearby service have in common: models within the machine's means, and nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.config import ModelSection, SchedulerSection
from edgeinfer.daemon.host import ModelHost
from edgeinfer.errors import ConfigError
from edgeinfer.execution.ledger import OURSELVES
from edgeinfer.store.store import BundleStore
from tests.execution.local_rig import MIB, write_bundle
from tests.system.programs import running_pids
from tests.worker import graphs

pytestmark = [pytest.mark.system, pytest.mark.slow]


def install(state: Path, *names: str) -> None:
    for name in names:
        source = write_bundle(state.parent / name, name, graphs.identity(), peak_bytes=32 * MIB)
        BundleStore(state).add(source, lambda *_: None)


def host(
    state: Path, *sections: ModelSection, ceiling_bytes: int = 1 << 30, cpus: list[int] | None = None
) -> ModelHost:
    return ModelHost(
        sections,
        SchedulerSection(cpus=cpus),
        state_dir=state,
        ceiling_bytes=ceiling_bytes,
        reserve_bytes=0,
        on_crash=lambda _: None,
        clock=MonotonicClock(),
    )


async def test_more_threads_than_cores_are_not_used_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path / "state", "echo")
    one = min(os.sched_getaffinity(0))
    made = host(tmp_path / "state", ModelSection("echo", threads=64), cpus=[one])
    section = made.cache.section("echo")
    assert section is not None
    assert section.threads == 1
    assert "threads model=echo configured=64 used=1" in caplog.text


async def test_cpus_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.cpus: none of \[4000\] may be used here; usable are"):
        host(tmp_path / "state", cpus=[4000])


async def test_the_most_important_is_loaded_first_and_what_does_not_fit_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    install(tmp_path / "state", "a", "b", "c")
    sections = [ModelSection("a"), ModelSection("b", priority=2), ModelSection("c", preload=False, priority=9)]
    made = host(tmp_path / "state", *sections)
    children: list[int] = []
    async with made.running():
        await made.start()
        own = made.ledger.snapshot().by_owner[OURSELVES]
        assert own > 20 * MIB, "what we take ourselves is ours to count"
        made.ledger.set_ceiling(own + 50 * MIB)
        await made.preload()
        assert {status.name: status.state for status in made.cache.status()} == {
            "a": "refused", "b": "loaded", "c": "unloaded",
        }  # fmt: skip
        assert "not loaded model=a error=a/fp32 needs" in caplog.text
        children = made.nursery.pids()
        assert len(children) == 2
    assert running_pids(children) == []
    assert not any(thread.name.startswith("storage") and thread.is_alive() for thread in await _settled_threads())


async def _settled_threads() -> list[threading.Thread]:
    await asyncio.sleep(0.05)
    return threading.enumerate()


async def test_a_budget_below_our_own_size_is_told_and_nothing_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path / "state", "echo")
    made = host(tmp_path / "state", ModelSection("echo"), ceiling_bytes=MIB)
    async with made.running():
        await made.start()
        await made.preload()
        assert "no memory for models: at least" in caplog.text
        assert "is needed of 1.0 MiB (edgeinfer itself takes" in caplog.text
        assert ", the smallest model (echo) 32 MiB); raise memory.ceiling" in caplog.text
        assert made.cache.residents() == []
