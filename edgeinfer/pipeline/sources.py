"""Make the source that a loop's section asks for: what a preset needs to know is found out here, at each start."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path

from edgeinfer.clock import Clock
from edgeinfer.config import (
    CameraSource,
    CommandSource,
    DirectorySource,
    LoopSection,
    MicrophoneSource,
    RtspSource,
    SourceSection,
)
from edgeinfer.pipeline import presets
from edgeinfer.pipeline.child import Launch
from edgeinfer.pipeline.command import CommandFrames
from edgeinfer.pipeline.directory import DirectoryFrames
from edgeinfer.pipeline.frame import Source, SourceError
from edgeinfer.pipeline.microphone import MicrophoneFrames
from edgeinfer.pipeline.off_thread import off_thread
from edgeinfer.pipeline.regular import open_regular
from edgeinfer.pipeline.v4l2 import pixel_formats
from edgeinfer.pipeline.wav import WavFrames

_JPEGS = CommandSource(["ffmpeg"], framing="jpeg")
_MOST_CREDENTIALS_BYTES = 1024


def make_source(section: LoopSection, *, clock: Clock, storage: Executor) -> Source:
    """Return the loop's source. `storage` is the daemon's one thread for what loops read and write."""
    return open_source(section.source, name=section.name, clock=clock, storage=storage)


def open_source(section: SourceSection, *, name: str, clock: Clock, storage: Executor) -> Source:
    """Return a source, known by `name`; what it does with files and devices it does in the `storage` thread."""
    match section:
        case DirectorySource():
            return DirectoryFrames(section, clock=clock, storage=storage)
        case CommandSource():
            return CommandFrames(section, name=name, clock=clock)
        case CameraSource():
            prepare = _prepared(storage, functools.partial(_camera, section))
            return CommandFrames(_JPEGS, name=name, clock=clock, prepare=prepare)
        case RtspSource():
            prepare = _prepared(storage, functools.partial(_network_camera, section))
            return CommandFrames(_JPEGS, name=name, clock=clock, prepare=prepare)
        case MicrophoneSource():
            prepare = _prepared(storage, functools.partial(_microphone, section))
            return MicrophoneFrames(section, name=name, clock=clock, prepare=prepare)
    return WavFrames(section, clock=clock, storage=storage)


def _prepared(storage: Executor, find_out: Callable[[], Launch]) -> Callable[[], Awaitable[Launch]]:
    async def prepare() -> Launch:
        return await off_thread(storage, find_out)

    return prepare


def _camera(section: CameraSource) -> Launch:
    return presets.camera(section, pixel_formats(section.device))


def _network_camera(section: RtspSource) -> Launch:
    if section.credentials_file is None:
        return presets.network_camera(section, "", 0)
    return presets.network_camera(section, _credentials(section.credentials_file), _ffmpeg_major())


def _microphone(section: MicrophoneSource) -> Launch:
    return presets.microphone(section, [program for program in ("arecord", "ffmpeg") if shutil.which(program)])


def _credentials(path: Path) -> str:
    """Return the file's line.

    Raises:
        SourceError: it cannot be read, or is no such file.
    """
    try:
        with open_regular(path) as file:
            return file.read(_MOST_CREDENTIALS_BYTES).decode().rstrip("\r\n")
    except SourceError as error:
        raise SourceError(f"credentials_file {error}") from error
    except OSError as error:
        raise SourceError(f"credentials_file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"credentials_file {path} is not UTF-8 text") from error


def _ffmpeg_major() -> int:
    """Return ffmpeg's version, a high number for one that was built from a nightly snapshot (`N-…`), 0 for none."""
    try:
        done = subprocess.run(["ffmpeg", "-version"], capture_output=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.match(rb"ffmpeg version n?(\d+)\.", done.stdout)
    return int(match[1]) if match else 99
