from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer_bench.bound import Job, most_on_time

jobs_of = st.lists(
    st.builds(
        lambda arrival, window, work: Job(arrival, arrival + window, work),
        st.integers(0, 12), st.integers(0, 8), st.integers(1, 5),
    ),
    max_size=7,
)  # fmt: skip


def largest_matching(jobs: list[Job], cores: int) -> int:
    """Match instants of cores with units of work by augmenting paths: slow, and right without further thought."""
    units = [(job.arrival, job.due) for job in jobs for _ in range(job.work)]
    slots = [instant for instant in range(max((job.due for job in jobs), default=0)) for _ in range(cores)]
    served: dict[int, int] = {}

    def serve(slot: int, tried: set[int]) -> bool:
        for unit, (arrival, due) in enumerate(units):
            if arrival <= slots[slot] < due and unit not in tried:
                tried.add(unit)
                if unit not in served or serve(served[unit], tried):
                    served[unit] = slot
                    return True
        return False

    return sum(serve(slot, set()) for slot in range(len(slots)))


@given(jobs_of, st.integers(1, 3))
def test_the_bound_is_the_largest_matching_of_instants_and_work(jobs: list[Job], cores: int) -> None:
    bound = most_on_time(jobs, cores=cores)
    best = largest_matching(jobs, cores)
    # Whole instants can't be shared by cores that come free within one; the bound may use what is left of them.
    assert bound == best if cores == 1 else bound >= best


@given(jobs_of, st.integers(1, 3))
def test_nobody_is_served_more_than_was_asked_or_than_there_is_time(jobs: list[Job], cores: int) -> None:
    bound = most_on_time(jobs, cores=cores)
    assert bound <= sum(min(job.work, (job.due - job.arrival) * cores) for job in jobs)
    assert bound <= cores * max((job.due for job in jobs), default=0)


def test_what_cannot_be_finished_still_counts_in_part() -> None:
    assert most_on_time([Job(0, 4, 10)]) == 4
    assert most_on_time([Job(0, 4, 3), Job(0, 4, 3)]) == 4


def test_urgent_work_interrupts() -> None:
    assert most_on_time([Job(0, 12, 10), Job(3, 5, 2)]) == 12


def test_a_job_due_on_arrival_gets_nothing() -> None:
    assert most_on_time([Job(5, 5, 1)]) == 0
    assert most_on_time([]) == 0


def test_there_is_no_bound_without_cores() -> None:
    with pytest.raises(ValueError, match="0 cores"):
        most_on_time([], cores=0)
