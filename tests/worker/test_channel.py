"""Messages arrive whole, in order and with their descriptors, or the channel says why not."""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec
import pytest

from edgeinfer.errors import ProtocolError
from edgeinfer.worker.channel import (
    MAX_MESSAGE_BYTES,
    ChannelClosed,
    ChannelFull,
    DaemonEnd,
    ProcessEnd,
)
from edgeinfer.worker.messages import Attach, Detach, ForgetStream, FromWorker, Log, ToWorker
from edgeinfer.worker.pair import make_pair


class Ends:
    """Both ends of a channel, and what the daemon's heard."""

    def __init__(self, out_limit: int = 4) -> None:
        ours, theirs = make_pair()
        self.heard: list[FromWorker] = []
        self.closed: list[str] = []
        self.raw = theirs
        self.process: ProcessEnd[ToWorker, FromWorker] = ProcessEnd(theirs, ToWorker)
        self.daemon: DaemonEnd[FromWorker, ToWorker] = DaemonEnd(
            ours,
            asyncio.get_running_loop(),
            FromWorker,
            on_message=self.heard.append,
            on_closed=self.closed.append,
            out_limit=out_limit,
        )


async def until(happened: object) -> None:
    async with asyncio.timeout(1):
        while not happened():  # type: ignore[operator]
            await asyncio.sleep(0)


async def test_descriptors_arrive_with_their_message_and_close_on_exec() -> None:
    ends = Ends()
    fd = os.memfd_create("test")
    ends.daemon.send(Attach(7, 11), [fd])
    message, fds = ends.process.receive()
    assert message == Attach(7, 11)
    assert len(fds) == 1
    assert os.fstat(fds[0]).st_ino == os.fstat(fd).st_ino
    assert not os.get_inheritable(fds[0])
    for each in (fd, *fds):
        os.close(each)
    ends.daemon.close()


async def test_process_that_does_not_read_fills_a_bounded_queue_and_loses_no_order() -> None:
    ends = Ends(out_limit=4)
    sent = 0

    def send_for_ever() -> None:
        nonlocal sent
        while True:
            ends.daemon.send(ForgetStream("x" * 50_000 + str(sent)))
            sent += 1

    with pytest.raises(ChannelFull):
        send_for_ever()
    assert sent > 4
    for number in range(sent):  # reading lets the queued ones follow
        message, _ = ends.process.receive()
        assert isinstance(message, ForgetStream)
        assert message.stream.lstrip("x") == str(number)
        for _ in range(3):  # turns of the loop, in which it sends on
            await asyncio.sleep(0)
    ends.daemon.send(Detach(1))
    assert ends.process.receive() == (Detach(1), [])
    ends.daemon.close()


async def test_message_larger_than_the_bound_is_refused_before_it_is_sent() -> None:
    ends = Ends()
    with pytest.raises(ProtocolError, match=rf"ForgetStream of \d+ bytes exceeds .* {MAX_MESSAGE_BYTES}"):
        ends.daemon.send(ForgetStream("x" * MAX_MESSAGE_BYTES))
    ends.daemon.send(Detach(2))
    assert ends.process.receive() == (Detach(2), [])
    ends.daemon.close()


@pytest.mark.parametrize("garbage", [b"\xc1", b"nonsense", b"\x81\xa4type\xa5Nobod", b"\x00" * 1000])
async def test_nonsense_closes_the_channel_and_says_so_once(garbage: bytes) -> None:
    ends = Ends()
    ends.process.send(Log(30, "before"))
    ends.raw.send(garbage)
    await until(lambda: ends.closed)
    assert ends.heard == [Log(30, "before")]
    assert len(ends.closed) == 1
    assert "unreadable" in ends.closed[0]
    with pytest.raises(ChannelClosed):
        ends.daemon.send(Detach(1))


async def test_oversize_packet_from_the_process_is_a_protocol_error_not_a_truncated_message() -> None:
    ends = Ends()
    ends.raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE_BYTES)
    ends.raw.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    await until(lambda: ends.closed)
    assert str(MAX_MESSAGE_BYTES) in ends.closed[0]


async def test_descriptors_from_a_process_are_closed_unseen() -> None:
    ends = Ends()
    read_fd, write_fd = os.pipe()
    socket.send_fds(ends.raw, [msgspec.msgpack.encode(Log(30, "here is one"))], [write_fd])
    os.close(write_fd)
    await until(lambda: ends.heard)
    assert ends.heard == [Log(30, "here is one")]
    assert os.read(read_fd, 1) == b""  # nobody holds the other end
    os.close(read_fd)
    ends.daemon.close()
    ends.process.close()


async def test_end_of_either_side_is_seen_by_the_other() -> None:
    ends = Ends()
    ends.process.close()
    await until(lambda: ends.closed)
    assert ends.closed == [""]
    other = Ends()
    other.daemon.close()
    with pytest.raises(ChannelClosed):
        other.process.receive()
    with pytest.raises(ChannelClosed):
        other.process.send(Log(30, "anybody?"))
    await asyncio.sleep(0)
    assert other.closed == []  # it was us
