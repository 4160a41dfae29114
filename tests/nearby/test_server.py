"""Nearby service and offload executor talk to each other over a real broker."""

from __future__ import annotations

import pytest

from edgeinfer.request import Placement, Result
from tests.nearby.rig import open_site
from tests.system.broker import Broker

pytestmark = pytest.mark.system


async def test_an_offloaded_request_is_answered_next_door(broker: Broker) -> None:
    async with open_site(broker.section()) as site:
        await site.device()
        await site.peer()
        request = site.request()
        ending = await site.executor.execute(request)
        assert isinstance(ending, Result), ending
        assert ending.placement is Placement.NEARBY
        assert ending.where == "hall"
        assert site.answers(request, ending)
        print(request.timeline, site.executor.snapshot())
