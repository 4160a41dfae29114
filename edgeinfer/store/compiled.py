"""Keep the compiled forms of installed variants: one folder each, whole or not there, within bounds, for one key.

    STATE_DIR/compiled/DIGEST/VARIANT-KEY12/form.json      what was measured and chosen
                                           /model.onnx     and its weights beside it; absent when plain was best
    STATE_DIR/compiled/.work-…/                            being written; a crash's rest goes with the next writer

They lie outside the bundle's folder, so that its digest holds, and can be removed at any time: then the variant loads
as it came. A form whose key is not the one asked for (another CPU, another ONNX Runtime) is as good as none. How forms
are made and which one is best is decided elsewhere. Everything here blocks: call it from the storage thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from edgeinfer.artifact.hashing import sha256_of
from edgeinfer.artifact.manifest import File
from edgeinfer.artifact.profile import OperatingCost
from edgeinfer.errors import ArtifactError, mib
from edgeinfer.plain_file import open_plain, read_plain
from edgeinfer.store.durable import StorageError, fsync_directory, remove_tree, storage_errors, write_atomically

MODEL_FILE: Final = "model.onnx"
MAX_STORE_BYTES: Final = 2 << 30
"""Of all forms together; the least recently used go first."""
KEEP_FREE_BYTES: Final = 64 << 20
"""Of the disk, for everybody else."""
_SCHEMA: Final = 1
_RECORD: Final = "form.json"
_MAX_RECORD_BYTES: Final = 1 << 20
_WORK: Final = ".work-"
_FRESH_S: Final = 86400
"""A use is noted once a day: flash cards wear."""


@dataclass(frozen=True, slots=True)
class FormKey:
    """What a compiled form holds for; with anything else it is stale."""

    bundle_digest: str
    variant: str
    onnxruntime: str
    machine: str
    """`x86_64`, `aarch64`, …"""
    cpu_flags: frozenset[str]
    options: tuple[str, ...] = ()
    """Whatever else of the session went into the files: providers, optimization."""

    @property
    def digest(self) -> str:
        """The key as hex sha256."""
        parts = [str(_SCHEMA), self.bundle_digest, self.variant, self.onnxruntime, self.machine]
        parts += [" ".join(sorted(self.cpu_flags)), *self.options]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class FormCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one form of a variant costs here, as measured."""

    form: Literal["plain", "prepacked", "mapped"]
    problem: str = ""
    """Why it can't be used; empty when its golden answers are right."""
    load_ms: float = 0.0
    peak_bytes: int = 0
    """Anonymous memory at the peak of loading and running."""
    steady_bytes: int = 0
    """Anonymous memory after the runs."""
    hot_bytes: int = 0
    """Mapped weights that the runs touch; the same pages for all workers."""
    disk_bytes: int = 0
    latencies_us: list[int] = []
    """Of each timed request; 0 where it failed."""
    plain_latencies_us: list[int] = []
    """Of the same requests in the plain form, run by turns with these; 0 where it failed in either."""
    covers_largest: bool = False
    """Whether a request of the largest declared shape was among them."""


class Record(msgspec.Struct, frozen=True):
    """The whole of form.json."""

    schema: int
    key: str
    bundle_digest: str
    variant: str
    onnxruntime: str
    form: Literal["plain", "prepacked", "mapped"]
    """The chosen one; of the others there are no files."""
    why: str
    operating: OperatingCost
    """What the chosen form costs, as the profile has it."""
    costs: list[FormCost]
    """Of every form that was tried."""
    files: dict[str, File]

    @property
    def cost(self) -> FormCost:
        """Cost of the chosen form."""
        return self.cost_of(self.form)

    def cost_of(self, form: str) -> FormCost:
        """Return what was measured of a form; nothing but zeros of one that was not tried."""
        return next((cost for cost in self.costs if cost.form == form), FormCost(form=self.form))


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """One variant's chosen form."""

    folder: Path
    record: Record

    @property
    def disk_bytes(self) -> int:
        """What its files take."""
        return sum(file.size_bytes for file in self.record.files.values())

    @property
    def model_path(self) -> Path:
        """The ONNX file; there is none when the form is plain."""
        return self.folder / MODEL_FILE

    @property
    def weights(self) -> list[tuple[Path, int]]:
        """The files that sessions map, with their sizes."""
        return [(self.folder / name, file.size_bytes) for name, file in self.record.files.items() if name != MODEL_FILE]


