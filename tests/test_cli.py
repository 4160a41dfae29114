"""The command line: exit statuses, one clear line for every fault, and no traceback for anybody's mistake."""

from __future__ import annotations

import argparse
import fcntl
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import cli, errors
from edgeinfer.cli import asking
from edgeinfer.cli.checking import guess_kind
from edgeinfer.client.answer import Inference, Output
from edgeinfer.request import Ending, Expired, Failure, Reason, Refusal
from edgeinfer.store.durable import StorageError
from edgeinfer.store.store import BundleStore, Installed
from tests.artifact.making import make_bundle
from tests.gateway.serving import ScriptedSubmit, serving_in_thread

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


def test_the_environment_names_the_socket_and_the_option_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_in_thread(ScriptedSubmit(), status={"ready": True, "device": "here"}) as (_, path):
        monkeypatch.setenv("EDGEINFER_SOCKET", str(path))
        assert json.loads(run("status", "--json", capsys=capsys)[1])["device"] == "here"
        assert run("infer", "support-intent", "text", capsys=capsys)[0] == 0
        assert run("bench", "double", "--seconds", "0.1", capsys=capsys)[0] == 0
        assert run("status", "--json", "--socket", tmp_path / "other.sock", capsys=capsys)[0] == 69
        monkeypatch.setenv("EDGEINFER_SOCKET", str(tmp_path / "other.sock"))
        assert run("status", "--json", "--socket", path, capsys=capsys)[0] == 0


