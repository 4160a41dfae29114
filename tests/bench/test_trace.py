from __future__ import annotations

import pytest

from edgeinfer_bench.trace import FOLDER, LONG_US, SHORT_US, SLACK_US, Arrivals, Sizes, encode, generate, read_trace

KINDS: list[tuple[Sizes, Arrivals]] = [
    ("equal", "poisson"), ("equal", "bursty"), ("mixed", "poisson"), ("mixed", "bursty"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "arrivals"), KINDS)
def test_the_committed_trace_is_what_the_generator_makes(sizes: Sizes, arrivals: Arrivals) -> None:
    trace = generate(sizes, arrivals)
    assert (FOLDER / f"{trace.name}.json").read_bytes() == encode(trace)
    assert read_trace(sizes, arrivals)[0] == trace


@pytest.mark.parametrize(("sizes", "arrivals"), KINDS)
def test_a_trace_holds_what_it_says(sizes: Sizes, arrivals: Arrivals) -> None:
    trace = generate(sizes, arrivals)
    jobs = trace.until(trace.span_us)
    assert len(jobs) == len(trace.at_us)
    assert [job.at_us for job in jobs] == sorted(job.at_us for job in jobs)
    assert all(SLACK_US[0] <= job.slack_us <= SLACK_US[1] for job in jobs)
    assert sum(job.firm for job in jobs) / len(jobs) == pytest.approx(0.5, abs=0.08)
    assert sum(job.size_us for job in jobs) / trace.span_us == pytest.approx(1.0, abs=0.15)


def test_half_of_the_work_of_a_mixed_trace_is_in_short_jobs() -> None:
    jobs = generate("mixed", "poisson").until(1e9)
    short_us = sum(job.size_us for job in jobs if job.size_us == SHORT_US)
    assert {job.size_us for job in jobs} == {SHORT_US, LONG_US}
    assert short_us / sum(job.size_us for job in jobs) == pytest.approx(0.5, abs=0.05)


def test_bursts_are_denser_than_a_poisson_process() -> None:
    def dispersion(arrivals: Arrivals) -> float:
        """Return variance over mean of the arrivals in steps of 50 ms: 1 for a Poisson process."""
        trace = generate("mixed", arrivals)
        steps = [0] * (trace.span_us // 50_000)
        for at_us in trace.at_us:
            steps[at_us // 50_000] += 1
        mean = sum(steps) / len(steps)
        return sum((count - mean) ** 2 for count in steps) / len(steps) / mean

    assert dispersion("bursty") > 2 * dispersion("poisson")


def test_a_trace_can_be_cut_short() -> None:
    trace = generate("equal", "poisson")
    assert [job.at_us for job in trace.until(100_000)] == [at for at in trace.at_us if at < 100_000]
