"""Benchmark of the toolchain: for every recipe what it makes, beside what others make of the same float model.

Run by `make bench-tools`; docs/benchmarks.md says what is measured. `make` runs in a process per artefact, `rivals` are
the other makers, `judging` says how good and how fast artefacts are, `figures` what that means.
"""
