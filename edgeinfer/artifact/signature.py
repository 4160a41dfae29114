"""Prove who made a bundle: its `model.sig` against the public keys that this device trusts.

The format is OpenSSF model-signing 1.x: a Sigstore bundle around a DSSE envelope around an in-toto statement that lists
every file with its sha256. The manifest lists the same files with the same digests, and a bundle that was verified
(`bundle.verify_bundle`) holds exactly those: so here the two lists are compared and nothing is hashed again. Only
signatures by a plain elliptic-curve key (P-256, P-384, P-521) are understood, because a device can check them without
asking anybody.

Needs the extra `signatures` (`cryptography`). Import this module only where a signature is checked: in the process that
installs, never in the daemon.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from edgeinfer.artifact.bundle import MAX_SIGNATURE_BYTES
from edgeinfer.artifact.manifest import MANIFEST_FILE, SIGNATURE_FILE, Manifest
from edgeinfer.errors import ArtifactError, ConfigError, Problem
from edgeinfer.plain_file import read_plain

PAYLOAD_TYPE = "application/vnd.in-toto+json"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_MAX_KEY_BYTES = 16 << 10
_CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""What model-signing signs with, and the digest that belongs to it."""


class SignatureInvalid(ArtifactError):
    """The bundle's signature is missing, not by a trusted key, or not for these files."""


class _PublicKey(msgspec.Struct):
    hint: str = ""


class _Material(msgspec.Struct):
    public_key: _PublicKey | None = msgspec.field(default=None, name="publicKey")


class _Signed(msgspec.Struct):
    sig: str


class _Envelope(msgspec.Struct):
    payload: str
    payload_type: str = msgspec.field(name="payloadType")
    signatures: list[_Signed]


class _SigstoreBundle(msgspec.Struct):
    media_type: str = msgspec.field(name="mediaType")
    material: _Material = msgspec.field(name="verificationMaterial")
    envelope: _Envelope | None = msgspec.field(default=None, name="dsseEnvelope")


class _Subject(msgspec.Struct):
    digest: dict[str, str]


class _Serialization(msgspec.Struct):
    method: str
    hash_type: str


class _Resource(msgspec.Struct):
    name: str
    digest: str
    algorithm: str


class _Predicate(msgspec.Struct):
    serialization: _Serialization
    resources: list[_Resource]


