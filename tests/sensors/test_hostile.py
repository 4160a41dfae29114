"""Whatever a driver writes into a file, a reader answers with a value or an `OSError`: nothing else ends its thread."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.sensors.cooling import read_cooling
from edgeinfer.sensors.cpu import BusyMeter, cpu_clock, load_average, usable_cpus
from edgeinfer.sensors.energy import EnergyState, add_sample
from edgeinfer.sensors.firmware import FirmwareReader, Slowdown
from edgeinfer.sensors.hwmon import find_temperatures, read_thresholds
from edgeinfer.sensors.power import EnergyDomain, PowerSample, Rail, find_domains, find_rails, read_power
from edgeinfer.sensors.probe import InlineProbe
from edgeinfer.sensors.thermal import ThermalReader
from edgeinfer.sensors.vcgencmd import Vcgencmd
from tests.sensors.boards import BOARDS
from tests.sensors.tree import FakeClock, FakeTree

CONTENT = st.one_of(
    st.binary(max_size=40),
    st.integers(-(10**30), 10**30).map(lambda value: str(value).encode()),
    st.sampled_from([b"", b"\n", b"None", b"nan", b"inf", b"1e9", b"0x10", b"1_0", b"9" * 4096, b"-" + b"9" * 4090,
                     b"\xd9\xa3", b"<unknown>", b"0-99999999999", b"1-0", b"cpu x", b"\0" * 5000]),
)  # fmt: skip


def ask_everything(tree: FakeTree) -> None:
    clock = FakeClock()
    thermal = ThermalReader(
        tree.sys, ["cpu-thermal", "tj-thermal", "x86_pkg_temp", "hwmon:coretemp"], clock=clock, make_probe=InlineProbe
    )
    firmware = FirmwareReader(tree.sys, tree.proc, clock=clock, vcgencmd=Vcgencmd(["/nosuch/vcgencmd"]))
    busy = BusyMeter(tree.proc)
    for _ in range(3):
        thermal.read(busy.share())
        assert isinstance(firmware.read().slowdown, Slowdown)
        clock.advance(1)
    cpu_clock(tree.sys)
    read_cooling(tree.sys)
    load_average(tree.proc)
    assert usable_cpus(tree.sys, tree.proc)
    for item in find_temperatures(tree.sys):
        read_thresholds(item)
    for domain in find_domains(tree.sys):
        add_sample(EnergyState(0, PowerSample(None, 5)), PowerSample(None, 1), 1_000_000_000, domain.range_uj)
    sources: list[Rail | EnergyDomain] = [*find_rails(tree.sys), *find_domains(tree.sys)]
    for source in sources:
        try:
            sample = read_power(source)
        except OSError:
            continue
        add_sample(EnergyState(0, sample), sample, 1_000_000_000, getattr(source, "range_uj", 0))


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(BOARDS)), st.integers(0, 10**6), st.lists(CONTENT, min_size=1, max_size=8))
def test_no_content_of_any_file_breaks_a_reader(board: str, seed: int, contents: list[bytes]) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        tree = FakeTree(root)
        BOARDS[board](tree)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        for path, content in zip(random.Random(seed).sample(files, len(contents)), contents, strict=True):
            path.write_bytes(content)
        ask_everything(tree)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("board", BOARDS)
def test_files_that_are_directories_or_gone_break_no_reader(tree: FakeTree, board: str) -> None:
    BOARDS[board](tree)
    for index, path in enumerate(sorted(path for path in tree.sys.rglob("*") if path.is_file())):
        path.unlink()
        if index % 2:
            path.mkdir()
        if index % 7 == 0:
            ask_everything(tree)
    ask_everything(tree)
