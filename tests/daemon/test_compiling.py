"""Compiled at installation, over real workers: a model of 32 MB is kept in the leaner form, or stays as it came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from edgeinfer import oip
from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.artifact.profile import read_profile
from edgeinfer.cli import main
from edgeinfer.clock import MonotonicClock
from edgeinfer.config import ModelSection, SchedulerSection
from edgeinfer.daemon.compiling import Compiler
from edgeinfer.daemon.host import ModelHost
from edgeinfer.daemon.install import install_bundle
from edgeinfer.request import Result
from edgeinfer.sensors.cpuinfo import cpu_flags
from edgeinfer.store.compiled import CompiledForm, CompiledStore
from edgeinfer.store.store import BundleStore, Installed
from edgeinfer.worker.nursery import Nursery
from tests.execution.local_rig import MIB, open_place, request_of, variant, write_bundle
from tests.worker import graphs

pytestmark = [pytest.mark.system, pytest.mark.slow]

SIZE, LAYERS, PEAK = 1024, 8, 100 * MIB
ROW = [TensorSpec("x", "FP32", [1, SIZE])], [TensorSpec("y", "FP32", [1, SIZE])]


def chain(folder: Path, *, layers: int = LAYERS) -> Path:
    """Write a bundle of `layers` matrices of 4 MiB."""
    graph = graphs.linear(SIZE, layers)
    x = y = np.random.default_rng(1).standard_normal((1, SIZE)).astype(np.float32)
    for weight in graph.graph.initializer:
        y = y @ numpy_helper.to_array(weight)
    answer = oip.encode_response([("y", "FP32", [1, SIZE], y.astype(np.float32).tobytes())])
    return write_bundle(folder, "chain", graph, ROW, variants=[variant("fp32", PEAK)], golden=(request_of(x=x), answer))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("compiled")
    return install_bundle(chain(folder / "source"), folder / "state")


@pytest.fixture
def own(installed: Installed, tmp_path: Path) -> Installed:
    """A copy that a test may spoil."""
    shutil.copytree(state_of(installed), tmp_path / "state")
    return BundleStore(tmp_path / "state").active("chain")


def state_of(installed: Installed) -> Path:
    return installed.path.parents[2]


def form_of(installed: Installed) -> CompiledForm:
    (form,) = CompiledStore(state_of(installed)).forms(installed.digest)
    return form


def compile_here(installed: Installed, store: CompiledStore, memory_bytes: Callable[[], int]) -> CompiledForm | None:
    async def run() -> CompiledForm | None:
        nursery = Nursery()
        await nursery.start()
        try:
            with ThreadPoolExecutor(1) as storage:
                compiler = Compiler(
                    nursery=nursery, store=store, cpu_flags=cpu_flags(), storage=storage, memory_bytes=memory_bytes
                )
                return await compiler.compile(installed, installed.manifest.variants[0])
        finally:
            await nursery.close()

    return asyncio.run(run())


def test_installation_keeps_a_leaner_form_and_what_was_measured(installed: Installed) -> None:
    record = form_of(installed).record
    assert record.form in {"prepacked", "mapped"}, record
    assert [cost.problem for cost in record.costs] == ["", "", ""]
    plain, chosen = record.cost_of("plain"), record.cost
    assert plain.steady_bytes - chosen.steady_bytes > 28 * MIB
    assert 30 * MIB < chosen.hot_bytes < 40 * MIB
    verify_bundle(installed.path)
    profile = read_profile(BundleStore(state_of(installed)).profile_path(installed.digest))
    (cost,) = profile.costs
    assert (cost.form, cost.mapped_bytes, profile.origin) == (record.form, chosen.hot_bytes, "measured")
    assert cost.latency.p50_us > 0


def test_list_shows_the_form(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state-dir", str(state_of(installed))]
    assert main(["bundle", "list", "--json", *state]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["forms"]["fp32"]["form"] == form_of(installed).record.form
    assert row["forms"]["fp32"]["disk_bytes"] == form_of(installed).disk_bytes
    assert main(["bundle", "list", *state]) == 0
    assert f"[fp32 ({form_of(installed).record.form})]" in capsys.readouterr().out


async def test_workers_map_the_form_and_its_weights_are_charged_once(own: Installed, tmp_path: Path) -> None:
    async with open_place(tmp_path, cpu_flags=cpu_flags()) as place:
        resident = await place.load("chain", workers=2)
        assert resident.form is not None
        assert resident.form.record.form == form_of(own).record.form
        hot = form_of(own).record.cost.hot_bytes
        charged = place.ledger.snapshot().by_owner
        assert charged[f"weights {own.digest[:12]}/fp32"] == hot
        assert charged["chain/fp32"] < place.cost(own, workers=2) - 2 * 40 * MIB
        assert place.status("chain").reserved_bytes == sum(charged.values())
        for worker in resident.workers:
            memory = worker.memory()
            assert memory is not None
            assert memory.anon_bytes < 28 * MIB, "32 MiB of weights are not its own"
        zeros = place.request("chain", request_of(x=np.zeros((1, SIZE), np.float32)))
        answer = await place.executor.execute(zeros)
        assert isinstance(answer, Result)
        answer.release()


async def test_another_cpu_ignores_the_form(own: Installed, tmp_path: Path) -> None:
    async with open_place(tmp_path, cpu_flags=cpu_flags() | {"new"}) as place:
        resident = await place.load("chain")
        assert resident.form is None
        assert set(place.ledger.snapshot().by_owner) == {"chain/fp32"}


async def test_a_daemon_on_another_cpu_makes_its_own_form_before_it_loads(own: Installed, tmp_path: Path) -> None:
    before = form_of(own).record
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"flags : {' '.join(cpu_flags())} new\n")
    host = ModelHost(
        [ModelSection("chain")],
        SchedulerSection(),
        state_dir=tmp_path / "state",
        ceiling_bytes=1 << 30,
        reserve_bytes=0,
        on_crash=lambda _: None,
        clock=MonotonicClock(),
        proc_root=tmp_path / "proc",
    )
    async with host.running():
        await host.start()
        await host.preload()
        after = form_of(own).record
        assert after.key != before.key
        (resident,) = host.cache.residents()
        assert (resident.form is None) == (after.form == "plain")
        assert not [owner for owner in host.ledger.snapshot().by_owner if owner.startswith("compiling")]


@pytest.mark.parametrize("damage", ["weights", "model"])
async def test_damaged_form_is_given_up_and_the_variant_loads_as_it_came(
    own: Installed, tmp_path: Path, damage: str
) -> None:
    form = form_of(own)
    path = form.model_path if damage == "model" else form.weights[0][0]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    async with open_place(tmp_path, cpu_flags=cpu_flags()) as place:
        resident = await place.load("chain")
        assert resident.form is None
        assert CompiledStore(tmp_path / "state").forms(own.digest) == []


async def test_form_that_the_runtime_refuses_is_given_up(
    own: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: CompiledForm = form_of(own)
    form.model_path.write_bytes(b"<html>")
    monkeypatch.setattr(CompiledStore, "check", lambda *_: None)
    monkeypatch.setattr(CompiledStore, "find", lambda *_: form)
    async with open_place(tmp_path, cpu_flags=cpu_flags()) as place:
        resident = await place.load("chain")
        assert resident.form is None
        assert set(place.ledger.snapshot().by_owner) == {"chain/fp32"}
    assert not form.folder.exists()


async def test_form_in_which_workers_keep_crashing_is_given_up_before_the_variant(
    own: Installed, tmp_path: Path
) -> None:
    async with open_place(tmp_path, cpu_flags=cpu_flags()) as place:
        resident = await place.load("chain")
        async with asyncio.timeout(20):
            while not any(note.quarantined for note in place.crashes):
                for worker in resident.workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGSEGV)
                await asyncio.sleep(0.02)
        await place.until(lambda: place.cache.residents() and place.cache.residents()[0] is not resident)
        await place.until(lambda: place.status("chain").state == "loaded")
        assert place.status("chain").variant == "fp32"
        assert place.cache.residents()[0].form is None
        assert set(place.ledger.snapshot().by_owner) == {"chain/fp32"}


@pytest.mark.parametrize(("free_bytes", "keep_free_bytes"), [(40 * MIB, 0), (1 << 30, 1 << 60)])
def test_no_memory_or_no_room_leaves_it_as_it_came_to_be_tried_again(
    installed: Installed, tmp_path: Path, free_bytes: int, keep_free_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = CompiledStore(tmp_path, keep_free_bytes=keep_free_bytes)
    with caplog.at_level("INFO"):
        assert compile_here(installed, store, lambda: free_bytes) is None
    short = "needs about 96 MiB of memory, 40 MiB are free" if free_bytes < 1 << 30 else "has room for 0.0 MiB"
    assert f"{short}; mapped:" in caplog.text
    assert store.forms(installed.digest) == []


def test_store_that_cannot_be_written_leaves_it_as_it_came(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the store should be")
    assert compile_here(installed, CompiledStore(tmp_path / "state"), lambda: 1 << 30) is None


def test_disk_that_fills_while_it_is_written_leaves_nothing(installed: Installed, tmp_path: Path) -> None:
    store = CompiledStore(tmp_path, max_bytes=40 * MIB)  # the raw weights fit, packed ones with both copies don't
    kept = compile_here(installed, store, lambda: 1 << 30)
    assert kept is None or kept.record.cost_of("prepacked").problem
    assert store.total_bytes() <= 40 * MIB
    assert not list((tmp_path / "compiled").glob(".work-*"))


def test_small_models_and_those_without_golden_requests_are_left_alone(tmp_path: Path) -> None:
    small = install_bundle(chain(tmp_path / "small", layers=1), tmp_path / "state")
    assert CompiledStore(tmp_path / "state").forms(small.digest) == []
    silent = write_bundle(tmp_path / "b", "silent", graphs.linear(SIZE, 3), ROW, variants=[variant("fp32", PEAK)])
    added = install_bundle(silent, tmp_path / "state")
    assert CompiledStore(tmp_path / "state").forms(added.digest) == []


def test_forms_go_with_the_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state-dir", str(tmp_path / "state")]
    assert main(["bundle", "add", str(chain(tmp_path / "source")), *state]) == 0
    assert "fp32 loads in its" in capsys.readouterr().out
    assert list((tmp_path / "state" / "compiled").glob("*/*/model.onnx"))
    assert main(["bundle", "remove", "chain", *state]) == 0
    assert not list((tmp_path / "state" / "compiled").glob("*/*"))
