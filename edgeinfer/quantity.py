"""What sizes, durations and temperatures are called once they have been read: integers whose type says the unit.

How people write them in TOML is `toml_file`'s.
"""

from __future__ import annotations

from typing import NewType

Bytes = NewType("Bytes", int)
"""A size in bytes; in TOML an integer, or a string such as "512 MiB"."""
Nanoseconds = NewType("Nanoseconds", int)
"""A duration; in TOML a string such as "40 ms", "2 s" or "5 min"."""
MilliCelsius = NewType("MilliCelsius", int)
"""A temperature in thousandths of a degree; in TOML degrees Celsius as a number."""
