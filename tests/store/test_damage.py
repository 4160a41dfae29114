"""Whatever lies in the store where a bundle should, the others stay usable and the damage is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.artifact.manifest import read_manifest
from edgeinfer.store.store import BundleStore
from tests.artifact.making import make_bundle


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[BundleStore, Path]:
    """Return a store with two bundles, and the manifest of the one that the test damages."""
    store = BundleStore(tmp_path / "state")
    for name in ("sound", "tiny"):
        make_bundle(tmp_path / name, name=name)
        store.add(tmp_path / name, lambda *_: None)
    return store, store.active("tiny").path / "manifest.json"


def _still_usable(store: BundleStore) -> None:
    again = BundleStore(store.state_dir)
    assert [item.manifest.name for item in again.installed()] == ["sound"]
    assert again.active("sound").active
    assert len(again.problems()) == 1


def _endless(manifest: Path) -> None:
    manifest.unlink()
    os.mkfifo(manifest)


def _huge(manifest: Path) -> None:
    with manifest.open("wb") as file:
        file.truncate(1 << 40)


def _folder(manifest: Path) -> None:
    manifest.unlink()
    manifest.mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "long number": lambda manifest: _replace(manifest, b'"schema": 1', b'"schema": ' + b"9" * 5000),
    "long key": lambda manifest: _replace(manifest, b'"latency_us": {}', b'"latency_us": {"' + b"9" * 5000 + b'": 1}'),
    "long version": lambda manifest: _replace(manifest, b'"1.0.0"', b'"1.0.' + b"9" * 5000 + b'"'),
    "pipe": _endless,
    "huge": _huge,
    "folder": _folder,
}


def _replace(manifest: Path, old: bytes, new: bytes) -> None:
    raw = manifest.read_bytes()
    manifest.write_bytes(raw.replace(old, new) if old in raw else raw.replace(b"{", b"{" + new + b",", 1))


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_bundle_leaves_the_others_usable(damaged: tuple[BundleStore, Path], what: str) -> None:
    store, manifest = damaged
    DAMAGE[what](manifest)
    _still_usable(store)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(at=st.integers(0), junk=st.binary(min_size=1, max_size=8))
def test_no_damaged_bytes_hide_the_other_bundles(damaged: tuple[BundleStore, Path], at: int, junk: bytes) -> None:
    store, manifest = damaged
    raw = manifest.read_bytes()
    at %= len(raw)
    changed = raw[:at] + junk + raw[at + len(junk) :]
    if changed != raw:
        manifest.write_bytes(changed)
        _still_usable(store)
        manifest.write_bytes(raw)


def test_a_check_that_fails_unforeseen_costs_one_bundle(
    damaged: tuple[BundleStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = damaged

    def trips(bundle: Path) -> object:
        if bundle == manifest.parent:
            raise OverflowError("regular expression code size limit exceeded")
        return read_manifest(bundle)

    monkeypatch.setattr("edgeinfer.store.store.read_manifest", trips)
    _still_usable(store)


def test_a_model_whose_folder_cannot_be_read_hides_no_other(
    damaged: tuple[BundleStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = damaged
    scan = os.scandir

    def refuses(path: Path) -> object:
        if Path(path) == manifest.parent.parent:
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuses)
    assert [item.manifest.name for item in store.installed()] == ["sound"]
