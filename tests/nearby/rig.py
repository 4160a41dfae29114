"""A site on a real broker: a nearby service that echoes, and the offload executor of a device."""

from __future__ import annotations

import array
import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from edgeinfer import oip
from edgeinfer.artifact.manifest import File, Manifest, Runtime, StateSpec, TensorSpec, Variant
from edgeinfer.clock import LoopClock
from edgeinfer.config import BrokerSection, OffloadSection
from edgeinfer.execution.offload import KnownModel, OffloadExecutor
from edgeinfer.metrics import Accounting
from edgeinfer.mqtt.link import MqttLink
from edgeinfer.mqtt.message import Message
from edgeinfer.mqtt.stamp import Stamper
from edgeinfer.mqtt.topics import Topics
from edgeinfer.nearby.advert import load_of, will
from edgeinfer.nearby.judge import ServedModel
from edgeinfer.nearby.server import NearbyServer
from edgeinfer.request import DataScope, Deadlines, Expired, Failure, InferRequest, Refusal, Result, Timeline
from edgeinfer.scheduling.scheduler import Scheduler
from tests.execution.fake import FakeExecutor, Script

MS = 1_000_000
_sites = itertools.count(1)
_values = itertools.count(1)


def manifest_of(name: str, *, stateful: bool = False, version: str = "1.0.0") -> Manifest:
    """A model that takes and gives a vector of floats."""
    return Manifest(
        schema=1,
        name=name,
        version=version,
        task="echo",
        inputs=[TensorSpec("x", "FP32", [-1], [1 << 20])],
        outputs=[TensorSpec("y", "FP32", [-1], [1 << 20])],
        variants=[Variant("fp32", "model.onnx", 1.0, 1 << 20, 1 << 20, {"1": 7000})],
        runtime=Runtime("1.32.0", 17, 10),
        files={"model.onnx": File("0" * 64, 1)},
        state=[StateSpec("h", "h2", "FP32", [1])] if stateful else [],
    )


def digest_of(name: str, version: str = "1.0.0") -> str:
    return hashlib.sha256(f"{name} {version}".encode()).hexdigest()


class EchoExecutor(FakeExecutor):
    """Answers with what was asked, as a model would: an OIP response and the bundle's digest."""

    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        ending = await super().execute(request)
        if isinstance(ending, Result):
            header = oip.request_header(request.payload)
            outputs = [
                ("y", tensor.datatype, tensor.shape, raw)
                for tensor, raw in zip(header.inputs, request.payload.tensors, strict=True)
            ]
            payload = oip.encode_response(outputs, model=request.model, version="1.0.0")
            ending = replace(ending, payload=payload, version="1.0.0", variant="fp32", digest=digest_of(request.model))
        return ending


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Wait for something that other processes bring about."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Peer:
    """One nearby service."""

    name: str
    link: MqttLink
    server: NearbyServer
    executor: EchoExecutor
    scheduler: Scheduler
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def stop(self) -> None:
        """End it as an operator would: server first, then the link."""
        for task in self.tasks:
            task.cancel()
            await asyncio.wait({task})


@dataclass
class Site:
    """A device on a site, and its peers."""

    section: BrokerSection
    name: str = field(default_factory=lambda: f"site{next(_sites)}")
    known: dict[str, KnownModel] = field(default_factory=dict)
    peers: list[Peer] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.topics = Topics("edgeinfer", self.name, "device-1")

    async def device(self, offload: OffloadSection | None = None, section: BrokerSection | None = None) -> None:
        """Connect the device."""
        self.link = MqttLink(section or self.section, name="site", client_id=f"{self.name}-device", clock=self.clock)
        self.executor = OffloadExecutor(
            self.link,
            self.topics,
            offload or OffloadSection(),
            lookup=lambda model, _: self.known.get(model),
            clock=self.clock,
        )
        self.replies: list[Message] = []
        self.link.subscribe(self.topics.offload_reply, self.replies.append)
        self.tasks.append(asyncio.create_task(self.link.run(), name="device.link"))
        await until(lambda: self.link.connected)

    async def peer(
        self,
        name: str = "hall",
        *,
        script: Callable[[InferRequest], Script] = lambda _: Script(1 * MS),
        models: tuple[str, ...] = ("echo",),
        location: str = "site",
        stateful: bool = False,
        version: str = "1.0.0",
        max_per_device: int = 16,
        cores: int = 4,
        start: bool = True,
        section: BrokerSection | None = None,
    ) -> Peer:
        """Start a nearby service and wait until the device knows of it."""
        topics = Topics("edgeinfer", self.name, name)
        stamper = Stamper(self.clock, boot="test", synced=lambda: True)
        link = MqttLink(
            section or self.section,
            name=name,
            client_id=f"{self.name}-{name}",
            clock=self.clock,
            will=will(topics, stamper.now()),
        )
        executor = EchoExecutor(self.clock, script)
        scheduler = Scheduler(
            local=executor, nearby=None, clock=self.clock, accounting=Accounting(), queue_limit=64, cores=cores
        )
        served = [
            ServedModel(manifest_of(model, stateful=stateful, version=version), digest_of(model, version), "fp32")
            for model in models
        ]
        server = NearbyServer(
            link,
            topics,
            submit=scheduler.submit,
            models=lambda: served,
            load=lambda: load_of(scheduler.snapshot()),
            stamper=stamper,
            clock=self.clock,
            location=location,
            max_per_device=max_per_device,
            advert_period_ns=200 * MS,
        )
        peer = Peer(name, link, server, executor, scheduler)
        self.peers.append(peer)
        for model in models:
            self.known.setdefault(model, KnownModel(digest_of(model), manifest_of(model, stateful=stateful)))
        if start:
            for main in (server.run, link.run, scheduler.run):
                peer.tasks.append(asyncio.create_task(main(), name=f"{name}.{main.__qualname__}"))
            await until(lambda: link.connected)
            if self.tasks:
                await until(lambda: name in {seen.name for seen in self.executor.snapshot().peers})
        return peer

    def request(
        self,
        model: str = "echo",
        *,
        within_ms: float = 2000,
        scope: DataScope = DataScope.SITE,
        elements: int = 1,
        accept_late: bool = False,
    ) -> InferRequest:
        """A request whose first element nobody else's has."""
        raw = array.array("f", [float(next(_values))] + [0.0] * (elements - 1)).tobytes()
        return InferRequest(
            model,
            oip.encode_request([("x", "FP32", [elements], raw)]),
            Deadlines(self.clock.now_ns() + round(within_ms * MS)),
            Timeline(self.clock.now_ns()),
            scope=scope,
            accept_late=accept_late,
        )

    def answers(self, request: InferRequest, result: Result) -> bool:
        """Whether a result is the echo of that request."""
        return bytes(result.payload.tensors[0]) == bytes(request.payload.tensors[0])

    async def close(self) -> None:
        for peer in self.peers:
            await peer.stop()
        for task in self.tasks:
            task.cancel()
            await asyncio.wait({task})


@asynccontextmanager
async def open_site(section: BrokerSection) -> AsyncIterator[Site]:
    site = Site(section)
    try:
        yield site
    finally:
        await site.close()
