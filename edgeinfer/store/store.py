"""Hold the installed bundles: add one all or nothing, say which is active, forget one.

    STATE_DIR/bundles/NAME/VERSION-DIGEST12/…   one folder per installed bundle, never changed after its commit
    STATE_DIR/active.json (.bak)                which of them is used
    STATE_DIR/profiles/DIGEST.json              what the device measured; outside the bundle, so that its digest holds
    STATE_DIR/compiled/DIGEST/…                 what the device made of it: see `compiled`
    STATE_DIR/crashes.json                      which variants crash here: see `crashes`
    STATE_DIR/staging/                          work in progress; whatever a crash left here is removed at opening
    STATE_DIR/store.lock                        held by whoever changes something

A commit is one rename of a verified, synced folder, and an activation one rename of active.json: after a kill or a
power cut at any instant the earlier version is active or the new one is, and nothing in between is ever looked at.
Running a bundle before it is trusted is the caller's `probe`. Everything here blocks (hashing, fsync): call `add` and
`verify` from the storage thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.manifest import MANIFEST_FILE, SIGNATURE_FILE, Manifest, read_manifest
from edgeinfer.artifact.profile import Profile, encode_profile
from edgeinfer.errors import ArtifactError, mib
from edgeinfer.store.active import ActiveFile, Choice, Choices
from edgeinfer.store.compiled import CompiledStore
from edgeinfer.store.crashes import CrashFile
from edgeinfer.store.durable import (
    StorageError,
    copy_durably,
    fsync_directory,
    fsync_tree,
    remove_tree,
    storage_errors,
    write_atomically,
)
from edgeinfer.store.trust import Vouch, anyone

_DIGEST = re.compile(r"[0-9a-f]{64}")

Probe = Callable[[Path, Manifest], None]
"""Loads and runs a verified bundle from its staging folder; raises to refuse it."""


@dataclass(frozen=True, slots=True)
class Installed:
    """One installed bundle."""

    path: Path
    manifest: Manifest
    digest: str
    active: bool

    @property
    def title(self) -> str:
        """Name, version and the digest's first digits."""
        return f"{self.manifest.name} {self.manifest.version} ({self.digest[:12]})"


