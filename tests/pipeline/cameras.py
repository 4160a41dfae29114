"""Senders for the tests of network cameras: ffmpeg itself over HTTP and UDP, and a small RTSP camera before it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from typing import Self

import pytest

needs_ffmpeg = pytest.mark.skipif(
    shutil.which("ffmpeg") is None, reason="ffmpeg is missing: run tools/setup/ffmpeg.sh as root"
)
needs_arecord = pytest.mark.skipif(
    shutil.which("arecord") is None, reason="arecord is missing: run tools/setup/ffmpeg.sh as root"
)
QUIET = ("ffmpeg", "-hide_banner", "-nostdin", "-loglevel", "error")
PICTURES = ("-re", "-f", "lavfi", "-i", "testsrc=size=160x120:rate=10")
"""Ten a second, each different from the one before."""


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def sending(
    *arguments: str, stdout: int = asyncio.subprocess.DEVNULL
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Send test pictures with ffmpeg; killed at the end, if not before."""
    process = await asyncio.create_subprocess_exec(*QUIET, *PICTURES, *arguments, stdout=stdout)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class HttpCamera:
    """A camera that shows MJPEG over HTTP, as most with a web page do; ffmpeg makes the pictures."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}/video.mjpg"

    async def __aenter__(self) -> Self:
        port = int(self.url.split(":")[2].partition("/")[0])
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self._showing: set[asyncio.subprocess.Process] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Be switched off: hang up, and refuse everybody."""
        self._server.close()
        for process in self._showing:
            process.kill()
        while self._showing:
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=frame\r\n\r\n")
            async with sending(
                "-f", "mpjpeg", "-boundary_tag", "frame", "-", stdout=asyncio.subprocess.PIPE
            ) as process:
                self._showing.add(process)
                assert process.stdout is not None
                while data := await process.stdout.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
        self._showing.discard(process)
        writer.close()


class RtspCamera(asyncio.DatagramProtocol):
    """An RTSP server for one stream over TCP, behind Basic authentication; what it shows is sent to it by RTP."""

    def __init__(self, credentials: str) -> None:
        self._expected = "Basic " + base64.b64encode(credentials.encode()).decode()
        self._port = free_port()
        self._rtp_port = free_port(socket.SOCK_DGRAM)
        self._playing: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.StreamWriter] = set()
        self.transports: list[str] = []
        """How each player that came wanted its packets."""

    @property
    def url(self) -> str:
        return f"rtsp://127.0.0.1:{self._port}/live"

    @property
    def rtp(self) -> str:
        return f"rtp://127.0.0.1:{self._rtp_port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._datagrams, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", self._rtp_port))
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        self._datagrams.close()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    def close(self) -> None:
        """Be switched off: hang up, and refuse everybody."""
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    def datagram_received(self, data: bytes, addr: object) -> None:
        for writer in self._playing:
            writer.write(b"$\0" + len(data).to_bytes(2, "big") + data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                while head[:1] == b"$":  # the player's own reports
                    head = head[4 + int.from_bytes(head[2:4], "big") :]
                self._reply(head.decode(), writer)
        self._playing.discard(writer)
        self._connections.discard(writer)
        writer.close()

    def _reply(self, head: str, writer: asyncio.StreamWriter) -> None:
        request, *lines = head.split("\r\n")
        method, url, _ = request.split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status, extra, body = "200 OK", "Session: 1\r\n", ""
        if method != "OPTIONS" and headers.get("authorization") != self._expected:
            status, extra = "401 Unauthorized", 'WWW-Authenticate: Basic realm="camera"\r\n'
        elif method == "DESCRIBE":
            body = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\nm=video 0 RTP/AVP 32\r\na=control:1\r\n"
            extra = f"Content-Base: {url}/\r\nContent-Type: application/sdp\r\nContent-Length: {len(body)}\r\n"
        elif method == "SETUP":
            self.transports.append(headers["transport"])
            extra += f"Transport: {headers['transport']}\r\n"
        elif method == "PLAY":
            self._playing.add(writer)
        writer.write(f"RTSP/1.0 {status}\r\nCSeq: {headers['cseq']}\r\n{extra}\r\n{body}".encode())
