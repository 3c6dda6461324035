"""Chunks that a node keeps on its own disk: bounded, shared by its processes, verified on every read (I3).

A file is seen whole or not at all, and any of them may go at any time. Readers take no lock. What a process
is about to write is counted first, under a lock, and only a scan counts anything out, so that the count is
never below what lies on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from pydantic import Field
from typing_extensions import Buffer

from repo_service.client.shared_count import Turn, take_turn
from repo_service.domain.digest import BLAKE3, ChunkHasher, parse_digest
from repo_service.domain.errors import InvalidInput, Unavailable
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.views import View

DIRECTORY_VARIABLE = "KVGRAFT_CACHE_DIR"
OFF = "off"

DEFAULT_LIMIT = 10 * 2**30

# A piece is hashed while it still lies in the core's cache.
_PIECE = 2**20

# How old the note of a chunk's last use may become.
_USED_S = 60.0

# How long nothing is written after a write failed.
_PAUSE_S = 60.0

# How long a writer waits for its turn to count, and how long nothing is written without one.
_TURN_S = 0.5
_WITHOUT_A_TURN_S = 5.0

_CLEAR_S = 10.0

_FAN = re.compile(r"[0-9a-f]{2}", re.ASCII)
_REST = re.compile(r"[0-9a-f]{62}", re.ASCII)
_TEMP_PREFIX = "kvgraft-"

_log = logging.getLogger(__name__)
_warned: set[str] = set()


class CacheCounts(View):
    """What a cache did for this process."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0
    dropped: int = Field(0, description="Files that were damaged, and removed; misses, too.")


class CacheInfo(View):
    """What lies in a cache's directory, whoever put it there."""

    directory: str
    limit_bytes: int
    chunks: int
    bytes: int


class _Kept(NamedTuple):
    used_ns: int
    size: int
    path: str


