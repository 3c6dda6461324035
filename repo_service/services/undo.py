"""The store put back where a transaction failed after it had written there."""

from __future__ import annotations

from datetime import datetime

from repo_service.domain.views import TagInfo
from repo_service.index import ENTRY, Noted
from repo_service.services.documents import EntryDocument, entry_key, holds, seal, tag_key, tag_place
from repo_service.storage import Store


def follow_rows(store: Store, document: Noted, created_at: datetime | None, tags: list[TagInfo]) -> None:
    """Make the store say of a document what the rows say, which other writers may have changed meanwhile.

    Called under the write lock.
    """
    if document.kind != ENTRY:
        _say(store, tag_key(document.namespace, document.name), seal(tags[0]) if tags else None)
        return
    entry = None
    if created_at is not None:
        entry = seal(EntryDocument(namespace=document.namespace, artifact_id=document.name, created_at=created_at))
    _say(store, entry_key(document.namespace, document.name), entry)
    for tag in tags:
        _say(store, tag_place(tag), seal(tag))


def _say(store: Store, key: str, data: bytes | None) -> None:
    if data is None:
        store.delete(key)
    elif not holds(store, key, data):
        store.put(key, data)
