"""Pages on the host, written as a model computes and verified as they are read: what a pager brings in.

They lie in memory, or in a temporary file that is mapped, for contexts that are larger than memory.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from blake3 import blake3

from engine_adapter.tensors import host_bytes
from repo_service.domain.errors import InvalidInput, PageCorrupt, StorageFull

if TYPE_CHECKING:
    from torch import Tensor

# Memory is taken in pieces of about this size.
_SLAB_BYTES = 64 * 2**20


class HostPages:
    """A `PageSource` over pages of one shape, each with the BLAKE3 digest of its bytes.

    A page's tokens lie along its last axis but one. A page begins as zeros.

    Parameters
    ----------
    shape, dtype
        Of a page.
    directory
        Where to keep the pages in a file, which has no name and goes with the process; None keeps them
        in memory.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, directory: Path | None = None) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.page_bytes = math.prod(self.shape) * dtype.itemsize
        step = math.lcm(self.page_bytes, mmap.ALLOCATIONGRANULARITY)
        self._slab_bytes = step * max(1, _SLAB_BYTES // step)
        self._file: IO[bytes] | None = None
        if directory is not None:
            if not directory.is_dir():
                raise InvalidInput(f"{directory} is not a directory: pages can't be kept there")
            self._file = tempfile.TemporaryFile(dir=directory, prefix="kvgraft-pages-")  # noqa: SIM115
        self._slabs = 0
        self._free: list[Tensor] = []
        self._pages: dict[Hashable, Tensor] = {}
        self._digests: dict[Hashable, bytes] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pages

    @property
    def host_bytes(self) -> int:
        """Bytes taken in memory or in the file."""
        return self._slabs * self._slab_bytes

    def write(self, key: Hashable, states: Iterable[Tensor], start: int = 0) -> None:
        """Put tokens into a page, new or there already, from token ``start`` of it on.

        Parameters
        ----------
        states
            What goes into the page's rows, one tensor a row, each ``[..., tokens, dim]``; a page of
            ``[2, heads, tokens, dim]`` has keys and values for rows.
        """
        with self._lock:
            page = self.page(key)
            put(page, states, start)
            self._digests[key] = _digest(page)

    def page(self, key: Hashable) -> Tensor:
        """A page's memory, new or there already, to be written to; `seal` then says that it is whole."""
        with self._lock:
            page = self._pages.get(key)
            if page is None:
                page = self._pages[key] = self._take()
            return page

    def seal(self, key: Hashable) -> None:
        """Take the digest of a page as it is now."""
        with self._lock:
            self._digests[key] = _digest(self._pages[key])

    def read(self, key: Hashable, out: Tensor) -> None:
        """Copy a page into ``out``.

        Raises
        ------
        PageCorrupt
            If its bytes are not those that were written.
        KeyError
        """
        if self._copy(key, out):
            return
        with self._lock:  # Perhaps it was being written to.
            if self._copy(key, out):
                return
        raise PageCorrupt(
            f"page {key} is damaged: memory or a temporary file was altered behind the run's back; begin it again",
            page=str(key),
        )

    def free(self, key: Hashable) -> None:
        """Give a page's memory to other pages."""
        with self._lock:
            self._digests.pop(key, None)
            self._free.append(self._pages.pop(key))

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            self._pages.clear()
            self._digests.clear()
            self._free.clear()
            self._slabs = 0
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy(self, key: Hashable, out: Tensor) -> bool:
        out.copy_(self._pages[key])
        # What is hashed is the copy, which is what is handed on.
        return _digest(out) == self._digests[key]

    def _take(self) -> Tensor:
        if self._free:
            return self._free.pop().zero_()
        self._free.extend(self._slab())
        return self._free.pop()

    def _slab(self) -> Iterator[Tensor]:
        start, size = self.host_bytes, self._slab_bytes
        try:
            if self._file is None:
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    memory.madvise(mmap.MADV_HUGEPAGE)
            else:
                os.posix_fallocate(self._file.fileno(), start, size)
                memory = mmap.mmap(self._file.fileno(), size, offset=start)
        except OSError as error:
            where = "memory" if self._file is None else "the temporary file"
            raise StorageFull(f"there is no room in {where} for {size} more bytes of pages: {error}") from None
        self._slabs += 1
        flat = torch.frombuffer(memory, dtype=self.dtype)
        yield from reversed(flat.view(-1, *self.shape).unbind())


def put(page: Tensor, states: Iterable[Tensor], start: int) -> None:
    """Put tokens into a page's rows, from token ``start`` of it on; see `HostPages.write`."""
    for row, state in zip(page, states, strict=True):
        row[..., start : start + state.shape[-2], :].copy_(state)


def _digest(page: Tensor) -> bytes:
    data: Any = host_bytes(page)
    return blake3(data).digest()
