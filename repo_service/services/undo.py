"""Putting the store back as it was when the index could not follow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from repo_service.storage import Store


@contextmanager
def put_back_on_failure(store: Store, keys: Iterable[str]) -> Iterator[None]:
    """Undo what the block did to small documents if it raises, as when a disk is too full to commit."""
    before = {key: store.get(key) for key in keys}
    try:
        yield
    except Exception:
        for key, data in before.items():
            if data is None:
                store.delete(key)
            elif store.get(key) != data:
                store.put(key, data)
        raise
