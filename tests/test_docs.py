"""The documentation is held against the code: commands, flags, events, verbs, reasons, exit statuses, and every link."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgeinfer.cli
import edgeinfer_tools.cli
from edgeinfer.client.answer import EXIT_CODES
from edgeinfer.control.commands import FAULTS, VERBS
from edgeinfer.errors import EdgeInferError
from edgeinfer.telemetry.events import KINDS

ROOT = Path(__file__).parents[1]
PAGES = sorted({
    *ROOT.glob("*.md"),
    *(page for folder in ("docs", "models", "tools", "tests", "device-configs") for page in (ROOT / folder).rglob("*.md")),
})  # fmt: skip

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6}\s+(.*)$", re.MULTILINE)
PROGRAMS = {"edgeinfer": edgeinfer.cli, "edgeinfer-tools": edgeinfer_tools.cli}


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that headings give, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")) for heading in HEADING.findall(prose(page)))
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue  # another site's, which no test may need
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or not file.is_relative_to(ROOT):
            broken.append(target)
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            broken.append(f"{target} (no such heading)")
    assert broken == []


def walk(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield every command of a parser with its flags, the longest spelling of each."""
    flags = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from walk(child, (*words, name))
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            flags.append(max(action.option_strings, key=len))
    yield words, flags


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_and_flag_is_in_the_readme(program: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = []
    for words, flags in walk(PROGRAMS[program].build_parser(), (program,)):
        command = (
            r"\s+".join(map(re.escape, words[:-1])) + rf"\s+(?:[\w-]+\|)*{re.escape(words[-1])}"
        )  # `bundle add|list`
        if len(words) > 1 and not re.search(rf"(?<![\w-]){command}(?![\w-])", text):
            missing.append(" ".join(words))
        missing += [
            f"{' '.join(words)} {flag}"
            for flag in flags
            if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)
        ]
    assert missing == []


def table_words(page: str, heading: str) -> set[str]:
    """Return the words in backticks of the first column of the table below a heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.split(r"^#", text.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return {
        word
        for row in section.splitlines()
        if row.startswith("| `")
        for word in re.findall(r"`([^`]+)`", row.split("|")[1])
    }


def test_every_event_is_described() -> None:
    assert table_words("docs/operations.md", "### Events") == KINDS.keys()


def reasons() -> set[str]:
    """Return every reason that the command plane or the daemon's actions can give, as their sources spell them."""
    found = {reason for _, _, reason in FAULTS}
    for path in [*(ROOT / "edgeinfer/control").glob("*.py"), ROOT / "edgeinfer/daemon/actions.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                position = {"nack": 0, "Refused": 0, "_Ending": 1, "_refuse_pending": 1, "Nack": 2}.get(name)
                if position is not None and len(node.args) > position:
                    found |= constants(node.args[position])
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                found |= constants(node.value.elts[0])  # judge answers (reason, detail)
    return found


def constants(node: ast.expr) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def test_every_verb_and_reason_is_described() -> None:
    documented = table_words("docs/operations.md", "## Commands")
    assert documented == VERBS.keys() | reasons()


def test_the_unit_is_described_as_it_is() -> None:
    unit = (ROOT / "edgeinfer/daemon/edgeinfer.service").read_text(encoding="utf-8")
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    page = (ROOT / "docs/systemd.md").read_text(encoding="utf-8")
    assert f"every {int(settings['WatchdogSec']) // 2} s (half of `WatchdogSec`)" in page
    assert f"restarted after {settings['RestartSec']} s" in page
    assert f"left after {settings['TimeoutStopSec']} s is killed" in page
    assert f"`OOMScoreAdjust={settings['OOMScoreAdjust']}`" in page


def faults(kind: type[EdgeInferError]) -> Iterator[type[EdgeInferError]]:
    for child in kind.__subclasses__():
        yield child
        yield from faults(child)


def test_every_exit_status_is_in_the_one_table() -> None:
    for module in ("edgeinfer.client", "edgeinfer.store.durable", "edgeinfer_tools.faults"):
        importlib.import_module(module)
    statuses = {fault.exit_code for fault in faults(EdgeInferError)}
    for package in ("edgeinfer/cli", "tools/edgeinfer_tools"):
        for path in (ROOT / package).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
                    statuses |= {node.value.value} if type(node.value.value) is int else set()
    assert {2, 65, 69, 73, 75, 78} <= statuses
    page = (ROOT / "docs/exit-status.md").read_text(encoding="utf-8")
    assert [status for status in sorted(statuses) if f"\n| {status} |" not in page] == []


def test_the_status_of_every_refusal_is_told() -> None:
    page = (ROOT / "docs/exit-status.md").read_text(encoding="utf-8")
    told = {
        reason: int(status)
        for row, status in re.findall(r"^\| (`.*) \| (\d+) \|$", page, re.MULTILINE)
        for reason in re.findall(r"`([a-z_]+)`", row)
    }
    assert told == {reason.value: status for reason, status in EXIT_CODES.items()}


def test_the_page_shows_what_check_config_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    example = page.split("A small `device.toml`:\n\n```toml\n", 1)[1].split("```", 1)[0]
    (tmp_path / "device.toml").write_text(
        example.replace('model = "pp-ocr-det"', 'model = "pp-ocr-dett"') + "[scheduler]\nqueue_limt = 9\n"
    )
    monkeypatch.chdir(tmp_path)
    assert edgeinfer.cli.main(["check-config", "device.toml"]) == 78
    assert f"$ edgeinfer check-config device.toml\n{capsys.readouterr().err}```" in page
