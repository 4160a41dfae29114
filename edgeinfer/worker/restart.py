"""Decide when the next zygote starts after one has ended, and whether its import is to blame.

Pure but for what it counts; nobody is started here.
"""

from __future__ import annotations

import signal
from typing import Final

from edgeinfer.clock import NS_PER_S
from edgeinfer.worker.lineage import ExitStatus

_STEADY_NS: Final = 10 * NS_PER_S
"""A zygote that lived this long was healthy: the next restart is immediate again."""
_LONGEST_PAUSE_S: Final = 30.0
_MAX_EARLY_DEATHS: Final = 3
"""So many zygotes killed during the import, and the import itself is to blame."""
FIRST_COOL_DOWN_S: Final = 1.0
LONGEST_COOL_DOWN_S: Final = 60.0
"""From an import that is to blame to the next one; it doubles while they fail."""


class Restarts:
    """The pauses between one service's zygotes: none after a healthy one, else growing up to half a minute.

    A runtime that cannot be imported is left alone for longer, up to a minute.
    """

    def __init__(self, *, first_cool_down_s: float = FIRST_COOL_DOWN_S) -> None:
        self.count = 0
        """Zygotes that were started because another one had ended."""
        self._first_cool_down_s = self._cool_down_s = first_cool_down_s
        self._pause_s = 0.0
        self._early_deaths = 0

    def ready(self) -> None:
        """Note that a zygote has imported the runtime."""
        self._early_deaths = 0

    def blames_import(self, status: ExitStatus, complaint: str) -> bool:
        """Return whether a zygote that never became ready failed by itself, not by chance (memory was short, say)."""
        self._early_deaths += 1
        return bool(complaint) or status.signal != signal.SIGKILL or self._early_deaths >= _MAX_EARLY_DEATHS

    def after(self, lived_ns: int) -> float:
        """Return how many seconds to wait before the next one starts."""
        self.count += 1
        return self._grown() if lived_ns <= _STEADY_NS else self._reset()

    def unstarted(self) -> float:
        """Return how many seconds to wait when the system did not let one start."""
        return self._grown()

    def cool_down(self) -> float:
        """Return how many seconds to leave the runtime alone after an import that is to blame."""
        pause_s, self._cool_down_s = self._cool_down_s, min(LONGEST_COOL_DOWN_S, 2 * self._cool_down_s)
        return pause_s

    def _grown(self) -> float:
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2 + 0.1)
        return self._pause_s

    def _reset(self) -> float:
        self._pause_s, self._cool_down_s = 0.0, self._first_cool_down_s
        return 0.0
