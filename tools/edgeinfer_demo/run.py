"""Play the scenario: set load, ambient and broker phase by phase, watch, and judge what the device did by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.artifact.board import Board, load_board
from edgeinfer.client import Client
from edgeinfer.clock import MonotonicClock
from edgeinfer.errors import EdgeInferError, LinkError
from edgeinfer.sensors.process import process_memory, process_tree
from edgeinfer_demo.bystanders import Bystanders, note
from edgeinfer_demo.live import Display, View
from edgeinfer_demo.observer import Observer
from edgeinfer_demo.plant import Plant
from edgeinfer_demo.scenario import PHASES, Phase
from edgeinfer_demo.summary import compose
from edgeinfer_demo.verdict import Evidence, PhaseRecord, judge
from edgeinfer_demo.world import World, keeping, running
from edgeinfer_tools.sample_files import write_samples

SENTENCE = "I was charged twice for my invoice"
_MODELS = Path(__file__).resolve().parents[2] / "models"
_PROC = Path("/proc")
_ONLINE_TIMEOUT_S = 20.0


async def play(world: World, display: Display, out: Path, *, speed: float = 1.0) -> int:
    """Run the whole demo below `world.root`, and return 0 when every check holds, else 1.

    Writes `out`/report.json, and keeps the services' logs and configuration beside it, however it ends.

    Raises:
        EdgeInferError: something could not be started.
    """
    display.say("preparing: frames and audio, bundles, broker")
    write_samples(_MODELS / "pp-ocr-det", world.frames)
    write_samples(_MODELS / "silero-vad", world.audio)
    world.write_files()
    await asyncio.to_thread(world.install)
    board = _hastened(load_board(world.board), speed)
    with Plant(board, world.root / "sys", ambient_c=PHASES[0].ambient_c) as plant, keeping(world, out), running(world):
        world.start_broker()
        world.start_nearby()
        world.start_daemon()
        run = _Run(world, display, plant, speed)
        evidence = await run.play()
    checks = judge(evidence)
    report = compose(evidence, run.peak_pss_bytes, checks, board=board.name, seconds=run.seconds)
    path = await asyncio.to_thread(_write, report, out)
    display.summary(report, checks)
    if said := note(evidence.others_cores, os.cpu_count() or 1):
        display.say(said)
    display.say(f"written to {path}; logs and configuration of the services are beside it")
    if failed := [check.name for check in checks if not check.ok]:
        display.say(f"failed: {', '.join(failed)}")
        for name in ("daemon", "nearby"):
            display.say(f"--- the last lines of {name}'s log")
            display.say("\n".join(world.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]))
        return 1
    return 0


def _hastened(board: Board, speed: float) -> Board:
    """Return the board with its heat moving `speed` times as fast, as the scenario does."""
    assert board.lab is not None  # it is the demo's own
    return replace(board, lab=replace(board.lab, capacity_j_per_c=board.lab.capacity_j_per_c / speed))


def _write(report: dict[str, Any], out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return path


class _Run:
    """One run of the scenario."""

    def __init__(self, world: World, display: Display, plant: Plant, speed: float) -> None:
        self._world = world
        self._display = display
        self._plant = plant
        self._speed = speed
        self._observer = Observer(world)
        self._status: dict[str, Any] = {}
        self._phase = PHASES[0]
        self._end_s = 0.0
        self._intent = "never asked"
        self.peak_pss_bytes = 0
        self.seconds = 0.0

    async def play(self) -> Evidence:
        """Go through the phases and return the evidence."""
        began_s = time.monotonic()
        bystanders = Bystanders(_PROC, root_pid=os.getpid(), clock=MonotonicClock())
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._plant.run(), name="plant"),
                group.create_task(self._observer.link.run(), name="link"),
                group.create_task(self._watch(), name="watch"),
                group.create_task(self._local_app(), name="local-app"),
            ]
            assert self._world.daemon is not None
            self._plant.attach(self._world.daemon.pid)
            await self._until_ready()
            self._end_s = time.monotonic() + sum(phase.seconds for phase in PHASES) / self._speed
            records = [await self._go_through(phase) for phase in PHASES]
            status = await self._observer.status() or self._status
            others_cores = bystanders.cores()
            exit_status = await asyncio.to_thread(self._world.stop_services)
            await asyncio.sleep(0.5)  # the device's last words are on their way
            exit_status |= await asyncio.to_thread(self._world.stop)
            for task in tasks:
                task.cancel()
        self.seconds = time.monotonic() - began_s
        return Evidence(
            phases=tuple(records),
            events=tuple(self._observer.events),
            report=self._observer.report or status["report"],
            intent=self._intent,
            exit_status=exit_status,
            firmware_throttled_s=self._plant.state.throttled_s,
            peak_c=self._plant.state.peak_c,
            others_cores=others_cores,
        )

    async def _go_through(self, phase: Phase) -> PhaseRecord:
        self._phase = phase
        self._plant.ambient_c = phase.ambient_c
        await self._observer.command("set-loop", {"loop": "camera", "period_ms": phase.camera_period_ms})
        if not phase.broker_up:
            self._world.stop_broker()
            self._observer.online = False
        before = await self._counts()
        await asyncio.sleep(phase.seconds / self._speed)
        after = await self._counts()
        if not phase.broker_up:
            await asyncio.to_thread(self._world.start_broker)
            await self._until_online()
        return _difference(phase, phase.seconds / self._speed, before, after)

    async def _counts(self) -> dict[str, dict[str, Any]]:
        status = await self._observer.status()
        if status is None:
            raise LinkError("the daemon does not answer on its socket")
        return {counts["origin"]: counts for counts in status["report"]["origins"]}

    async def _until_ready(self) -> None:
        async with asyncio.timeout(60):
            while not self._status.get("ready"):
                self._check_alive()
                await asyncio.sleep(0.1)
            await self._until_online()

    async def _until_online(self) -> None:
        """Wait until the device has said over MQTT that it is there, as it does by itself at each connection."""
        try:
            async with asyncio.timeout(_ONLINE_TIMEOUT_S):
                while not self._observer.online:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise LinkError(f"the device is not back on the broker after {_ONLINE_TIMEOUT_S:g} s") from None

    def _check_alive(self) -> None:
        for name, process in (("daemon", self._world.daemon), ("nearby", self._world.nearby)):
            if process is not None and process.poll() is not None:
                log = self._world.log(name).read_text(encoding="utf-8", errors="replace")[-2000:]
                raise LinkError(f"{name} ended with {process.returncode}:\n{log}")

    async def _watch(self) -> None:
        """Once a second: the daemon's status over its socket, its memory, and the view."""
        while True:
            self._status = await self._observer.status() or self._status
            if self._world.daemon is not None:
                pids = [item.pid for item in process_tree(_PROC, self._world.daemon.pid)]
                self.peak_pss_bytes = max(self.peak_pss_bytes, process_memory(_PROC, pids).pss_bytes)
            if self._status.get("ready") and self._end_s:
                self._display.show(
                    View(
                        phase=self._phase,
                        left_s=max(0.0, self._end_s - time.monotonic()),
                        board_c=self._plant.state.temp_c,
                        report=self._status["report"],
                        state=self._status["state"],
                        broker_up=self._world.broker is not None and self._world.broker.poll() is None,
                        recent=tuple(self._observer.recent),
                    )
                )
            await asyncio.sleep(1.0)

    async def _local_app(self) -> None:
        """Ask about a sentence twice a second, as an app on the device would."""
        while True:
            with contextlib.suppress(EdgeInferError):
                self._intent = await asyncio.to_thread(self._ask)
            await asyncio.sleep(0.5)

    def _ask(self) -> str:
        with Client(self._world.socket) as client:
            answer = client.infer_text("support-intent", SENTENCE, deadline_ms=200)
        return f"{answer.label} {answer.score:.4f}"


def _difference(
    phase: Phase, seconds: float, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> PhaseRecord:
    def placed(placement: str) -> dict[str, int]:
        return {
            origin: counts["ok_by_placement"].get(placement, 0)
            - before.get(origin, {}).get("ok_by_placement", {}).get(placement, 0)
            for origin, counts in after.items()
        }

    def ended(counts: dict[str, Any]) -> int:
        return int(counts.get("received", 0)) - int(counts.get("in_flight", 0))

    return PhaseRecord(
        name=phase.name,
        seconds=seconds,
        ok_local=placed("local"),
        ok_nearby=placed("nearby"),
        ended={origin: ended(counts) - ended(before.get(origin, {})) for origin, counts in after.items()},
    )
