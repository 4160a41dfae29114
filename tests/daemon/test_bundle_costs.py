"""`edgeinfer measure`: a bundle's costs on this device, as a profile, with nothing left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest

from edgeinfer.artifact.archive import pack_bundle
from edgeinfer.artifact.board import load_board, shipped_boards
from edgeinfer.artifact.profile import Profile
from edgeinfer.cli import main
from edgeinfer_tools.build import Options, build
from edgeinfer_tools.recipe import load_recipe
from tests.tools.conftest import MODELS

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    board = load_board(shipped_boards() / "generic-x86.toml")
    output = tmp_path_factory.mktemp("built") / "bundle"
    return build(load_recipe(MODELS / "support-intent"), board, output, Options(seconds=0.02), lambda _: None).bundle


def test_a_folder_and_its_archive_measure_the_same_bundle(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "bundle.tar"
    digest = pack_bundle(bundle, archive)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for path in (bundle, archive):
        assert main(["measure", str(path), "--json", "--seconds", "0.02", "--board", "my-board"]) == 0
        profile = msgspec.json.decode(capsys.readouterr().out, type=Profile)
        assert (profile.origin, profile.board, profile.bundle_digest) == ("measured", "my-board", digest)
        assert [(cost.variant, cost.threads) for cost in profile.costs] == [("fp32", 1)]
        assert profile.costs[0].latency.runs > 0
    assert list((tmp_path / "tmp").iterdir()) == []


def test_more_threads_than_there_are_cpus_are_left_out(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", str(bundle), "--seconds", "0.02", "--threads", "1", "--threads", "1000"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_what_is_no_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", str(tmp_path / "none")]) == 66
    (tmp_path / "x.tar").write_bytes(b"nothing")
    assert main(["measure", str(tmp_path / "x.tar")]) == 65
    assert "x.tar" in capsys.readouterr().err