class _Statement(msgspec.Struct):
    type: str = msgspec.field(name="_type")
    predicate_type: str = msgspec.field(name="predicateType")
    subject: list[_Subject]
    predicate: _Predicate


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key by which bundles may be signed."""

    path: Path
    fingerprint: str
    """sha256 of the key in PEM form, as signatures name it."""
    key: EllipticCurvePublicKey


def read_keys(paths: Iterable[Path]) -> list[TrustedKey]:
    """Read public keys in PEM form.

    Raises:
        ConfigError: with every one that cannot be read, or is no key that bundles are signed with.
    """
    keys, problems = [], []
    for path in paths:
        try:
            key = load_pem_public_key(read_plain(path, _MAX_KEY_BYTES))
        except OSError as error:
            problems.append(Problem(str(path), f"cannot be read: {error.strerror}"))
            continue
        except (ValueError, UnsupportedAlgorithm):
            problems.append(Problem(str(path), "is no public key in PEM form (-----BEGIN PUBLIC KEY-----)"))
            continue
        if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
            problems.append(Problem(str(path), f"is no key on one of the curves {', '.join(_CURVES)}"))
            continue
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        keys.append(TrustedKey(path, hashlib.sha256(pem).hexdigest(), key))
    if problems:
        raise ConfigError("trusted keys", tuple(problems))
    return keys


def is_signed(bundle: Path) -> bool:
    """Whether there is a signature at all; says nothing about what it is worth."""
    return (bundle / SIGNATURE_FILE).exists()


def verify_signature(bundle: Path, manifest: Manifest, digest: str, keys: Iterable[TrustedKey]) -> TrustedKey:
    """Return the trusted key that vouches for every file of the bundle.

    `manifest` and `digest` are what `bundle.verify_bundle` returned for the same folder: the bytes are checked already.

    Raises:
        SignatureInvalid: no signature, a broken one, one by another key, or one for other files.
    """
    signed = _read(bundle / SIGNATURE_FILE)
    envelope = signed.envelope
    if envelope is None or envelope.payload_type != PAYLOAD_TYPE or len(envelope.signatures) != 1:
        raise SignatureInvalid(f"{bundle}: {SIGNATURE_FILE} is not one signature of model-signing 1.x")
    payload = _decoded(envelope.payload, bundle)
    signature = _decoded(envelope.signatures[0].sig, bundle)
    hint = signed.material.public_key.hint if signed.material.public_key else ""
    key = _signer(payload, signature, hint, list(keys), bundle)
    try:
        statement = msgspec.json.decode(payload, type=_Statement)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SignatureInvalid(f"{bundle}: what was signed is no statement of model-signing 1.x: {error}") from error
    _check_statement(statement, manifest, digest, bundle)
    return key


def _read(path: Path) -> _SigstoreBundle:
    try:
        data = read_plain(path, MAX_SIGNATURE_BYTES)
    except FileNotFoundError as error:
        text = f"{path.parent} is not signed; sign it with: edgeinfer-tools sign {path.parent.name} --key KEY.pem"
        raise SignatureInvalid(text) from error
    except OSError as error:
        raise SignatureInvalid(f"{path} cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=_SigstoreBundle)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SignatureInvalid(f"{path} is no signature by a key (a Sigstore bundle): {error}") from error


def _decoded(text: str, bundle: Path) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SignatureInvalid(f"{bundle}: {SIGNATURE_FILE} holds broken base64: {error}") from error


def _signer(payload: bytes, signature: bytes, hint: str, keys: list[TrustedKey], bundle: Path) -> TrustedKey:
    """Return the key that made the signature; the hint only spares the others, it proves nothing."""
    message = pre_authentication_encoding(payload)
    for trusted in keys:
        if hint not in {"", trusted.fingerprint}:
            continue
        algorithm: hashes.HashAlgorithm = getattr(hashes, _CURVES[trusted.key.curve.name])()
        try:
            trusted.key.verify(signature, message, ECDSA(algorithm))
        except InvalidSignature:
            continue
        return trusted
    known = ", ".join(f"{trusted.path.name} {trusted.fingerprint[:12]}" for trusted in keys) or "none"
    by = f"by key {hint[:12]}" if hint else "by an unnamed key"
    text = f"{bundle} is signed {by}, and not validly by a key that is trusted here ({known})"
    raise SignatureInvalid(f"{text}; add its public key to the trusted ones, or sign the bundle anew")


def pre_authentication_encoding(payload: bytes) -> bytes:
    """Return the bytes that a DSSE signature is made over (github.com/secure-systems-lab/dsse, protocol.md)."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _check_statement(statement: _Statement, manifest: Manifest, digest: str, bundle: Path) -> None:
    """Hold what was signed against what is there: the same files with the same bytes, no more and no less."""
    predicate = statement.predicate
    if statement.type != STATEMENT_TYPE or statement.predicate_type != PREDICATE_TYPE:
        raise SignatureInvalid(f"{bundle}: the signature states {statement.predicate_type!r}, not {PREDICATE_TYPE}")
    if (predicate.serialization.method, predicate.serialization.hash_type) != ("files", "sha256"):
        how = f"{predicate.serialization.method} by {predicate.serialization.hash_type}"
        raise SignatureInvalid(f"{bundle} was signed as {how}; sign whole files by sha256, which is the default")
    signed = {item.name: item.digest for item in predicate.resources}
    if len(signed) != len(predicate.resources) or {item.algorithm for item in predicate.resources} != {"sha256"}:
        raise SignatureInvalid(f"{bundle}: the signature lists a file twice, or by another digest than sha256")
    _check_root(statement, bundle)
    there = {name: file.sha256 for name, file in manifest.files.items()} | {MANIFEST_FILE: digest}
    if differing := _differences(signed, there):
        raise SignatureInvalid(f"{bundle}: the signature is for other contents: {differing}; sign the bundle anew")


def _check_root(statement: _Statement, bundle: Path) -> None:
    """The statement's subject is the digest of all its digests."""
    whole = hashlib.sha256()
    try:
        for item in statement.predicate.resources:
            whole.update(bytes.fromhex(item.digest))
    except ValueError as error:
        raise SignatureInvalid(f"{bundle}: the signature lists what is no digest: {error}") from error
    if [subject.digest.get("sha256") for subject in statement.subject] != [whole.hexdigest()]:
        raise SignatureInvalid(f"{bundle}: the signature's own digest is not that of its list")


def _differences(signed: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Say in what the two lists differ, at most the first few files; empty when they don't."""
    notes = [f"{name} is not signed" for name in sorted(there.keys() - signed.keys())]
    notes += [f"{name} is signed and not there" for name in sorted(signed.keys() - there.keys())]
    notes += [f"{name} differs" for name in sorted(there.keys() & signed.keys()) if there[name] != signed[name]]
    return "; ".join(notes[:4]) + (f" and {len(notes) - 4} more" if len(notes) > 4 else "")
