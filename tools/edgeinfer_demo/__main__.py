"""Run the demo: `python -m edgeinfer_demo --bundles build/bundles --out build/demo`.

Exit status 0 when every check holds, 1 when one doesn't, 69 when something could not be started.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from edgeinfer.daemon.lifecycle import first_fault
from edgeinfer.errors import EdgeInferError
from edgeinfer_demo.live import Display
from edgeinfer_demo.run import play
from edgeinfer_demo.world import World


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(prog="edgeinfer_demo", description="The whole main job, live.")
    parser.add_argument("--bundles", type=Path, default=Path("build/bundles"), help="default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where report.json goes")
    parser.add_argument("--no-governor", action="store_true", help="run with thermal.enabled = false: must fail")
    parser.add_argument("--no-offload", action="store_true", help="run with offload.enabled = false: must fail")
    parser.add_argument("--speed", type=float, default=1.0, help="shorten every phase by this factor")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="edgeinfer-demo-") as folder:
            world = World(Path(folder), args.bundles, governor=not args.no_governor, offload=not args.no_offload)
            with Display() as display:
                return asyncio.run(play(world, display, args.out, speed=args.speed))
    except BaseExceptionGroup as group:
        fault = first_fault(group)
        if fault is None:
            raise
        print(f"edgeinfer demo: {fault}", file=sys.stderr)
        return fault.exit_code
    except EdgeInferError as error:
        print(f"edgeinfer demo: {error}", file=sys.stderr)
        return error.exit_code


raise SystemExit(main())