class BundleStore:
    """The bundles of one state directory. Several processes may share it: changes exclude each other by a lock."""

    def __init__(self, state_dir: Path, *, clean: bool = True) -> None:
        """Open the store, making its folders and removing what a crash left behind (not `clean`: only to look at it).

        Never raises: with a read-only or missing disk what is installed stays usable, `problems` says what is
        wrong, and changes are refused when they are tried.
        """
        self.state_dir = state_dir
        self._bundles = state_dir / "bundles"
        self._staging = state_dir / "staging"
        self._profiles = state_dir / "profiles"
        self._active = ActiveFile(state_dir)
        self._opening_problems: list[str] = []
        if not clean:
            return
        try:
            with self._changing("cleaning up"):
                for left in list(self._staging.iterdir()):
                    remove_tree(left)
        except StorageError as error:
            self._opening_problems.append(str(error))

    def add(self, source: Path, probe: Probe, *, vouch: Vouch = anyone) -> Installed:
        """Install the bundle at `source` (a folder or a plain tar) and make it the active version of its model.

        Verified, copied, verified again, vouched for, probed, committed, activated, in this order. Adding what is
        installed already heals it if it is damaged, activates it, and ends the quarantine of its variants. On any
        failure, the probe's included, the earlier version stays active and nothing of the new one is left.

        Raises:
            ArtifactError: the bundle is not sound, nobody vouches for it, or the version is installed with other
                contents.
            StorageError: the disk is full or cannot be written, or another process is changing the store.
            EdgeInferError: whatever the probe raises.
        """
        with self._changing(f"installing {source}"):
            work = Path(tempfile.mkdtemp(prefix="add-", dir=self._staging))
            try:
                staged = work / "bundle"
                self._stage(source, staged)
                with _called(source, staged):
                    manifest, digest = verify_bundle(staged)
                    vouch(staged, manifest, digest)
                target = self._place(manifest, digest)
                self._refuse_other_contents(manifest, digest)
                probe(staged, manifest)
                fresh = not _is_sound(target)
                if fresh:
                    self._commit(staged, target, work / "damaged")
                try:
                    self._choose(manifest.name, target.name)
                except OSError:
                    if fresh:
                        os.rename(target, staged)  # noqa: PTH104
                    raise
                CrashFile(self.state_dir).forget(digest)  # it was just tried: whatever it did before, it may try again
            finally:
                remove_tree(work)
        return Installed(target, manifest, digest, active=True)

    def require_readable(self) -> None:
        """Tell a store that is empty or not there yet from one that cannot be looked into.

        Raises:
            StorageError: it cannot be read.
        """
        with storage_errors(f"reading {self.state_dir}"), contextlib.suppress(FileNotFoundError):
            for name in os.scandir(self._bundles):
                if name.is_dir(follow_symlinks=False):
                    os.scandir(name.path).close()

    def installed(self) -> list[Installed]:
        """Return what is installed, by name, then version; damaged manifests are left out and told by `problems`."""
        return [item for item, _ in self._scan() if item is not None]

    def problems(self) -> list[str]:
        """Return everything that is wrong with the store, in words; empty when it is sound. Reads manifests only."""
        _, found = self._active.read()
        return self._opening_problems + found + [problem for _, problem in self._scan() if problem]

    def active(self, name: str, version: str = "") -> Installed:
        """Return the active version of the model, or the one asked for.

        Raises:
            ArtifactError: it is not installed; the text says what is.
        """
        everything = self.installed()
        candidates = [item for item in everything if item.manifest.name == name]
        for item in candidates:
            if item.manifest.version == version or (not version and item.active):
                return item
        if candidates:
            versions = ", ".join(f"{item.manifest.version}{' (active)' if item.active else ''}" for item in candidates)
            what = f"version {version}" if version else "active version"
            raise ArtifactError(f"{name} has no {what}; installed: {versions} (edgeinfer bundle add PATH)")
        names = ", ".join(sorted({item.manifest.name for item in everything})) or "none"
        raise ArtifactError(f"no bundle {name!r} in {self.state_dir}; installed: {names} (edgeinfer bundle add PATH)")

    def activate(self, name: str, version: str) -> Installed:
        """Make an installed version the active one.

        Raises:
            ArtifactError: it is not installed.
            StorageError: the choice cannot be written; the earlier version stays active.
        """
        with self._changing(f"activating {name} {version}"):
            item = self.active(name, version)
            self._choose(name, item.path.name)
        return replace(item, active=True)

    def previous(self, name: str) -> Installed | None:
        """Return the version that was active before this one, if it is still installed."""
        choices, _ = self._active.read()
        choice = None if choices is None else choices.models.get(name)
        for item in self.installed():
            if choice is not None and item.manifest.name == name and item.path.name == choice.previous:
                return item
        return None

    def earlier(self, than: Installed) -> list[Installed]:
        """Return the versions that may stand in for one: the active one, or the one before it, then the older ones."""
        name, folder = than.manifest.name, than.path.name
        choice = self._choices().get(name, Choice(""))
        before = choice.previous if choice.active == folder else choice.active
        others = [item for item in self.installed() if item.manifest.name == name and item.path.name != folder]
        older = [item for item in others if _version_key(item.path.name) < _version_key(folder)]
        first = [item for item in others if item.path.name == before]
        return first + [item for item in reversed(older) if item not in first]

    def remove(self, name: str, version: str = "") -> list[Installed]:
        """Remove a version (default: every one) of the model and return what was removed.

        When the active one goes, the one before becomes active, else the newest that is left.

        Raises:
            ArtifactError: it is not installed.
            StorageError: it cannot be removed.
        """
        with self._changing(f"removing {name}"):
            mine = [item for item in self.installed() if item.manifest.name == name]
            gone = [item for item in mine if version in {"", item.manifest.version}]
            if not gone:
                self.active(name, version)  # raises and says what there is
                raise ArtifactError(f"no bundle {name!r} {version}")
            self._forget(name, [item.path.name for item in mine if item not in gone])
            for item in gone:
                work = Path(tempfile.mkdtemp(prefix="remove-", dir=self._staging))
                os.rename(item.path, work / "bundle")  # noqa: PTH104
                fsync_directory(item.path.parent)
                remove_tree(work)
                self.profile_path(item.digest).unlink(missing_ok=True)
                CompiledStore(self.state_dir).remove(item.digest)
                CrashFile(self.state_dir).forget(item.digest)
        return gone

    def verify(self, name: str, version: str = "") -> Installed:
        """Check every byte of an installed bundle.

        Raises:
            ArtifactError: it is not installed or not sound any more; adding it again heals it.
        """
        item = self.active(name, version)
        _, digest = verify_bundle(item.path)
        if not item.path.name.endswith(f"-{digest[:12]}"):
            raise ArtifactError(f"{item.path} holds the bundle {digest[:12]}: something changed it; add it again")
        return item

    def profile_path(self, digest: str) -> Path:
        """Return where this device's profile of a bundle lies; it need not exist.

        Raises:
            ArtifactError: not a bundle digest.
        """
        if not _DIGEST.fullmatch(digest):
            raise ArtifactError(f"{digest!r} is not a bundle digest")
        return self._profiles / f"{digest}.json"

    def write_profile(self, profile: Profile) -> None:
        """Keep what this device measured of a bundle.

        Raises:
            StorageError: it cannot be written.
        """
        with storage_errors(f"writing the profile of {profile.model}"):
            self._profiles.mkdir(parents=True, exist_ok=True)
            write_atomically(self.profile_path(profile.bundle_digest), encode_profile(profile))

    def _stage(self, source: Path, staged: Path) -> None:
        """Put the declared files of `source` into the new folder `staged`, synced."""
        if source.is_dir():
            manifest, _ = verify_bundle(source)
            total = sum(file.size_bytes for file in manifest.files.values())
            self._require_room(source, total)
            signature = [SIGNATURE_FILE] if (source / SIGNATURE_FILE).exists() else []
            staged.mkdir(mode=0o755)
            for name in (MANIFEST_FILE, *signature, *manifest.files):
                target = staged / name
                target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                copy_durably(source / name, target)
        elif source.is_file():
            self._require_room(source, source.stat().st_size)
            from edgeinfer.artifact.archive import unpack_bundle  # noqa: PLC0415 - only to install

            unpack_bundle(source, staged)
        elif not source.exists():
            raise ArtifactError(f"{source}: no such file or directory")
        else:
            raise ArtifactError(f"{source} is neither a bundle folder nor a bundle archive")
        fsync_tree(staged)

    def _require_room(self, source: Path, needed_bytes: int) -> None:
        free = shutil.disk_usage(self._staging).free
        if needed_bytes + (1 << 20) > free:
            raise StorageError(
                f"installing {source} needs {mib(needed_bytes)}, {mib(free)} free in {self.state_dir}",
                OSError(errno.ENOSPC, "no space left"),
            )

    def _place(self, manifest: Manifest, digest: str) -> Path:
        return self._bundles / manifest.name / f"{manifest.version}-{digest[:12]}"

    def _refuse_other_contents(self, manifest: Manifest, digest: str) -> None:
        for item in self.installed():
            same = item.manifest.name == manifest.name and item.manifest.version == manifest.version
            if same and item.digest != digest and item.path.name != f"{manifest.version}-{digest[:12]}":
                raise ArtifactError(
                    f"{manifest.name} {manifest.version} is installed with other contents ({item.digest[:12]}, "
                    f"not {digest[:12]}): raise the version, or edgeinfer bundle remove {manifest.name} "
                    f"{manifest.version} first"
                )

    def _commit(self, staged: Path, target: Path, damaged: Path) -> None:
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if target.exists():
            os.rename(target, damaged)  # noqa: PTH104
        fsync_directory(self._bundles)
        os.rename(staged, target)  # noqa: PTH104
        fsync_directory(target.parent)

    def _choose(self, name: str, folder: str) -> None:
        chosen, _ = self._active.read()
        models = self._choices(without=folder)
        before = models.get(name, Choice(active=""))
        if chosen is None or before.active != folder:
            models[name] = Choice(active=folder, previous=before.active)
            self._active.write(Choices(models=models))

    def _forget(self, name: str, left: list[str]) -> None:
        """Point the model at one of the folders that are `left`, before the others go."""
        models = self._choices()
        choice = models.pop(name, Choice(active=""))
        if choice.active in left:
            models[name] = Choice(choice.active, choice.previous if choice.previous in left else "")
        elif left:
            models[name] = Choice(choice.previous if choice.previous in left else max(left, key=_version_key))
        self._active.write(Choices(models=models))

    def _choices(self, *, without: str = "") -> dict[str, Choice]:
        """Return what is active by model; from what is installed (`without` one) when no file of ours can be read."""
        choices, _ = self._active.read()
        if choices is not None:
            return dict(choices.models)
        newest: dict[str, str] = {}
        for name, folder in self._folders():
            if folder != without:
                newest[name] = max(newest.get(name, folder), folder, key=_version_key)
        return {name: Choice(active=folder) for name, folder in newest.items()}

    def _folders(self) -> list[tuple[str, str]]:
        """Return (model, folder) of everything that was committed and can be looked into; empty without a store."""
        return [
            (name, folder)
            for name in sorted(_folder_names(self._bundles))
            for folder in sorted(_folder_names(self._bundles / name), key=_version_key)
        ]

    def _scan(self) -> Iterator[tuple[Installed | None, str]]:
        choices = self._choices()
        for name, folder in self._folders():
            path = self._bundles / name / folder
            try:
                manifest, digest = read_manifest(path)
            except ArtifactError as error:
                yield None, str(error)
                continue
            except (ValueError, ArithmeticError, RuntimeError, MemoryError) as error:  # one bundle is not all of them
                yield None, f"{path} cannot be read: {type(error).__name__}: {str(error)[:200]}"
                continue
            if (manifest.name, f"{manifest.version}-{digest[:12]}") != (name, folder):
                yield (
                    None,
                    f"{path} holds {manifest.name} {manifest.version} {digest[:12]}: it was changed; add it again",
                )
            else:
                yield Installed(path, manifest, digest, active=choices.get(name, Choice("")).active == folder), ""

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Hold the store's lock and have its folders; OSErrors of the block become `StorageError`.

        Raises:
            StorageError: also when another process holds the lock.
        """
        with storage_errors(what):
            for folder in (self._bundles, self._staging, self._profiles):
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(self.state_dir / "store.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(lock, what)
                yield
            finally:
                os.close(lock)


@contextmanager
def _called(source: Path, staged: Path) -> Iterator[None]:
    """Let the block's complaints name what the user gave, not our copy of it, which is gone when they are read.

    Raises:
        ArtifactError: as the block did.
    """
    try:
        yield
    except ArtifactError as error:
        raise type(error)(str(error).replace(str(staged), str(source))) from error


def _folder_names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_sound(bundle: Path) -> bool:
    try:
        verify_bundle(bundle)
    except ArtifactError:
        return False
    return True


def _lock(descriptor: int, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        busy = OSError(error.errno, "another process is changing the store; try again when it is done")
        raise StorageError(what, busy) from error


def _version_key(folder: str) -> tuple[tuple[int, ...], bool, str]:
    """Order folder names by version: numerically, a pre-release before its release, then by digest."""
    version = folder.rpartition("-")[0]
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    parts = tuple(int(part) for part in numbers.groups()) if numbers else ()
    return parts, "-" not in version, folder


__all__ = ["BundleStore", "Installed", "Probe", "StorageError"]
