"""Room kept for deletions: on a full disk, even taking something away needs some."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from repo_service.domain.errors import StorageFull

SIZE = 2**20

T = TypeVar("T")


class Reserve:
    """A file of zeros that is given up when a deletion finds no space, and made again afterwards.

    Parameters
    ----------
    path
        Beside the index, or None where there is no disk.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def keep(self) -> None:
        """Make the file if it is not there and there is room for it."""
        if self._path is None or (self._path.exists() and self._path.stat().st_size >= SIZE):
            return
        with suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, SIZE)
            except OSError:
                self._path.unlink()
            finally:
                os.close(fd)

    def spent_on(self, deletion: Callable[[], T]) -> T:
        """Delete, if need be in the reserve's room.

        Raises
        ------
        StorageFull
            If that was not enough either.
        """
        try:
            try:
                return deletion()
            except StorageFull:
                if not self._give_up():
                    raise
            return deletion()
        finally:
            # Also after one that needed no room of it but made some.
            self.keep()

    def _give_up(self) -> bool:
        if self._path is None:
            return False
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
