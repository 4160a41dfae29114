"""A file's sha256 is the same whoever computes it, and large files are hashed without loading OpenSSL here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.artifact import hashing

LARGE = bytes(range(256)) * (7 << 12)
"""7 MiB."""


def hash_file(path: Path, most_bytes: int) -> tuple[str, int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return hashing.sha256_of(descriptor, most_bytes=most_bytes)
    finally:
        os.close(descriptor)


@pytest.fixture
def without_openssl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_hashlib", None)


@pytest.mark.parametrize("data", [b"", b"abc", LARGE])
def test_digest_and_size(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    assert hash_file(tmp_path / "file", len(data)) == (hashlib.sha256(data).hexdigest(), len(data))


@pytest.mark.usefixtures("without_openssl")
def test_another_process_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    monkeypatch.setattr(hashing, "_hash_here", None)  # it must not be needed
    assert hash_file(tmp_path / "file", len(LARGE)) == (hashlib.sha256(LARGE).hexdigest(), len(LARGE))


@pytest.mark.usefixtures("without_openssl")
def test_a_file_that_grew_is_told_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    _, size = hash_file(tmp_path / "file", (4 << 20) + 1)
    assert (4 << 20) + 1 < size < len(LARGE)


@pytest.mark.usefixtures("without_openssl")
@pytest.mark.parametrize("broken", ["/nonexistent/python", "/bin/false", "/bin/true"])
def test_without_another_process_it_is_done_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    monkeypatch.setattr(sys, "executable", broken)
    assert hash_file(tmp_path / "file", len(LARGE)) == (hashlib.sha256(LARGE).hexdigest(), len(LARGE))


@pytest.mark.usefixtures("without_openssl")
def test_a_process_that_read_and_then_failed_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    monkeypatch.setattr(hashing, "_HASH_STDIN", "import os, sys; os.read(0, 1000); sys.exit(1)")
    assert hash_file(tmp_path / "file", len(LARGE)) == (hashlib.sha256(LARGE).hexdigest(), len(LARGE))


def test_openssl_stays_out_of_a_process_that_has_not_loaded_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    code = f"""
import os, sys
from edgeinfer.cli import openssl
openssl.keep_out()
from edgeinfer.artifact.hashing import sha256_of
import asyncio, hashlib
print(*sha256_of(os.open({str(tmp_path / "file")!r}, os.O_RDONLY), most_bytes={len(LARGE)}))
assert hashlib.sha256(b"abc").hexdigest().startswith("ba7816bf")
assert "libcrypto" not in open("/proc/self/maps").read()
openssl.let_in()
import ssl
assert ssl.create_default_context() is not None
import paho.mqtt.client
assert paho.mqtt.client.ssl is ssl, "an encrypted link has all that it needs"
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == [hashlib.sha256(LARGE).hexdigest(), str(len(LARGE))]
