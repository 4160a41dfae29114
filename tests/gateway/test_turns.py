from __future__ import annotations

import asyncio
import itertools

import pytest

from edgeinfer.errors import ProtocolError
from edgeinfer.gateway.turns import MAX_JSON_BYTES, Turns, check_json_bytes
from tests.virtual_time import VirtualLoop, run_virtual


def _work_for(seconds: float) -> float:
    """Hold the loop for so long, in virtual time; return when that began."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    began_s = loop.time()
    loop._jumping.now += seconds
    return began_s


def test_others_have_the_loop_for_as_long_as_each_piece_of_work_had_it() -> None:
    async def main() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        began_s, others = loop.time(), list[float]()

        async def other() -> None:
            while True:
                others.append(loop.time())
                await asyncio.sleep(0.0005)

        watching = asyncio.create_task(other())
        works = [asyncio.create_task(turns.run(MAX_JSON_BYTES, lambda: _work_for(0.003))) for _ in range(5)]
        begun = [round((at_s - began_s) * 1000, 3) for at_s in await asyncio.gather(*works)]
        watching.cancel()
        assert begun == sorted(begun)
        assert all(later - earlier >= 6 for earlier, later in itertools.pairwise(begun))
        pauses = [later - earlier for earlier, later in itertools.pairwise(others)]
        assert max(pauses) < 0.004, "never two in a row"

    run_virtual(main())


def test_a_small_one_waits_for_nobody_and_a_large_one_not_when_it_is_alone() -> None:
    async def main() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        began_s = loop.time()
        assert not turns.would_wait(MAX_JSON_BYTES)
        assert await turns.run(MAX_JSON_BYTES, lambda: _work_for(0.003)) == began_s
        assert turns.would_wait(MAX_JSON_BYTES)
        assert not turns.would_wait(1000)
        assert await turns.run(1000, lambda: _work_for(0)) == began_s + 0.003
        await asyncio.sleep(0.003)
        assert not turns.would_wait(MAX_JSON_BYTES)

    run_virtual(main())


def test_work_that_fails_gives_the_turn_on() -> None:
    async def main() -> None:
        turns = Turns()
        with pytest.raises(ZeroDivisionError):
            await turns.run(MAX_JSON_BYTES, lambda: 1 / 0)
        assert await turns.run(MAX_JSON_BYTES, lambda: 7) == 7

    run_virtual(main())


def test_says_how_much_json_and_what_to_send_instead() -> None:
    check_json_bytes(MAX_JSON_BYTES)
    with pytest.raises(ProtocolError, match="has 131073 bytes, at most 131072 are read; send tensors as binary data"):
        check_json_bytes(MAX_JSON_BYTES + 1)
