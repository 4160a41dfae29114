"""Say what boards could sustain with a bundle, before anybody buys one. Estimates, every figure of it.

Latency is scaled as `search.estimate` says. Heat follows the first-order model of the board file's [lab] table, at
rest:

    T = ambient + R * (idle + watt_per_core * busy)

`busy` is how many cores compute on average. So a temperature limit allows so many core-seconds a second, and a run
costs its CPU time. The rate that stays below our first trip is one that is never held back; the rate up to the
firmware's trip is the most that the board gives before it throttles.
"""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.manifest import Manifest, Variant
from edgeinfer.artifact.profile import OperatingCost, Profile
from edgeinfer.errors import ConfigError, Problem
from edgeinfer.worker.costing import measure_variants
from edgeinfer_tools.machine import this_machine
from edgeinfer_tools.search import estimate
from edgeinfer_tools.sizes import human

MILLI = 1000
COLDEST_C, HOTTEST_C = -60.0, 120.0


@dataclass(frozen=True, slots=True)
class Fit:
    """What one board could do with one variant at one thread count."""

    board: str
    variant: str
    threads: int
    p99_us: int
    copies: int
    """Workers that its cores and its memory have room for."""
    peak_bytes: int
    ceiling_bytes: int
    unthrottled_hz: float
    """Runs a second with all copies, whatever the heat."""
    cool_hz: float | None
    """What it could sustain below our first trip; None: the board file has no thermal model."""
    firmware_hz: float | None
    """The same up to the firmware's trip."""
    duty_cycle: float | None
    """Of `cool_hz`: the share of the time that its copies run."""
    problem: str
    """Why it cannot do it at all; empty when it can."""
    estimated: bool


def sustained_cores(board: Board, limit_c: float, ambient_c: float) -> float | None:
    """Return how many cores may be busy on average for ever below a temperature; None without a thermal model."""
    if board.lab is None:
        return None
    power_w = (limit_c - ambient_c) / board.lab.resistance_c_per_w
    return min(float(board.cpu.cores), max(0.0, (power_w - board.lab.idle_w) / board.lab.watt_per_core))


