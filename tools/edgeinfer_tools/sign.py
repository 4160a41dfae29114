"""Sign a bundle, so that devices can tell whose it is: OpenSSF model-signing by an elliptic-curve key.

The reference implementation signs; what a device will do is done at once with what came out. Only a bundle that was
verified is signed, and `model.sig` appears in it complete or not at all. Nothing else may lie in the folder: neither a
device nor the reference tool accepts a file that nobody signed.

Needs the extra `signing`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from model_signing.hashing import Config as Hashing
from model_signing.signing import Config as Signing

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.manifest import SIGNATURE_FILE
from edgeinfer.artifact.signature import TrustedKey, is_signed, read_keys, verify_signature
from edgeinfer_tools.faults import KeyRefused, OutputExists
from edgeinfer_tools.pack import write_durably


def sign(bundle: Path, key: Path, *, password: bytes | None = None, replace: bool = False) -> TrustedKey:
    """Write `model.sig` into the bundle, and return the public half of the key that made it.

    Args:
        bundle: the bundle's folder. It is verified first.
        key: the private key, in PEM form.
        password: of the key's file, where it has one.
        replace: replace the signature that is there.

    Raises:
        ArtifactError: the bundle is not sound.
        OutputExists: it is signed already.
        KeyRefused: the key cannot be read, or is none that bundles are signed with.
    """
    bundle = bundle.absolute()  # the library takes a relative path to be left out as one below the bundle
    manifest, digest = verify_bundle(bundle)
    if is_signed(bundle) and not replace:
        raise OutputExists(f"{bundle} is signed already; --replace signs it anew")
    public = _public_key(key, password)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-sign-") as scratch:
        public_file = Path(scratch) / f"{key.stem}.pub.pem"
        public_file.write_bytes(public)
        trusted = read_keys([public_file])
        signed = Path(scratch) / SIGNATURE_FILE
        # Folders that git makes are ignored by default; a bundle has none, and what it has must all be signed.
        ignored = [bundle / SIGNATURE_FILE]
        whole = Hashing().set_ignored_paths(paths=ignored, ignore_git_paths=False).set_allow_symlinks(False)
        signer = Signing().set_hashing_config(whole)
        # Bytes, whatever its annotation says: it hands them on to what takes nothing else.
        signer.use_elliptic_key_signer(private_key=key, password=password)
        signer.sign(bundle, signed)
        write_durably(bundle / SIGNATURE_FILE, signed.read_bytes())
    return verify_signature(bundle, manifest, digest, trusted)


def _public_key(key: Path, password: bytes | None) -> bytes:
    """Return the public half of a private key, in PEM form.

    Raises:
        KeyRefused: it cannot be read, needs another password, or is of another kind.
    """
    try:
        private = load_pem_private_key(key.read_bytes(), password)
    except OSError as error:
        raise KeyRefused(f"{key} cannot be read: {error.strerror}") from error
    except TypeError as error:  # a password is missing, or one too many
        needs = "has a password: give --password-file" if password is None else "has no password: leave it out"
        raise KeyRefused(f"{key} {needs}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        what = "is no private key in PEM form" if password is None else "is no private key, or has another password"
        raise KeyRefused(f"{key} {what}; make one with: openssl ecparam -name prime256v1 -genkey -noout") from error
    if not isinstance(private, EllipticCurvePrivateKey):
        raise KeyRefused(f"{key} is no elliptic-curve key; make one: openssl ecparam -name prime256v1 -genkey -noout")
    return private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_password(path: Path | None) -> bytes | None:
    """Return the first line of a password file; None without one.

    Raises:
        KeyRefused: it cannot be read.
    """
    if path is None:
        return None
    try:
        return path.read_bytes().split(b"\n", 1)[0].rstrip(b"\r")
    except OSError as error:
        raise KeyRefused(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error
