"""Turn a TOML file into frozen dataclasses, or say everything that is wrong with it at once.

The board file and the service config are read with this: unknown keys, wrong types and failed checks are all
collected, each with its dotted key path, into one `ConfigError`; what can be read of a wrong file is checked, too.
Sizes and durations are written for people
("512 MiB", "40 ms") and held as integers with the unit in the field's name.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import cattrs
from cattrs.cols import list_structure_factory

from edgeinfer.errors import ConfigError, Problem
from edgeinfer.plain_file import read_plain
from edgeinfer.quantity import Bytes, MilliCelsius, Nanoseconds

T = TypeVar("T")

_SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_TIME_UNITS = {"us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
_QUANTITY = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]+)\s*")
_MAX_INTEGER = (1 << 63) - 1
"""TOML promises no more; longer ones cost time and fill messages."""
MAX_FILE_BYTES = 1 << 20


def parse_bytes(value: Any) -> Bytes:
    """Read a size.

    Raises:
        ValueError: not a size; the text says what one looks like.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INTEGER:
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
        raise ValueError(f"{_short(value)} is not a temperature in degrees Celsius between -55 and 150")
    return MilliCelsius(round(value * 1000))


def _quantity(value: Any, units: dict[str, int], expected: str) -> int:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"{_short(value)} is not {expected} (units: {', '.join(units)})")
    return round(float(match[1]) * units[match[2]])


def _short(value: Any) -> str:
    """Return a value as it came, or its beginning."""
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:  # str() of a very long one is refused
        return "a whole number of more than 64 bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _strict_int(value: Any, _: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{_short(value)} is not a whole number")  # noqa: TRY004
    if abs(value) > _MAX_INTEGER:
        raise ValueError("is a whole number of more than 64 bits")
    return value


def _strict_float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):  # noqa: PLR0124
        raise ValueError(f"{_short(value)} is not a number")
    return float(value)


