from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.artifact import archive as archive_module
from edgeinfer.artifact.archive import pack_bundle, unpack_bundle
from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.errors import ArtifactError
from tests.artifact.making import listing, make_bundle


def test_equal_bundles_make_equal_archives_that_unpack_to_equal_bundles(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_bundle(tmp_path / name, files={"z.txt": b"z", "a" * 120 + ".txt": b"long names too"})
    (tmp_path / "b/model/fp32.onnx").touch()
    digest = pack_bundle(tmp_path / "a", tmp_path / "a.tar")
    assert pack_bundle(tmp_path / "b", tmp_path / "b.tar") == digest
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    unpack_bundle(tmp_path / "a.tar", tmp_path / "c")
    assert listing(tmp_path / "c") == listing(tmp_path / "a")
    assert verify_bundle(tmp_path / "c")[1] == digest


def test_nothing_is_left_of_an_archive_of_a_broken_bundle(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a")
    (tmp_path / "a/model/fp32.onnx").write_bytes(b"other")
    with pytest.raises(ArtifactError):
        pack_bundle(tmp_path / "a", tmp_path / "a.tar")
    assert not list(tmp_path.glob("a.tar*"))


def test_an_archive_never_lies_in_its_bundle_and_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a")
    before = listing(tmp_path / "a")
    for place in ("x.tar", "manifest.json", "model/fp32.onnx"):
        with pytest.raises(ArtifactError, match="would lie inside the bundle"):
            pack_bundle(tmp_path / "a", tmp_path / "a" / place)
    assert listing(tmp_path / "a") == before
    (tmp_path / "a.tar.part").write_text("somebody's")
    pack_bundle(tmp_path / "a", tmp_path / "a.tar")
    assert (tmp_path / "a.tar.part").read_text() == "somebody's"


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
def test_headers_upon_headers_are_no_archive(tmp_path: Path, kind: bytes) -> None:
    block = tarfile.TarInfo("h")
    block.type, block.size = kind, 0
    (tmp_path / "a.tar").write_bytes(block.tobuf(tarfile.USTAR_FORMAT) * 5000 + bytes(1024))
    with pytest.raises(ArtifactError):
        unpack_bundle(tmp_path / "a.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _member(name: str, data: bytes = b"data", **fields: object) -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        for field, value in fields.items():
            setattr(member, field, value)
        tar.addfile(member, io.BytesIO(data))

    return add


def _link(name: str, target: str, kind: bytes) -> Callable[[tarfile.TarFile], None]:
    return _member(name, b"", type=kind, linkname=target)


def _many(tar: tarfile.TarFile) -> None:
    for number in range(13):
        _member(str(number), b"")(tar)


HOSTILE: dict[str, tuple[list[Callable[[tarfile.TarFile], None]], str]] = {
    "parent path": ([_member("../escaped")], "not a plain path"),
    "parent path inside": ([_member("a/../../escaped")], "not a plain path"),
    "absolute path": ([_member("/tmp/escaped")], "not a plain path"),
    "backslash": ([_member("..\\escaped")], "not a plain path"),
    "symbolic link": ([_link("a", "/tmp", tarfile.SYMTYPE)], "no plain file"),
    "file through a symbolic link": ([_link("a", "..", tarfile.SYMTYPE), _member("a/escaped")], "no plain file"),
    "hard link": ([_member("a"), _link("b", "../outside", tarfile.LNKTYPE)], "no plain file"),
    "device": ([_link("null", "", tarfile.CHRTYPE)], "no plain file"),
    "pipe": ([_link("pipe", "", tarfile.FIFOTYPE)], "no plain file"),
    "the same name twice": ([_member("a"), _member("a")], "twice"),
    "a file below a file": ([_member("a"), _member("a/b")], "where it also has a folder"),
    "deep folders": ([_member("/".join("abcdefghij"))], "not a plain path"),
    "a long name": ([_member("n" * 300)], "not a plain path"),
    "too many members": ([_many], "more than 12"),
    "too large": ([_member("a", b"x" * 5000)], "exceeds"),
    "too large in sum": ([_member("a", b"x" * 3000), _member("b", b"x" * 3000)], "exceeds"),
    "nothing": ([], "empty"),
    "no manifest": ([_member("a")], r"hostile\.tar: manifest\.json must be at the top, and there is none in it"),
    "its folder on top": (
        [_member("tiny/a"), _member("tiny/manifest.json")],
        r"hostile\.tar: manifest\.json must be at the top; use tar -C tiny -cf hostile\.tar \.",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_escapes_from_an_archive_with(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "MAX_MEMBERS", 12)
    archive, cage = tmp_path / "hostile.tar", tmp_path / "cage"
    cage.mkdir()
    members, text = HOSTILE[what]
    with tarfile.open(archive, "w") as tar:
        for add in members:
            add(tar)
    with pytest.raises(ArtifactError, match=text):
        unpack_bundle(archive, cage / "bundle", max_bytes=4000)
    assert list(tmp_path.rglob("*")) == [archive, cage] or sorted(tmp_path.rglob("*")) == sorted([archive, cage])


def test_refuses_a_sparse_member_that_claims_ten_gigabytes(tmp_path: Path) -> None:
    """GNU sparse in PAX form: a few bytes of archive that would become a huge file."""
    member = tarfile.TarInfo("GNUSparseFile.0/huge")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(10 << 30)}
    body = b"1\n0\n0\n".ljust(512, b"\0")
    member.size = len(body)
    with tarfile.open(tmp_path / "sparse.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(body))
    with pytest.raises(ArtifactError, match="sparse"):
        unpack_bundle(tmp_path / "sparse.tar", tmp_path / "out", max_bytes=20 << 30)
    assert not (tmp_path / "out").exists()


def test_refuses_an_extended_header_that_wants_all_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type = tarfile.XHDTYPE
    header.size = 1 << 30
    (tmp_path / "a.tar").write_bytes(header.tobuf() + bytes(1 << 20))
    with pytest.raises(ArtifactError, match="announces"):
        unpack_bundle(tmp_path / "a.tar", tmp_path / "out")


def test_refuses_compression_and_says_what_to_do(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a")
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as tar:
        tar.add(tmp_path / "a", "a")
    with pytest.raises(ArtifactError, match="gunzip"):
        unpack_bundle(tmp_path / "a.tgz", tmp_path / "out")


def test_a_download_that_was_cut_off_is_noticed_wherever_it_was_cut(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a")
    pack_bundle(tmp_path / "a", tmp_path / "a.tar")
    whole = (tmp_path / "a.tar").read_bytes()
    needed = len(whole.rstrip(b"\0"))
    for cut in range(0, needed, 331):
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        with pytest.raises(ArtifactError):
            _unpack_and_verify(tmp_path / "cut.tar", tmp_path / "out")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def _unpack_and_verify(archive: Path, folder: Path) -> None:
    unpack_bundle(archive, folder)
    verify_bundle(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.data())
def test_a_damaged_archive_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "a.tar").exists():
        make_bundle(tmp_path / "a")
        pack_bundle(tmp_path / "a", tmp_path / "a.tar")
    damaged = bytearray((tmp_path / "a.tar").read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "d.tar").write_bytes(damaged)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    try:
        unpack_bundle(tmp_path / "d.tar", tmp_path / "out")
    except ArtifactError:
        assert not (tmp_path / "out").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"a", "a.tar", "d.tar", "out"}
