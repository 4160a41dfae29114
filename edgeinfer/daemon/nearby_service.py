"""Run the nearby service: the device's own model cache and scheduler, behind an MQTT door."""

from __future__ import annotations

import asyncio
import logging
import os

from edgeinfer.clock import NS_PER_S, Clock, MonotonicClock
from edgeinfer.config import NearbyConfig
from edgeinfer.daemon import allocator, descriptors
from edgeinfer.daemon.host import ModelHost
from edgeinfer.daemon.identity import default_id
from edgeinfer.daemon.lifecycle import cancel, drain, run_until_signal, until
from edgeinfer.daemon.systemd import Notifier, Watchdog, extended_start
from edgeinfer.execution.local import LocalExecutor
from edgeinfer.execution.resident import CrashNote, ResidentModel
from edgeinfer.limits import Limits, ThermalLevel
from edgeinfer.metrics import Accounting
from edgeinfer.mqtt.link import MqttLink
from edgeinfer.mqtt.stamp import Stamper, read_boot_id
from edgeinfer.mqtt.topics import Topics
from edgeinfer.nearby.advert import load_of, will
from edgeinfer.nearby.judge import ServedModel
from edgeinfer.nearby.server import NearbyServer
from edgeinfer.request import Outcome
from edgeinfer.scheduling.scheduler import Scheduler
from edgeinfer.worker.hatch import Hatched

_log = logging.getLogger(__name__)

_DEFAULT_RESERVE_BYTES = 256 << 20
_MEMORY_PERIOD_NS = NS_PER_S


def run_nearby(config: NearbyConfig, *, hatched: Hatched | None = None) -> int:
    """Run until SIGTERM, SIGINT or SIGQUIT and return the exit status.

    Raises:
        EdgeInferError: it could not start.
    """
    descriptors.raise_limit(workers=sum(model.workers for model in config.model), loops=0)
    allocator.use_one_arena()
    return run_until_signal(lambda stop: _serve(config, hatched, stop))


class Nearby:
    """Everything one nearby service consists of. Loop thread only; made inside the running loop."""

    def __init__(self, config: NearbyConfig, *, clock: Clock, hatched: Hatched | None = None) -> None:
        """Make every room; nothing runs before `_serve` starts the tasks.

        Raises:
            ConfigError: the CPUs that were asked for are not there.
        """
        assert config.mqtt.site is not None  # checked with the config
        self.config = config
        self.clock = clock
        self.host = ModelHost(
            config.model,
            config.scheduler,
            state_dir=config.state_dir,
            ceiling_bytes=_all_memory_bytes() if config.memory.ceiling is None else config.memory.ceiling,
            reserve_bytes=_DEFAULT_RESERVE_BYTES if config.memory.reserve is None else config.memory.reserve,
            on_crash=_tell_crash,
            clock=clock,
            hatched=hatched,
        )
        self.topics = Topics(config.mqtt.prefix, config.site, config.name or default_id())
        self.scheduler = Scheduler(
            local=LocalExecutor(self.host.cache, where=self.topics.device, clock=clock),
            nearby=None,
            clock=clock,
            accounting=Accounting(),
            queue_limit=config.scheduler.queue_limit,
            cores=self.host.cores,
            observe=self._observe,
        )
        stamper = Stamper(clock, boot=read_boot_id())
        self.link = MqttLink(
            config.mqtt.site,
            name="site",
            client_id=f"edgeinfer-nearby-{self.topics.device}",
            clock=clock,
            will=will(self.topics, stamper.now()),
        )
        self.server = NearbyServer(
            self.link,
            self.topics,
            submit=self.scheduler.submit,
            models=self.served,
            load=lambda: load_of(self.scheduler.snapshot()),
            stamper=stamper,
            clock=clock,
            location=config.location,
            max_per_device=config.max_per_device,
            advert_period_ns=config.advert_period,
        )

    def served(self) -> list[ServedModel]:
        """Return the models that requests can be answered from: those in memory, and those loaded on demand."""
        cache = self.host.cache
        served = []
        for section in self.config.model:
            found = cache.find(section.name)
            installed = cache.installed(section.name)
            if isinstance(found, ResidentModel):
                served.append(ServedModel(found.manifest, found.installed.digest, found.variant.name))
            elif isinstance(found, int) and installed is not None:
                best = section.variant or installed.manifest.variants[0].name
                served.append(ServedModel(installed.manifest, installed.digest, best))
        return served

    def _observe(self, outcome: Outcome) -> None:
        self.host.cache.demand(outcome.request.model)  # one that came too soon for its model is not the last

    async def keep_budget(self) -> None:
        """Follow what memory the machine has left, for ever."""
        while True:
            ceiling = self.host.memory_ceiling()
            self.scheduler.set_limits(Limits(ThermalLevel.NOMINAL, self.host.cpus, 1.0, ceiling))
            await asyncio.sleep(_MEMORY_PERIOD_NS / NS_PER_S)


async def _serve(config: NearbyConfig, hatched: Hatched | None, stop: asyncio.Event) -> None:
    clock = MonotonicClock()
    notifier = Notifier.from_environ(os.environ)
    nearby = Nearby(config, clock=clock, hatched=hatched)
    try:
        async with nearby.host.running(), asyncio.TaskGroup() as group:
            async with extended_start(notifier, clock=clock):
                await until(stop, nearby.host.start())
                tasks = _start_tasks(nearby, group, notifier)
                await until(stop, nearby.host.preload())
            if not stop.is_set():
                tasks.append(group.create_task(nearby.link.run(), name="link[site]"))
                notifier.ready(f"{len(nearby.served())} models served")
                _log.info("running nearby=%s models=%d", nearby.topics.device, len(nearby.served()))
                allocator.settle()
                await stop.wait()
            async with extended_start(notifier, clock=clock):
                notifier.stopping("draining")
                nearby.scheduler.start_draining()
                nearby.server.advertise()
                drained = await drain(
                    nearby.scheduler, timeout_ns=config.scheduler.drain_timeout, answered=nearby.server.drained
                )
                await cancel(tasks)
        _log.info("stopped, %d requests drained", drained)
    finally:
        notifier.close()


def _start_tasks(nearby: Nearby, group: asyncio.TaskGroup, notifier: Notifier) -> list[asyncio.Task[None]]:
    """Start everything but the link, which waits until there is something to serve; in the order in which they end."""
    watchdog = Watchdog(notifier, progress=lambda: nearby.scheduler.progress, clock=nearby.clock)
    tasks = (
        ("server", nearby.server.run()),
        ("scheduler", nearby.scheduler.run()),
        ("model-cache", nearby.host.cache.run()),
        ("memory", nearby.keep_budget()),
        ("watchdog", watchdog.run()),
    )
    return [group.create_task(work, name=name) for name, work in tasks]


def _all_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _tell_crash(note: CrashNote) -> None:
    _log.error(
        "crash model=%s variant=%s quarantined=%s detail=%r", note.model, note.variant, note.quarantined, note.detail
    )
