"""Measure candidates on a board, over the system's own ssh: `--on ssh://user@board`.

The board needs an ssh server and an installed edgeinfer with `edgeinfer measure`; nothing is installed, and nothing is
left there. A folder of its own is made below the board's temporary folder by a shell that holds it for as long as the
link lasts: when we end, are killed, or the link breaks, that shell's input ends, and it removes the folder. Keys, hosts
and jumps are ssh's own configuration's; it is never asked for a password.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

import msgspec

from edgeinfer.artifact.profile import Profile
from edgeinfer.errors import ConfigError, LinkError, Problem, SessionError

CONNECT_S: Final = 15
COPY_S: Final = 600
MEASURE_S: Final = 900
"""On top of the time that measuring itself is given."""
_UNREACHABLE: Final = 255
"""How ssh itself ends when there is no link."""
_NOT_FOUND: Final = (126, 127)
_USAGE: Final = 2
_HOLD: Final = (
    'd=$(mktemp -d "${TMPDIR:-/tmp}/edgeinfer-search.XXXXXX") || exit 74; '
    "trap 'rm -rf \"$d\"' EXIT; trap 'exit 1' HUP INT TERM; echo \"$d\"; cat >/dev/null"
)


class BoardUnusable(LinkError):
    """The board can be reached, but its edgeinfer cannot measure: install or update it there."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the board is."""

    host: str
    user: str = ""
    port: int | None = None
    program: str = "edgeinfer"
    """The `edgeinfer` there: a name on the PATH, or a path."""

    def __str__(self) -> str:
        return f"ssh://{self.target}{f':{self.port}' if self.port else ''}"

    @property
    def target(self) -> str:
        """As ssh is told it."""
        return f"{self.user}@{self.host}" if self.user else self.host


