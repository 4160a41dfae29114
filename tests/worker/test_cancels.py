"""Cancels reach a worker's second thread in order, and a worker that is gone or stuck is noticed."""

from __future__ import annotations

import os

import pytest

from edgeinfer.worker.cancels import CancelPipe, read_cancels
from edgeinfer.worker.channel import ChannelClosed, ChannelFull


def test_every_run_number_arrives_in_order_until_the_daemon_is_gone() -> None:
    pipe, heard = CancelPipe(), list[int]()
    worker_end = pipe.open()
    numbers = [*range(1, 200), 1 << 40]
    for number in numbers:
        pipe.send(number)
    pipe.close()
    pipe.close()
    read_cancels(worker_end, heard.append)  # returns: the daemon's end is closed
    assert heard == numbers
    os.close(worker_end)


def test_a_worker_that_does_not_read_is_noticed_after_a_bounded_number() -> None:
    pipe = CancelPipe()
    worker_end = pipe.open()

    def send_for_ever() -> None:
        for number in range(1 << 20):
            pipe.send(number)

    with pytest.raises(ChannelFull):
        send_for_ever()
    pipe.close()
    os.close(worker_end)


def test_a_worker_that_is_gone_is_noticed() -> None:
    pipe = CancelPipe()
    with pytest.raises(ChannelClosed):
        pipe.send(1)  # not open yet
    os.close(pipe.open())
    with pytest.raises(ChannelClosed):
        pipe.send(1)
    pipe.close()
    with pytest.raises(ChannelClosed):
        pipe.send(1)