def _strict_str(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is not a string")  # noqa: TRY004
    return value


def _strict_bool(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{_short(value)} is neither true nor false")  # noqa: TRY004
    return value


def _path(value: Any, _: Any) -> Path:
    text = _strict_str(value, None)
    if not text or "\0" in text:
        raise ValueError(f"{_short(value)} is not a path")
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
    converter.register_structure_hook_factory(
        _is_list,
        lambda kind: _of(list, list_structure_factory(kind, converter), _no_list),
    )
    converter.register_structure_hook_factory(
        dataclasses.is_dataclass, lambda kind: _of(dict, converter.gen_structure_attrs_fromdict(kind), _no_section)
    )
    return converter


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is list


def _of(
    container: type[Any], inner: Callable[[Any, Any], Any], complaint: Callable[[Any], str]
) -> Callable[[Any, Any], Any]:
    """Return the hook `inner`, behind a check that it gets what it takes apart: a text has elements and keys, too."""

    def hook(value: Any, kind: Any) -> Any:
        if not isinstance(value, container):
            raise ValueError(complaint(value))  # noqa: TRY004
        return inner(value, kind)

    return hook


def _no_list(value: Any) -> str:
    if isinstance(value, dict):
        return f"must be a list: [{{ {next(iter(value), 'key')} = … }}], or a section in double brackets"
    return f"must be a list: [{_toml(value)}]"


def _no_section(value: Any) -> str:
    return f"must be a section, or {{ key = value, … }}; {_toml(value)} is none"


def _toml(value: Any) -> str:
    """Return a value about as it stands in the file, short."""
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def load_toml(path: Path) -> dict[str, Any]:
    """Return the file's table.

    Raises:
        ConfigError: missing, unreadable, no plain file, longer than `MAX_FILE_BYTES` or no TOML.
    """
    try:
        raw = read_plain(path, MAX_FILE_BYTES)
        return tomllib.loads(raw.decode("utf-8").replace("\r\n", "\n"))
    except OSError as error:
        raise ConfigError(str(path), (Problem("", f"cannot be read: {error.strerror}"),)) from error
    except RecursionError as error:
        raise ConfigError(str(path), (Problem("", "is not TOML: it is nested too deeply"),)) from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are such; an endless integer raises a bare one
        raise ConfigError(str(path), (Problem("", f"is not TOML: {error}"),)) from error


def structure(
    table: dict[str, Any],
    cls: type[T],
    source: str,
    converter: cattrs.Converter,
    check: Callable[[T], Iterable[Problem]] = lambda _: (),
) -> T:
    """Return `table` as `cls`, if `check` finds nothing wrong with it.

    Of a table with wrong types or unknown keys, `check` is given what could be read of it: keys with a default have it,
    and None stands in lists for elements that cannot be read, so that one run tells everything.

    Raises:
        ConfigError: with every problem found, by key path.
    """
    problems: list[Problem] = []
    found: T | None
    try:
        found = converter.structure(table, cls)
    except cattrs.BaseValidationError as error:
        problems = _problems(error, "", _places(cls))
        found = _salvage(table, cls, converter)
    if found is not None:
        told = [problem.path for problem in problems]
        problems += [problem for problem in check(found) if not any(_overlap(problem.path, path) for path in told)]
    if problems:
        raise ConfigError(source, tuple(problems))
    assert found is not None  # what could not be read at all has problems
    return found


def _overlap(one: str, other: str) -> bool:
    """Return whether one key path is the other, or leads to it."""
    short, long = sorted((one, other), key=len)
    return long == short or long.startswith((f"{short}.", f"{short}["))


def _salvage(value: Any, kind: Any, converter: cattrs.Converter) -> Any:
    """Return what can be read of `value`, None when that is nothing."""
    try:
        return converter.structure(value, kind)
    except (cattrs.BaseValidationError, ConfigError, ValueError, TypeError):
        pass
    if _is_list(kind):
        (element,) = typing.get_args(kind)
        return [_salvage(item, element, converter) for item in value] if isinstance(value, list) else [None]
    section = next((part for part in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(part)), None)
    if section is None or not isinstance(value, dict) or len(typing.get_args(kind)) > 2:
        return None
    hints = typing.get_type_hints(section)
    readable = {
        field.name: found
        for field in dataclasses.fields(section)
        if field.name in value and (found := _salvage(value[field.name], hints[field.name], converter)) is not None
    }
    try:
        return typing.cast("type[Any]", section)(**readable)
    except TypeError:  # a key without default is missing
        return None


def _places(cls: Any, header: str = "") -> dict[str, list[str]]:
    """Return the sections that have a key, by key; the top level is ""."""
    found: dict[str, list[str]] = {}
    for key, hint in typing.get_type_hints(cls).items():
        found.setdefault(key, []).append(header)
        for section in _sections(hint):
            for inner, headers in _places(section, f"{header}.{key}".strip(".")).items():
                found.setdefault(inner, []).extend(place for place in headers if place not in found.get(inner, ()))
    return found


def _sections(hint: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _sections(part)


def _problems(error: BaseException, path: str, places: dict[str, list[str]]) -> list[Problem]:
    """Flatten cattrs' tree of errors into problems with dotted key paths."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in dataclasses.fields(typing.cast("Any", error.cl))]
        return [Problem(f"{path}.{key}".lstrip("."), _unknown(key, path, known, places))
                for key in sorted(error.extra_fields)]  # fmt: skip
    if isinstance(error, cattrs.IterableValidationError):
        noted, plain = error.group_exceptions()
        found = [item for sub, note in noted for item in _problems(sub, f"{path}[{note.index}]", places)]
        return found + [item for sub in plain for item in _problems(sub, path, places)]
    if isinstance(error, cattrs.ClassValidationError):
        attributes, plain = error.group_exceptions()
        found = [item for sub, note in attributes for item in _problems(sub, f"{path}.{note.name}".lstrip("."), places)]
        return found + [item for sub in plain for item in _problems(sub, path, places)]
    if isinstance(error, cattrs.BaseValidationError):
        return [item for sub in error.exceptions for item in _problems(sub, path, places)]
    if isinstance(error, KeyError):
        return [Problem(path, "is required")]
    if isinstance(error, ConfigError):
        return [Problem(f"{path}.{problem.path}".strip("."), problem.message) for problem in error.problems]
    return [Problem(path, str(error) or type(error).__name__)]


def _unknown(key: str, path: str, known: list[str], places: dict[str, list[str]]) -> str:
    """Say what may have been meant by a key that does not exist here: one that belongs elsewhere, or a slip."""
    here = re.sub(r"\[\d+\]", "", path)
    elsewhere = [place for place in places.get(key, ()) if place != here]
    below = [place for place in elsewhere if place.startswith(f"{here}.")]
    if 0 < len(elsewhere := (below if here else []) or elsewhere) <= 3:
        hint = "; it belongs in " + " or ".join(f"[{place}]" if place else "the top level" for place in elsewhere)
    else:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
        hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown key{hint} (known here: {', '.join(sorted(known))})"
