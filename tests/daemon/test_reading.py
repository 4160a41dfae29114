"""A configuration read by a child is the one that would have been read here, and its faults are told here."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from edgeinfer.config import RtspSource, load_device_config
from edgeinfer.daemon.reading import in_child, read_device
from edgeinfer.errors import ConfigError

EVERYTHING = """
board = "raspberry-pi-5-8gb"
[device]
id = "a"
[thermal]
zones = ["mine"]
sample_period = "2 s"
[mqtt.site]
host = "broker"
tls_ca = "/etc/ca.pem"
[[model]]
name = "m"
[[loop]]
name = "l"
model = "m"
scope = "site"
period = "40 ms"
deadline = "40 ms"
source = { kind = "rtsp", url = "rtsp://camera/1" }
sinks = [{ kind = "mqtt" }, { kind = "jsonl", path = "/tmp/x" }]
"""


def write(folder: Path, text: str) -> Path:
    (folder / "device.toml").write_text(text)
    return folder / "device.toml"


def test_what_the_child_has_read_is_what_would_have_been_read_here(tmp_path: Path) -> None:
    path = write(tmp_path, EVERYTHING)
    found = in_child(partial(read_device, path))()
    assert found == read_device(path)
    assert found.config == load_device_config(path)
    assert isinstance(found.config.loop[0].source, RtspSource)
    assert found.board.name == "raspberry-pi-5-8gb"
    assert found.board.thermal.zones == ["mine"]


def test_doubts_come_along(tmp_path: Path) -> None:
    path = write(tmp_path, EVERYTHING.replace('[mqtt.site]\nhost = "broker"\ntls_ca = "/etc/ca.pem"\n', ""))
    assert [doubt.path for doubt in in_child(partial(read_device, path))().doubts] == ["loop[0].sinks", "loop[0].scope"]


@pytest.mark.parametrize(("text", "key"), [("[device]\nid = 3", "device.id"), ('board = "nosuch"', "board")])
def test_a_fault_is_told_here_with_the_files_name(tmp_path: Path, text: str, key: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        in_child(partial(read_device, path))()
    assert caught.value.source == str(path)
    assert [problem.path for problem in caught.value.problems] == [key]


def test_a_child_that_dies_costs_nothing_but_time() -> None:
    here = os.getpid()

    def work() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 42

    assert in_child(work)() == 42


def test_a_process_with_threads_does_not_fork() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert in_child(os.getpid)() == os.getpid()
    finally:
        release.set()
        thread.join()
    assert in_child(os.getpid)() != os.getpid()