def fit_variant(
    board: Board, variant: Variant, costs: Sequence[OperatingCost], *, ambient_c: float, deadline_ms: float | None,
    estimated: bool,
) -> list[Fit]:  # fmt: skip
    """Return the fits of a variant whose costs on the board are given, one for each."""
    found = []
    missing = sorted(set(variant.instruction_sets) - set(board.cpu.instruction_sets))
    for cost in costs:
        ceiling = int(board.memory.ceiling)
        copies = min(max(1, board.cpu.cores // cost.threads), ceiling // cost.load_peak_bytes)
        problem = f"needs {', '.join(missing)}, which its file does not list" if missing else ""
        if copies < 1:
            problem = f"needs {human(cost.load_peak_bytes)}, the ceiling is {human(ceiling)}"
        run_s, cpu_s = cost.latency.mean_us / 1e6, max(cost.cpu_us_per_run, 1) / 1e6
        unthrottled = copies / run_s

        def rate(limit_mc: int, most: float = unthrottled, cpu_s: float = cpu_s) -> float | None:
            busy = sustained_cores(board, limit_mc / MILLI, ambient_c)
            return None if busy is None else min(most, busy / cpu_s)

        first = board.thermal.trips[0].at_c if board.thermal.trips else board.thermal.firmware_trip_c
        cool = rate(first)
        if not problem and deadline_ms is not None and cost.latency.p99_us > deadline_ms * MILLI:
            problem = f"p99 is over the deadline of {deadline_ms:g} ms that it was built for"
        found.append(
            Fit(
                board=board.name,
                variant=variant.name,
                threads=cost.threads,
                p99_us=cost.latency.p99_us,
                copies=copies,
                peak_bytes=cost.load_peak_bytes,
                ceiling_bytes=ceiling,
                unthrottled_hz=round(unthrottled, 3),
                cool_hz=None if cool is None else round(cool, 3),
                firmware_hz=None if (most := rate(board.thermal.firmware_trip_c)) is None else round(most, 3),
                duty_cycle=None if cool is None or not unthrottled else round(cool / unthrottled, 3),
                problem=problem,
                estimated=estimated,
            )
        )
    return found


def fit(
    bundle: Path, boards: Sequence[Board], *, ambient_c: float, profile: Profile | None, seconds: float
) -> list[Fit]:
    """Return what each board could sustain with each variant of a bundle, at one thread and at all of its cores.

    Measures the variants here first. `profile` has what one of the boards has measured itself: its rows are then that.

    Raises:
        ArtifactError: it is no sound bundle.
        ConfigError: the profile is of another model, or the air is none.
        SessionError: a variant does not run here.
    """
    manifest, _ = verify_bundle(bundle)
    problems = []
    if not COLDEST_C <= ambient_c <= HOTTEST_C:
        problems.append(Problem("--ambient", f"{ambient_c:g} C is not between {COLDEST_C:g} and {HOTTEST_C:g}"))
    if profile is not None and profile.model != manifest.name:
        problems.append(Problem("--profile-from", f"is of {profile.model}, this is {manifest.name}"))
    if problems:
        raise ConfigError("fit", tuple(problems))
    machine = this_machine()
    _, costs = asyncio.run(measure_variants(manifest, bundle, threads=sorted({1, machine.cores}), seconds=seconds))
    here = estimate.machine_speed(machine, platform.machine(), mb_s=estimate.bandwidth_here())
    shares = _integer_shares(bundle)
    found = []
    for board in boards:
        for variant in manifest.variants:
            own = [
                cost for cost in (profile.costs if profile is not None and profile.board == board.name else ())
                if cost.variant == variant.name and cost.form == "plain"
            ]  # fmt: skip
            rows = own or estimate.on_board(
                [cost for cost in costs if cost.variant == variant.name],
                here,
                estimate.board_speed(board),
                integer_share=shares.get(variant.name, 0.0),
                weights_bytes=_weights_bytes(manifest, variant),
                threads=[1, board.cpu.cores],
            )
            rows = own or [cost for cost in rows if cost.threads in {1, board.cpu.cores}]
            measured = bool(own) and profile is not None and profile.origin == "measured"
            found += fit_variant(
                board, variant, rows, ambient_c=ambient_c, deadline_ms=manifest.deadline_ms, estimated=not measured
            )
    return found


def _weights_bytes(manifest: Manifest, variant: Variant) -> int:
    return sum(file.size_bytes for name, file in manifest.files.items() if name.startswith(variant.file))


def _integer_shares(bundle: Path) -> dict[str, float]:
    """Return by variant what share of the multiplications the report says is done in 8 bits."""
    try:
        report: dict[str, Any] = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
        return {
            str(item["name"]): 0.0
            if item["method"] in {"keep", "fp16"}
            else 1 - float(item["stayed_float"]["multiplications_share"])
            for item in report["variants"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def as_json(found: Sequence[Fit], *, ambient_c: float) -> dict[str, Any]:
    """Return the fits, fit for JSON."""
    return {
        "ambient_c": ambient_c,
        "estimated": any(item.estimated for item in found),
        "estimate_model": estimate.WORDS,
        "fits": [asdict(item) for item in found],
    }


def as_text(found: Sequence[Fit], *, ambient_c: float) -> str:
    """Return the table for people."""
    board = max(len(item.board) for item in found)
    variant = max(7, *(len(item.variant) for item in found))
    head = f"{'p99 ms':>9} {'copies':>6} {'peak':>9} {'below trip':>10} {'firmware':>9} {'duty':>5}"
    lines = [
        f"ESTIMATES at {ambient_c:g} C ambient, by clock, instruction sets, memory and the boards' thermal models;",
        "latency within a factor of 2 to 3. Rates are runs a second that can go on for ever.",
        "",
        f"{'board':<{board}}  {'variant':<{variant}} {'thr':>3} {head}",
    ]
    for item in found:
        p99 = f"{'~' if item.estimated else ''}{item.p99_us / 1000:.2f}"
        duty = "" if item.duty_cycle is None else f"{item.duty_cycle:.0%}"
        rates = f"{_rate(item.cool_hz):>10} {_rate(item.firmware_hz):>9} {duty:>5}"
        figures = f"{p99:>9} {item.copies:>6} {human(item.peak_bytes):>9} {rates}"
        lines.append(
            f"{item.board:<{board}}  {item.variant:<{variant}} {item.threads:>3} {figures}  {item.problem}".rstrip()
        )
    return "\n".join([*lines, "", "~ estimated; `edgeinfer measure BUNDLE --json` on the board gives --profile-from"])


def _rate(rate_hz: float | None) -> str:
    return "unknown" if rate_hz is None else f"{rate_hz:.3g}" if rate_hz < 100 else f"{rate_hz:.0f}"
