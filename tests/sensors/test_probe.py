from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeinfer.sensors.probe import InlineProbe, Probe, ThreadProbe, Waiting, read_static, read_text

MakeProbe = Callable[[str, Callable[[], str]], Probe[str]]


def settle(probe: Probe[str], deadline_s: float = 5.0) -> str | OSError:
    """Ask until there is an answer."""
    end = time.monotonic() + deadline_s
    while isinstance(answer := probe.poll(time.monotonic_ns()), Waiting):
        assert time.monotonic() < end, "no answer"
        time.sleep(0.001)
    return answer


@pytest.fixture(params=[InlineProbe, ThreadProbe])
def make_probe(request: pytest.FixtureRequest) -> Iterator[MakeProbe]:
    made: list[Probe[str]] = []

    def make(name: str, read: Callable[[], str]) -> Probe[str]:
        probe: Probe[str] = request.param(name, read)
        made.append(probe)
        return probe

    yield make
    for probe in made:
        probe.close()


def test_probe_answers_with_the_newest_value(make_probe: MakeProbe) -> None:
    values = iter("abcdefghij")
    probe = make_probe("x", lambda: next(values))
    assert settle(probe) == "a"
    assert settle(probe) in {"b", "c"}  # a slow thread may have been asked once more


def test_probe_returns_the_driver_error_as_a_value(make_probe: MakeProbe) -> None:
    def fail() -> str:
        raise OSError(19, "No such device")

    answer = settle(make_probe("x", fail))
    assert isinstance(answer, OSError)
    assert answer.errno == 19


def test_hanging_read_never_stalls_the_caller_and_heals(tmp_path: Path) -> None:
    fifo = tmp_path / "temp"
    os.mkfifo(fifo)  # opening it blocks until somebody writes: a driver that hangs
    probe = ThreadProbe("hang", lambda: read_text(fifo))
    started = time.perf_counter()
    answers = [probe.poll(ns) for ns in (1, 2, 3)]
    assert time.perf_counter() - started < 0.25
    assert answers == [Waiting(1), Waiting(1), Waiting(1)]
    with fifo.open("w") as file:
        file.write("51000\n")
    assert settle(probe) == "51000"
    probe.close()


def test_hanging_probe_costs_one_named_daemon_thread(tmp_path: Path) -> None:
    fifo = tmp_path / "temp"
    os.mkfifo(fifo)
    probe = ThreadProbe("thermal_zone7", lambda: read_text(fifo))
    for ns in range(20):
        probe.poll(ns)
    threads = [thread for thread in threading.enumerate() if thread.name == "sensor[thermal_zone7]"]
    assert len(threads) == 1
    assert threads[0].daemon
    probe.close()
    fd = os.open(fifo, os.O_WRONLY)  # let the thread go
    os.close(fd)
    threads[0].join(5)
    assert not threads[0].is_alive()


def test_static_read_of_a_fifo_or_nothing_is_empty_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert read_static(tmp_path / "fifo") == ""
    assert read_static(tmp_path / "absent") is None
    assert read_static(tmp_path) is None
