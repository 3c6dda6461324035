"""A number of bytes that the processes of a node keep together, under a lock that a dead one lets go of."""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

# The number and its CRC: a damaged one is known for that.
_NUMBER = struct.Struct("<Q")
_CRC = struct.Struct("<I")

_RETRY_S = 0.001


class Turn:
    """The number, while nobody else may read or write it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self) -> int | None:
        """The number; None where nobody has written one, or it is damaged."""
        data = os.pread(self._fd, _NUMBER.size + _CRC.size, 0)
        found = data[: _NUMBER.size]
        return int(_NUMBER.unpack(found)[0]) if found and data == _sealed(found) else None

    def write(self, number: int) -> None:
        os.pwrite(self._fd, _sealed(_NUMBER.pack(number)), 0)


@contextmanager
def take_turn(path: str, wait_s: float) -> Iterator[Turn | None]:
    """A turn at the number in a file, which is made where there is none; None if others had it for ``wait_s``.

    Each turn opens the file anew, so that threads exclude each other as processes do, also after a fork.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        locked = _lock(fd, time.monotonic() + wait_s)
        yield Turn(fd) if locked else None
    finally:
        # A child that was forked meanwhile holds the descriptor, too.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _sealed(number: bytes) -> bytes:
    return number + _CRC.pack(zlib.crc32(number))


def _lock(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_S)
