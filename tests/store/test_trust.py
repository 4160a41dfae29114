"""With keys there, only what they vouch for is installed; without, every sound bundle."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from edgeinfer.artifact.manifest import Manifest
from edgeinfer.artifact.signature import SignatureInvalid
from edgeinfer.errors import ConfigError
from edgeinfer.store.store import BundleStore
from edgeinfer.store.trust import MAX_KEYS, SignaturesUnchecked, anyone, voucher
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
    assert voucher(tmp_path / "none", named=False) is anyone
    (keys / "README").write_text("put keys here")
    assert voucher(keys, named=False) is anyone
    assert BundleStore(tmp_path / "state").add(bundle, run, vouch=voucher(keys, named=False)).active


def test_a_folder_that_somebody_named_must_be_there_and_hold_a_key(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder of trusted keys"):
        voucher(tmp_path / "none")
    (keys / "README").write_text("put keys here")
    with pytest.raises(ConfigError, match="there is no trusted key in it"):
        voucher(keys)
    public_file(keys)
    assert voucher(keys) is not anyone


@pytest.mark.parametrize("named", [True, False])
def test_a_link_to_nothing_lets_nothing_pass(named: bool, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "not-mounted")
    for folder in (tmp_path / "link", tmp_path / "link" / "keys"):
        with pytest.raises(ConfigError, match=f"cannot be read: {tmp_path}/link is a link to nothing"):
            voucher(folder, named=named)
    (keys / "c.pem").symlink_to("/nonexistent")
    with pytest.raises(ConfigError, match=r"c\.pem: cannot be read: No such file"):
        voucher(keys, named=named)


def test_a_default_folder_below_a_link_may_be_missing(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(keys)
    assert voucher(tmp_path / "link" / "none", named=False) is anyone


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", ["k.pub", "k.PEM", "k.Crt", "k.key"])
def test_what_may_be_meant_as_a_key_is_not_passed_over(name: str, named: bool, keys: Path) -> None:
    public_file(keys, KEY, name)
    with pytest.raises(ConfigError, match=rf"only \*\.pem are: {name}; rename or remove"):
        voucher(keys, named=named)
    public_file(keys)  # beside a key that counts, too
    with pytest.raises(ConfigError, match=name):
        voucher(keys, named=named)


def test_a_key_file_that_would_block_or_never_end_is_refused(keys: Path) -> None:
    os.mkfifo(keys / "f.pem")
    (keys / "z.pem").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="it is a pipe") as refused:
        voucher(keys)
    assert "z.pem: cannot be read: it is a device" in str(refused.value)


def test_a_missing_extra_is_not_the_folders_fault(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public_file(keys)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for name in [name for name in sys.modules if name.startswith(("cryptography.", "edgeinfer.artifact.signature"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SignaturesUnchecked, match="install edgeinfer with its extra `signatures`") as refused:
        voucher(keys)
    assert "problem" not in str(refused.value)


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