class NodeCache:
    """A directory of chunks by digest. Methods may be called from several threads, and after a fork.

    Nothing here raises for what the disk does: a chunk that can't be read or kept is fetched from the repository.

    Parameters
    ----------
    directory
        Made with access for its owner only. One that exists is used only if it is so.
    limit_bytes
        Most bytes on the disk, files being written included; by default 10 GiB, and no more than a tenth of what
        would be free without the cache.
    """

    def __init__(self, directory: str | os.PathLike[str], limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise InvalidInput(f"the cache can't be bounded to {limit_bytes} bytes; it must be 1 or more")
        self.directory = os.path.abspath(directory)
        self._limit_bytes = limit_bytes
        self._temp = f"{self.directory}/tmp"
        self._prepared = False
        self._paused_until = 0.0
        self._eviction: threading.Thread | None = None
        self._forget_counts()

    def read(self, digest: str, spec: ChunkSpec, out: memoryview) -> bool:
        """Read a chunk into ``out`` (writable, ``spec.size`` bytes), hashing it on the way; False if it is not there.

        A file that holds anything else is removed, and ``out`` is then unspecified.
        """
        path = self._path(digest)
        whole = None
        with suppress(OSError):
            self._require_private()
            whole = self._read(path, digest, spec, out[: spec.size])
        if whole is False:
            with suppress(OSError):
                os.unlink(path)
        self._count(whole, spec.size)
        return whole is True

    def keep(self, digest: str, data: Buffer) -> None:
        """Keep a chunk that is known to be what its digest says, if there is room and a turn."""
        path = self._path(digest)
        if time.monotonic() < self._paused_until or os.path.lexists(path):
            return
        try:
            if not self._prepared:
                self._prepare()
            self._write(path, memoryview(data).cast("B"))
        except FileNotFoundError:
            # Somebody removed the whole directory; the next chunk makes it again.
            self._prepared = False
        except OSError as error:
            self._give_up(error)

    def info(self) -> CacheInfo:
        """Look what is there."""
        kept, size = self._scan()
        return CacheInfo(directory=self.directory, limit_bytes=self._limit(size), chunks=len(kept), bytes=size)

    def clear(self) -> CacheInfo:
        """Remove every chunk; returns what was removed. Processes that use the cache go on.

        Raises
        ------
        Unavailable
            If the directory can't be written, or another process has been evicting for long.
        """
        removed: list[_Kept] = []
        try:
            self._require_private()
            with take_turn(f"{self.directory}/evicting", _CLEAR_S) as turn:
                if turn is None:
                    raise Unavailable(f"another process is busy in the cache in {self.directory}: try again")
                removed = self._evict_to(-1)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise Unavailable(f"the cache in {self.directory} can't be cleared: {error.strerror}") from error
        size = sum(file.size for file in removed)
        return CacheInfo(directory=self.directory, limit_bytes=self._limit(0), chunks=len(removed), bytes=size)

    @property
    def counts(self) -> CacheCounts:
        """What was found and not found by this process through this object."""
        return CacheCounts(**self._seen)

    def close(self) -> None:
        """Wait for a running eviction. The cache may be used again."""
        if self._eviction is not None:
            self._eviction.join()

    # Reading

    def _read(self, path: str, digest: str, spec: ChunkSpec, out: memoryview) -> bool | None:
        """Whether the file holds the chunk; None where there is none."""
        try:
            # Not blocked by a pipe in a chunk's place.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            return False if error.errno == errno.ELOOP else None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != spec.size or _hashed(fd, spec, out) != digest:
                return False
            if abs(time.time() - status.st_mtime) > _USED_S:
                with suppress(OSError):
                    os.utime(fd)
            return True
        except OSError:
            return False
        finally:
            os.close(fd)

    def _count(self, whole: bool | None, size: int) -> None:
        if os.getpid() != self._pid:
            self._forget_counts()
        with self._counting:
            self._seen["hits" if whole else "misses"] += 1
            self._seen["hit_bytes" if whole else "missed_bytes"] += size
            self._seen["dropped"] += whole is False

    def _forget_counts(self) -> None:
        # A lock that another thread held in a fork stays locked in the child.
        self._counting = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._pid = os.getpid()

    # Writing

    def _prepare(self) -> None:
        os.makedirs(os.path.dirname(self.directory), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.directory, 0o700)
        self._require_private()
        os.makedirs(self._temp, 0o700, exist_ok=True)
        with self._turn() as turn:
            if turn is not None:
                self._remove_leftovers()
        self._prepared = True

    def _require_private(self) -> None:
        """Raise `OSError` for a directory that others may enter, or that is not there: nothing in it is this cache's."""
        status = os.stat(self.directory)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077:
            raise PermissionError(errno.EPERM, f"it is not this user's alone: owner {status.st_uid}, mode {mode:03o}")

    def _write(self, path: str, data: memoryview) -> None:
        reserved = self._reserve(len(data))
        if reserved is None:
            return
        fd, temp = reserved
        try:
            rest = data
            while rest:
                rest = rest[os.write(fd, rest) :]
            try:
                os.rename(temp, path)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(os.path.dirname(path), 0o700)
                os.rename(temp, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
        finally:
            os.close(fd)

    def _reserve(self, size: int) -> tuple[int, str] | None:
        """A new temp file that has ``size`` bytes already, locked while its writer lives; None without room."""
        with self._turn() as turn:
            if turn is None:
                # Whoever has it may have been stopped: the next chunks don't wait as well.
                self._paused_until = time.monotonic() + _WITHOUT_A_TURN_S
                return None
            used = turn.read()
            if used is None:
                used = self._scan()[1]
            limit = self._limit(used)
            # Early, so that there is room meanwhile; not so where a chunk is much of the whole.
            margin = limit // 20 if size <= limit // 20 else 0
            if size <= limit < used + size + margin:
                self._begin_eviction(size)
            if limit < used + size:
                return None
            turn.write(used + size)
            temp = f"{self._temp}/{_TEMP_PREFIX}{uuid.uuid4().hex}"
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.ftruncate(fd, size)
            except OSError:
                os.close(fd)
                raise
            return fd, temp

    def _give_up(self, error: OSError) -> None:
        """Write nothing for a while; whoever runs this process is told once."""
        self._paused_until = time.monotonic() + _PAUSE_S
        self._prepared = False
        if self.directory not in _warned:
            _warned.add(self.directory)
            _log.warning(
                "the cache in %s can't be written (%s): chunks are fetched each time they are needed. "
                "Make room there or name another directory in %s; %s=%s does without",
                self.directory,
                error.strerror or error,
                DIRECTORY_VARIABLE,
                DIRECTORY_VARIABLE,
                OFF,
            )

    def _limit(self, used: int) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        place = self.directory
        while not os.path.exists(place):
            place = os.path.dirname(place)
        disk = os.statvfs(place)
        return min(DEFAULT_LIMIT, (disk.f_bavail * disk.f_frsize + used) // 10)

    # Evicting

    def _begin_eviction(self, room: int) -> None:
        """Let a thread of its own bring the cache to nine tenths of its bound, and make ``room``."""
        if self._eviction is None or not self._eviction.is_alive():
            self._eviction = threading.Thread(target=self._evict, args=(room,), name="kvgraft-evict")
            self._eviction.start()

    def _evict(self, room: int) -> None:
        # What can't be removed now may be with the next eviction.
        with suppress(OSError), take_turn(f"{self.directory}/evicting", wait_s=0) as turn:
            if turn is not None:
                self._evict_to(None, room)

    def _evict_to(self, target: int | None, room: int = 0) -> list[_Kept]:
        """Remove the least recently used chunks until ``target`` bytes are left, and count anew; returns what went."""
        with self._turn() as turn:
            before = None if turn is None else turn.read()
            if turn is not None:
                self._remove_leftovers()
        kept, size = self._scan()
        if target is None:
            limit = self._limit(size)
            target = max(0, limit - max(limit // 10, room))
        removed = []
        for file in sorted(kept):
            if size <= target:
                break
            with suppress(OSError):
                os.unlink(file.path)
                removed.append(file)
                size -= file.size
        with self._turn() as turn:
            now = None if turn is None else turn.read()
            if turn is not None and before is not None and now is not None:
                # Whether the scan saw what was begun meanwhile is not known.
                turn.write(size + max(0, now - before))
        return removed

    def _scan(self) -> tuple[list[_Kept], int]:
        """Every chunk, and the bytes of all files; one that is being written is counted at least once."""
        size = 0
        for entry in _entries(self._temp):
            with suppress(OSError):
                size += entry.stat(follow_symlinks=False).st_size
        kept = []
        for fan in _entries(self.directory):
            for entry in _entries(fan.path) if _FAN.fullmatch(fan.name) else ():
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if _REST.fullmatch(entry.name) and not stat.S_ISDIR(status.st_mode):
                        kept.append(_Kept(status.st_mtime_ns, status.st_size, entry.path))
        return kept, size + sum(file.size for file in kept)

    def _remove_leftovers(self) -> None:
        """Remove temp files whose writers have died; with the count's lock, under which new ones are locked."""
        for entry in _entries(self._temp):
            if entry.name.startswith(_TEMP_PREFIX):
                with suppress(OSError):
                    fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(entry.path)
                    finally:
                        os.close(fd)

    def _turn(self) -> AbstractContextManager[Turn | None]:
        return take_turn(f"{self.directory}/bytes", _TURN_S)

    def _path(self, digest: str) -> str:
        name = parse_digest(digest, BLAKE3).hex()
        return f"{self.directory}/{name[:2]}/{name[2:]}"


def _hashed(fd: int, spec: ChunkSpec, out: memoryview) -> str | None:
    """Read a whole file into ``out``; returns the digest of what was read, None if it ended early."""
    hasher = ChunkHasher(spec.dtype, spec.shape)
    position = 0
    while position < len(out):
        piece = out[position : position + _PIECE]
        read = os.readv(fd, [piece])
        if not read:
            return None
        hasher.update(piece[:read])
        position += read
    return hasher.digest()


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(directory) as entries:
        yield from entries
