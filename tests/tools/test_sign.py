"""What we sign the reference tool verifies, and the other way round; nobody is told "signed" by mistake."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.signature import SignatureInvalid, read_keys, verify_signature
from edgeinfer.errors import ArtifactError
from edgeinfer_tools.cli import main
from edgeinfer_tools.faults import KeyRefused, OutputExists
from edgeinfer_tools.sign import sign
from tests.artifact.making import listing, make_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "work" / "tiny"
    folder.mkdir(parents=True)
    make_bundle(folder)
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private key and its public half."""
    return make_keys(tmp_path)


def make_keys(folder: Path, password: bytes | None = None) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "key.pem", folder / "key.pub.pem"
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def reference(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the reference implementation's own command."""
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_the_reference_tool_verifies_what_we_signed(bundle: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign(bundle, private)
    found = reference("verify", "key", "--public_key", public, "--signature", bundle / "model.sig", bundle)
    assert found.returncode == 0, found.stderr
    (bundle / "model/fp32.onnx").write_bytes(b"other")
    spoiled = reference("verify", "key", "--public_key", public, "--signature", bundle / "model.sig", bundle)
    assert spoiled.returncode != 0


@pytest.mark.slow
def test_we_verify_what_the_reference_tool_signed(bundle: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    found = reference("sign", "key", "--private_key", private, "--signature", bundle / "model.sig", bundle)
    assert found.returncode == 0, found.stderr
    manifest, digest = verify_bundle(bundle)
    assert verify_signature(bundle, manifest, digest, read_keys([public])).path == public


def test_signing_adds_the_signature_and_nothing_else(bundle: Path, keys: tuple[Path, Path]) -> None:
    before = listing(bundle)
    trusted = sign(bundle, keys[0])
    after = listing(bundle)
    assert after.pop("model.sig")
    assert after == before
    assert trusted.fingerprint == read_keys([keys[1]])[0].fingerprint
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["tiny"]


def test_a_bundle_named_by_a_relative_path_is_signed_anew(
    bundle: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    for _ in range(3):
        sign(Path("tiny"), keys[0], replace=True)
    manifest, digest = verify_bundle(bundle)
    assert verify_signature(bundle, manifest, digest, read_keys([keys[1]])).path == keys[1]


def test_a_signature_is_replaced_only_when_asked(bundle: Path, keys: tuple[Path, Path]) -> None:
    sign(bundle, keys[0])
    first = (bundle / "model.sig").read_bytes()
    with pytest.raises(OutputExists, match="signed already; --replace"):
        sign(bundle, keys[0])
    assert (bundle / "model.sig").read_bytes() == first
    sign(bundle, keys[0], replace=True)
    assert (bundle / "model.sig").read_bytes() != first  # ECDSA signs with a fresh nonce


def test_a_damaged_bundle_is_not_signed(bundle: Path, keys: tuple[Path, Path]) -> None:
    (bundle / "model/fp32.onnx").write_bytes(b"other")
    with pytest.raises(ArtifactError):
        sign(bundle, keys[0])
    (bundle / "stray").write_bytes(b"x")
    with pytest.raises(ArtifactError, match="stray"):
        sign(bundle, keys[0])
    assert not (bundle / "model.sig").exists()


def test_a_key_with_a_password(bundle: Path, tmp_path: Path) -> None:
    private, _ = make_keys(tmp_path, b"secret")
    with pytest.raises(KeyRefused, match="has a password: give --password-file"):
        sign(bundle, private)
    with pytest.raises(KeyRefused, match="or has another password"):
        sign(bundle, private, password=b"wrong")
    sign(bundle, private, password=b"secret")
    assert (bundle / "model.sig").exists()


def test_a_password_too_many_and_keys_of_other_kinds(bundle: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(KeyRefused, match="has no password: leave it out"):
        sign(bundle, keys[0], password=b"secret")
    with pytest.raises(KeyRefused, match="No such file"):
        sign(bundle, tmp_path / "none.pem")
    with pytest.raises(KeyRefused, match="is no private key in PEM form"):
        sign(bundle, keys[1])
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (tmp_path / "rsa.pem").write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(KeyRefused, match="is no elliptic-curve key"):
        sign(bundle, tmp_path / "rsa.pem")


def test_from_the_command_line(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = keys
    assert main(["sign", str(bundle), "--key", str(private)]) == 0
    assert "is signed by key" in capsys.readouterr().out
    assert main(["inspect", str(bundle)]) == 0
    assert "not checked: name the key that you trust with --key" in capsys.readouterr().out
    assert main(["inspect", str(bundle), "--key", str(public)]) == 0
    assert ": ok" in capsys.readouterr().out
    (tmp_path / "else").mkdir()
    _, stranger = make_keys(tmp_path / "else")
    assert main(["inspect", str(bundle), "--key", str(stranger)]) == SignatureInvalid.exit_code
    assert "not validly by a key that is trusted here" in capsys.readouterr().err


def test_a_packed_bundle_carries_its_signature_and_equal_bundles_pack_alike(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sign(bundle, keys[0])
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy, copy_function=shutil.copyfile)  # other times and modes
    one, two = tmp_path / "one.tar", tmp_path / "two.tar"
    assert main(["pack", str(bundle), "-o", str(one)]) == 0
    assert main(["pack", str(copy), "-o", str(two)]) == 0
    assert one.read_bytes() == two.read_bytes()
    assert main(["pack", str(copy), "-o", str(two)]) == OutputExists.exit_code
    capsys.readouterr()
    assert main(["inspect", str(one), "--key", str(keys[1])]) == 0
    assert ": ok" in capsys.readouterr().out
