"""Only a trusted key's signature for exactly these bytes counts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.signature import (
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    STATEMENT_TYPE,
    SignatureInvalid,
    pre_authentication_encoding,
    read_keys,
    verify_signature,
)
from edgeinfer.errors import ConfigError
from tests.artifact.making import make_bundle

KEY = ec.generate_private_key(ec.SECP256R1())


def public_file(folder: Path, key: ec.EllipticCurvePrivateKey = KEY, name: str = "maker.pem") -> Path:
    path = folder / name
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


def statement(bundle: Path) -> dict[str, Any]:
    """What model-signing 1.1.1 states about a folder (written down from one of its signatures)."""
    names = sorted(str(p.relative_to(bundle)) for p in bundle.rglob("*") if p.is_file() and p.name != "model.sig")
    digests = {name: hashlib.sha256((bundle / name).read_bytes()).hexdigest() for name in names}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": bundle.name, "digest": {"sha256": root(digests.values())}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {"method": "files", "allow_symlinks": False, "hash_type": "sha256", "ignore_paths": []},
            "resources": [{"digest": d, "name": n, "algorithm": "sha256"} for n, d in digests.items()],
        },
    }


def root(digests: Any) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


def sign(bundle: Path, stated: dict[str, Any], key: ec.EllipticCurvePrivateKey = KEY) -> None:
    payload = json.dumps(stated).encode()
    digest = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}[key.curve.key_size]
    signature = key.sign(pre_authentication_encoding(payload), ec.ECDSA(digest))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    whole = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(pem).hexdigest()}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    (bundle / "model.sig").write_text(json.dumps(whole))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    make_bundle(folder)
    return folder


def check(bundle: Path, *keys: Path) -> str:
    manifest, digest = verify_bundle(bundle)
    return verify_signature(bundle, manifest, digest, read_keys(keys)).path.name


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_a_trusted_key_vouches_whatever_its_curve(bundle: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    key = ec.generate_private_key(curve)
    sign(bundle, statement(bundle), key)
    other = public_file(tmp_path, name="other.pem")
    assert check(bundle, other, public_file(tmp_path, key, "mine.pem")) == "mine.pem"


def test_an_unsigned_bundle_is_told_how_to_be_signed(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(SignatureInvalid, match="is not signed; sign it with: edgeinfer-tools sign tiny --key"):
        check(bundle, public_file(tmp_path))


def test_another_key_does_not_vouch_even_when_the_hint_names_the_trusted_one(bundle: Path, tmp_path: Path) -> None:
    stranger = ec.generate_private_key(ec.SECP256R1())
    sign(bundle, statement(bundle), stranger)
    with pytest.raises(SignatureInvalid, match=r"not validly by a key that is trusted here \(maker.pem"):
        check(bundle, public_file(tmp_path))
    signature = json.loads((bundle / "model.sig").read_text())
    signature["verificationMaterial"]["publicKey"]["hint"] = read_keys([public_file(tmp_path)])[0].fingerprint
    (bundle / "model.sig").write_text(json.dumps(signature))
    with pytest.raises(SignatureInvalid, match="not validly"):
        check(bundle, public_file(tmp_path))


def test_without_a_trusted_key_nothing_is_valid(bundle: Path) -> None:
    sign(bundle, statement(bundle))
    with pytest.raises(SignatureInvalid, match=r"trusted here \(none\)"):
        check(bundle)


def test_a_signature_of_other_contents_is_refused_by_the_file(bundle: Path, tmp_path: Path) -> None:
    sign(bundle, statement(bundle))
    signature = (bundle / "model.sig").read_bytes()
    changed = tmp_path / "changed"
    changed.mkdir()
    make_bundle(changed, model=b"\x08\x08\x3a\x03\x12\x01h", files={"extra.json": b"{}"})
    (changed / "model.sig").write_bytes(signature)
    with pytest.raises(
        SignatureInvalid, match=r"extra.json is not signed; manifest.json differs; model/fp32.onnx differs"
    ):
        check(changed, public_file(tmp_path))


def _drop(stated: dict[str, Any]) -> None:
    resources = stated["predicate"]["resources"]
    resources.pop()
    stated["subject"][0]["digest"]["sha256"] = root(item["digest"] for item in resources)


def _add(stated: dict[str, Any]) -> None:
    resources = stated["predicate"]["resources"]
    resources.append({"digest": "00" * 32, "name": "ghost", "algorithm": "sha256"})
    stated["subject"][0]["digest"]["sha256"] = root(item["digest"] for item in resources)


def _twice(stated: dict[str, Any]) -> None:
    stated["predicate"]["resources"].append(stated["predicate"]["resources"][0])


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(stated: dict[str, Any]) -> None:
        *way, last = path.split(".")
        at: Any = stated
        for step in way:
            at = at[int(step)] if step.isdigit() else at[step]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_drop, "is not signed"),
        (_add, "ghost is signed and not there"),
        (_twice, "lists a file twice"),
        (_set("predicateType", "https://model_signing/Digests/v0.1"), "states 'https://model_signing/Digests/v0.1'"),
        (_set("_type", "https://in-toto.io/Statement/v0.1"), "the signature states"),
        (_set("predicate.serialization.method", "shards"), "was signed as shards by sha256"),
        (_set("predicate.serialization.hash_type", "blake2b"), "was signed as files by blake2b"),
        (_set("predicate.resources.0.algorithm", "md5"), "by another digest"),
        (_set("predicate.resources.0.digest", "zz"), "what is no digest"),
        (_set("subject.0.digest", {"sha256": "00" * 32}), "own digest is not that of its list"),
        (_set("subject", []), "own digest is not that of its list"),
        (_set("predicate.resources", "all"), "no statement of model-signing"),
    ],
)
def test_a_trusted_key_that_signed_something_else_does_not_vouch(
    bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    stated = statement(bundle)
    change(stated)
    sign(bundle, stated)
    with pytest.raises(SignatureInvalid, match=complaint):
        check(bundle, public_file(tmp_path))


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0" * 100, b"[]", b"{}", b"[" * 100_000, b'{"mediaType": "x", "verificationMaterial": {}}', b"\xff\xfe{"],
    ids=["empty", "zeros", "list", "nothing", "deep", "no-envelope", "not-utf8"],
)
def test_garbage_is_no_signature(bundle: Path, tmp_path: Path, raw: bytes) -> None:
    (bundle / "model.sig").write_bytes(raw)
    with pytest.raises(SignatureInvalid, match=r"model\.sig"):
        check(bundle, public_file(tmp_path))


@pytest.mark.parametrize("at", ["payload", "sig"])
def test_one_flipped_character_voids_it(bundle: Path, tmp_path: Path, at: str) -> None:
    sign(bundle, statement(bundle))
    whole = json.loads((bundle / "model.sig").read_text())
    holder = whole["dsseEnvelope"] if at == "payload" else whole["dsseEnvelope"]["signatures"][0]
    holder[at] = holder[at][:20] + ("A" if holder[at][20] != "A" else "B") + holder[at][21:]
    (bundle / "model.sig").write_text(json.dumps(whole))
    with pytest.raises(SignatureInvalid, match="not validly"):
        check(bundle, public_file(tmp_path))
    holder[at] = "not base64!"
    (bundle / "model.sig").write_text(json.dumps(whole))
    with pytest.raises(SignatureInvalid, match="broken base64"):
        check(bundle, public_file(tmp_path))


def test_every_bad_key_is_named(tmp_path: Path) -> None:
    good = public_file(tmp_path)
    (tmp_path / "text.pem").write_text("hello")
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    (tmp_path / "ed.pem").write_bytes(other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(ConfigError) as caught:
        read_keys([good, tmp_path / "none.pem", tmp_path / "text.pem", tmp_path / "ed.pem"])
    text = str(caught.value)
    assert "none.pem: cannot be read: No such file" in text
    assert "text.pem: is no public key in PEM form" in text
    assert "ed.pem: is no key on one of the curves secp256r1" in text
    assert "maker.pem" not in text
