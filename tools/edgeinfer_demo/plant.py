"""An emulated board's heat: from the CPU time that processes really used to the temperature that their sensors show.

The model is first order, T' = (ambient + R * P - T) / (R * C) with P = idle + watt per core * busy cores, and its
constants come from the board file. `PlantModel.advance` is pure and exact; `Plant` feeds it with what the daemon's
process tree has used, several times a second, shows the result in a /sys tree, and does what firmware does at its
trip: it counts the seconds, and cuts the CPU quota where it may.

    python -m edgeinfer_demo.plant --board device-configs/demo-board.toml --root DIR

takes `attach PID`, `ambient CELSIUS` and `quit` on its standard input and writes one line of JSON a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from edgeinfer.artifact.board import Board, LabModel, load_board
from edgeinfer.clock import NS_PER_S, Clock, MonotonicClock
from edgeinfer.errors import ConfigError, Problem
from edgeinfer.sensors.process import process_tree
from edgeinfer_demo.plant_quota import CpuQuota, open_quota
from edgeinfer_demo.plant_tree import BoardTree

_PERIOD_S = 0.2
_NOISE_C = 0.15
"""Real sensors flicker by a step or two; a value without any noise would look frozen at equilibrium."""
_TRACE_SAMPLES = 36_000  # two hours


@dataclass(frozen=True, slots=True)
class PlantState:
    """The board at one moment."""

    temp_c: float
    throttling: bool = False
    """Whether firmware holds the clock down."""
    throttled_s: float = 0.0
    peak_c: float = -math.inf
    energy_j: float = 0.0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlantModel:
    """The physics of one board. Pure."""

    lab: LabModel
    firmware_trip_c: float

    @classmethod
    def of(cls, board: Board) -> PlantModel:
        """Return the model of a board file.

        Raises:
            ConfigError: the file has no `[lab]`.
        """
        if board.lab is None:
            raise ConfigError(board.name, (Problem("lab", "is required to emulate this board"),))
        return cls(board.lab, board.thermal.firmware_trip_c / 1000)

    @property
    def time_constant_s(self) -> float:
        """After this time 63 % of a change of temperature has happened."""
        return self.lab.resistance_c_per_w * self.lab.capacity_j_per_c

    def power_w(self, busy_cores: float, *, clock_share: float = 1.0) -> float:
        """Return the power while `busy_cores` work, at that share of the highest clock."""
        return self.lab.idle_w + self.lab.watt_per_core * busy_cores * clock_share

    def equilibrium_c(self, busy_cores: float, ambient_c: float) -> float:
        """Return where the temperature would settle."""
        return ambient_c + self.lab.resistance_c_per_w * self.power_w(busy_cores)

    def start(self, ambient_c: float) -> PlantState:
        """Return a board that has idled for long."""
        temp_c = self.equilibrium_c(0, ambient_c)
        return PlantState(temp_c, peak_c=temp_c)

    def advance(
        self, state: PlantState, busy_cores: float, ambient_c: float, dt_s: float, *, clock_share: float = 1.0
    ) -> PlantState:
        """Return the state `dt_s` later, with load and ambient constant in between: the exact solution."""
        power_w = self.power_w(busy_cores, clock_share=clock_share)
        target_c = ambient_c + self.lab.resistance_c_per_w * power_w
        temp_c = target_c + (state.temp_c - target_c) * math.exp(-dt_s / self.time_constant_s)
        holding = (
            temp_c > self.firmware_trip_c - self.lab.throttle_hysteresis_c
            if state.throttling
            else temp_c >= self.firmware_trip_c
        )
        return PlantState(
            temp_c=temp_c,
            throttling=holding,
            throttled_s=state.throttled_s + (dt_s if state.throttling else 0.0),
            peak_c=max(state.peak_c, temp_c),
            energy_j=state.energy_j + power_w * dt_s,
            elapsed_s=state.elapsed_s + dt_s,
        )


@dataclass(frozen=True, slots=True)
class PlantSample:
    """One step, for the trace."""

    elapsed_s: float
    temp_c: float
    ambient_c: float
    busy_cores: float
    throttling: bool


class TreeMeter:
    """Tells how many cores a process and its descendants have kept busy since it was last asked.

    Sums the CPU time of the living and of those they have waited for, so a worker that ends between two looks is
    counted too. Resolution: a clock tick (10 ms) for each process.
    """

    def __init__(self, pid: int, *, clock: Clock, proc_root: Path = Path("/proc")) -> None:
        self.pid = pid
        self._clock = clock
        self._proc_root = proc_root
        self._last = (clock.now_ns(), self._total_ns())

    def pids(self) -> list[int]:
        """Return the processes of the tree; empty when the root has ended."""
        return [item.pid for item in process_tree(self._proc_root, self.pid)]

    def busy_cores(self) -> float:
        """Return the mean number of busy cores since the last call."""
        last_ns, last_total_ns = self._last
        self._last = now_ns, total_ns = (self._clock.now_ns(), self._total_ns())
        if now_ns <= last_ns:
            return 0.0
        return max(0, total_ns - last_total_ns) / (now_ns - last_ns)

    def _total_ns(self) -> int:
        return sum(item.cpu_ns + item.reaped_ns for item in process_tree(self._proc_root, self.pid))


class Plant:
    """An emulated board around real processes. One thread; the owner calls `step` or runs `run`, and `close`."""

    def __init__(
        self, board: Board, root: Path, *, ambient_c: float = 25.0, clock: Clock | None = None, enforce: bool = True
    ) -> None:
        """Make the tree below `root`, at the idle temperature.

        Args:
            board: With its `[lab]` constants.
            root: Becomes the daemon's `sys_root`.
            ambient_c: Air around the board; change it any time.
            clock: Monotonic time.
            enforce: Cut the real CPU quota while firmware throttles, where that is permitted.
        """
        self.model = PlantModel.of(board)
        self.ambient_c = ambient_c
        self.tree = BoardTree(board, root)
        self.trace: deque[PlantSample] = deque(maxlen=_TRACE_SAMPLES)
        self._cores = min(board.cpu.cores, len(os.sched_getaffinity(0)))
        self._clock = clock or MonotonicClock()
        self._state = self.model.start(ambient_c)
        self._meter: TreeMeter | None = None
        self._noise = random.Random(1)  # noqa: S311  # the same noise in every run
        self._last_ns = self._clock.now_ns()
        quota = open_quota(f"edgeinfer-plant-{os.getpid()}-{id(self):x}") if enforce else "not asked for"
        self._quota = quota if isinstance(quota, CpuQuota) else None
        self.enforcement = "cpu quota" if self._quota else f"none: {quota}"
        """How firmware throttling is made to hurt, for reports."""
        self._show()

    @property
    def state(self) -> PlantState:
        """The board now: the truth, without the sensors' noise."""
        return self._state

    def attach(self, pid: int) -> None:
        """Heat with the CPU time of `pid` and its descendants from now on (after a restart: attach again)."""
        self._meter = TreeMeter(pid, clock=self._clock)
        if self._quota:
            self._quota.add(self._meter.pids())

    def step(self) -> PlantState:
        """Account for what was used since the last step, and show the new temperature."""
        now_ns = self._clock.now_ns()
        dt_s = (now_ns - self._last_ns) / NS_PER_S
        self._last_ns = now_ns
        busy = self._meter.busy_cores() if self._meter else 0.0
        was = self._state
        # With a real quota less time is used, and that alone is less power; else the lower clock is only pretended.
        share = self.model.lab.throttled_share if was.throttling and not self._quota else 1.0
        self._state = self.model.advance(was, busy, self.ambient_c, dt_s, clock_share=share)
        if self._quota and self._state.throttling is not was.throttling:
            self._quota.set(self._cores * self.model.lab.throttled_share if self._state.throttling else None)
        self.trace.append(
            PlantSample(self._state.elapsed_s, self._state.temp_c, self.ambient_c, busy, self._state.throttling)
        )
        self._show()
        return self._state

    async def run(self) -> None:
        """Step five times a second until cancelled."""
        while True:
            self.step()
            await asyncio.sleep(_PERIOD_S)

    def close(self) -> None:
        """Lift the quota and close the files."""
        if self._quota:
            self._quota.close()
            self._quota = None
        self.tree.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self) -> None:
        noise = self._noise.uniform(-_NOISE_C, _NOISE_C)
        self.tree.show(self._state.temp_c + noise, throttling=self._state.throttling)