@pytest.mark.parametrize("given", ['{"x": [[1, 2.5]]}', "[[1, 2.5]]", "@file"])
def test_numbers_are_asked_about_as_json(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.json").write_text('{"x": [[1, 2.5]]}')
    given = given.replace("file", str(tmp_path / "in.json"))
    with serving_in_thread(ScriptedSubmit()) as (_, path):
        status, out, _ = run("infer", "double", "--inputs", given, "--json", "--socket", path, capsys=capsys)
    assert status == 0
    assert json.loads(out)["outputs"][0]["data"] == [2.0, 5.0]


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ("{x: 1}", 2, "--inputs is not JSON"),
        ("@none.json", 66, "none.json cannot be read: No such file or directory"),
        ("@bad.json", 65, "bad.json is not JSON"),
        ('{"z": [1]}', 65, "there is no input 'z'; double takes x"),
        ('{"x": [[1], [2, 3]]}', 65, "not all of one length"),
    ],
)
def test_inputs_that_are_none(
    given: str, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_bytes(b"\xff{")
    with serving_in_thread(ScriptedSubmit()) as (_, path):
        got, out, err = run("infer", "double", "--inputs", given, "--socket", path, capsys=capsys)
    assert (got, out) == (status, "")
    assert said in err
    assert "Traceback" not in err
    assert run("infer", "m", "text", "--inputs", "{}", capsys=capsys)[0] == 2


def test_a_score_is_printed_under_the_outputs_own_name() -> None:
    def answered(*names: str) -> str:
        outputs = tuple(Output(name, "FP32", (1,), memoryview(bytes(4))) for name in names)
        answer = Inference("m", "1", outputs, "moving", 10.0, "local", "dev-1", "fp32", "", 1.0, late=False)
        return asking._describe(answer).partition("\n")[0]

    assert answered("logits") == "moving logits=10.0000"
    assert answered("probability") == "moving probability=10.0000"
    assert answered("logits", "boxes") == "moving score=10.0000", "it may come of either"


ENDINGS: list[tuple[Ending, int, dict[str, str]]] = [
    (Refusal(Reason.MEMORY, "3 MiB"), 75, {"outcome": "rejected", "reason": "memory", "detail": "3 MiB"}),
    (Refusal(Reason.INPUT_INVALID, "x"), 65, {"outcome": "rejected", "reason": "input_invalid", "detail": "x"}),
    (Refusal(Reason.MODEL_UNAVAILABLE, "x"), 75, {"outcome": "rejected", "reason": "model_unavailable", "detail": "x"}),
    (Expired("it waited"), 75, {"outcome": "expired", "reason": "queued", "detail": "it waited"}),
    (Failure("crashed", "SIGSEGV"), 70, {"outcome": "failed", "reason": "crashed", "detail": "SIGSEGV"}),
]


@pytest.mark.parametrize(("ending", "expected", "document"), ENDINGS)
def test_a_request_without_an_answer_is_told_to_people_and_programs(
    ending: Ending, expected: int, document: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_in_thread(ScriptedSubmit(lambda _: ending)) as (_, path):
        status, out, err = run("infer", "support-intent", "text", "--socket", path, capsys=capsys)
        assert (status, out) == (expected, "")
        status, out, err_json = run("infer", "support-intent", "text", "--json", "--socket", path, capsys=capsys)
    assert (status, err_json) == (expected, err)
    said = json.loads(out)
    assert err == f"edgeinfer: support-intent: {said.pop('error')}\n"
    assert said == document


def test_a_model_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_thread(ScriptedSubmit()) as (_, path):
        assert run("bench", "nope", "--socket", path, capsys=capsys)[0] == 69
        status, out, _ = run("infer", "nope", "text", "--json", "--socket", path, capsys=capsys)
    assert (status, json.loads(out)["reason"]) == (69, "model_unavailable")


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


def test_removing_more_than_one_version_has_to_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ("--state-dir", tmp_path / "state")
    for version in ("1.0.0", "1.1.0"):
        make_bundle(tmp_path / version, version=version)
        add(tmp_path / "state", tmp_path / version)
    status, out, err = run("bundle", "remove", "tiny", *state, capsys=capsys)
    assert (status, out) == (2, "")
    assert err == "edgeinfer: tiny has versions 1.0.0, 1.1.0 (active); name one, or --all\n"
    assert run("bundle", "remove", "tiny", "1.0.0", "--all", *state, capsys=capsys)[0] == 2
    assert len(BundleStore(tmp_path / "state").installed()) == 2
    status, out, _ = run("bundle", "remove", "tiny", "--all", *state, capsys=capsys)
    assert (status, len(out.splitlines())) == (0, 2)
    add(tmp_path / "state", tmp_path / "1.0.0")
    assert run("bundle", "remove", "tiny", *state, capsys=capsys)[0] == 0


def test_a_new_version_says_that_a_running_service_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(source: Path, state_dir: Path, **_: Any) -> Installed:
        return BundleStore(state_dir).add(source, lambda *_: None)

    monkeypatch.setattr("edgeinfer.daemon.install.install_bundle", install)
    for version, told in (("1.0.0", False), ("1.1.0", True)):
        make_bundle(tmp_path / version, version=version)
        out = run("bundle", "add", tmp_path / version, "--state-dir", tmp_path / "state", capsys=capsys)[1]
        assert ("a running service keeps the version it has loaded" in out) is told


CONFIGS: dict[str, str] = {
    "device.toml": "colour = 1\n[paths]\nstate_dir = '{}'\n",
    "nearby.toml": "colour = 1\nstate_dir = '{}'\n[mqtt.site]\nhost = 'b'\n",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configuration_says_where_the_bundles_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bundle(tmp_path / "tiny")
    add(tmp_path / "state", tmp_path / "tiny")
    config = tmp_path / name
    config.write_text(CONFIGS[name].format(tmp_path / "state"))
    assert "tiny 1.0.0" in run("bundle", "list", "--config", config, capsys=capsys)[1]
    assert run("bundle", "verify", "tiny", "--config", config, capsys=capsys)[0] == 0
    assert run("bundle", "list", "--config", config, "--state-dir", tmp_path, capsys=capsys)[0] == 2
    monkeypatch.setattr("edgeinfer.cli.bundles.DEFAULT_CONFIG", config)
    assert "tiny 1.0.0" in run("bundle", "list", capsys=capsys)[1]
    assert "no bundles" in run("bundle", "list", "--state-dir", tmp_path / "other", capsys=capsys)[1]
    assert run("bundle", "remove", "tiny", capsys=capsys)[0] == 0
    config.write_text(CONFIGS[name].replace("'{}'", "5"))
    status, _, err = run("bundle", "list", capsys=capsys)
    assert (status, "state_dir: 5 is not a path" in err) == (78, True)
    config.write_text("")
    monkeypatch.setattr("edgeinfer.cli.bundles.DEFAULT_STATE_DIR", tmp_path / "usual")
    monkeypatch.setattr("edgeinfer.cli.bundles.DEFAULT_NEARBY_STATE_DIR", tmp_path / "usual")
    assert f"no bundles in {tmp_path / 'usual'}" in run("bundle", "list", capsys=capsys)[1]
    assert run("bundle", "list", "--config", tmp_path / "none.toml", capsys=capsys)[0] == 78
    config.unlink()
    assert f"no bundles in {tmp_path / 'usual'}" in run("bundle", "list", capsys=capsys)[1]
    config.symlink_to(config)  # it is there, and cannot be read
    assert run("bundle", "list", capsys=capsys)[0] == 78


def test_looking_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    assert run("bundle", "list", "--state-dir", state, capsys=capsys)[0] == 0
    assert run("bundle", "verify", "--state-dir", state, capsys=capsys)[0] == 0
    assert not state.exists()
    make_bundle(tmp_path / "tiny")
    add(state, tmp_path / "tiny")
    (state / "staging" / "somebody-elses").mkdir()
    with (state / "store.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for verb in ("list", "verify"):
            assert run("bundle", verb, "--state-dir", state, capsys=capsys)[::2] == (0, "")
    assert (state / "staging" / "somebody-elses").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
@pytest.mark.parametrize("verb", ["list", "verify"])
def test_a_store_of_another_user_is_not_an_empty_one(verb: str, tmp_path: Path) -> None:
    make_bundle(tmp_path / "tiny")
    add(tmp_path / "state", tmp_path / "tiny")
    (tmp_path / "state").chmod(0o750)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os._exit(cli.main(["bundle", verb, "--state-dir", str(tmp_path / "state")]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == StorageError.exit_code


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["bundle", "verify", "ghost"], 65, "no bundle 'ghost'"),
        (["bundle", "remove", "ghost"], 65, "no bundle 'ghost'"),
        (["bundle", "remove", "tiny", "9.9.9"], 65, "no version 9.9.9"),
        (["bundle", "verify", "./nowhere"], 65, "nowhere"),
        (["bundle", "add", "/nowhere/bundle"], 65, "/nowhere/bundle: no such file or directory"),
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
    assert run("bundle", "list", "--state-dir", tmp_path / "file" / "x", capsys=capsys)[0] == StorageError.exit_code


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
        status, _, err = run("check-config", "--kind", other, file, capsys=capsys)
        assert status == 78
        assert err.startswith(f"edgeinfer: {file} (checked as a {other} file; --kind changes that): ")


@pytest.mark.parametrize(
    ("content", "name", "kind"),
    [
        ("state_dir = '/x'\npaths.socket = '/s'", "any.toml", "device"),
        ("name = 'x'\nboard = 'auto'", "nearby.toml", "device"),
        ("site = 'x'\n[[loop]]", "any.toml", "device"),
        ("name = 'x'\n[offload]", "any.toml", "device"),
        ("name = 'x'\n[telemetry]", "any.toml", "device"),
        ("name = 'x'\n[device]", "any.toml", "device"),
        ("state_dir = '/x'", "any.toml", "nearby"),
        ("[mqtt.site]\nhost = 'b'", "nearby-garage.toml", "nearby"),
        ("[mqtt.site]\nhost = 'b'", "any.toml", "device"),
        ("name = 'x'\n[cpu]", "any.toml", "board"),
        ("quirks = []", "any.toml", "board"),
    ],
)
def test_the_kind_is_guessed_by_what_only_one_kind_has(content: str, name: str, kind: str) -> None:
    assert guess_kind(tomllib.loads(content), Path(name)) == kind


def test_what_only_the_start_would_have_told_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "device.toml"
    file.write_text("board = 'rasberry'\n")
    status, _, err = run("check-config", file, capsys=capsys)
    assert (status, "  board: no board 'rasberry'; known are " in err) == (78, True)
    file.write_text("board = 'rasberry'\ncolour = 1\n[[model]]\nname = 'A'\n")
    err = run("check-config", file, capsys=capsys)[2]
    assert "3 problems" in err
    file.write_text(
        f"board = '{tmp_path}/none.toml'\nscheduler.cpus = [0, 4095]\nmodel = [{{ name = 'm' }}]\n"
        "[[loop]]\nname = 'l'\nmodel = 'm'\nperiod = '1 s'\ndeadline = '1 s'\nscope = 'site'\n"
        "source = { kind = 'directory', path = '/' }\nsinks = [{ kind = 'mqtt' }]\n"
    )
    status, out, err = run("check-config", file, capsys=capsys)
    assert (status, out) == (0, f"{file}: a sound device file\n")
    warned = [line.removeprefix(f"edgeinfer: {file}: warning: ").partition(": ")[0] for line in err.splitlines()]
    assert warned == ["board", "scheduler.cpus", "loop[0].sinks", "loop[0].scope"]
    board = tmp_path / "none.toml"
    board.write_text("colour = 1")
    status, _, err = run("check-config", file, capsys=capsys)
    assert (status, err.startswith(f"edgeinfer: {board}: ")) == (78, True)


def test_a_ceiling_that_holds_no_model_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "device.toml"
    for ceiling, warned in (("30 MiB", True), ("256 MiB", False)):
        file.write_text(f"memory.ceiling = '{ceiling}'\n")
        status, _, err = run("check-config", file, capsys=capsys)
        assert status == 0
        assert ("warning: memory.ceiling: 30 MiB have room for no model: edgeinfer itself takes about" in err) is warned


@pytest.mark.parametrize("kind", ["device", "nearby"])
def test_a_folder_of_keys_that_was_named_and_has_none_lets_nothing_pass(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bundle(tmp_path / "tiny")
    monkeypatch.setattr("edgeinfer.daemon.install.probe_bundle", lambda *_: None)
    monkeypatch.setattr("edgeinfer.cli.bundles.DEFAULT_KEYS", tmp_path / "usual")
    where = ("bundle", "add", tmp_path / "tiny", "--no-compile")
    for place in ("--keys", tmp_path / "none"), ("--keys", tmp_path):
        status, _, err = run(*where, "--state-dir", tmp_path / "state", *place, capsys=capsys)
        assert (status, "trusted key" in err) == (78, True)
    config, section = tmp_path / f"{kind}.toml", "[paths]\n" if kind == "device" else ""
    rest = "" if kind == "device" else "[mqtt.site]\nhost = 'b'\n[[model]]\nname = 'tiny'\n"
    state = f"state_dir = '{tmp_path / 'state'}'\n"
    config.write_text(f"{section}{state}keys = '{tmp_path / 'none'}'\n{rest}")
    status, _, err = run(*where, "--config", config, capsys=capsys)
    assert (status, "there is no such folder of trusted keys" in err) == (78, True)
    status, _, err = run("check-config", config, capsys=capsys)
    assert (status, f"keys: {tmp_path / 'none'}: there is no such folder of trusted keys" in err) == (0, True)
    config.write_text(f"{section}{state}{rest}")
    assert "keys" not in run("check-config", config, capsys=capsys)[2]
    assert run(*where, "--config", config, capsys=capsys)[0] == 0, "nobody named one"


@pytest.mark.parametrize("command", ["run", "nearby"])
def test_a_fault_that_the_start_finds_names_the_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.toml"
    file.write_text(
        f"{'paths.state_dir' if command == 'run' else 'state_dir'} = '{tmp_path}/state'\nscheduler.cpus = [4095]\n"
        "[[model]]\nname = 'm'\n" + ("" if command == "run" else "[mqtt.site]\nhost = 'b'\n")
    )
    monkeypatch.setattr("edgeinfer.cli.services._set_up_logging", lambda _: None)
    status, _, err = run(command, "--config", file, capsys=capsys)
    assert status == 78
    assert err.startswith(f"edgeinfer: {file}: 1 problem\n  scheduler.cpus: none of [4095] may be used here")
    if command == "run":
        file.write_text("board = 'rasberry'\n")
        assert run("run", "--config", file, capsys=capsys)[2].startswith(f"edgeinfer: {file}: 1 problem\n  board: no ")


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
    assert err.startswith(f"edgeinfer: {file}")
    if command != "nearby":
        for part in said:
            assert part in err


def test_the_unit_names_this_installation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run("unit", "--config", tmp_path / "d.toml", capsys=capsys)
    assert status == 0
    assert str(tmp_path / "d.toml") in out
    assert not re.search("@[A-Z]|fill", out)
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
