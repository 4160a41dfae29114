"""`python -m edgeinfer_bench run|show`."""

from __future__ import annotations

import argparse
import importlib
import logging
from pathlib import Path

from edgeinfer_bench import BENCHES
from edgeinfer_bench.record import read_records, write_record
from edgeinfer_bench.show import show


def main() -> int:
    """Run the named benchmarks (default all), or show what was measured."""
    parser = argparse.ArgumentParser(prog="edgeinfer_bench")
    parser.add_argument("verb", choices=("run", "show"))
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--bundles", type=Path, default=Path("build/bundles"))
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    logging.basicConfig(level=logging.ERROR)  # what is killed and restarted on purpose is no news
    if args.verb == "run":
        for name in args.names or BENCHES:
            record = importlib.import_module(f"edgeinfer_bench.{name}").measure(args.bundles.resolve())
            write_record(record, args.out)
            show([record])
        return 0
    show(read_records(args.out))
    return 0


raise SystemExit(main())
