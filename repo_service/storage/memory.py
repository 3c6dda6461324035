"""A store in this process's memory, for tests and for trying things out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from typing_extensions import Buffer

from repo_service.storage.store import MAX_OBJECT_BYTES, Store, check_key, check_size


class MemoryStore(Store):
    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._written: dict[str, float] = {}
        self._lock = threading.Lock()

    def get(self, key: str, limit: int = MAX_OBJECT_BYTES) -> bytes | None:
        data = self._objects.get(check_key(key))
        if data is not None:
            check_size(key, len(data), limit)
        return data

    def read_into(self, key: str, out: memoryview, seen: Callable[[memoryview], object]) -> int | None:
        data = self._objects.get(check_key(key))
        if data is None:
            return None
        piece = out[: len(data)]
        piece[:] = data[: len(piece)]
        seen(piece)
        return len(data)

    def put(self, key: str, data: Buffer) -> None:
        with self._lock:
            self._objects[check_key(key)] = bytes(data)
            self._written[key] = time.monotonic()

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._lock:
            if check_key(key) in self._objects:
                return False
            self._objects[key] = bytes(data)
            self._written[key] = time.monotonic()
            return True

    def delete(self, key: str, *, durable: bool = True) -> None:  # noqa: ARG002
        with self._lock:
            self._objects.pop(check_key(key), None)

    def exists(self, key: str) -> bool:
        return check_key(key) in self._objects

    def age_s(self, key: str) -> float | None:
        with self._lock:
            return time.monotonic() - self._written[key] if check_key(key) in self._objects else None

    def remove_leftovers(self, *, dry_run: bool = False) -> Iterator[str]:  # noqa: ARG002
        return iter(())

    def list(self, prefix: str) -> Iterator[str]:
        below = f"{check_key(prefix)}/"
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(below))
        return iter(keys)
