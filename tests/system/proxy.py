"""A TCP proxy for tests that can swallow everything: the connection looks open and nothing arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Proxy:
    """Forwards between its own port and 127.0.0.1:`upstream`, until told to swallow or to cut."""

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.accepted = 0
        self.swallow = False
        """Read and drop every byte, both ways, on all connections: half-open."""
        self.delay_s = 0.0
        """Hold each chunk back this long, each way."""
        self.upstream = upstream
        """Where new connections go."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Close all connections."""
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, up_writer}
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink), name="proxy.pump")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not self.swallow:
                    sink.write(data)
                    await sink.drain()
        if not self.swallow:
            sink.close()


@contextlib.asynccontextmanager
async def proxy_to(upstream: int) -> AsyncIterator[Proxy]:
    """Run a proxy on an ephemeral port of 127.0.0.1."""
    proxy = Proxy(upstream)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        for task in list(proxy._tasks):
            task.cancel()
        await asyncio.gather(*proxy._tasks, return_exceptions=True)
