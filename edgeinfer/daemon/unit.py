"""Fill in the systemd units that ship beside this module.

Owns what depends on where edgeinfer is installed; every other line is the template's. `systemd-analyze verify` and
`security` are held against the result by tests/daemon/test_unit.py.
"""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path
from typing import Literal

from edgeinfer.errors import ConfigError, Problem

Kind = Literal["device", "nearby"]

_TEMPLATES: dict[Kind, str] = {"device": "edgeinfer.service", "nearby": "edgeinfer-nearby.service"}

_HIDING: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("/home", "/root", "/run/user"), "ProtectHome=yes", "ProtectHome=read-only"),
    (("/tmp", "/var/tmp"), "PrivateTmp=yes", "PrivateTmp=no"),  # noqa: S108 - where an installation may be found
)
"""Folders that a line of the sandbox hides, and the line that shows them."""

_WORD = re.compile(r"[A-Za-z0-9_./:@+-]+")


def render_unit(kind: Kind, executable: Path, config: Path, *, python: Path | None = None) -> str:
    """Return the unit file's text.

    `executable` is the `edgeinfer` command; of a Python file (`python -m edgeinfer`) this interpreter is the command.
    Where program, interpreter or config lie in a folder that the sandbox hides, that one line is weakened, with a
    comment. `python` is where the interpreter's own installation lies, by default this one's.

    Raises:
        ConfigError: a path is relative: systemd would refuse it.
    """
    problems = [
        Problem(name, f"{path} is not an absolute path, and a unit needs one")
        for name, path in (("executable", executable), ("config", config))
        if not path.is_absolute()
    ]
    if problems:
        raise ConfigError("systemd unit", tuple(problems))
    words = [str(executable)] if executable.suffix != ".py" else [sys.executable, "-m", "edgeinfer"]
    template = (resources.files("edgeinfer.daemon") / _TEMPLATES[kind]).read_text(encoding="utf-8")
    text = template.replace("@EXECUTABLE@ ", " ".join(map(_quoted, words)) + " ").replace(
        "@CONFIG@\n", _quoted(str(config)) + "\n"
    )
    needed = dict.fromkeys((words[0], str(python or sys.base_prefix), str(config)))
    for folders, hides, shows in _HIDING:
        if found := [path for path in needed if path.startswith(tuple(f"{folder}/" for folder in folders))]:
            text = text.replace(hides, f"# weaker than usual: {', '.join(found)} would be hidden\n{shows}")
    return text


def _quoted(word: str) -> str:
    """Return `word` as one argument of ExecStart: specifiers and variables switched off, quoted if need be."""
    safe = word.replace("%", "%%").replace("$", "$$")
    if _WORD.fullmatch(safe):
        return safe
    escaped = safe.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
