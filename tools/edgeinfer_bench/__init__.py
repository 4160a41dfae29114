"""Benchmarks: each prints a table and writes build/bench/NAME.json; claims about speed and memory live here."""
