"""What the way through the runtime costs, beside raw `session.run`: single requests, and the heavy loop."""

from __future__ import annotations

from pathlib import Path

from edgeinfer_bench.calls import measure_calls
from edgeinfer_bench.heavy import measure_heavy
from edgeinfer_bench.record import Record


def measure(bundles: Path) -> Record:
    """Return the record; takes about a minute and a half."""
    made, calls = measure_calls()
    digests, heavy = measure_heavy(bundles)
    return Record(
        bench="overhead",
        workload={
            "models": {**made, **digests},
            "threads": 1,
            "concurrency": 1,
            "clock": "local: submit to outcome; socket: the client's call; "
            "heavy loop: the frame's bytes are in the daemon, to the result handed to the sink; raw: session.run",
        },
        figures=[*calls, *heavy],
    )
