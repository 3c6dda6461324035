"""What clients have put at S3 themselves: it lies there, unverified, as long as its push runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby

from repo_service.domain.errors import PushNotFound
from repo_service.index import Index
from repo_service.services.documents import UPLOADS
from repo_service.storage import Store


def given_up(store: Store, index: Index, grace_s: float | None = None, push_id: str | None = None) -> Iterator[str]:
    """Keys of uploads whose push runs no longer, and, with a grace, of those that are older than it, in seconds.

    Parameters
    ----------
    push_id
        Look at this push only.
    """
    prefix = UPLOADS if push_id is None else f"{UPLOADS}/{push_id}"
    for running, keys in groupby(store.list(prefix), lambda key: key.split("/")[1]):
        if not _runs(index, running):
            yield from keys
        elif grace_s is not None:
            for key in keys:
                age_s = store.age_s(key)
                if age_s is not None and age_s >= grace_s:
                    yield key


def remove_uploads(store: Store, index: Index, push_id: str | None = None) -> None:
    """Remove what was uploaded for a push that has ended, or for all that have.

    Raises
    ------
    KvgraftError
    """
    with ThreadPoolExecutor(store.concurrency) as pool:
        for _ in pool.map(lambda key: store.delete(key, durable=False), given_up(store, index, push_id=push_id)):
            pass


def _runs(index: Index, push_id: str) -> bool:
    with suppress(PushNotFound):
        index.push(push_id)
        return True
    return False
