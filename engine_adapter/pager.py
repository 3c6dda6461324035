"""A fixed pool of device pages: least recently used goes first, pinned pages stay, a thread reads ahead.

It knows no attention, no artifact and no model: pages have keys, and a `PageSource` fills them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from engine_adapter.cache import take_memory
from engine_adapter.staging import Staging
from repo_service.domain.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor


class PageSource(Protocol):
    """Where pages come from. Called by several threads at once."""

    def read(self, key: Hashable, out: Tensor) -> None:
        """Fill ``out``, host memory of a page's shape, with a page whose bytes were verified (I3)."""


@dataclass
class PagerCounters:
    """What a pager did since it was made.

    Attributes
    ----------
    hits, misses
        Pages asked for that were in the pool or on their way, and that were not.
    prefetched
        Pages that the thread began to read before they were asked for.
    evictions
        Pages that gave way to others.
    bytes_read
        Bytes that came from the source.
    stall_s
        Seconds that those who asked for pages waited for them.
    peak_bytes
        The pool's bytes on the device: taken once, and never more.
    """

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    evictions: int = 0
    bytes_read: int = 0
    stall_s: float = 0.0
    peak_bytes: int = 0

    def since(self, earlier: PagerCounters) -> PagerCounters:
        """What was counted after ``earlier``, a copy of these counters."""
        return PagerCounters(
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.prefetched - earlier.prefetched,
            self.evictions - earlier.evictions,
            self.bytes_read - earlier.bytes_read,
            self.stall_s - earlier.stall_s,
            self.peak_bytes,
        )


class _State(Enum):
    EMPTY = "nobody reads it yet, or reading failed"
    READING = "somebody reads it"
    READY = "it may be used"


@dataclass(eq=False)
class _Slot:
    """A page's place in the pool."""

    view: Tensor
    state: _State = _State.EMPTY
    pins: int = 0
    forgotten: bool = False
    # On CUDA: the copy that brought the page, and the last work on the device that used it.
    arrived: Any = None
    used: Any = None


