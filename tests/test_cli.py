"""The command line: exit statuses, one clear line for every fault, and no traceback for anybody's mistake."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import cli, errors
from edgeinfer.cli import asking
from edgeinfer.client import DeadlineExpired, Rejected
from edgeinfer.store.durable import StorageError
from edgeinfer.store.store import BundleStore
from tests.artifact.making import make_bundle

ROOT = Path(__file__).parents[1]


def run(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run the command in this process; return its status and what it wrote."""
    try:
        status = cli.main([*map(str, arguments)])
    except SystemExit as usage:
        status = int(usage.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


FAULTS: list[tuple[errors.EdgeInferError, int]] = [
    (errors.EdgeInferError("x"), 1),
    (errors.ConfigError("device.toml", (errors.Problem("a.b", "is wrong"), errors.Problem("c", "is too"))), 78),
    (errors.ArtifactError("x"), 65),
    (errors.ManifestInvalid("x"), 65),
    (errors.DigestMismatch("x"), 65),
    (errors.UnsupportedSchema("x"), 65),
    (errors.BudgetExceeded("m", needed_bytes=1, free_bytes=0, ceiling_bytes=0), 75),
    (errors.SessionError("load_failed", "x"), 70),
    (errors.RuntimeUnusable("x"), 70),
    (errors.LinkError("x"), 69),
    (errors.ProtocolError("x"), 76),
    (errors.InternalError("x"), 70),
]


def test_every_fault_is_one_message_and_its_own_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.EdgeInferError)}
    assert named == {type(fault) for fault, _ in FAULTS}, "a new fault needs a status here"
    for fault, expected in FAULTS:

        def act(_: argparse.Namespace, fault: errors.EdgeInferError = fault) -> int:
            raise fault

        monkeypatch.setattr(asking, "_status", act)
        status, out, err = run("status", capsys=capsys)
        assert (status, out) == (expected, "")
        assert err == f"edgeinfer: {fault}\n"


