"""Mapped weights under the budget: a hot set that does not fit is refused like any other memory, on every path."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.config import ModelSection
from edgeinfer.daemon.install import install_bundle
from edgeinfer.errors import BudgetExceeded
from edgeinfer.execution.loader import Loader
from edgeinfer.request import Result
from edgeinfer.sensors.cpuinfo import cpu_flags
from edgeinfer.store.compiled import CompiledForm, CompiledStore
from edgeinfer.store.store import Installed
from tests.daemon.test_compiling import SIZE, chain
from tests.execution.local_rig import MIB, open_place, request_of
from tests.system.programs import Program, wait_until
from tests.system.test_memory import group, inside, memory, models

__all__ = ["group"]

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("mapped")
    made = install_bundle(chain(folder / "source", layers=16), folder / "state")
    if form_of(made).record.form == "plain":
        pytest.skip("nothing was gained by mapping the weights here")
    yield made
    shutil.rmtree(folder, ignore_errors=True)


def state_of(installed: Installed) -> Path:
    return installed.path.parents[2]


def form_of(installed: Installed) -> CompiledForm:
    (form,) = CompiledStore(state_of(installed)).forms(installed.digest)
    return form


async def test_every_budget_from_zero_until_it_loads_refuses_cleanly_with_mapped_weights_too(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(state_of(installed), tmp_path / "state")
    seen: list[str] = []
    real = Loader.cost_bytes

    def cost_bytes(self: Loader, *arguments: object) -> int:
        seen.append("form" if arguments[3] is not None else "plain")
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Loader, "cost_bytes", cost_bytes)
    hot_bytes = form_of(installed).record.cost.hot_bytes
    async with open_place(tmp_path, cpu_flags=cpu_flags()) as place:
        section = ModelSection("chain", preload=False)
        refused, wrong, steps = set[str](), list[str](), 0
        for ceiling in range(0, 400 * MIB, 4 * MIB):
            place.ledger.set_ceiling(ceiling)
            seen.clear()
            try:
                resident = await place.cache.load(section)
            except BudgetExceeded as error:
                steps += 1
                refused.add(re.sub(r" [0-9a-f]{12}/.*", "", error.what))
                wrong += (
                    [str(error)] if error.needed_bytes <= error.free_bytes or error.ceiling_bytes != ceiling else []
                )
                assert "form" in seen, "the leaner form was tried first"
                assert place.workers() == set(), "nothing starts before all of it is reserved"
                assert place.ledger.snapshot().reserved_bytes == 0, "a part stayed reserved"
                assert place.cache.residents() == []
                continue
            break
        assert steps > 10
        assert (refused, wrong) == ({"chain/fp32"}, [])
        held = place.ledger.snapshot()
        assert held.reserved_bytes <= held.ceiling_bytes < held.reserved_bytes + 4 * MIB
        assert resident.form is not None
        assert held.by_owner[f"weights {installed.digest[:12]}/fp32"] == hot_bytes
        ending = await place.executor.execute(place.request("chain", request_of(x=np.ones((1, SIZE), np.float32))))
        assert isinstance(ending, Result)
        ending.release()
        await place.cache.unload("chain")
        # The worker's own part fits and the weights' doesn't: its reservation is given back as well.
        own_bytes = resident.section.workers * (held.reserved_bytes - hot_bytes)
        place.ledger.set_ceiling(own_bytes + hot_bytes // 2)
        with pytest.raises(BudgetExceeded):
            await place.cache.load(section)
        assert place.ledger.snapshot().reserved_bytes == 0


def test_a_hot_set_beyond_the_control_groups_limit_is_refused_and_loaded_once_it_fits(
    installed: Installed, tmp_path: Path, group: Path
) -> None:
    (group / "memory.limit_in_bytes").write_text(str(128 * MIB))
    config = '[memory]\nreserve = "8 MiB"\n' + models("chain")
    with Program(tmp_path / "device", config, wrapper=inside(group / "inner")) as program:
        shutil.copytree(state_of(installed), program.state_dir)
        program.ready()
        assert program.model_state("chain") == "refused"
        assert memory(program)["ceiling_bytes"] <= 120 * MIB
        assert "weights" not in memory(program)
        (group / "memory.limit_in_bytes").write_text(str(400 * MIB))
        wait_until(lambda: program.model_state("chain") == "loaded", "it is tried again every ten seconds", 30)
        figures = memory(program)
        assert figures["reserved_bytes"] > 60 * MIB + figures["itself_bytes"]
        with program.client() as client:
            for _ in range(20):  # its hot set is in the cache now; what is charged must not count twice
                client.infer("chain", {"x": np.ones((1, SIZE), np.float32)}, deadline_ms=5000)
        wait_until(lambda: memory(program)["ceiling_bytes"] > 340 * MIB, "the cache is no usage")
        (group / "memory.limit_in_bytes").write_text(str(130 * MIB))
        wait_until(lambda: program.model_state("chain") == "unloaded", "it gives way when the budget falls", 20)
        with contextlib.suppress(IndexError):
            assert "evicted" in program.models()["chain"]["detail"]
