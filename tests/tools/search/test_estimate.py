"""Estimates follow the stated formula, and are never better than what they are made from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.artifact.board import Board, known_boards, load_board
from edgeinfer_tools.search.estimate import Speed, board_speed, factor, has_half, no_faster, on_board, speed, speed_up
from tests.tools.search.bench import cost

HERE = Speed("here", "x86_64", 2, 100e9, 400e9, 10_000)


def twice(value: Speed) -> Speed:
    return replace(value, float_ops_s=value.float_ops_s * 2, integer_ops_s=value.integer_ops_s * 2)


def test_a_machine_like_this_one_takes_as_long() -> None:
    assert factor(HERE, HERE, integer_share=0.4, weights_bytes=50 << 20, t_here_us=9000) == pytest.approx(1)


def test_compute_scales_by_operations_and_memory_by_bandwidth() -> None:
    half = Speed("half", "x86_64", 2, 50e9, 100e9, 10_000)
    assert factor(HERE, half, integer_share=0, weights_bytes=0, t_here_us=1000) == pytest.approx(2)
    assert factor(HERE, half, integer_share=1, weights_bytes=0, t_here_us=1000) == pytest.approx(4)
    # 20 MB at 10 GB/s take 2 of 4 ms: that half does not scale with the clock.
    assert factor(HERE, half, integer_share=0, weights_bytes=20_000_000, t_here_us=4000) == pytest.approx(1.5)


def test_eight_bits_gain_nothing_where_there_are_no_kernels_for_them() -> None:
    pi4, pi5 = (board_speed(load_board(known_boards()[name])) for name in ("raspberry-pi-4-2gb", "raspberry-pi-5-8gb"))
    assert pi4.integer_ops_s / pi4.float_ops_s == 2
    assert pi5.integer_ops_s / pi5.float_ops_s == 4
    vnni = speed("v", "x86_64", ["avx2", "avx512f", "avx512_vnni"], cores=1, clock_mhz=2000, mb_s=1)
    avx2 = speed("a", "x86_64", ["avx2"], cores=1, clock_mhz=2000, mb_s=1)
    assert vnni.float_ops_s == 2 * avx2.float_ops_s
    assert vnni.integer_ops_s == 4 * avx2.integer_ops_s


@pytest.mark.parametrize("name", sorted(known_boards()))
def test_every_known_board_has_a_speed(name: str) -> None:
    found = board_speed(load_board(known_boards()[name]))
    assert found.float_ops_s > 1e9
    assert found.integer_ops_s >= found.float_ops_s


def test_more_threads_than_were_measured_follow_amdahl() -> None:
    single, double = cost("v", 10), cost("v", 6, threads=2)
    assert speed_up(single, double, 2) == pytest.approx(10 / 6)
    assert speed_up(single, double, 1000) == pytest.approx(5, rel=0.01)  # a fifth is serial
    four = Speed("four", "x86_64", 4, 100e9, 400e9, 10_000)
    found = on_board([single, double], HERE, four, integer_share=0, weights_bytes=0, threads=[4])
    assert [item.threads for item in found] == [1, 2, 4]
    assert found[2].latency.p50_us == pytest.approx(4000, rel=0.01)


def test_thread_counts_beyond_the_board_are_left_out(board: Board) -> None:
    single = replace(board, cpu=replace(board.cpu, cores=1))
    there = board_speed(single)
    found = on_board([cost("v", 10), cost("v", 6, threads=2)], HERE, there, integer_share=0, weights_bytes=0)
    assert [item.threads for item in found] == [1]


@given(st.floats(0, 1), st.integers(0, 1 << 30), st.floats(1, 1e7))
def test_a_faster_machine_is_never_slower(share: float, size: int, took: float) -> None:
    slow, fast = (
        factor(HERE, there, integer_share=share, weights_bytes=size, t_here_us=took) for there in (HERE, twice(HERE))
    )
    assert fast <= slow


def test_half_precision_is_no_faster_where_a_board_does_not_compute_in_it(board: Board) -> None:
    assert not has_half(board.cpu.instruction_sets)
    assert has_half(["asimdhp"])
    floats = [cost("fp32", 10), cost("fp32", 6, threads=2)]
    found = no_faster([cost("fp16", 4), cost("fp16", 7, threads=2)], floats)
    assert [item.latency.p50_us for item in found] == [10_000, 7_000]
    assert [item.variant for item in found] == ["fp16", "fp16"]