def test_interrupting_is_no_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def act(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(asking, "_status", act)
    assert run("status", capsys=capsys) == (130, "", "")


@pytest.mark.parametrize("arguments", [[], ["bundle"], ["infer"], ["nonsense"], ["run", "--log-level", "loud"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(*arguments, capsys=capsys)
    assert status == 2
    assert "usage: edgeinfer" in err


def test_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["status"], ["infer", "m", "text"]):
        status, _, err = run(*arguments, "--socket", tmp_path / "e.sock", capsys=capsys)
        assert status == 69
        assert str(tmp_path / "e.sock") in err
        assert len(err.splitlines()) == 1


def test_infer_takes_a_text_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("infer", "m", capsys=capsys)[0] == 2
    assert run("infer", "m", "text", "--file", "x", capsys=capsys)[0] == 2
    status, _, err = run("infer", "m", "--file", tmp_path / "none.jpg", "--socket", tmp_path / "s", capsys=capsys)
    assert status == 66
    assert err == f"edgeinfer: {tmp_path / 'none.jpg'} cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (Rejected("memory", "m needs 3 MiB"), "edgeinfer: m: rejected (memory): m needs 3 MiB\n"),
        (DeadlineExpired("queued", "it waited"), "edgeinfer: m: "),
    ],
)
def test_a_refusal_is_told_and_may_be_tried_again(
    ending: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def infer_text(*_: Any, **__: Any) -> None:
        raise ending

    monkeypatch.setattr("edgeinfer.client.Client.infer_text", infer_text)
    status, out, err = run("infer", "m", "text", capsys=capsys)
    assert (status, out) == (75, "")
    assert err.startswith(said)


# Bundles


def add(state: Path, source: Path) -> None:
    BundleStore(state).add(source, lambda *_: None)


def test_bundles_are_listed_verified_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ("--state-dir", tmp_path / "state")
    assert "edgeinfer bundle add PATH" in run("bundle", "list", *state, capsys=capsys)[1]
    assert "edgeinfer bundle add PATH" in run("bundle", "verify", *state, capsys=capsys)[1]
    for version in ("1.0.0", "1.1.0"):
        make_bundle(tmp_path / version, version=version, description="for tests")
        add(tmp_path / "state", tmp_path / version)
    status, out, _ = run("bundle", "list", *state, capsys=capsys)
    assert status == 0
    old, new = out.splitlines()
    assert old.startswith("  tiny 1.0.0 ")
    assert new.startswith("* tiny 1.1.0 ")
    rows = json.loads(run("bundle", "list", "--json", *state, capsys=capsys)[1])
    assert [(row["name"], row["version"], row["active"], row["variants"]) for row in rows] == [
        ("tiny", "1.0.0", False, ["fp32"]),
        ("tiny", "1.1.0", True, ["fp32"]),
    ]
    assert run("bundle", "verify", *state, capsys=capsys)[0] == 0
    assert run("bundle", "verify", tmp_path / "1.0.0", *state, capsys=capsys)[1].startswith("ok tiny 1.0.0 ")
    status, out, _ = run("bundle", "remove", "tiny", "1.1.0", *state, capsys=capsys)
    assert (status, out.startswith("removed tiny 1.1.0 ")) == (0, True)
    assert run("bundle", "list", *state, capsys=capsys)[1].startswith("* tiny 1.0.0 ")


def test_verifying_looks_at_everything_and_says_all_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    for name in ("a", "b", "c"):
        make_bundle(tmp_path / name, name=name)
        add(state, tmp_path / name)
    for name in ("a", "c"):
        [file] = state.glob(f"bundles/{name}/*/model/fp32.onnx")
        file.write_bytes(b"\0" * file.stat().st_size)
    [manifest] = state.glob("bundles/b/*/manifest.json")
    status, out, err = run("bundle", "verify", "--state-dir", state, capsys=capsys)
    assert status == 65
    assert out.startswith("ok b 1.0.0 ")
    assert len(err.splitlines()) == 2
    manifest.write_text("{")
    status, out, err = run("bundle", "verify", "--state-dir", state, capsys=capsys)
    assert (status, out) == (65, "")
    assert len(err.splitlines()) == 3
    listed = run("bundle", "list", "--state-dir", state, capsys=capsys)
    assert listed[0] == 0
    assert str(manifest) in listed[2], "a damaged one is not passed over in silence"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["bundle", "verify", "ghost"], 65, "no bundle 'ghost'"),
        (["bundle", "remove", "ghost"], 65, "no bundle 'ghost'"),
        (["bundle", "remove", "tiny", "9.9.9"], 65, "no version 9.9.9"),
        (["bundle", "verify", "./nowhere"], 65, "nowhere"),
        (["bundle", "add", "/nowhere/bundle"], 65, "/nowhere/bundle"),
        (["bundle", "add", "/dev/null"], 65, "/dev/null"),
    ],
)
def test_mistakes_with_bundles(
    arguments: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bundle(tmp_path / "tiny")
    add(tmp_path / "state", tmp_path / "tiny")
    got, _, err = run(*arguments, "--state-dir", tmp_path / "state", capsys=capsys)
    assert got == status
    assert said in err


def test_a_store_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_bundle(tmp_path / "tiny")
    (tmp_path / "file").write_text("")
    status, _, err = run("bundle", "add", tmp_path / "tiny", "--state-dir", tmp_path / "file" / "x", capsys=capsys)
    assert status == StorageError.exit_code
    assert str(tmp_path / "file" / "x") in err
    assert run("bundle", "list", "--state-dir", tmp_path / "file" / "x", capsys=capsys)[0] == 0


# Configuration

SOUND = {
    "device": 'board = "generic-x86"\n[[model]]\nname = "m"\n',
    "nearby": 'site = "lab"\nmqtt.site = { host = "b" }\n[[model]]\nname = "m"\n',
    "board": (ROOT / "device-configs" / "generic-x86.toml").read_text(),
}


@pytest.mark.parametrize("kind", list(SOUND))
def test_a_sound_file_is_recognised(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "any.toml"
    file.write_text(SOUND[kind])
    assert run("check-config", file, capsys=capsys) == (0, f"{file}: a sound {kind} file\n", "")
    for other in set(SOUND) - {kind}:
        assert run("check-config", "--kind", other, file, capsys=capsys)[0] == 78


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ["cannot be read: No such file"]),
        (b"\xff\xfe", ["is not TOML"]),
        (b"a = ", ["is not TOML"]),
        (b'paths.socket = "a\\u0000b"\npaths.state_dir = ""', ["paths.socket", "paths.state_dir", "2 problems"]),
        (b'[[loop]]\nname = "l"\n', ["loop[0].model: is required", "loop[0].source", "loop[0].period"]),
    ],
)
@pytest.mark.parametrize("command", ["check-config", "run", "nearby"])
def test_a_wrong_file_is_told_with_every_key_path(
    command: str, content: bytes | None, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "device.toml"
    if content is not None:
        file.write_bytes(content)
    status, _, err = run(command, *([] if command == "check-config" else ["--config"]), file, capsys=capsys)
    assert status == 78
    assert err.startswith(f"edgeinfer: {file}: ")
    if command != "nearby":
        for part in said:
            assert part in err


def test_the_unit_names_this_installation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run("unit", "--config", tmp_path / "d.toml", capsys=capsys)
    assert status == 0
    assert str(tmp_path / "d.toml") in out
    assert " nearby " in run("unit", "--nearby", capsys=capsys)[1]


# As a process


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "edgeinfer", *map(str, arguments)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_fault(tmp_path: Path) -> None:
    make_bundle(tmp_path / "tiny")
    add(tmp_path / "state", tmp_path / "tiny")
    reading, writing = os.pipe()
    os.close(reading)
    process = start("bundle", "list", "--json", "--state-dir", tmp_path / "state", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["infer", "status"])
def test_ctrl_c_while_waiting_for_an_answer(command: str, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "e.sock"))
    listener.listen()
    asked = threading.Event()

    def accept() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            asked.set()
            connection.recv(1 << 16)
            connection.recv(1)

    thread = threading.Thread(target=accept)
    thread.start()
    arguments = ["infer", "m", "text", "--deadline-ms", "30000"] if command == "infer" else ["status"]
    process = start(*arguments, "--socket", tmp_path / "e.sock", stdout=subprocess.PIPE)
    assert asked.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    thread.join(5)
    listener.close()
    assert (process.returncode, out, err) == (130, "", "")