class CompiledStore:
    """The compiled forms of one state directory. Several processes may read it, one writes at a time."""

    def __init__(
        self, state_dir: Path, *, max_bytes: int = MAX_STORE_BYTES, keep_free_bytes: int = KEEP_FREE_BYTES
    ) -> None:
        self._folder = state_dir / "compiled"
        self._max_bytes = max_bytes
        self._keep_free_bytes = keep_free_bytes

    def find(self, key: FormKey) -> CompiledForm | None:
        """Return the form that was made for exactly this key, None when there is none or it is damaged.

        Sizes are compared, not contents: see `check`. Notes that it was used.
        """
        folder = self._place(key)
        form = _read(folder)
        if form is None or form.record.key != key.digest:
            return None
        for name, file in form.record.files.items():
            try:
                if (folder / name).stat().st_size != file.size_bytes:
                    return None
            except OSError:
                return None
        _note_use(folder)
        return form

    def forms(self, bundle_digest: str) -> list[CompiledForm]:
        """Return what is kept for a bundle, stale ones included, by variant."""
        found = [_read(folder) for folder in _subfolders(self._folder / bundle_digest)]
        return sorted((form for form in found if form is not None), key=lambda form: form.record.variant)

    def check(self, form: CompiledForm) -> None:
        """Check every byte of a form's files: one flipped bit in weights would load silently.

        Raises:
            ArtifactError: they are not what was written; `discard` it, and load the variant as it came.
        """
        for name, file in form.record.files.items():
            path = form.folder / name
            try:
                with open(open_plain(path, follow=False), "rb") as reader:  # noqa: PTH123
                    found, _ = sha256_of(reader.fileno(), most_bytes=file.size_bytes)
            except OSError as error:
                raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
            if found != file.sha256:
                raise ArtifactError(f"{path} was changed: its sha256 is {found[:12]}, was {file.sha256[:12]}")

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Have a folder on the store's disk to make forms in, and be the only one who changes the store.

        Removes what a crash left behind, and the folder at the end.

        Raises:
            StorageError: the disk cannot be written, or another process is at it.
        """
        with storage_errors("keeping a compiled form"):
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(lock)
                for left in self._folder.glob(f"{_WORK}*"):
                    remove_tree(left)
                work = Path(tempfile.mkdtemp(prefix=_WORK, dir=self._folder))
                try:
                    yield work
                finally:
                    remove_tree(work)
            finally:
                os.close(lock)

    def room_bytes(self) -> int:
        """Return how much may be written now: what the disk has free beyond the share of others, within the bound."""
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError:
            return 0
        return max(0, min(free - self._keep_free_bytes, self._max_bytes))

    def commit(self, work: Path, made: Path | None, key: FormKey, record: Record) -> CompiledForm:
        """Keep a form; `made` is the folder in `work` with its synced files, None for plain. Inside `writing` only.

        Replaces every other form of the variant, also those of other keys. Others give way when the store would grow
        beyond its bound.

        Raises:
            StorageError: it is larger than the bound, or the disk is full. What there was before is still there.
        """
        staged = made or Path(tempfile.mkdtemp(prefix="plain-", dir=work))
        target = self._place(key)
        with storage_errors(f"keeping the {record.form} form of {record.variant}"):
            size = sum(file.size_bytes for file in record.files.values())
            mine = [form.folder for form in self.forms(key.bundle_digest) if form.record.variant == key.variant]
            self._make_room(size, without=mine)
            write_atomically(staged / _RECORD, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
            staged.chmod(0o755)
            fsync_directory(staged)
            target.parent.mkdir(mode=0o755, exist_ok=True)
            fsync_directory(self._folder)
            if target.exists():
                _take_away(target, work)
            os.rename(staged, target)  # noqa: PTH104
            fsync_directory(target.parent)
            for folder in mine:
                if folder != target:
                    _take_away(folder, work)
        return CompiledForm(target, record)

    def discard(self, form: CompiledForm) -> None:
        """Forget a form: the variant loads as it came from now on, until one is made again. Never raises."""
        remove_tree(form.folder)

    def remove(self, bundle_digest: str) -> None:
        """Forget everything of a bundle. Never raises; what cannot be removed now is `prune`d later."""
        if bundle_digest:
            remove_tree(self._folder / bundle_digest)

    def prune(self, installed: Collection[str]) -> None:
        """Forget the forms of bundles that are not installed any more."""
        for folder in _subfolders(self._folder):
            if folder.name not in installed and not folder.name.startswith(_WORK):
                remove_tree(folder)

    def total_bytes(self) -> int:
        """Return what all forms take."""
        return sum(form.disk_bytes for form in self._everything())

    def _place(self, key: FormKey) -> Path:
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", key.variant)[:40]
        return self._folder / key.bundle_digest / f"{readable}-{key.digest[:12]}"

    def _everything(self) -> Iterator[CompiledForm]:
        for folder in _subfolders(self._folder):
            yield from self.forms(folder.name)

    def _make_room(self, size: int, *, without: Iterable[Path]) -> None:
        """Remove the least recently used forms until `size` more bytes are within the bound.

        Raises:
            OSError: there can't be enough.
        """
        if size > self._max_bytes:
            raise OSError(errno.EFBIG, f"it has {mib(size)}, all forms together may have {mib(self._max_bytes)}")
        others = [form for form in self._everything() if form.folder not in set(without) and form.disk_bytes]
        others.sort(key=lambda form: _used_at(form.folder))
        total = sum(form.disk_bytes for form in others)
        for form in others:
            if total + size <= self._max_bytes:
                break
            remove_tree(form.folder)
            total -= form.disk_bytes


def describe_files(folder: Path) -> dict[str, File]:
    """Return name, size and sha256 of every file in a folder.

    Raises:
        OSError: one cannot be read.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as reader:
            size_bytes = path.stat().st_size
            files[path.name] = File(sha256_of(reader.fileno(), most_bytes=size_bytes)[0], size_bytes)
    return files


