"""The shipped units, judged by systemd itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from edgeinfer.daemon.unit import Kind, render_unit
from edgeinfer.errors import ConfigError

KINDS: tuple[Kind, ...] = get_args(Kind)
CONFIG = Path("/etc/edgeinfer/device.toml")
PYTHON = Path("/usr")

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def write_unit(folder: Path, kind: Kind, executable: Path = Path(sys.executable)) -> Path:
    unit = folder / f"edgeinfer-{kind}.service"
    unit.write_text(render_unit(kind, executable, CONFIG, python=PYTHON))
    return unit


def lines(kind: Kind) -> list[str]:
    text = render_unit(kind, Path("/opt/edgeinfer/bin/edgeinfer"), CONFIG, python=PYTHON)
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@needs_systemd
@pytest.mark.parametrize("kind", KINDS)
def test_systemd_finds_nothing_wrong_with_it(kind: Kind, tmp_path: Path) -> None:
    unit = write_unit(tmp_path, kind)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=yes", str(unit)],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_systemd_would_find_something(tmp_path: Path) -> None:
    unit = write_unit(tmp_path, "device", Path("/nowhere/edgeinfer"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=yes", str(unit)], check=False, capture_output=True, timeout=60
    )
    assert done.returncode != 0


@needs_systemd
@pytest.mark.parametrize("kind", KINDS)
def test_systemd_rates_the_sandbox_as_tight(kind: Kind, tmp_path: Path) -> None:
    unit = write_unit(tmp_path, kind, Path("/opt/edgeinfer/bin/edgeinfer"))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=25", str(unit)],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "promise",
    [
        "Type=notify",
        "NotifyAccess=main",
        "Restart=always",
        "StartLimitIntervalSec=0",
        "WatchdogSec=30",
        "KillMode=mixed",
        "OOMPolicy=continue",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
    ],
)
def test_promises_of_docs_systemd(kind: Kind, promise: str) -> None:
    assert promise in lines(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_python_is_executed_directly_so_that_systemd_sees_how_it_ended(kind: Kind) -> None:
    [command] = [line for line in lines(kind) if line.startswith("ExecStart=")]
    verb = "run" if kind == "device" else "nearby"
    assert command == f"ExecStart=/opt/edgeinfer/bin/edgeinfer {verb} --config /etc/edgeinfer/device.toml"
    assert not [line for line in lines(kind) if line.startswith(("ExecStartPre", "ExecStartPost", "ExecStopPost"))]


def test_a_wrong_config_is_retried_slowly_and_never_for_the_last_time() -> None:
    settings = dict(line.split("=", 1) for line in lines("device") if "=" in line)
    assert int(settings["RestartSec"]) >= 5
    assert "RestartPreventExitStatus" not in settings
    assert "StartLimitBurst" not in settings


def test_both_services_live_in_the_same_sandbox() -> None:
    own = {
        kind: {
            line for line in lines(kind) if not line.startswith(("Desc", "ExecStart", "StateDirectory=", "RuntimeD"))
        }
        for kind in KINDS
    }
    assert own["device"] == own["nearby"]


def test_module_run_uses_the_interpreter(tmp_path: Path) -> None:
    text = render_unit("device", tmp_path / "edgeinfer" / "__main__.py", CONFIG)
    assert f"ExecStart={sys.executable} -m edgeinfer run --config {CONFIG}\n" in text


def test_words_are_escaped_for_systemd() -> None:
    text = render_unit("device", Path("/opt/edge infer/100%/$x/edgeinfer"), Path('/etc/a "b".toml'))
    assert r'ExecStart="/opt/edge infer/100%%/$$x/edgeinfer" run --config "/etc/a \"b\".toml"' in text


@pytest.mark.parametrize(
    ("executable", "gone", "instead"),
    [
        ("/home/pi/venv/bin/edgeinfer", "ProtectHome=yes", "ProtectHome=read-only"),
        ("/root/venv/bin/edgeinfer", "ProtectHome=yes", "ProtectHome=read-only"),
        ("/tmp/venv/bin/edgeinfer", "PrivateTmp=yes", "PrivateTmp=no"),
    ],
)
def test_the_sandbox_does_not_hide_the_program_itself(executable: str, gone: str, instead: str) -> None:
    text = render_unit("device", Path(executable), CONFIG, python=PYTHON)
    assert f"{gone}\n" not in text
    assert f"would be hidden\n{instead}\n" in text


def test_an_interpreter_in_a_home_directory_is_not_hidden_either() -> None:
    text = render_unit("device", Path("/opt/venv/bin/edgeinfer"), CONFIG, python=Path("/home/pi/.pyenv/versions/3.11"))
    assert "would be hidden\nProtectHome=read-only\n" in text


def test_relative_paths_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        render_unit("device", Path("bin/edgeinfer"), Path("device.toml"))