class Pager:
    """A pool of ``pages`` device pages of one shape, filled on demand and ahead of it.

    Parameters
    ----------
    pages
        Pages in the pool, at least 1. Their memory is taken here, and no more later.
    shape, dtype, device
        Of a page.
    source
        Fills pages.
    prefetch
        Keep a thread that reads ahead.

    Raises
    ------
    InvalidInput
        If the pool has no page, or is larger than the device.
    """

    def __init__(
        self,
        pages: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        source: PageSource,
        *,
        prefetch: bool = True,
    ) -> None:
        if not isinstance(pages, int) or pages < 1:
            raise InvalidInput(f"a pool of {pages} pages was asked for: at least one is needed", pages=pages)
        self.pages = pages
        self.device = torch.device(device)
        self.page_bytes = math.prod(shape) * dtype.itemsize
        try:
            self._memory: Tensor | None = take_memory((pages, *shape), dtype, self.device)
        except (RuntimeError, OSError, MemoryError, OverflowError) as error:
            raise InvalidInput(
                f"a pool of {pages} pages of {self.page_bytes} bytes can't be had on {self.device}: {error}",
                pages=pages,
            ) from None
        self._source = source
        self._staging = Staging(shape, dtype, self.device)
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._asked = threading.Condition(lock)
        self._all = [_Slot(page) for page in self._memory.unbind()]
        self._free = list(reversed(self._all))
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()  # The first is the first to give way.
        self._wishes: dict[Hashable, None] = {}
        self._ahead: deque[Hashable] = deque()
        self._closed = False
        self._counters = PagerCounters(peak_bytes=pages * self.page_bytes)
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._read_ahead, name="kvgraft-prefetch", daemon=True)
            self._thread.start()

    @property
    def counters(self) -> PagerCounters:
        """A copy of what was counted so far."""
        with self._changed:
            return replace(self._counters)

    @contextmanager
    def pinned(self, keys: Sequence[Hashable], *, scan: bool = False) -> Iterator[list[Tensor]]:
        """Pages on the device, in the order of ``keys``, which stay where they are inside the context.

        Parameters
        ----------
        scan
            The pages are one step of a longer scan and are wanted next when it comes round again. They are
            the first to give way afterwards: in a scan that is longer than the pool, whatever was used
            longest ago is what is needed soonest.

        Raises
        ------
        InvalidInput
            If they and the pages that are pinned already are more than the pool has.
        Exception
            Whatever the source raised for one of them.
        """
        slots = self._pin(keys)
        try:
            yield [slots[key].view for key in keys]
        finally:
            self._unpin(slots, scan)

    def prefetch(self, keys: Iterable[Hashable]) -> None:
        """Ask for pages to be read ahead, in this order; returns at once.

        A call takes the place of earlier ones, as far as they were not begun. Pinned pages stay, and so do
        the pages asked for here until they are used. What can't be read is left to whoever pins it.
        """
        if self._thread is None:
            return
        with self._changed:
            self._wishes = dict.fromkeys(keys)
            self._ahead = deque(key for key in self._wishes if key not in self._slots)
            self._tell()

    def forget(self, key: Hashable) -> None:
        """Drop a page whose content has changed or is gone; who has it pinned keeps what it was."""
        with self._changed:
            self._wishes.pop(key, None)
            slot = self._slots.pop(key, None)
            if slot is None:
                return
            slot.forgotten = True
            if not slot.pins and slot.state is not _State.READING:
                self._release(slot)

    def amend(self, key: Hashable, change: Callable[[Tensor], None]) -> None:
        """Change a page in the pool as its source was changed; nothing if it is not there.

        Whoever has it pinned sees the change. A page on its way is forgotten.
        """
        with self._changed:
            slot = self._slots.get(key)
            if slot is None:
                return
            if slot.state is not _State.READY:
                self.forget(key)
                return
            self._staging.wait_for(slot.arrived)
            change(slot.view)
            slot.used = self._staging.now()

    def close(self) -> None:
        """Stop the thread and give the pool's memory back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._asked.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._staging.finish()
        self._slots.clear()
        self._free.clear()
        self._all.clear()
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pin(self, keys: Sequence[Hashable]) -> dict[Hashable, _Slot]:
        slots: dict[Hashable, _Slot] = {}
        try:
            with self._changed:
                wanted = dict.fromkeys(keys)
                missing = []
                for key in wanted:
                    self._wishes.pop(key, None)
                    # What is here already is pinned first, or it would give way to what is not.
                    if (slot := self._slots.get(key)) is None:
                        missing.append(key)
                    else:
                        slots[key] = slot
                        slot.pins += 1
                self._counters.hits += len(slots)
                self._counters.misses += len(missing)
                for key in missing:
                    slot = self._claim(len(wanted))
                    if key in self._slots:  # Another thread was quicker.
                        self._release(slot)
                        slot = self._slots[key]
                    slots[key] = self._slots[key] = slot
                    slot.pins += 1
            began = time.perf_counter()
            waited = [self._ready(key, slot) for key, slot in slots.items()]
            if any(waited):
                with self._changed:
                    self._counters.stall_s += time.perf_counter() - began
        except BaseException:
            self._unpin(slots, scan=False)
            raise
        for slot in slots.values():
            self._staging.wait_for(slot.arrived)
        return slots

    def _claim(self, wanted: int) -> _Slot:
        """A slot for a page that is missing; another page may give way. Waits for reads that nobody pinned."""
        while True:
            if self._closed:
                raise RuntimeError("the pager is closed")
            slot = self._take(())
            if slot is not None:
                return slot
            if all(slot.pins for slot in self._all):
                raise InvalidInput(
                    f"{wanted} pages were asked for at once, and the pool's {self.pages} are pinned: "
                    "give it more pages or ask for fewer at a time",
                    pages=self.pages,
                    wanted=wanted,
                )
            self._changed.wait()

    def _take(self, kept: Container[Hashable]) -> _Slot | None:
        if self._free:
            return self._free.pop()
        for key, slot in self._slots.items():
            if not slot.pins and slot.state is _State.READY and key not in kept:
                del self._slots[key]
                slot.state = _State.EMPTY
                self._counters.evictions += 1
                return slot
        return None

    def _ready(self, key: Hashable, slot: _Slot) -> bool:
        """Have a pinned slot filled, by this thread unless another is at it; False if it was already."""
        waited = False
        with self._changed:
            while slot.state is not _State.EMPTY:
                if slot.state is _State.READY:
                    return waited
                self._changed.wait()
                waited = True
            slot.state = _State.READING
        self._fill(key, slot)
        return True

    def _fill(self, key: Hashable, slot: _Slot) -> None:
        filled = False
        try:
            slot.arrived = self._staging.fill(slot.view, slot.used, lambda out: self._source.read(key, out))
            filled = True
        finally:
            with self._changed:
                slot.state = _State.READY if filled else _State.EMPTY
                if filled:
                    self._counters.bytes_read += self.page_bytes
                if not slot.pins and (slot.forgotten or not filled):
                    self._discard(key, slot)
                self._tell()

    def _unpin(self, slots: dict[Hashable, _Slot], scan: bool) -> None:
        with self._changed:
            used = self._staging.now()
            for key, slot in slots.items():
                slot.used = used
                slot.pins -= 1
                if slot.pins:
                    continue
                if slot.forgotten or slot.state is _State.EMPTY:
                    self._discard(key, slot)
                elif slot.state is _State.READY:
                    self._slots.move_to_end(key, last=not scan)
            self._tell()

    def _discard(self, key: Hashable, slot: _Slot) -> None:
        if self._slots.get(key) is slot:
            del self._slots[key]
        self._release(slot)

    def _release(self, slot: _Slot) -> None:
        slot.state = _State.EMPTY
        slot.forgotten = False
        self._free.append(slot)
        self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for a page or a place; the thread only if there is something to read."""
        self._changed.notify_all()
        if self._ahead:
            self._asked.notify()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                while (found := self._next_wish()) is None and not self._closed:
                    self._asked.wait()
                if found is None or self._closed:
                    return
            try:
                self._fill(*found)
            except Exception:
                continue  # Whoever pins the page reads it again, and is told.

    def _next_wish(self) -> tuple[Hashable, _Slot] | None:
        while self._ahead:
            key = self._ahead[0]
            if key not in self._wishes or key in self._slots:
                self._ahead.popleft()
                continue
            slot = self._take(self._wishes)
            if slot is None:
                return None
            self._ahead.popleft()
            slot.state = _State.READING
            self._slots[key] = slot
            self._counters.prefetched += 1
            return key, slot
        return None
