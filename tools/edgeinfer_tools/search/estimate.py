"""Estimate what a model costs on a board from what it costs on another machine. Pure; every result is an estimate.

The model, in words that `WORDS` repeats in every profile made by it:

    t_board = t_here * ((1 - m) * C_here / C_board + m * B_here / B_board)

- C, compute: clock times the operations per clock of one core, by instruction set; what is multiplied in 8 bits by the
  8-bit kernels, the rest in float.
- B, memory: the bandwidth of main memory. m, the share of the time that memory takes: the bytes of the weights, read
  once per run at B_here, over t_here; nothing where the weights fit a core's cache, and at most 0.9.
- More threads than were measured here: Amdahl's law, through the runs with one thread and with the most.
- Half precision is no faster than float on a board that does not compute in it.
- Memory is taken over as it is: the same runtime allocates the same tensors.

The tables below are from the vendors' instruction throughputs; none of it was fitted on hardware. Caches, firmware,
operators that are not matrix products and cooling are left out. Expect the truth within a factor of two of the estimate
between x86 machines and of three across architectures; orders between forms of one model are more reliable than the
numbers. What a board has measured itself always replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.profile import Latency, OperatingCost
from edgeinfer_tools.machine import Machine
from edgeinfer_tools.targets import Target

WORDS = (
    "estimated: here * ((1 - m) * compute here / compute there + m * bandwidth here / bandwidth there), compute = "
    "clock * operations per clock by instruction set, m = weights read once per run; within a factor of 2 to 3"
)
ERROR_FACTOR = {"same": 2.0, "other": 3.0}
"""What to expect at worst, within one architecture and across."""
CACHE_BYTES = 1 << 20
"""Weights below this are taken to stay in a core's cache."""
MOST_MEMORY_SHARE = 0.9
DEFAULT_CLOCK_MHZ = 2000
DEFAULT_BANDWIDTH_MB_S = 12_000
"""Where a board file says none: one channel of DDR4 at about half its peak."""

FLOAT_OPS = {
    "x86-vnni": 32, "x86-avx512-novnni": 64, "x86-avx2": 32, "x86-sse": 8, "arm-dotprod": 16, "arm-nodotprod": 8,
}  # fmt: skip
"""Float operations of one core per clock, a fused multiply-add counted as two, by kernel family."""
INTEGER_OPS = {
    "x86-vnni": 128, "x86-avx512-novnni": 128, "x86-avx2": 64, "x86-sse": 16, "arm-dotprod": 64, "arm-nodotprod": 16,
}  # fmt: skip
"""8-bit operations, likewise."""
WIDE = 2
"""AVX-512 with VNNI has registers of twice the width of AVX-VNNI."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a machine can do, as far as the estimate looks at it."""

    name: str
    architecture: str
    cores: int
    float_ops_s: float
    """One core's."""
    integer_ops_s: float
    bandwidth_mb_s: float


def speed(name: str, architecture: str, flags: Iterable[str], *, cores: int, clock_mhz: float, mb_s: float) -> Speed:
    """Return the speed of a machine with these /proc/cpuinfo flags."""
    flags = set(flags)
    kernels = Target(name, architecture, tuple(sorted(flags))).kernels.name
    wide = WIDE if kernels == "x86-vnni" and "avx512_vnni" in flags else 1
    hz = clock_mhz * 1e6 * wide
    return Speed(name, architecture, cores, hz * FLOAT_OPS[kernels], hz * INTEGER_OPS[kernels], mb_s)


def board_speed(board: Board) -> Speed:
    """Return the speed of a board by its file."""
    cpu = board.cpu
    mb_s = board.memory.bandwidth_mb_s or DEFAULT_BANDWIDTH_MB_S
    return speed(
        board.name, cpu.architecture, cpu.instruction_sets, cores=cpu.cores, clock_mhz=cpu.max_clock_mhz, mb_s=mb_s
    )


def machine_speed(machine: Machine, architecture: str, *, mb_s: float) -> Speed:
    """Return the speed of the machine that measured."""
    clock = machine.clock_mhz or DEFAULT_CLOCK_MHZ
    return speed(machine.cpu, architecture, machine.flags, cores=machine.cores, clock_mhz=clock, mb_s=mb_s)


