from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer import oip
from edgeinfer.artifact.bundle import decode_golden, encode_golden, read_golden, verify_bundle
from edgeinfer.artifact.manifest import bundle_digest
from edgeinfer.errors import ArtifactError, DigestMismatch, ManifestInvalid, UnsupportedSchema
from edgeinfer.request import Payload
from tests.artifact.making import make_bundle


def test_a_sound_bundle_is_its_manifest_and_digest(tmp_path: Path) -> None:
    made = make_bundle(tmp_path, files={"labels/en.txt": b"a\nb\n"})
    (tmp_path / "model.sig").write_bytes(b"signature")
    manifest, digest = verify_bundle(tmp_path)
    assert manifest == made
    assert digest == bundle_digest((tmp_path / "manifest.json").read_bytes())


def _flip(bundle: Path) -> None:
    path = bundle / "model/fp32.onnx"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _append(bundle: Path) -> None:
    with (bundle / "model/fp32.onnx").open("ab") as file:
        file.write(b"\0")


def _truncate(bundle: Path) -> None:
    path = bundle / "model/fp32.onnx"
    path.write_bytes(path.read_bytes()[:-1])


def _replace(make: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """Put something with the right bytes, but no plain file of the bundle's own, in the model's place."""

    def act(bundle: Path) -> None:
        path, outside = bundle / "model/fp32.onnx", bundle.parent / "outside.onnx"
        path.rename(outside)
        make(path, outside)

    return act


def _socket(bundle: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(bundle / "s"))


def _pipe_for_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()
    os.mkfifo(bundle / "manifest.json")


def _manifest_text(text: str) -> Callable[[Path], object]:
    return lambda bundle: (bundle / "manifest.json").write_text(text)


BROKEN: dict[str, tuple[Callable[[Path], object], type[ArtifactError], str]] = {
    "one bit flipped": (_flip, DigestMismatch, "sha256"),
    "bytes appended": (_append, DigestMismatch, "8 bytes, the manifest declares 7"),
    "cut off": (_truncate, DigestMismatch, "6 bytes, the manifest declares 7"),
    "file missing": (lambda b: (b / "model/fp32.onnx").unlink(), ManifestInvalid, "'model/fp32.onnx' is missing"),
    "file too many": (lambda b: (b / "x.bin").write_bytes(b""), ManifestInvalid, "'x.bin' is not in"),
    "folder too many": (lambda b: (b / "empty").mkdir(), ManifestInvalid, "'empty' holds no file"),
    "symbolic link": (_replace(lambda p, o: p.symlink_to(o)), ManifestInvalid, "symbolic link"),
    "hard link": (_replace(lambda p, o: p.hardlink_to(o)), ManifestInvalid, "2 hard links"),
    "pipe": (_replace(lambda p, _: os.mkfifo(p)), ManifestInvalid, "pipe"),
    "socket": (_socket, ManifestInvalid, "socket"),
    "no manifest": (lambda b: (b / "manifest.json").unlink(), ManifestInvalid, "it has no manifest.json"),
    "manifest is a pipe": (
        _pipe_for_manifest,
        ManifestInvalid,
        "plain file",
    ),
    "manifest empty": (_manifest_text(""), ManifestInvalid, "is not a manifest"),
    "manifest half": (_manifest_text('{"schema": 1, "na'), ManifestInvalid, "is not a manifest"),
    "manifest is HTML": (_manifest_text("<html>404</html>"), ManifestInvalid, "is not a manifest"),
    "another schema": (_manifest_text('{"schema": 2}'), UnsupportedSchema, "schema 2"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_refuses_a_bundle_with(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = tmp_path / "bundle"
    make_bundle(bundle)
    act, error, text = BROKEN[what]
    act(bundle)
    with pytest.raises(error, match=text) as caught:
        verify_bundle(bundle)
    assert str(bundle) in str(caught.value)


def test_every_problem_of_the_listing_is_told_at_once(tmp_path: Path) -> None:
    make_bundle(tmp_path)
    (tmp_path / "model/fp32.onnx").unlink()
    (tmp_path / "stray").write_bytes(b"")
    with pytest.raises(ManifestInvalid, match=r"'stray' is not in the manifest; 'model/fp32.onnx' is missing"):
        verify_bundle(tmp_path)


def test_golden_files_give_their_payloads(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path)
    request, response = read_golden(tmp_path, manifest.golden[0])
    header, payload = oip.decode_request(request.header, b"".join(map(bytes, request.tensors)))
    assert [tensor.name for tensor in header.inputs] == ["x"]
    assert oip.elements(header.inputs[0], payload.tensors[0]) == [1.0]
    assert oip.elements(oip.response_header(response).outputs[0], response.tensors[0]) == [2.0]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
def test_golden_files_round_trip(raws: list[bytes]) -> None:
    payload = oip.encode_response([(f"y{index}", "UINT8", [len(raw)], raw) for index, raw in enumerate(raws)])
    back = decode_golden(encode_golden(payload), "golden")
    assert back.header == payload.header
    assert list(map(bytes, back.tensors)) == raws


@given(st.binary(max_size=200))
def test_a_golden_file_of_any_bytes_is_refused_not_crashed_on(data: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        decode_golden(data + b"\xff", "golden")


@pytest.mark.parametrize("sizes", [(5,), (3, 2), (-1,)])
def test_refuses_golden_tensors_that_do_not_add_up(sizes: tuple[int, ...]) -> None:
    header = Payload(
        b'{"outputs":[' + b",".join(b'{"parameters":{"binary_data_size":%d}}' % size for size in sizes) + b"]}"
    )
    with pytest.raises(ManifestInvalid):
        decode_golden(encode_golden(header) + b"1234", "golden")
    with pytest.raises(ManifestInvalid, match="announces a header"):
        decode_golden(struct.pack("<Q", 99) + b"{}", "golden")
