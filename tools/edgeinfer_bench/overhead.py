"""What the way through the runtime costs: the heavy loop, beside raw `session.run`."""

from __future__ import annotations

from pathlib import Path

from edgeinfer_bench.heavy import measure_heavy
from edgeinfer_bench.record import Record


def measure(bundles: Path) -> Record:
    """Return the record; takes about a minute."""
    digests, figures = measure_heavy(bundles)
    return Record(
        bench="overhead",
        workload={
            "models": digests,
            "threads": 1,
            "concurrency": 1,
            "clock": "loop: the frame's bytes are in the daemon, to the result handed to the sink; raw: session.run",
        },
        figures=figures,
    )
