"""Run the Python of a recipe, and say where in it something went wrong.

graph.py and data.py are their author's code and may raise anything, at once or while they are iterated. Whatever it is
becomes one line with file, line and cause, as for any other mistake in a recipe.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeinfer.errors import EdgeInferError
from edgeinfer_tools.faults import RecipeCodeFailed
from edgeinfer_tools.samples import Inputs, Stream


@contextmanager
def blamed_on(path: Path, *, line: int = 1) -> Iterator[None]:
    """Turn what the code of `path` raises into a fault that names its line.

    `line` is named when no line of the file had a part in it: where the function is defined that was called.

    Raises:
        RecipeCodeFailed: it raised something. Our own faults pass as they are.
    """
    try:
        yield
    except EdgeInferError:
        raise
    except (Exception, SystemExit) as error:  # somebody else's code raises what it likes, and must not end the build
        raise RecipeCodeFailed(path, _line_in(path, error) or line, f"{type(error).__name__}: {error}") from error


def call(path: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of the file returns.

    Raises:
        RecipeCodeFailed: it raised something, or does not take these arguments.
    """
    with blamed_on(path, line=first_line(function)):
        return function(*arguments)


def items(path: Path, function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield what a function of the file yields.

    Raises:
        RecipeCodeFailed: it raised something, or gives nothing that can be iterated.
    """
    found = call(path, function, *arguments)
    if not isinstance(found, Iterable):
        text = f"{function.__name__}() gives {type(found).__name__}; it must yield, or return a list"
        raise RecipeCodeFailed(path, first_line(function), text)
    yield from _guarded(path, found, first_line(function))


def streams(path: Path, function: Callable[..., Any], *arguments: Any) -> Iterator[Stream]:
    """Yield the streams of a function of data.py; their requests are guarded alike.

    Raises:
        RecipeCodeFailed: it raised something, or yields something else.
    """
    line = first_line(function)
    for item in items(path, function, *arguments):
        if not isinstance(item, Stream):
            text = f"{function.__name__}() yields {type(item).__name__}, not edgeinfer_tools.samples.Stream"
            raise RecipeCodeFailed(path, line, text)
        yield replace(item, requests=_Requests(path, item, line))


class _Requests:
    """The requests of one stream, as often as they are asked for."""

    def __init__(self, path: Path, stream: Stream, line: int) -> None:
        self._path = path
        self._stream = stream
        self._line = line

    def __iter__(self) -> Iterator[Inputs]:
        for request in _guarded(self._path, self._stream.requests, self._line):
            if not isinstance(request, Mapping):
                what = f"a request of stream {self._stream.name!r} is {type(request).__name__}"
                raise RecipeCodeFailed(self._path, self._line, f"{what}, not a dict of inputs by name")
            yield request


def _guarded(path: Path, iterable: Iterable[Any], line: int) -> Iterator[Any]:
    with blamed_on(path, line=line):
        iterator = iter(iterable)
    while True:
        with blamed_on(path, line=line):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _line_in(path: Path, error: BaseException) -> int | None:
    """Return the innermost line of the file that had a part in the error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None


def first_line(function: Callable[..., Any]) -> int:
    """Return the line of its file at which a function begins."""
    code = getattr(function, "__code__", None)
    return code.co_firstlineno if code is not None else 1
