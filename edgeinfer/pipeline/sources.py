"""Make the source that a loop's section asks for."""

from __future__ import annotations

from concurrent.futures import Executor

from edgeinfer.clock import Clock
from edgeinfer.config import CommandSource, DirectorySource, LoopSection
from edgeinfer.pipeline.command import CommandFrames
from edgeinfer.pipeline.directory import DirectoryFrames
from edgeinfer.pipeline.frame import Source
from edgeinfer.pipeline.wav import WavFrames


def make_source(section: LoopSection, *, clock: Clock, storage: Executor) -> Source:
    """Return the loop's source. `storage` is the daemon's one storage thread."""
    if isinstance(section.source, DirectorySource):
        return DirectoryFrames(section.source, clock=clock, storage=storage)
    if isinstance(section.source, CommandSource):
        return CommandFrames(section.source, name=section.name, clock=clock)
    return WavFrames(section.source, clock=clock, storage=storage)
