"""A store on a local file system: temp file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import Buffer

from repo_service.domain.errors import DocumentCorrupt, StorageFull, Unavailable
from repo_service.storage.store import MAX_OBJECT_BYTES, Store, check_key, check_size, is_key

TEMP = "tmp"

# A piece is hashed while it still lies in the core's cache.
_PIECE = 1024 * 1024

# What opening or removing a file says where no file is.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# What the system says where the medium or the file system has lost one file, or something else lies in its place.
_LOST = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ELOOP, errno.ENXIO}


class LocalStore(Store):
    """Objects as files below ``root``; files being written lie in ``root/tmp``.

    Parameters
    ----------
    root
        An existing directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._temp = f"{self._root}/{TEMP}"
        with _translated(self._temp):
            _make_directory(self._temp)

    def get(self, key: str, limit: int = MAX_OBJECT_BYTES) -> bytes | None:
        path = self._path(key)
        with _translated(path), _read(path):
            fd = _open_file(path)
            if fd is None:
                return None
            with open(fd, "rb", buffering=0) as file:
                check_size(key, os.fstat(fd).st_size, limit)
                return file.readall()

    def read_into(self, key: str, out: memoryview, seen: Callable[[memoryview], object]) -> int | None:
        path = self._path(key)
        with _translated(path), _read(path):
            fd = _open_file(path)
            if fd is None:
                return None
            try:
                size = os.fstat(fd).st_size
                position = 0
                while position < len(out):
                    piece = out[position : position + _PIECE]
                    read = os.readv(fd, [piece])
                    if not read:
                        return position
                    seen(piece[:read])
                    position += read
                return size
            finally:
                os.close(fd)

    def put(self, key: str, data: Buffer) -> None:
        path = self._path(key)
        with _translated(path), self._written(data) as temp:
            _in_directory(path, lambda: os.replace(temp, path))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        path = self._path(key)
        with _translated(path):
            if not self._is_file(path):
                with self._written(data) as temp:
                    try:
                        _in_directory(path, lambda: os.link(temp, path))
                        return True
                    except FileExistsError:
                        if not self._is_file(path):
                            raise
            # Whoever wrote it may not have come to this yet.
            _sync_directory(os.path.dirname(path))
        return False

    def delete(self, key: str, *, durable: bool = True) -> None:
        path = self._path(key)
        with _translated(path), suppress(*_ABSENT):
            os.unlink(path)
            if durable:
                _sync_directory(os.path.dirname(path))

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with _translated(path):
            return self._is_file(path)

    def age_s(self, key: str) -> float | None:
        path = self._path(key)
        with _translated(path):
            try:
                return time.time() - os.stat(path).st_mtime
            except _ABSENT:
                return None

    def remove_leftovers(self, *, dry_run: bool = False) -> Iterator[str]:
        with _translated(self._temp):
            for entry in sorted(os.scandir(self._temp), key=lambda entry: entry.name):
                if entry.is_file(follow_symlinks=False) and _remove_abandoned(entry.path, dry_run=dry_run):
                    yield f"{TEMP}/{entry.name}"

    def list(self, prefix: str) -> Iterator[str]:
        top = self._path(prefix)
        with _translated(top):
            for directory, names, files in os.walk(top, onerror=_raise_unless_absent):
                names.sort()
                relative = os.path.relpath(directory, self._root)
                yield from filter(is_key, (f"{relative}/{name}" for name in sorted(files)))

    @staticmethod
    def _is_file(path: str) -> bool:
        try:
            # Whatever is no directory can be replaced, and removed.
            return not stat.S_ISDIR(os.stat(path).st_mode)
        except _ABSENT:
            return False
        except OSError as error:
            if error.errno not in _LOST:
                raise
            # It is there, and reading it tells what is wrong with it.
            return True

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @contextmanager
    def _written(self, data: Buffer) -> Iterator[str]:
        """A synced temp file with ``data``, gone afterwards unless it was renamed."""
        temp = f"{self._temp}/{uuid.uuid4().hex}"
        try:
            fd = _create_locked(temp)
            try:
                rest = memoryview(data).cast("B")
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
                yield temp
            finally:
                os.close(fd)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temp)


def _open_file(path: str) -> int | None:
    """A descriptor to read a file; None where there is none, or something else, which may not be waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except _ABSENT:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return fd


def _create_locked(path: str) -> int:
    """A new file, locked until it is closed: a writer that dies lets go of it."""
    while True:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        # It was taken for a leftover before the lock was there.
        os.close(fd)


def _remove_abandoned(path: str, *, dry_run: bool) -> bool:
    """Remove a temp file that no writer holds; False if one does, or if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except _ABSENT:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not dry_run:
            os.unlink(path)
        return True
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(fd)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, _ABSENT):
        raise error


def _in_directory(path: str, place: Callable[[], None]) -> None:
    directory = os.path.dirname(path)
    try:
        place()
    except FileNotFoundError:
        _make_directory(directory)
        place()
    _sync_directory(directory)


def _make_directory(path: str) -> None:
    """Create a directory and those above it, each durable in its parent."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_directory(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    _sync_directory(parent)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _read(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise DocumentCorrupt(f"the disk can't read {path}: {error.strerror}", path=path) from error


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageFull(
                f"no space is left to write {path}: free some or move the repository to a larger disk", path=path
            ) from error
        raise Unavailable(f"the file system refused {path}: {error.strerror}", path=path) from error
