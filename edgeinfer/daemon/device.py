"""Put the rooms of a device together, and hand out what they know as one snapshot.

Rooms that the configuration has no use for are not even imported: links, offload, commands and loops take 3 MB.

Owns no decisions: which room does what is the rooms' own business. How the whole starts and ends is `service`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from edgeinfer import __version__
from edgeinfer.artifact.board import Board
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.clock import Clock
from edgeinfer.config import DeviceConfig, JsonLinesSink, LoopSection, SinkSection
from edgeinfer.control.journal import Journal
from edgeinfer.daemon.figures import gateway_figures, loop_figures
from edgeinfer.daemon.host import ModelHost
from edgeinfer.daemon.identity import default_id
from edgeinfer.errors import BudgetExceeded
from edgeinfer.execution.local import LocalExecutor
from edgeinfer.execution.resident import CrashNote
from edgeinfer.gateway.bounds import bounds_within
from edgeinfer.gateway.catalog import ModelInfo
from edgeinfer.gateway.gateway import Gateway
from edgeinfer.governor.frequency_cap import FrequencyCap
from edgeinfer.governor.governor import Governor
from edgeinfer.governor.own_load import OwnLoad
from edgeinfer.limits import Limits
from edgeinfer.metrics import Accounting
from edgeinfer.mqtt.envelope import JSON_CONTENT_TYPE
from edgeinfer.mqtt.message import Keep, Message
from edgeinfer.mqtt.stamp import Stamper, read_boot_id
from edgeinfer.mqtt.topics import Topics
from edgeinfer.request import Outcome
from edgeinfer.scheduling.scheduler import Scheduler
from edgeinfer.sensors.sampling import BoardSensors
from edgeinfer.telemetry.publisher import Publisher, make_will
from edgeinfer.telemetry.report import Identity
from edgeinfer.telemetry.snapshot import Snapshot, accounting_figures
from edgeinfer.worker.hatch import Hatched

if TYPE_CHECKING:
    from edgeinfer.control.plane import CommandPlane
    from edgeinfer.execution.offload import KnownModel, OffloadExecutor
    from edgeinfer.mqtt.link import MqttLink
    from edgeinfer.pipeline.loop import InferenceLoop
    from edgeinfer.pipeline.sink import Sink

_log = logging.getLogger(__name__)


class Device:
    """Everything one daemon consists of. Loop thread only; made inside the running loop."""

    def __init__(self, config: DeviceConfig, board: Board, *, clock: Clock, hatched: Hatched | None = None) -> None:
        """Make every room; nothing runs before `service` starts the tasks.

        Raises:
            ConfigError: the CPUs that were asked for are not there.
        """
        self.config = config
        self.clock = clock
        self.phase = "starting"
        self.board = board
        self.sensors = BoardSensors(
            config.paths.sys_root,
            config.paths.proc_root,
            self.board.thermal.zones,
            clock=clock,
            rails=board.power.rails,
        )
        self._crashes: Counter[str] = Counter()
        self._crash_details: dict[str, str] = {}
        self._ceiling_bytes = board.memory.ceiling if config.memory.ceiling is None else config.memory.ceiling
        self.host = ModelHost(
            config.model,
            config.scheduler,
            state_dir=config.paths.state_dir,
            ceiling_bytes=self._ceiling_bytes,
            reserve_bytes=self.board.memory.reserve if config.memory.reserve is None else config.memory.reserve,
            on_crash=self._note_crash,
            clock=clock,
            sys_root=config.paths.sys_root,
            proc_root=config.paths.proc_root,
            hatched=hatched,
        )
        self.cache = self.host.cache
        self.accounting = Accounting()
        self._connect()
        self.local = LocalExecutor(self.cache, where=self.topics.device, clock=clock)
        self.scheduler = Scheduler(
            local=self.local,
            nearby=self.offload,
            clock=clock,
            accounting=self.accounting,
            queue_limit=config.scheduler.queue_limit,
            cores=self.host.cores,
            observe=self._observe,
        )
        self.governor = Governor(
            thermal=self.board.thermal,
            config=config.thermal,
            read=self.sensors.read,
            cpus=self.host.cpus,
            memory_ceiling=self.host.memory_ceiling,
            clock=clock,
            publish=self._obey,
            own_load=OwnLoad(self.host.nursery.pids, clock=clock).share,
            cap=FrequencyCap(config.paths.sys_root) if config.thermal.frequency_cap else None,
        )
        self._make_flows()

    def _connect(self) -> None:
        """Make the links and what speaks over them: offload on the site's, telemetry and commands on the fleet's."""
        mqtt, device = self.config.mqtt, self.config.device
        self.topics = Topics(mqtt.prefix, device.site, device.id or default_id())
        self.stamper = Stamper(self.clock, boot=read_boot_id(self.config.paths.proc_root))
        will = make_will(self.topics, self.stamper, __version__)
        client_id = f"edgeinfer-{self.topics.device}"
        self.site_link: MqttLink | None = None
        self.fleet_link: MqttLink | None = None
        self.offload: OffloadExecutor | None = None
        if mqtt.fleet is None and mqtt.site is None:
            return
        from edgeinfer.mqtt.link import MqttLink  # noqa: PLC0415

        if mqtt.fleet is not None:
            self.fleet_link = MqttLink(
                mqtt.fleet, name="fleet", client_id=f"{client_id}-fleet", clock=self.clock, will=will
            )
        if mqtt.site is not None:
            both = self.fleet_link is None
            self.site_link = MqttLink(
                mqtt.site, name="site", client_id=client_id, clock=self.clock, will=will if both else None
            )
            if both:
                self.fleet_link = self.site_link
        if self.config.offload.enabled and self.site_link is not None:
            from edgeinfer.execution.offload import OffloadExecutor  # noqa: PLC0415

            self.offload = OffloadExecutor(
                self.site_link, self.topics, self.config.offload, lookup=self._known_model, clock=self.clock
            )

    def _make_flows(self) -> None:
        """Make what brings requests in and tells of them: publisher, loops, gateway, commands."""
        self.publisher = Publisher(
            self.fleet_link,
            self.topics,
            snapshot=self.snapshot,
            identity=Identity(board=self.board.name, version=__version__, started_ns=self.clock.now_ns()),
            stamper=self.stamper,
            clock=self.clock,
            period_ns=self.config.telemetry.report_period,
        )
        self.loops = {section.name: self._loop(section) for section in self.config.loop}
        self.gateway = Gateway(
            socket_path=self.config.paths.socket,
            submit=self.scheduler.submit,
            models=self._model_infos,
            status=self.publisher.status,
            clock=self.clock,
            bounds=bounds_within(self._ceiling_bytes),
            decline=self.scheduler.decline,
            active=self._model_info,
        )
        self.journal = Journal(self.config.paths.state_dir / "commands.json", self.host.storage)
        self.plane: CommandPlane | None = None
        if self.fleet_link is not None:
            from edgeinfer.control.plane import CommandPlane  # noqa: PLC0415
            from edgeinfer.daemon.actions import DeviceActions  # noqa: PLC0415

            self.plane = CommandPlane(
                self.fleet_link,
                self.topics,
                DeviceActions(self.cache, self.loops, self.publisher),
                journal=self.journal,
                stamper=self.stamper,
                clock=self.clock,
            )

    def reserve_buffers(self) -> None:
        """Charge the gateway's buffers to the memory budget, at their worst; after `host.start`, before any model.

        Where not even they fit, apps are served all the same, and a log line tells.
        """
        try:
            self.host.reserve_for("gateway", self.gateway.buffer_bytes, in_use=lambda: self.gateway.buffered_bytes)
        except BudgetExceeded as error:
            _log.error("the gateway's buffers are not within the budget: %s", error)

    def _loop(self, section: LoopSection) -> InferenceLoop:
        from edgeinfer.pipeline.loop import InferenceLoop  # noqa: PLC0415
        from edgeinfer.pipeline.sources import make_source  # noqa: PLC0415

        return InferenceLoop(
            section,
            source=make_source(section, clock=self.clock, storage=self.host.media),
            sinks=[self._sink(section.name, sink) for sink in section.sinks],
            submit=self.scheduler.submit,
            manifest=partial(self._manifest, section.model),
            clock=self.clock,
            stamp=lambda: msgspec.to_builtins(self.stamper.now()),
        )

    @property
    def links(self) -> list[MqttLink]:
        """Every link once."""
        return list(dict.fromkeys(link for link in (self.site_link, self.fleet_link) if link is not None))

    def snapshot(self) -> Snapshot:
        """Return everything that is reported, at this moment."""
        total, origins = accounting_figures(self.accounting)
        scheduler = self.scheduler.snapshot()
        offload = self.offload.snapshot() if self.offload else None
        runtime = self.host.nursery.snapshot()
        return Snapshot(
            at_ns=self.clock.now_ns(),
            phase=self.phase,
            total=total,
            origins=origins,
            queue_length=scheduler.queue_length,
            running=scheduler.running_local + scheduler.running_nearby,
            governor=self.governor.snapshot(),
            limits=self.governor.limits,
            ledger=self.host.ledger.snapshot(),
            used_bytes=self.host.budget.reading().own.held_bytes,
            peak_used_bytes=self.host.budget.peak_own_bytes,
            pressure=self.host.memory.pressure,
            models=tuple(self.cache.status()),
            loops=tuple(
                loop_figures(self.loops[section.name].snapshot(), scope=section.scope) for section in self.config.loop
            ),
            links=tuple(link.snapshot() for link in self.links),
            offload_enabled=self.offload is not None,
            peers=offload.usable_peers if offload else (),
            peers_unusable=offload.unusable_peers if offload else {},
            offload_counters=offload.counters if offload else {},
            crashes=dict(self._crashes),
            crash_details=dict(self._crash_details),
            onnxruntime=runtime.onnxruntime,
            providers=runtime.providers,
            runtime_problem=runtime.reason,
            pid=os.getpid(),
            zygote_pid=runtime.zygote_pid or 0,
            storage_degraded=self.journal.degraded or self.cache.is_forgetful or self.host.storage.is_stuck,
            gateway=gateway_figures(self.gateway.snapshot()),
            sensor_matters=self.config.thermal.enabled and self.board.thermal.fault_duty_cycle < 1,
        )

    def _obey(self, limits: Limits) -> None:
        """Hand new limits to everyone who has to obey them."""
        self.host.ledger.set_ceiling(limits.memory_ceiling_bytes)
        self.cache.set_cpus(limits.cpus)
        self.scheduler.set_limits(limits)
        self.publisher.wake()

    def _observe(self, outcome: Outcome) -> None:
        self.publisher.observe(outcome)
        self.cache.demand(outcome.request.model)  # one that came too soon for its model is not the last

    def _note_crash(self, note: CrashNote) -> None:
        self._crashes[note.model] += 1
        self._crash_details[note.model] = note.detail
        self.publisher.wake()

    def _known_model(self, name: str, version: str | None) -> KnownModel | None:
        installed = self.cache.installed(name)
        if installed is None or (version and installed.manifest.version != version):
            return None
        from edgeinfer.execution.offload import KnownModel  # noqa: PLC0415

        return KnownModel(installed.digest, installed.manifest)

    def _manifest(self, name: str) -> Manifest | None:
        installed = self.cache.installed(name)
        return installed.manifest if installed else None

    def _model_infos(self) -> list[ModelInfo]:
        infos = []
        for status in self.cache.status():
            installed = self.cache.installed(status.name)
            if installed is not None:
                infos.append(ModelInfo(installed.manifest, installed.digest, status.state == "loaded", status.detail))
        return infos

    def _model_info(self, name: str) -> ModelInfo | None:
        """Return what a request for the model needs to know of it: not how it stands."""
        installed = self.cache.installed(name)
        return None if installed is None else ModelInfo(installed.manifest, installed.digest, ready=True)

    def _sink(self, loop: str, section: SinkSection) -> Sink:
        from edgeinfer.pipeline.sink import JsonLines, MqttResults  # noqa: PLC0415

        if isinstance(section, JsonLinesSink):
            return JsonLines(section, clock=self.clock, storage=self.host.media)
        link = self.site_link or self.fleet_link

        def send(topic: str, payload: bytes) -> None:
            if link is not None:
                keep = Keep.FIFO if section.qos else Keep.NEVER
                link.send(Message(topic=topic, payload=payload, qos=section.qos, content_type=JSON_CONTENT_TYPE), keep)

        return MqttResults(section, topic=self.topics.result(loop), send=send)

    def close(self) -> None:
        """Give back what is not a task."""
        self.governor.close()
        self.sensors.close()
