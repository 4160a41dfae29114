"""One alarm rings for the first of many moments, however they are set."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.clock import NS_PER_MS, Alarm, LoopClock
from tests.virtual_time import run_virtual


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=30))
def test_nothing_that_was_set_is_missed(steps: list[tuple[int, int]]) -> None:
    async def main() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        due: list[int] = []
        late_ns: list[int] = []

        def look() -> None:
            now_ns = clock.now_ns()
            for at_ns in [at_ns for at_ns in due if at_ns <= now_ns]:
                due.remove(at_ns)
                late_ns.append(now_ns - at_ns)
            for at_ns in due:
                alarm.set(at_ns)

        alarm = Alarm(look)
        for pause_ms, in_ms in steps:
            await asyncio.sleep(pause_ms / 1000)
            due.append(clock.now_ns() + in_ms * NS_PER_MS)
            alarm.set(due[-1])
        await asyncio.sleep(0.1)
        assert not due
        assert len(late_ns) == len(steps)
        assert max(late_ns) <= 1000, "the virtual clock is a float of seconds"

    run_virtual(main())


def test_a_stopped_alarm_does_not_ring() -> None:
    async def main() -> None:
        rung: list[int] = []
        alarm = Alarm(lambda: rung.append(1))
        alarm.set(LoopClock(asyncio.get_running_loop()).now_ns() + NS_PER_MS)
        alarm.stop()
        await asyncio.sleep(1)
        assert not rung

    run_virtual(main())
