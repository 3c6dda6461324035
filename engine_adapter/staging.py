"""The way of a page onto a device: read in place on a CPU, through pinned memory and a stream of its own on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Pages under way at once: one is read while others are copied.
_BUFFERS = 4


class Staging:
    """Fills device pages from host memory. Events are None where the device has no streams.

    Parameters
    ----------
    shape, dtype, device
        Of a page.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._buffers: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()
        if device.type != "cpu":
            for _ in range(_BUFFERS):
                buffer = torch.empty(tuple(shape), dtype=dtype, pin_memory=self._stream is not None)
                self._buffers.put((buffer, None))

    def fill(self, page: Tensor, used: Any, read: Callable[[Tensor], None]) -> Any:
        """Have ``read`` fill host memory and bring that to ``page``; returns the event of its arrival.

        Parameters
        ----------
        used
            The event after which the page may be overwritten.
        """
        if self._device.type == "cpu":
            read(page)
            return None
        buffer, copied = self._buffers.get()
        try:
            if copied is not None:
                copied.synchronize()
            read(buffer)
            if self._stream is None:
                page.copy_(buffer)
                return None
            with torch.cuda.stream(self._stream):
                if used is not None:
                    self._stream.wait_event(used)
                page.copy_(buffer, non_blocking=True)
                copied = self._stream.record_event()
            return copied
        finally:
            self._buffers.put((buffer, copied))

    def wait_for(self, arrived: Any) -> None:
        """Let what the device does next wait for a page's arrival."""
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)

    def now(self) -> Any:
        """The event after what the device was given to do so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def finish(self) -> None:
        """Wait for copies that are under way."""
        if self._stream is not None:
            self._stream.synchronize()
