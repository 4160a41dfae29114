"""With keys there, only what they vouch for is installed; without, every sound bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from edgeinfer.artifact.manifest import Manifest
from edgeinfer.artifact.signature import SignatureInvalid
from edgeinfer.errors import ConfigError
from edgeinfer.store.store import BundleStore
from edgeinfer.store.trust import MAX_KEYS, anyone, voucher
from tests.artifact.making import listing, make_bundle
from tests.artifact.test_signature import KEY, public_file, sign, statement


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    make_bundle(folder)
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    return folder


def run(_bundle: Path, _manifest: Manifest) -> None:
    """A probe that everything passes."""


def never(_bundle: Path, _manifest: Manifest) -> None:
    pytest.fail("a bundle that nobody vouches for must not be run")


def test_without_a_key_every_sound_bundle_is_taken(bundle: Path, keys: Path, tmp_path: Path) -> None:
    assert voucher(tmp_path / "none") is anyone
    (keys / "README").write_text("put keys here")
    assert voucher(keys) is anyone
    assert BundleStore(tmp_path / "state").add(bundle, run, vouch=voucher(keys)).active


def test_a_signed_bundle_is_installed_with_its_signature(bundle: Path, keys: Path, tmp_path: Path) -> None:
    public_file(keys)
    sign(bundle, statement(bundle))
    installed = BundleStore(tmp_path / "state").add(bundle, run, vouch=voucher(keys))
    assert listing(installed.path) == listing(bundle)


def test_an_unsigned_or_strange_bundle_is_refused_before_it_runs(bundle: Path, keys: Path, tmp_path: Path) -> None:
    public_file(keys)
    store = BundleStore(tmp_path / "state")
    with pytest.raises(SignatureInvalid, match="tiny is not signed"):
        store.add(bundle, never, vouch=voucher(keys))
    sign(bundle, statement(bundle), ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(SignatureInvalid, match="not validly by a key that is trusted here"):
        store.add(bundle, never, vouch=voucher(keys))
    assert store.installed() == []
    assert list((tmp_path / "state" / "staging").iterdir()) == []


def test_any_one_of_several_keys_will_do(bundle: Path, keys: Path, tmp_path: Path) -> None:
    public_file(keys, ec.generate_private_key(ec.SECP384R1()), "a.pem")
    public_file(keys, KEY, "b.pem")
    sign(bundle, statement(bundle))
    assert BundleStore(tmp_path / "state").add(bundle, run, vouch=voucher(keys)).active


def test_keys_that_cannot_be_read_let_nothing_pass(keys: Path, tmp_path: Path) -> None:
    (keys / "broken.pem").write_text("no key")
    with pytest.raises(ConfigError, match=r"broken\.pem: is no public key"):
        voucher(keys)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the trusted keys cannot be read"):
        voucher(tmp_path / "file")
    for index in range(MAX_KEYS + 1):
        (keys / f"{index}.pem").write_text("")
    with pytest.raises(ConfigError, match=f"{MAX_KEYS + 2} keys, at most {MAX_KEYS}"):
        voucher(keys)