def parse_address(text: str) -> Address:
    """Return the board that `ssh://[USER@]HOST[:PORT][/PATH/TO/edgeinfer]` names.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _no_address(text, str(error)) from error
    if parts.scheme != "ssh" or not parts.hostname or parts.query or parts.fragment:
        raise _no_address(text, "write ssh://[USER@]HOST[:PORT][/PATH/TO/edgeinfer]")
    if parts.password is not None:
        raise _no_address(text.replace(f":{parts.password}@", ":…@"), "holds a password; use a key")
    if parts.hostname.startswith("-") or (parts.username or "").startswith("-"):
        raise _no_address(text, "is no host or user")
    program = parts.path if len(parts.path) > 1 else "edgeinfer"
    return Address(parts.hostname, parts.username or "", port, program)


def _no_address(text: str, problem: str) -> ConfigError:
    return ConfigError("--on", (Problem("", f"{text}: {problem}"),))


@dataclass(frozen=True, slots=True)
class RemoteBoard:
    """A board to which there is a link."""

    address: Address
    folder: str
    """Ours, on the board."""
    version: str
    """Of the edgeinfer there."""
    options: tuple[str, ...]
    """For ssh and scp alike."""

    def measure(self, bundle: Path, *, threads: Sequence[int], seconds: float) -> Profile:
        """Copy a bundle's archive to the board, measure it there, remove it, and return the profile.

        Raises:
            LinkError: the link broke.
            BoardUnusable: the edgeinfer there cannot measure.
            SessionError: the board could not load or run it; `detail` is what it said.
        """
        there = f"{self.folder}/{bundle.name}"
        port = ["-P", str(self.address.port)] if self.address.port else []
        copy = ["scp", "-q", *self.options, *port, str(bundle), f"{_scp_host(self.address)}:{there}"]
        _checked(self.address, _run(self.address, copy, COPY_S))
        words = [self.address.program, "measure", there, "--json", "--seconds", f"{seconds:g}"]
        words += [word for count in threads for word in ("--threads", str(count))]
        done = self._ssh(shlex.join(words) + f"; s=$?; rm -f {shlex.quote(there)}; exit $s", MEASURE_S + 10 * seconds)
        if done.returncode:
            _refused(self, done)
        try:
            return msgspec.json.decode(done.stdout, type=Profile)
        except msgspec.MsgspecError as error:
            text = f"{self.address}: edgeinfer {self.version} there speaks another dialect: {error}; update it"
            raise BoardUnusable(text) from error

    def _ssh(self, command: str, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        return _run(self.address, [*ssh(self.address, self.options), command], timeout_s)


@contextmanager
def linked(address: Address, *, config: Path | None = None) -> Iterator[RemoteBoard]:
    """Yield the board, for as long as the block lasts; after it, nothing of ours is there.

    `config` is an ssh configuration to use instead of the user's own.

    Raises:
        LinkError: it cannot be reached.
        BoardUnusable: there is no edgeinfer, or one that cannot measure.
    """
    with tempfile.TemporaryDirectory(prefix="ei-") as sockets:  # short: a socket's path has at most 108 bytes
        shared = ["ControlMaster=auto", f"ControlPath={sockets}/%C", "ControlPersist=no"]
        settings = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=15", *shared]
        options = (*(("-F", str(config)) if config is not None else ()), *(w for s in settings for w in ("-o", s)))
        holder = _start([*ssh(address, options), _HOLD])
        try:
            folder = _first_line(address, holder)
            board = RemoteBoard(address, folder, "", options)
            yield RemoteBoard(address, folder, _version(board), options)
        finally:
            _end(holder)


def ssh(address: Address, options: Sequence[str]) -> list[str]:
    """Return the words that run a command on the board, but for the command."""
    port = ["-p", str(address.port)] if address.port else []
    return ["ssh", "-T", *options, *port, "--", address.target]


def _scp_host(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{address.user}@{host}" if address.user else host


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        raise LinkError(f"{command[0]} cannot be started: {error.strerror}; install an ssh client") from error


def _first_line(address: Address, holder: subprocess.Popen[bytes]) -> str:
    """Return the folder that the holding shell made."""
    stdout: IO[bytes] | None = holder.stdout
    assert stdout is not None
    line = stdout.readline().decode("utf-8", "replace").strip()  # ssh itself ends after ConnectTimeout
    if re.fullmatch(r"/\S+/edgeinfer-search\.\w+", line):
        return line
    _end(holder)
    said = holder.stderr.read() if holder.stderr is not None else b""
    done = subprocess.CompletedProcess(holder.args, holder.returncode, line.encode(), said)
    _checked(address, done)
    raise LinkError(
        f"{address}: its login shell says {line!r} before anything else; it must be silent and a POSIX shell"
    )


def _version(board: RemoteBoard) -> str:
    """Return the version of the edgeinfer there, once it is known to be able to measure.

    Raises:
        BoardUnusable: there is none, or an older one.
    """
    program = shlex.quote(board.address.program)
    done = board._ssh(f"{program} --version", CONNECT_S * 4)  # noqa: SLF001 - the same class's seam
    if done.returncode in _NOT_FOUND:
        text = f"{board.address}: no edgeinfer there ({board.address.program}: {_last_line(done)})"
        raise BoardUnusable(f"{text}; install it, or name its path: {board.address}/opt/edgeinfer/bin/edgeinfer")
    _checked(board.address, done)
    words = done.stdout.decode("utf-8", "replace").split()
    version = words[-1] if words else "of unknown version"
    done = board._ssh(f"{program} measure --help", CONNECT_S * 4)  # noqa: SLF001
    if done.returncode == _USAGE:
        raise BoardUnusable(f"{board.address}: edgeinfer {version} there has no `measure`; update it")
    _checked(board.address, done)
    return version


def _run(address: Address, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise LinkError(f"{address}: {command[0]} did not end within {timeout_s:.0f} s") from error
    except OSError as error:
        raise LinkError(f"{command[0]} cannot be started: {error.strerror}; install an ssh client") from error


def _checked(address: Address, done: subprocess.CompletedProcess[bytes]) -> None:
    if done.returncode == _UNREACHABLE:
        raise LinkError(f"{address} cannot be reached: {_last_line(done)}")
    if done.returncode:
        raise LinkError(f"{address}: {_last_line(done)} (status {done.returncode})")


def _refused(board: RemoteBoard, done: subprocess.CompletedProcess[bytes]) -> None:
    """Tell a fault of the candidate from one of the board or the link.

    Raises:
        LinkError, BoardUnusable, SessionError: as the status says.
    """
    if done.returncode == _UNREACHABLE:
        _checked(board.address, done)
    if done.returncode in {_USAGE, *_NOT_FOUND}:
        raise BoardUnusable(f"{board.address}: edgeinfer {board.version}: {_last_line(done)}; update it")
    raise SessionError("refused_there", f"{board.address}: {_last_line(done)}")


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return (lines[-1].strip() if lines else f"status {done.returncode}").removeprefix("edgeinfer: ")


def _end(holder: subprocess.Popen[bytes]) -> None:
    """End the holding shell by the end of its input, so that it removes its folder."""
    if holder.stdin is not None and not holder.stdin.closed:
        holder.stdin.close()
    try:
        holder.wait(CONNECT_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()
    if holder.stdout is not None:
        holder.stdout.close()