def new_record(
    key: FormKey,
    *,
    form: FormCost,
    why: str,
    operating: OperatingCost,
    costs: Iterable[FormCost],
    files: dict[str, File],
) -> Record:
    """Return the record of a choice."""
    return Record(
        schema=_SCHEMA,
        key=key.digest,
        bundle_digest=key.bundle_digest,
        variant=key.variant,
        onnxruntime=key.onnxruntime,
        form=form.form,
        why=why,
        operating=operating,
        costs=list(costs),
        files=files,
    )


def _read(folder: Path) -> CompiledForm | None:
    try:
        raw = read_plain(folder / _RECORD, _MAX_RECORD_BYTES, follow=False)
        record = msgspec.json.decode(raw, type=Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    sound = record.schema == _SCHEMA and all("/" not in name and name not in {".", ".."} for name in record.files)
    complete = record.form == "plain" or (MODEL_FILE in record.files and len(record.files) > 1)
    return CompiledForm(folder, record) if sound and complete else None


def _take_away(folder: Path, work: Path) -> None:
    os.rename(folder, Path(tempfile.mkdtemp(prefix="old-", dir=work)) / "form")  # noqa: PTH104


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _note_use(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - _used_at(folder) > _FRESH_S:
            os.utime(folder / _RECORD)


def _used_at(folder: Path) -> float:
    """Return the wall time of its last use, a label that only orders; 0 when unknown."""
    try:
        return (folder / _RECORD).stat().st_mtime
    except OSError:
        return 0.0


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        busy = OSError(error.errno, "another process is making compiled forms; try again when it is done")
        raise StorageError("keeping a compiled form", busy) from error
