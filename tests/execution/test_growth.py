"""A worker above its reservation is asked to shrink, then replaced, and never asked more than makes sense."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.clock import NS_PER_S
from edgeinfer.execution.growth import ASK_AGAIN_NS, FIRST_PAUSE_NS, LONGEST_PAUSE_NS, GrowthWatch, Remedy, WorkerSize

RESERVED = 100


def seen(watch: GrowthWatch, at_s: float, held: int, *, shrinks: int = 0, shrunk: int = 0, pid: int = 7) -> str:
    return watch.remedy(WorkerSize(pid, held, shrinks, shrunk), round(at_s * NS_PER_S)).value


def test_within_its_reservation_it_is_left_alone() -> None:
    watch = GrowthWatch(RESERVED)
    assert [seen(watch, second, RESERVED) for second in range(100)] == ["nothing"] * 100


def test_asked_once_and_helped() -> None:
    watch = GrowthWatch(RESERVED)
    assert seen(watch, 0, 300) == "shrink"
    assert seen(watch, 1, 300) == "nothing", "it is busy with a run"
    assert seen(watch, 2, 60, shrinks=1, shrunk=60) == "nothing"
    assert seen(watch, 90, 300, shrinks=1, shrunk=60) == "shrink"


def test_a_large_request_each_second_is_no_reason_to_replace_it() -> None:
    watch = GrowthWatch(RESERVED)
    for second in range(100):
        assert seen(watch, second, 300, shrinks=second, shrunk=60) == "shrink"


def test_one_that_cannot_shrink_is_replaced() -> None:
    watch = GrowthWatch(RESERVED)
    assert seen(watch, 0, 300) == "shrink"
    assert seen(watch, 1, 280, shrinks=1, shrunk=280) == "recycle"
    assert seen(watch, 2, 80, pid=8) == "nothing"


def test_where_fresh_ones_grow_too_replacing_gets_rare_and_asking_goes_on_slowly() -> None:
    watch, at_s, pid, recycled, asked = GrowthWatch(RESERVED), 0, 1, list[int](), 0
    shrinks = 0
    while at_s < 6 * 3600:
        match seen(watch, at_s, 300, shrinks=shrinks, shrunk=300, pid=pid):
            case "shrink":
                asked, shrinks = asked + 1, shrinks + 1
            case "recycle":
                recycled.append(at_s)
                pid, shrinks = pid + 1, 0
        at_s += 1
    pauses = [later - earlier for earlier, later in itertools.pairwise(recycled)]
    assert pauses[0] >= FIRST_PAUSE_NS / NS_PER_S
    assert all(later >= earlier for earlier, later in itertools.pairwise(pauses))
    assert LONGEST_PAUSE_NS / NS_PER_S <= pauses[-1] < LONGEST_PAUSE_NS / NS_PER_S + ASK_AGAIN_NS / NS_PER_S + 1
    assert asked <= 6 * 3600 * NS_PER_S / ASK_AGAIN_NS + len(recycled)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 200), st.integers(0, 200), st.booleans()), max_size=200))
def test_nobody_is_replaced_who_was_not_asked_and_has_not_answered(
    looks: list[tuple[int, int, int, bool]],
) -> None:
    watch, asked, answers = GrowthWatch(RESERVED), dict[int, int](), dict[int, int]()
    for at_s, (pid, held, shrunk, answered) in enumerate(looks):
        if answered and pid in asked:
            answers[pid] = answers.get(pid, 0) + 1
        size = WorkerSize(pid, held, answers.get(pid, 0), shrunk)
        match watch.remedy(size, at_s * NS_PER_S):
            case Remedy.SHRINK:
                asked[pid] = answers.get(pid, 0)
            case Remedy.RECYCLE:
                assert answers.get(pid, 0) > asked[pid]
                assert held > RESERVED
                assert shrunk > RESERVED
                del asked[pid]