async def _serve(plant: Plant) -> None:
    """Obey standard input until `quit` or its end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(plant.run(), name="plant"),
            group.create_task(_report(plant), name="report"),
        ]
        while line := await reader.readline():
            match line.decode("utf-8", "replace").split():
                case ["attach", pid] if pid.isdigit():
                    plant.attach(int(pid))
                case ["ambient", value]:
                    with contextlib.suppress(ValueError):
                        plant.ambient_c = float(value)
                case ["quit"]:
                    break
                case words:
                    print(f"{' '.join(words)!r} is not: attach PID, ambient CELSIUS, quit", file=sys.stderr)
        for task in tasks:
            task.cancel()


async def _report(plant: Plant) -> None:
    while True:
        await asyncio.sleep(1.0)
        busy = plant.trace[-1].busy_cores if plant.trace else 0.0
        line = asdict(replace(plant.state, peak_c=round(plant.state.peak_c, 3)))
        print(json.dumps(line | {"ambient_c": plant.ambient_c, "busy_cores": round(busy, 3)}), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run a plant as a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m edgeinfer_demo.plant", description="Emulate a board's heat.")
    parser.add_argument("--board", type=Path, required=True, help="board file with [lab] constants")
    parser.add_argument("--root", type=Path, required=True, help="where to make the /sys tree")
    parser.add_argument("--ambient", type=float, default=25.0, help="degrees Celsius (default 25)")
    options = parser.parse_args(arguments)
    with Plant(load_board(options.board), options.root, ambient_c=options.ambient) as plant:
        asyncio.run(_serve(plant))
    return 0


if __name__ == "__main__":
    sys.exit(main())