def bandwidth_here(size_bytes: int = 64 << 20, rounds: int = 5) -> float:
    """Return the bandwidth of this machine's main memory in MB/s: the fastest of a few copies, read and written."""
    import time

    source = np.ones(size_bytes // 8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best / 1e6


def factor(here: Speed, there: Speed, *, integer_share: float, weights_bytes: int, t_here_us: float) -> float:
    """Return by what a latency of one thread on `here` is multiplied for `there`.

    `integer_share` is the share of the multiplications that is done in 8 bits.
    """

    def effort(machine: Speed) -> float:
        return (1 - integer_share) / machine.float_ops_s + integer_share / machine.integer_ops_s

    compute = effort(there) / effort(here)
    memory = here.bandwidth_mb_s / there.bandwidth_mb_s
    share = 0.0
    if weights_bytes > CACHE_BYTES and t_here_us > 0:
        share = min(MOST_MEMORY_SHARE, weights_bytes / here.bandwidth_mb_s / t_here_us)  # MB/s is bytes per us
    return (1 - share) * compute + share * memory


def on_board(
    costs: Sequence[OperatingCost],
    here: Speed,
    there: Speed,
    *,
    integer_share: float,
    weights_bytes: int,
    threads: Iterable[int] = (),
    correction: float = 1.0,
) -> list[OperatingCost]:
    """Return the costs of one variant as estimated for a board, at the measured thread counts and at `threads`.

    Thread counts beyond the board's cores are left out. `correction` is by what the board's own measurements of other
    forms differ from this estimate.
    """
    plain = sorted((cost for cost in costs if cost.form == "plain"), key=lambda cost: cost.threads)
    by_threads = {cost.threads: cost for cost in plain}
    single, most = plain[0], plain[-1]
    wanted = sorted(count for count in {*by_threads, *threads} if count <= there.cores)
    times = correction * factor(
        here, there, integer_share=integer_share, weights_bytes=weights_bytes, t_here_us=single.latency.p50_us
    )
    found = []
    for count in wanted or [single.threads]:
        base = by_threads.get(count)
        if base is None:
            below = [cost for cost in plain if cost.threads < count]
            base = below[-1] if below else single
            gain = speed_up(single, most, count) / speed_up(single, most, base.threads)
        else:
            gain = 1.0
        found.append(_scaled(base, times / gain, threads=count))
    return found


def has_half(flags: Iterable[str]) -> bool:
    """Whether a CPU computes in half precision: elsewhere the runtime converts to float and back."""
    return not {"avx512_fp16", "asimdhp"}.isdisjoint(flags)


def no_faster(costs: Sequence[OperatingCost], floats: Sequence[OperatingCost]) -> list[OperatingCost]:
    """Return costs with the latency of the float model where theirs is lower, thread count by thread count.

    For half precision measured on a CPU that computes in it, and estimated for one that does not. [measured] pp-ocr-det
    takes 0.4 of float's time with AVX512-FP16.
    """
    known = {cost.threads: cost for cost in floats}
    found = []
    for cost in costs:
        slower = known.get(cost.threads)
        if slower is not None and slower.latency.p50_us > cost.latency.p50_us:
            cpu_us = max(cost.cpu_us_per_run, slower.cpu_us_per_run)
            cost = msgspec.structs.replace(cost, latency=slower.latency, cpu_us_per_run=cpu_us)  # noqa: PLW2901
        found.append(cost)
    return found


def speed_up(single: OperatingCost, most: OperatingCost, threads: int) -> float:
    """Return how much faster `threads` are than one, by Amdahl's law through two measurements."""
    if most.threads <= single.threads:
        serial = 0.3  # nothing is known; a small network's usual share
    else:
        ratio = most.latency.p50_us / single.latency.p50_us
        serial = min(1.0, max(0.0, (ratio - 1 / most.threads) / (1 - 1 / most.threads)))
    return 1 / (serial + (1 - serial) / threads)


def _scaled(cost: OperatingCost, times: float, *, threads: int) -> OperatingCost:
    def us(value: float) -> int:
        return max(1, round(value * times))

    took = cost.latency
    return msgspec.structs.replace(
        cost,
        threads=threads,
        latency=Latency(us(took.p50_us), us(took.p90_us), us(took.p99_us), us(took.mean_us), took.runs),
        load_ms=round(cost.load_ms * times, 3),
        cpu_us_per_run=round(cost.cpu_us_per_run * times * (threads / cost.threads if threads != cost.threads else 1)),
        clock_hz=None,
        energy_uj_per_run=None,
    )
