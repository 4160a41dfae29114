"""Turn a TOML file into frozen dataclasses, or say everything that is wrong with it at once.

The board file and the service config are read with this: unknown keys, wrong types and failed checks are all
collected, each with its dotted key path, into one `ConfigError`. Sizes and durations are written for people
("512 MiB", "40 ms") and held as integers with the unit in the field's name.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NewType, TypeVar

import cattrs

from edgeinfer.errors import ConfigError, Problem

T = TypeVar("T")

Bytes = NewType("Bytes", int)
"""A size in bytes; in TOML an integer, or a string such as "512 MiB"."""
Nanoseconds = NewType("Nanoseconds", int)
"""A duration; in TOML a string such as "40 ms", "2 s" or "5 min"."""
MilliCelsius = NewType("MilliCelsius", int)
"""A temperature in thousandths of a degree; in TOML degrees Celsius as a number."""

_SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_TIME_UNITS = {"us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(value: Any) -> Bytes:
    """Read a size.

    Raises:
        ValueError: not a size; the text says what one looks like.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Bytes(value)
    return Bytes(_quantity(value, _SIZE_UNITS, 'a size such as "512 MiB"'))


def parse_nanoseconds(value: Any) -> Nanoseconds:
    """Read a duration.

    Raises:
        ValueError: not a duration; the text says what one looks like.
    """
    return Nanoseconds(_quantity(value, _TIME_UNITS, 'a duration such as "40 ms"'))


def parse_milli_celsius(value: Any) -> MilliCelsius:
    """Read a temperature in degrees Celsius.

    Raises:
        ValueError: not a number, or no temperature a board can have.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not -55 <= value <= 150:
        raise ValueError(f"{value!r} is not a temperature in degrees Celsius between -55 and 150")
    return MilliCelsius(round(value * 1000))


def _quantity(value: Any, units: dict[str, int], expected: str) -> int:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"{value!r} is not {expected} (units: {', '.join(units)})")
    return round(float(match[1]) * units[match[2]])


def _strict_int(value: Any, _: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number")  # noqa: TRY004
    return value


def _strict_float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):  # noqa: PLR0124
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _strict_str(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")  # noqa: TRY004
    return value


def _strict_bool(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004
    return value


def _path(value: Any, _: Any) -> Path:
    text = _strict_str(value, None)
    if not text or "\0" in text:
        raise ValueError(f"{value!r} is not a path")
    return Path(text)


def make_converter() -> cattrs.Converter:
    """Return a converter with our rules: nothing coerced, nothing unknown, every problem kept."""
    converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
    converter.register_structure_hook(int, _strict_int)
    converter.register_structure_hook(float, _strict_float)
    converter.register_structure_hook(str, _strict_str)
    converter.register_structure_hook(bool, _strict_bool)
    converter.register_structure_hook(Path, _path)
    converter.register_structure_hook(Bytes, lambda value, _: parse_bytes(value))
    converter.register_structure_hook(Nanoseconds, lambda value, _: parse_nanoseconds(value))
    converter.register_structure_hook(MilliCelsius, lambda value, _: parse_milli_celsius(value))
    return converter


def load_toml(path: Path) -> dict[str, Any]:
    """Return the file's table.

    Raises:
        ConfigError: missing, unreadable or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), (Problem("", f"cannot be read: {error.strerror}"),)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), (Problem("", f"is not TOML: {error}"),)) from error


def structure(table: dict[str, Any], cls: type[T], source: str, converter: cattrs.Converter) -> T:
    """Return `table` as `cls`.

    Raises:
        ConfigError: with every problem found, by key path.
    """
    try:
        return converter.structure(table, cls)
    except cattrs.BaseValidationError as error:
        raise ConfigError(source, tuple(_problems(error))) from error


def _problems(error: BaseException, path: str = "") -> list[Problem]:
    """Flatten cattrs' tree of errors into problems with dotted key paths."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = ", ".join(sorted(field.alias or field.name for field in getattr(error.cl, "__attrs_attrs__", ())))
        known = known or ", ".join(sorted(getattr(error.cl, "__dataclass_fields__", ())))
        return [Problem(f"{path}.{key}".lstrip("."), f"unknown key (known here: {known})")
                for key in sorted(error.extra_fields)]  # fmt: skip
    if isinstance(error, cattrs.IterableValidationError):
        noted, plain = error.group_exceptions()
        found = [item for sub, note in noted for item in _problems(sub, f"{path}[{note.index}]")]
        return found + [item for sub in plain for item in _problems(sub, path)]
    if isinstance(error, cattrs.ClassValidationError):
        attributes, plain = error.group_exceptions()
        found = [item for sub, note in attributes for item in _problems(sub, f"{path}.{note.name}".lstrip("."))]
        return found + [item for sub in plain for item in _problems(sub, path)]
    if isinstance(error, cattrs.BaseValidationError):
        return [item for sub in error.exceptions for item in _problems(sub, path)]
    if isinstance(error, KeyError):
        return [Problem(path, "is required")]
    if isinstance(error, ConfigError):
        return [Problem(f"{path}.{problem.path}".strip("."), problem.message) for problem in error.problems]
    return [Problem(path, str(error) or type(error).__name__)]
