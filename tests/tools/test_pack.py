"""A bundle is there completely or not at all, and nothing is left lying about."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer_tools.faults import OutputExists
from edgeinfer_tools.pack import file_table, staging


def test_a_staged_folder_becomes_the_target(tmp_path: Path) -> None:
    with staging(tmp_path / "deep" / "bundle", replace=False) as folder:
        (folder / "file").write_bytes(b"x")
        assert not (tmp_path / "deep" / "bundle").exists()
    assert (tmp_path / "deep" / "bundle" / "file").read_bytes() == b"x"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["bundle"]


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
def test_a_fault_leaves_nothing(tmp_path: Path, fault: type[BaseException]) -> None:
    def spoil() -> None:
        with staging(tmp_path / "bundle", replace=False) as folder:
            (folder / "file").write_bytes(b"x")
            raise fault

    with pytest.raises(fault):
        spoil()
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "mine").write_bytes(b"precious")
    with pytest.raises(OutputExists, match=r"bundle exists; .*--replace"), staging(tmp_path / "bundle", replace=False):
        pytest.fail("the block must not run")
    assert (tmp_path / "bundle" / "mine").read_bytes() == b"precious"


def test_replacing_keeps_the_old_one_until_the_new_one_is_ready(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "manifest.json").write_bytes(b"{}")
    (target / "old").write_bytes(b"old")
    with pytest.raises(ValueError, match="spoiled"), staging(target, replace=True):
        raise ValueError("spoiled")
    assert (target / "old").exists()
    with staging(target, replace=True) as folder:
        (folder / "new").write_bytes(b"new")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_the_file_table_names_every_file_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"xyz")
    table = file_table(tmp_path)
    assert list(table) == ["a/b"]
    assert table["a/b"].size_bytes == 3


def test_replacing_touches_nothing_but_bundles(tmp_path: Path) -> None:
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    link = tmp_path / "link"
    link.symlink_to(precious)
    for target in (precious, link, precious / ".." / "thesis"):
        said = "is no bundle, and --replace replaces nothing else"
        with pytest.raises(OutputExists, match=said), staging(target, replace=True):
            pytest.fail("the block must not run")
    assert (precious / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize("replace", [False, True])
def test_what_appears_while_a_bundle_is_built_is_kept(tmp_path: Path, replace: bool) -> None:
    target = tmp_path / "bundle"

    def build() -> None:
        with staging(target, replace=replace) as folder:
            (folder / "file").write_bytes(b"x")
            target.mkdir()
            (target / "thesis.txt").write_text("years")

    with pytest.raises(OutputExists):
        build()
    assert (target / "thesis.txt").read_text() == "years"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
