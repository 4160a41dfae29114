from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.artifact.archive import pack_bundle
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.artifact.profile import Profile, read_profile
from edgeinfer.errors import ArtifactError, DigestMismatch, SessionError
from edgeinfer.store.crashes import CrashFile, CrashRecord, VariantKey
from edgeinfer.store.durable import StorageError, write_atomically
from edgeinfer.store.store import BundleStore, Installed
from tests.artifact.making import make_bundle


def accept(bundle: Path, manifest: Manifest) -> None:
    """Probe nothing."""


def _bundle(folder: Path, version: str = "1.0.0", name: str = "tiny", description: str = "") -> Path:
    path = folder / f"{name}-{version}{description}"
    make_bundle(path, name=name, version=version, description=description)
    return path


def _state(store: BundleStore) -> tuple[list[tuple[str, str, bool]], list[str]]:
    """Return what matters of a store: what is installed, and what lies around in staging."""
    found = [(item.manifest.name, item.manifest.version, item.active) for item in store.installed()]
    staging = store.state_dir / "staging"
    return found, sorted(path.name for path in staging.iterdir()) if staging.exists() else []


def test_adds_activates_and_lists(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    assert store.installed() == []
    one = store.add(_bundle(tmp_path), accept)
    two = store.add(_bundle(tmp_path, "1.1.0"), accept)
    assert _state(store) == ([("tiny", "1.0.0", False), ("tiny", "1.1.0", True)], [])
    assert store.active("tiny") == two
    assert store.active("tiny", "1.0.0").digest == one.digest
    assert store.previous("tiny") == store.active("tiny", "1.0.0")
    assert store.activate("tiny", "1.0.0").active
    assert store.active("tiny").digest == one.digest
    assert store.problems() == []
    again = BundleStore(tmp_path / "state")
    assert _state(again) == _state(store)


def test_who_stands_in_for_a_version(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    for version in ("1.0.0", "1.10.0", "1.9.0", "2.0.0"):
        store.add(_bundle(tmp_path, version), accept)
    store.add(_bundle(tmp_path, name="other"), accept)
    store.activate("tiny", "1.10.0")

    def stand_ins(version: str) -> list[str]:
        return [item.manifest.version for item in store.earlier(store.active("tiny", version))]

    assert stand_ins("1.10.0") == ["2.0.0", "1.9.0", "1.0.0"], "what was active before, also when it is newer"
    assert stand_ins("2.0.0") == ["1.10.0", "1.9.0", "1.0.0"]
    assert stand_ins("1.0.0") == ["1.10.0"], "the active one; never one that is newer for no reason"
    assert store.earlier(store.active("other")) == []


def test_adding_a_bundle_again_ends_its_quarantine_and_removing_it_forgets_it(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    file = CrashFile(store.state_dir)

    def quarantine(digest: str) -> None:
        key = VariantKey(digest, "fp32", "1.32.0")
        file.write({key: CrashRecord(key, "tiny", "1.0.0", crashes=3, quarantined=True)})

    installed = store.add(_bundle(tmp_path), accept)
    quarantine(installed.digest)
    quarantine("e" * 64)

    def refuse(*_: object) -> None:
        raise SessionError("run_failed", "no")

    with pytest.raises(SessionError):
        store.add(_bundle(tmp_path), refuse)
    assert file.quarantined(installed.digest), "what fails its probe has not earned another chance"
    store.add(installed.path, accept)  # what is installed can be given, too
    assert not file.quarantined(installed.digest)
    quarantine(installed.digest)
    store.remove("tiny")
    assert [key.digest for key in file.read()[0]] == ["e" * 64]


def test_versions_are_ordered_as_versions_not_as_text(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    for version in ("1.10.0", "1.9.0", "1.10.0-rc.1"):
        store.add(_bundle(tmp_path, version), accept)
    assert [item.manifest.version for item in store.installed()] == ["1.9.0", "1.10.0-rc.1", "1.10.0"]


def test_adds_an_archive(tmp_path: Path) -> None:
    pack_bundle(_bundle(tmp_path), tmp_path / "tiny.tar")
    store = BundleStore(tmp_path / "state")
    installed = store.add(tmp_path / "tiny.tar", accept)
    assert store.verify("tiny").digest == installed.digest


def test_what_is_wrong_with_an_archive_is_told_of_the_archive(tmp_path: Path) -> None:
    bundle, archive = _bundle(tmp_path), tmp_path / "tiny.tar"
    (bundle / "model/fp32.onnx").write_bytes(b"otherxx")
    store = BundleStore(tmp_path / "state")
    for content in (bundle, bundle / "manifest.json"):
        with tarfile.open(archive, "w") as tar:
            tar.add(content, "." if content == bundle else content.name)
        with pytest.raises(ArtifactError, match=str(archive)) as caught:
            store.add(archive, accept)
        assert "staging" not in str(caught.value)


def test_a_store_is_looked_at_without_touching_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    looking = BundleStore(state, clean=False)
    looking.require_readable()
    assert (looking.installed(), looking.problems(), state.exists()) == ([], [], False)
    BundleStore(state).add(_bundle(tmp_path), accept)
    (state / "staging" / "underway").mkdir()
    with (state / "store.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        looking = BundleStore(state, clean=False)
        assert _state(looking) == ([("tiny", "1.0.0", True)], ["underway"])
        assert looking.problems() == []


def test_the_probe_sees_the_bundle_before_it_is_installed(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    seen: list[tuple[bool, list[Installed]]] = []

    def probe(bundle: Path, manifest: Manifest) -> None:
        seen.append(((bundle / manifest.variants[0].file).is_file(), store.installed()))

    store.add(_bundle(tmp_path), probe)
    assert seen == [(True, [])]


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_a_failing_probe_leaves_the_earlier_version_active_and_nothing_behind(tmp_path: Path, version: str) -> None:
    store = BundleStore(tmp_path / "state")
    store.add(_bundle(tmp_path), accept)
    before = _state(store)

    def refuse(bundle: Path, manifest: Manifest) -> None:
        raise SessionError("crashed", "SIGSEGV")

    with pytest.raises(SessionError):
        store.add(_bundle(tmp_path, version), refuse)
    assert _state(store) == before
    assert store.verify("tiny", "1.0.0").active


def test_an_interrupt_in_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")

    def interrupt(bundle: Path, manifest: Manifest) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.add(_bundle(tmp_path), interrupt)
    assert _state(store) == ([], [])


def test_refuses_a_broken_bundle_and_says_which_file(tmp_path: Path) -> None:
    source = _bundle(tmp_path)
    (source / "model/fp32.onnx").write_bytes(b"otherxx")
    store = BundleStore(tmp_path / "state")
    with pytest.raises(DigestMismatch, match=r"model/fp32\.onnx"):
        store.add(source, accept)
    assert _state(store) == ([], [])
    with pytest.raises(ArtifactError, match="nowhere: no such file or directory"):
        store.add(tmp_path / "nowhere", accept)


def test_a_version_means_one_content(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    store.add(_bundle(tmp_path), accept)
    with pytest.raises(ArtifactError, match="installed with other contents"):
        store.add(_bundle(tmp_path, description="changed"), accept)
    store.remove("tiny", "1.0.0")
    store.add(_bundle(tmp_path, description="changed2"), accept)


def test_adding_again_heals_a_damaged_installation(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    installed = store.add(_bundle(tmp_path), accept)
    model = installed.path / "model/fp32.onnx"
    model.write_bytes(b"flipped")
    with pytest.raises(DigestMismatch):
        store.verify("tiny")
    store.add(tmp_path / "tiny-1.0.0", accept)
    assert store.verify("tiny").digest == installed.digest


def test_a_manifest_that_was_changed_on_the_device_is_noticed(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    installed = store.add(_bundle(tmp_path), accept)
    manifest = installed.path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    assert store.installed() == []
    assert "it was changed" in store.problems()[0]
    with pytest.raises(ArtifactError, match="no bundle 'tiny'"):
        store.active("tiny")


def test_names_what_there_is_when_something_is_missing(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    with pytest.raises(ArtifactError, match=r"no bundle 'tiny'.*installed: none"):
        store.active("tiny")
    store.add(_bundle(tmp_path), accept)
    with pytest.raises(ArtifactError, match=r"no bundle 'other'.*installed: tiny"):
        store.active("other")
    with pytest.raises(ArtifactError, match=r"no version 9\.9\.9; installed: 1\.0\.0 \(active\)"):
        store.active("tiny", "9.9.9")
    with pytest.raises(ArtifactError, match="no version"):
        store.remove("tiny", "9.9.9")


def test_removing_falls_back_to_the_version_before(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        store.add(_bundle(tmp_path, version), accept)
    store.activate("tiny", "1.0.0")
    assert [item.manifest.version for item in store.remove("tiny", "1.0.0")] == ["1.0.0"]
    assert store.active("tiny").manifest.version == "3.0.0"
    store.remove("tiny", "2.0.0")
    assert store.active("tiny").manifest.version == "3.0.0"
    assert [item.manifest.version for item in store.remove("tiny")] == ["3.0.0"]
    assert _state(store) == ([], [])


def test_profiles_live_outside_the_bundle_and_go_with_it(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")
    installed = store.add(_bundle(tmp_path), accept)
    profile = Profile(1, "tiny", "1.0.0", installed.digest, "b", "cpu", [], "1.32.0", "measured", [])
    store.write_profile(profile)
    assert read_profile(store.profile_path(installed.digest)) == profile
    store.verify("tiny")
    store.remove("tiny")
    assert not store.profile_path(installed.digest).exists()
    with pytest.raises(ArtifactError, match="not a bundle digest"):
        store.profile_path("../../etc/passwd")


# --- power cuts, kills, full and read-only disks


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "another schema": lambda data: data.replace(b'"schema": 1', b'"schema": 9'),
    "no JSON object": lambda _: b"[]",
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("backup", ["good", "damaged", "gone"])
def test_a_damaged_active_file_is_survived_and_reported(tmp_path: Path, what: str, backup: str) -> None:
    store = BundleStore(tmp_path / "state")
    for version in ("1.0.0", "2.0.0"):
        store.add(_bundle(tmp_path, version), accept)
    store.activate("tiny", "1.0.0")
    store.activate("tiny", "2.0.0")  # so that the backup says 1.0.0, and the newest is 2.0.0
    active, copy = tmp_path / "state/active.json", tmp_path / "state/active.json.bak"
    good = active.read_bytes()
    active.write_bytes(DAMAGE[what](good))
    if backup == "damaged":
        copy.write_bytes(DAMAGE[what](good))
    elif backup == "gone":
        copy.unlink()
    again = BundleStore(tmp_path / "state")
    assert again.active("tiny").manifest.version == ("1.0.0" if backup == "good" else "2.0.0")
    assert "active.json" in again.problems()[0]
    before = copy.read_bytes() if copy.exists() else None
    again.activate("tiny", "1.0.0" if backup != "good" else "2.0.0")
    if backup == "good":
        assert copy.read_bytes() == before, "a damaged file was rotated over the good copy"
    assert BundleStore(tmp_path / "state").problems() == []


SCRIPT = """
import os, signal, sys
from pathlib import Path
from edgeinfer.store import store as module
state, source, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
count = 0
def strike(event, args):
    global count
    if event in STEPS:
        count += 1
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)
STEPS = {"os.rename", "os.mkdir", "open", "os.remove", "shutil.rmtree"}
store = module.BundleStore(state)
sys.addaudithook(strike)
if sys.argv[4] == "add":
    store.add(source, lambda bundle, manifest: None)
else:
    store.remove("tiny", "2.0.0")
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["add", "remove"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path, what: str) -> None:
    """SIGKILL a process before its n-th file operation, for every n until it gets through."""
    source = _bundle(tmp_path, "2.0.0")
    pristine = tmp_path / "pristine"
    store = BundleStore(pristine)
    store.add(_bundle(tmp_path, "1.0.0"), accept)
    if what == "remove":
        store.add(source, accept)
    seen = set()
    for step in range(1, 200):
        state = tmp_path / f"state-{step}"
        subprocess.run(["cp", "-a", pristine, state], check=True)
        argv = [sys.executable, "-c", SCRIPT, str(state), str(source), str(step), what]
        ended = subprocess.run(argv, check=False, timeout=60, capture_output=True)
        assert ended.returncode in {0, -signal.SIGKILL}, ended.stderr.decode()
        after = BundleStore(state)
        versions, left = _state(after)
        assert left == []
        assert after.problems() == []
        assert ("tiny", "1.0.0") in {(name, version) for name, version, _ in versions}
        assert sum(active for _, _, active in versions) == 1
        for name, version, _ in versions:
            after.verify(name, version)
        seen.add(tuple(versions))
        if ended.returncode == 0:
            break
    else:
        pytest.fail("it never got through")
    assert step > 10
    old, new = ("tiny", "1.0.0", True), ("tiny", "2.0.0", True)
    assert len(seen) >= 2
    assert seen <= {
        (old,), (("tiny", "1.0.0", False), new), (old, ("tiny", "2.0.0", False)),
    }  # fmt: skip


@contextlib.contextmanager
def _mounted(folder: Path, size: str) -> Iterator[None]:
    """Mount a small tmpfs; skip where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "edgeinfer-test", str(folder)]
    made = subprocess.run(command, check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_refuses_clearly_at_whatever_size_it_is_full(tmp_path: Path) -> None:
    """Sweep the free space from nothing until the installation fits."""
    old = _bundle(tmp_path, "1.0.0")
    make_bundle(tmp_path / "big", version="2.0.0", files={"weights.bin": os.urandom(600_000)})
    pack_bundle(tmp_path / "big", tmp_path / "big.tar")
    with _mounted(tmp_path / "disk", "4m"):
        state = tmp_path / "disk/state"
        BundleStore(state).add(old, accept)
        ballast = tmp_path / "disk/ballast"
        for source in (tmp_path / "big", tmp_path / "big.tar"):
            fitted = refused = 0
            for free in range(0, 2_200_000, 200_000):
                with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
                os.truncate(ballast, max(0, ballast.stat().st_size - free))
                store = BundleStore(state)
                try:
                    store.add(source, accept)
                    fitted += 1
                    store.remove("tiny", "2.0.0")
                except StorageError as error:
                    refused += "the disk is full" in str(error) and error.errno == errno.ENOSPC
                ballast.unlink()
                assert _state(store) == ([("tiny", "1.0.0", True)], [])
                store.verify("tiny")
            assert fitted
            assert refused
            assert fitted + refused == 11


def test_a_disk_that_fills_up_between_commit_and_activation_takes_the_commit_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BundleStore(tmp_path / "state")
    store.add(_bundle(tmp_path), accept)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("edgeinfer.store.active.write_atomically", full)
    with pytest.raises(StorageError, match="the disk is full"):
        store.add(_bundle(tmp_path, "2.0.0"), accept)
    assert _state(store) == ([("tiny", "1.0.0", True)], [])


@pytest.mark.slow
def test_a_read_only_disk_keeps_serving_what_is_installed(tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", "4m"):
        state = tmp_path / "disk/state"
        BundleStore(state).add(_bundle(tmp_path), accept)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        store = BundleStore(state)
        assert "read-only" in store.problems()[0]
        assert store.verify("tiny").active
        for change in (
            lambda: store.add(_bundle(tmp_path, "2.0.0"), accept),
            lambda: store.remove("tiny"),
            lambda: store.activate("tiny", "1.0.0"),
        ):
            with pytest.raises(StorageError, match=r"read-only: remount it writable, or point paths\.state_dir"):
                change()
        assert store.verify("tiny").active


def test_a_state_directory_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a folder")
    store = BundleStore(tmp_path / "state")
    assert store.problems()
    assert store.installed() == []
    with pytest.raises(StorageError, match="installing"):
        store.add(_bundle(tmp_path), accept)


def test_a_second_process_is_told_to_wait_and_keeps_its_hands_off(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "state")

    def meanwhile(bundle: Path, manifest: Manifest) -> None:
        other = BundleStore(tmp_path / "state")
        assert bundle.exists(), "another process removed the staging of a live one"
        with pytest.raises(StorageError, match="another process is changing the store"):
            other.add(_bundle(tmp_path, "2.0.0"), accept)

    store.add(_bundle(tmp_path), meanwhile)
    assert _state(store) == ([("tiny", "1.0.0", True)], [])


def test_an_atomic_write_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        steps.append("fsync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync file")
        real_fsync(descriptor)

    def rename(source: Any, target: Any) -> None:
        steps.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    write_atomically(tmp_path / "f", b"new")
    assert steps == ["fsync file", "rename", "fsync folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
