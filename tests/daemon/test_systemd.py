"""sd_notify and the watchdog, against a real datagram socket and virtual time."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer.clock import NS_PER_S, LoopClock, MonotonicClock
from edgeinfer.daemon.systemd import Notifier, Watchdog, extended_start
from tests.virtual_time import run_virtual

WATCHDOG_NS = 2 * NS_PER_S


class Manager:
    """What systemd is to us: a bound datagram socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def received(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return messages


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = (
        f"@edgeinfer-test-{os.getpid()}-{id(request)}" if request.param == "abstract" else str(tmp_path / "notify")
    )
    manager = Manager(address)
    yield manager
    manager.socket.close()


def test_messages_arrive_as_systemd_reads_them(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    notifier.ready("2 models, 1 loop")
    notifier.status("draining\nsecond line")
    notifier.extend_timeout(30 * NS_PER_S)
    notifier.stopping()
    notifier.ping()
    assert manager.received() == [
        "READY=1\nSTATUS=2 models, 1 loop",
        "STATUS=draining",
        "EXTEND_TIMEOUT_USEC=30000000",
        "STOPPING=1",
        "WATCHDOG=1",
    ]


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier.from_environ({})
    assert not notifier.listening
    assert notifier.ready()
    assert notifier.watchdog_ns is None
    assert (
        asyncio.run(asyncio.wait_for(Watchdog(notifier, progress=lambda: 0, clock=MonotonicClock()).run(), 1)) is None
    )


@pytest.mark.parametrize("address", ["vsock:2:1234", "relative", "/nowhere/at/all"])
def test_an_address_that_cannot_be_reached_never_raises(address: str) -> None:
    notifier = Notifier(address)
    assert notifier.ready() is (address != "/nowhere/at/all")
    notifier.close()


def test_children_do_not_inherit_our_voice() -> None:
    environ = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "7", "HOME": "/"}
    notifier = Notifier.from_environ(environ, pid=7)
    assert environ == {"HOME": "/"}
    assert notifier.watchdog_ns == WATCHDOG_NS


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"WATCHDOG_USEC": "2000000"}, WATCHDOG_NS),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "7"}, WATCHDOG_NS),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_is_only_ours_when_meant_for_us(environ: dict[str, str], expected: int | None) -> None:
    assert Notifier.from_environ(dict(environ), pid=7).watchdog_ns == expected


def test_pings_about_every_second_for_a_watchdog_of_two(manager: Manager) -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        notifier = Notifier(manager.address, watchdog_ns=WATCHDOG_NS)
        arrivals: list[float] = []
        loop.add_reader(manager.socket, lambda: arrivals.extend([loop.time()] * len(manager.received())))
        clock = LoopClock(loop)
        task = asyncio.create_task(Watchdog(notifier, progress=lambda: int(loop.time() * 10), clock=clock).run())
        await asyncio.sleep(60.5)
        task.cancel()
        return arrivals

    arrivals = run_virtual(main())
    assert len(arrivals) == 60
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert all(gap == pytest.approx(1.0, abs=0.01) for gap in gaps)


def test_pings_stop_while_the_scheduler_is_stuck_and_come_back_at_once(manager: Manager) -> None:
    stuck_since = 0.0

    async def main() -> tuple[list[str], list[str], list[str]]:
        nonlocal stuck_since
        loop = asyncio.get_running_loop()
        notifier = Notifier(manager.address, watchdog_ns=WATCHDOG_NS)
        task = asyncio.create_task(
            Watchdog(notifier, progress=lambda: int(10 * (stuck_since or loop.time())), clock=LoopClock(loop)).run()
        )
        await asyncio.sleep(3.5)
        stuck_since = loop.time()
        await asyncio.sleep(0.6)  # the ping that is due knows only of the time before
        alive = manager.received()
        await asyncio.sleep(3600)  # stuck, while the event loop itself is fine
        stuck = manager.received()
        stuck_since = 0.0
        await asyncio.sleep(0.2)
        back = manager.received()
        task.cancel()
        return alive, stuck, back

    alive, stuck, back = run_virtual(main())
    assert alive == ["WATCHDOG=1"] * 4
    assert stuck == ["STATUS=the scheduler makes no progress; the watchdog restarts the service unless it resumes"]
    assert back[0] == "WATCHDOG=1"


@pytest.mark.slow
def test_a_ping_that_systemd_had_no_room_for_is_sent_again_before_the_time_is_up(manager: Manager) -> None:
    notifier = Notifier(manager.address, watchdog_ns=WATCHDOG_NS)
    while notifier.status("filling the queue"):
        pass

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(
            Watchdog(notifier, progress=lambda: int(loop.time() * 10), clock=LoopClock(loop)).run()
        )
        await asyncio.sleep(1.05)
        assert "WATCHDOG=1" not in manager.received()
        await asyncio.sleep(0.15)  # 1.2 s of 2 s
        task.cancel()
        return manager.received()

    assert "WATCHDOG=1" in run_virtual(main())


def test_a_slow_start_asks_for_time_until_its_limit_and_not_beyond(manager: Manager) -> None:
    async def main() -> tuple[int, int, list[str]]:
        clock = LoopClock(asyncio.get_running_loop())
        notifier = Notifier(manager.address)
        async with extended_start(notifier, clock=clock, every_ns=10 * NS_PER_S, limit_ns=60 * NS_PER_S):
            await asyncio.sleep(59)
            during = manager.received()
            await asyncio.sleep(600)
            beyond = manager.received()
        await asyncio.sleep(100)
        return len(during), len(beyond), during

    count, beyond, messages = run_virtual(main())
    assert (count, beyond) == (6, 0)
    assert set(messages) == {"EXTEND_TIMEOUT_USEC=30000000"}


def test_extending_ends_with_the_body_even_when_it_raises(manager: Manager) -> None:
    async def main() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        with pytest.raises(RuntimeError, match="load failed"):
            async with extended_start(Notifier(manager.address), clock=clock):
                raise RuntimeError("load failed")
        await asyncio.sleep(100)

    run_virtual(main())
    assert len(manager.received()) <= 1


@pytest.mark.slow
def test_a_frozen_event_loop_stops_the_pings(manager: Manager) -> None:
    """On the real clock, in another process: the loop blocks, so no ping may come from anywhere else."""
    script = """
import asyncio, os, time
from edgeinfer.clock import LoopClock
from edgeinfer.daemon.systemd import Notifier, Watchdog
async def main():
    loop = asyncio.get_running_loop()
    notifier = Notifier.from_environ(os.environ)
    task = asyncio.create_task(Watchdog(notifier, progress=lambda: int(loop.time() * 1000), clock=LoopClock(loop)).run())
    await asyncio.sleep(0.5)
    notifier.status("freezing")
    time.sleep(0.5)
    os._exit(0)
asyncio.run(main())
"""
    environ = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000"}
    environ.pop("WATCHDOG_PID", None)
    subprocess.run([sys.executable, "-c", script], env=environ, check=True, timeout=30)
    messages = manager.received()
    frozen = messages.index("STATUS=freezing")
    assert 3 <= messages[:frozen].count("WATCHDOG=1") <= 5
    assert messages[frozen + 1 :] == []
