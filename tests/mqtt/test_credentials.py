"""A link's files may be anything at all: the loop goes on, and the reason names the file."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.config import BrokerSection
from edgeinfer.errors import LinkError
from edgeinfer.mqtt import credentials as module
from edgeinfer.mqtt.backoff import LinkState
from edgeinfer.mqtt.credentials import CredentialFiles, Credentials
from edgeinfer.mqtt.link import MqttLink
from tests.nearby.rig import until


def broker(**changes: object) -> BrokerSection:
    return BrokerSection(**{"host": "127.0.0.1", "port": 9, **changes})  # type: ignore[arg-type]


async def test_a_password_is_what_stands_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("open sesame\n")
    found = await CredentialFiles(broker(username="ali", password_file=path)).read(timeout_s=2)
    assert found == Credentials(("ali", "open sesame"), None)


async def test_without_files_there_is_no_thread() -> None:
    before = threading.active_count()
    assert await CredentialFiles(broker()).read(timeout_s=2) == Credentials(None, None)
    assert threading.active_count() == before


@pytest.mark.parametrize("role", ["password_file", "tls_ca", "tls_cert", "tls_key"])
@pytest.mark.parametrize("what", ["a pipe", "a directory", "an endless device", "too long", "absent"])
async def test_what_is_no_plain_file_of_sensible_size_is_a_reason(tmp_path: Path, role: str, what: str) -> None:
    path = tmp_path / "odd"
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a directory":
        path.mkdir()
    elif what == "an endless device":
        path = Path("/dev/zero")
    elif what == "too long":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    changes: dict[str, object] = {"username": "u", role: path}
    if role == "tls_key":  # a certificate that is read before it
        (tmp_path / "cert").write_text("")
        changes["tls_cert"] = tmp_path / "cert"
    began_s = time.monotonic()
    with pytest.raises(LinkError, match=f"{path.name} cannot be"):
        await CredentialFiles(broker(**changes)).read(timeout_s=5)
    assert time.monotonic() - began_s < 2, "it was not waited for"


async def test_a_file_system_that_does_not_answer_costs_the_time_limit_and_no_second_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hang, calls = threading.Event(), list[Path]()

    def read(path: Path, _: int) -> bytes:
        calls.append(path)
        hang.wait(10)
        return b"late"

    monkeypatch.setattr(module, "read_plain", read)
    files = CredentialFiles(broker(username="u", password_file=tmp_path / "share"))
    for _ in range(3):
        with pytest.raises(LinkError, match=r"share cannot be read: no answer of the file system within 0\.05 s"):
            await files.read(timeout_s=0.05)
    assert len(calls) == 1
    hang.set()
    assert (await files.read(timeout_s=2)).user == ("u", "late")


async def test_a_link_whose_password_is_a_pipe_says_so(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    link = MqttLink(broker(username="u", password_file=path), name="site", client_id="c", clock=MonotonicClock())
    running = asyncio.create_task(link.run(), name="link")
    await until(lambda: link.state is LinkState.UNREACHABLE, within_s=2)
    assert "pipe cannot be read: it is a pipe, not a plain file" in link.snapshot().reason
    running.cancel()
    await asyncio.wait({running})
