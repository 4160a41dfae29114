"""Do blocking file work in the one thread that is for it, typed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def off_thread(storage: Executor, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Return `work(*arguments)`, done in the thread of `storage`; what it raises is raised here."""
    return await asyncio.get_running_loop().run_in_executor(storage, work, *arguments)
