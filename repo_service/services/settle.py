"""Crash recovery: the index follows the store where a process ended between the two."""

from __future__ import annotations

from collections.abc import Sequence

from repo_service.domain.views import TagInfo
from repo_service.index import ENTRY, Entry, Index, Noted
from repo_service.services.documents import entry_key, tag_key, tag_place, unseal
from repo_service.services.read import read_entry
from repo_service.storage import Store


def settle(store: Store, index: Index, found: Sequence[Noted] = ()) -> int:
    """Correct the index wherever a process left a note; returns the number of documents looked at.

    Parameters
    ----------
    found
        Further documents to look at.
    """
    if not found and not index.unsettled():
        return 0

    def look(noted: Noted) -> Entry | TagInfo | None:
        key = _key_of(noted)
        if noted.kind == ENTRY:
            return read_entry(store, key)
        data = store.get(key)
        return None if data is None else unseal(key, data, TagInfo, tag_place)

    return len(index.settle(look, lambda noted: store.delete(_key_of(noted)), found))


def _key_of(noted: Noted) -> str:
    make = entry_key if noted.kind == ENTRY else tag_key
    return make(noted.namespace, noted.name)
