"""A publish that the broker refuses and nobody waits for is told in the log: else a command just has no answer."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.errors import LinkError
from edgeinfer.mqtt.link import Keep, Message, MqttLink
from tests.nearby.rig import until
from tests.system.broker import Broker

INBOX = "edgeinfer/v1/lab/operator/inbox"

pytestmark = pytest.mark.system


async def test_a_refused_reply_is_a_warning_that_names_the_topic(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "acl").write_text("topic readwrite edgeinfer/v1/lab/cam-1/#\n")
    with Broker(tmp_path, [f"acl_file {tmp_path / 'acl'}"]) as broker:
        link = MqttLink(broker.section(), name="fleet", client_id="cam-1", clock=MonotonicClock())
        running = asyncio.create_task(link.run(), name="link")
        await until(lambda: link.connected)
        for payload in (b"1", b"2"):
            link.send(Message(INBOX, payload, qos=1), Keep.FIFO)
        link.send(Message("edgeinfer/v1/lab/cam-1/state", b"allowed", qos=1), Keep.FIFO)
        with pytest.raises(LinkError, match="refused"):
            await link.publish(Message("edgeinfer/v1/lab/cam-2/state", b"told to its caller"), timeout_s=2)
        await until(lambda: not link.snapshot().unfinished)
        running.cancel()
        await asyncio.wait({running})
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "one line for a topic within a minute, none for what a caller is told"
    assert f"refused={INBOX} reason=0x87" in warnings[0]
    assert link.snapshot().counters["refused"] == 3


async def test_publishes_that_gave_up_take_no_place_from_those_that_wait(tmp_path: Path) -> None:
    """A broker that is frozen for a while must not cost the publishes that come once it answers again."""
    with Broker(tmp_path) as broker:
        link = MqttLink(broker.section(), name="site", client_id="cam-1", clock=MonotonicClock())
        running = asyncio.create_task(link.run(), name="link")
        await until(lambda: link.connected)
        broker.freeze()
        tried = [link.publish(Message("t", b"x"), timeout_s=0.05) for _ in range(60)]
        lost = await asyncio.gather(*tried, return_exceptions=True)
        assert all(isinstance(error, LinkError) for error in lost)
        assert not link._outgoing._turns
        broker.thaw()
        assert await link.publish(Message("t", b"x"), timeout_s=5) in {0, 0x10}
        running.cancel()
        await asyncio.wait({running})
