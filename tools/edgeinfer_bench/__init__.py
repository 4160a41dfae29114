"""Benchmarks: each prints a table and writes build/bench/NAME.json; claims about speed and memory live here."""

BENCHES = ("overhead", "footprint", "load", "kill", "start", "overload")
"""Each is a module of this package with `measure(bundles: Path) -> Record`, and a section of docs/benchmarks.md."""
