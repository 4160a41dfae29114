"""The daemon and the peer, asked by the same client over HTTP with the same jobs and deadlines, by turns.

The daemon is asked over its UNIX socket with binary tensors and told each deadline; the peer over TCP with JSON
tensors, the only kind it takes, and it knows no deadlines. The client has one core; of the daemon only the workers are
held to one, like the peer's one thread that runs models. Which setting of the peer is best is tried with a window of
each trace first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from edgeinfer import oip
from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer_bench import peer
from edgeinfer_bench.asking import Answers, Server, play, to_port, to_socket
from edgeinfer_bench.models import model_file
from edgeinfer_bench.peer import PeerMissing
from edgeinfer_bench.player import CHAINS, Sent
from edgeinfer_bench.record import Figure
from edgeinfer_bench.service import Service

WINDOW_S = 0.8
"""Of each trace at each load, for each of the two."""
OUR_CONNECTIONS = 28
"""Nearly as many as the daemon takes."""
PEER_CONNECTIONS = 2
"""Where it does best of 1, 2, 4, 8, 16 and 64: with more, requests wait in it until they are late."""
_WARM_UP = 12
_SETTLE_S = 0.1


class Rivals:
    """Plays windows against both and keeps count. Loop thread only."""

    def __init__(self, daemon: Server, peers: Mapping[int, Server], failed: Mapping[int, str] | None = None) -> None:
        """`peers` by their `parallel_workers`; `failed` says why others of those can't be had."""
        self.daemon = daemon
        self._peers = dict(peers)
        self._failed = dict(failed or {})
        self._tried = dict.fromkeys(peers, 0.0)
        self._ours = Answers()
        self._theirs = Answers()
        self._windows = 0

    async def try_settings(self, windows: Sequence[Sequence[Sent]]) -> None:
        """Keep the setting of the peer that answers most in time."""
        for mode in list(self._peers):
            found = Answers()
            for jobs in windows:
                found.add(await self.ask_peer(mode, jobs))
            self._tried[mode] = found.on_time_ns / NS_PER_S
        if self._peers:
            best = max(self._peers, key=self._tried.__getitem__)
            self._peers = {best: self._peers[best]}

    async def play(self, jobs: Sequence[Sent], *, ours_first: bool) -> None:
        """Play a window against both."""
        if not self._peers:
            return
        (mode,) = self._peers
        if ours_first:
            ours, theirs = await self._ask_daemon(jobs), await self.ask_peer(mode, jobs)
        else:
            theirs, ours = await self.ask_peer(mode, jobs), await self._ask_daemon(jobs)
        if not self._peers:
            return
        self._ours.add(ours)
        self._theirs.add(theirs)
        self._windows += 1

    def figure(self) -> Figure:
        """Return the service time in time of ours, as a multiple of the peer's."""
        name = "overload.vs_peer_ratio"
        failed = "; ".join(f"parallel_workers={mode} failed: {why}" for mode, why in self._failed.items())
        if not self._peers or not self._theirs.on_time_ns:
            why = failed or f"nothing was answered in time: {self._theirs.note}"
            return Figure(name, None, "x", None, "higher", peer.TITLE, note=why)
        (mode,) = self._peers
        tried = ", ".join(f"{setting}: {seconds:.2f} s" for setting, seconds in self._tried.items())
        note = (
            f"over all traces and loads, both over HTTP from the same client; ours: {self._ours.note}; "
            f"peer: {self._theirs.note}; parallel_workers={mode}, because of the service time in time of a trial "
            f"({tried}); JSON tensors of zeros, {PEER_CONNECTIONS} connections{'; ' if failed else ''}{failed}"
        )
        value = self._ours.on_time_ns / self._theirs.on_time_ns
        return Figure(name, value, "x", None, "higher", peer.TITLE, self._windows, note)

    async def _ask_daemon(self, jobs: Sequence[Sent]) -> Answers:
        found = await play(self.daemon, jobs)
        await asyncio.sleep(_SETTLE_S)
        return found

    async def ask_peer(self, mode: int, jobs: Sequence[Sent]) -> Answers:
        """Play a window against one setting of the peer; one that fails is out."""
        found = Answers()
        try:
            found = await play(self._peers[mode], jobs)
        except* OSError as group:
            self._failed[mode] = repr(group.exceptions[0])
            del self._peers[mode]
        await asyncio.sleep(_SETTLE_S)
        return found


@contextlib.asynccontextmanager
async def open_rivals(root: Path, made: Mapping[int, Path], cpus: Sequence[int]) -> AsyncIterator[Rivals]:
    """Start the daemon and the peer in every setting, and let each answer some requests; end them afterwards.

    `cpus` is where the daemon's workers run.
    """
    service = Service(root, list(made.values()), extra_config=f"\n[scheduler]\ncpus = {list(cpus)}\n")
    files = {CHAINS[size].name: model_file(path) for size, path in made.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(service.running())
        daemon = Server(partial(to_socket, str(service.socket)), _DaemonRequest(), OUR_CONNECTIONS)
        peers: dict[int, Server] = {}
        failed: dict[int, str] = {}
        for mode in peer.MODES:
            try:
                running = stack.enter_context(peer.running(files, parallel_workers=mode))
            except PeerMissing as error:
                failed[mode] = str(error)
            else:
                peers[mode] = Server(partial(to_port, running.port), _PeerRequest(), PEER_CONNECTIONS)
        rivals = Rivals(daemon, peers, failed)
        await play(daemon, warm_up())
        for mode in peers:
            await rivals.ask_peer(mode, warm_up())
        yield rivals


def warm_up() -> list[Sent]:
    """Return jobs that come one after the other, with time enough."""
    step_ns = 30 * NS_PER_MS
    sizes = list(CHAINS) * _WARM_UP
    return [
        Sent(number * step_ns, number * step_ns + 5 * NS_PER_S, 1, size, firm=True) for number, size in enumerate(sizes)
    ]


class _PeerRequest:
    """Requests for the peer: always the same bytes."""

    def __init__(self) -> None:
        self._whole = {size: peer.request(chain.name, chain.feeds) for size, chain in CHAINS.items()}

    def __call__(self, job: Sent, left_ns: int) -> Sequence[bytes]:  # noqa: ARG002 - it cannot be told
        return (self._whole[job.size_us],)


class _DaemonRequest:
    """Requests for the daemon, each with its deadline."""

    def __init__(self) -> None:
        self._parts = {(size, firm): _parts(size, firm=firm) for size in CHAINS for firm in (True, False)}

    def __call__(self, job: Sent, left_ns: int) -> Sequence[bytes]:
        head, body = self._parts[job.size_us, job.firm]
        deadline = f"Edgeinfer-Deadline-Ms: {left_ns / NS_PER_MS:.3f}\r\n\r\n".encode()
        return head, deadline, *body


def _parts(size_us: int, *, firm: bool) -> tuple[bytes, Sequence[bytes]]:
    chain = CHAINS[size_us]
    zeros = bytes(chain.input_bytes)
    payload = oip.encode_request([("x", "FP32", [chain.rows, chain.width], zeros)], parameters={"firm": firm})
    head = (
        f"POST /v2/models/{chain.name}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/octet-stream\r\n{oip.HEADER_LENGTH}: {len(payload.header)}\r\n"
        f"Content-Length: {payload.size_bytes}\r\n"
    )
    return head.encode(), (payload.header, zeros)
