"""Crash recovery: the index follows the store where a process ended between the two."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from repo_service.domain.digest import SHA256
from repo_service.domain.errors import MalformedDigest
from repo_service.domain.views import TagInfo
from repo_service.index import DIVERGENCE, ENTRY, TAG, Entry, Index, Noted, Settled
from repo_service.services.documents import DIVERGENCES, ENTRIES, TAGS, entry_key, tag_key, tag_place, unseal
from repo_service.services.read import read_entry
from repo_service.storage import Store

_ENTRY = re.compile(rf"{ENTRIES}/([^/]+)/([0-9a-f]{{64}})\.json")
_TAG = re.compile(rf"{TAGS}/([^/]+)/([^/]+)\.json")
_DIVERGENCE = re.compile(rf"{DIVERGENCES}/([^/]+)/([^/]+)\.json")


def settle(store: Store, index: Index, found: Sequence[Noted] = ()) -> Settled:
    """Correct the index wherever a process left a note.

    Parameters
    ----------
    found
        Further documents to look at.
    """
    if not found and not index.unsettled():
        return Settled([], [])

    def look(noted: Noted) -> Entry | TagInfo | None:
        key = key_of(noted)
        if noted.kind == ENTRY:
            return read_entry(store, key)
        data = store.get(key)
        return None if data is None else unseal(key, data, TagInfo, tag_place)

    return index.settle(look, lambda noted: store.delete(key_of(noted)), found)


def drop_unread(store: Store, index: Index, artifact_id: str, namespace: str) -> bool:
    """Remove the entry of an artifact that can't be read and is not indexed; False if it is not such a one."""
    with suppress(MalformedDigest):
        return index.drop(Noted(ENTRY, namespace, artifact_id), lambda noted: store.delete(key_of(noted)))
    return False


def key_of(noted: Noted) -> str:
    """Where a document lies in the store."""
    make = entry_key if noted.kind == ENTRY else tag_key
    return make(noted.namespace, noted.name)


def noted_at(key: str) -> Noted | None:
    """The document that lies under a key of entries, tags or divergences; None if the key is none."""
    if match := _ENTRY.fullmatch(key):
        return Noted(ENTRY, match[1], f"{SHA256}:{match[2]}")
    for kind, pattern in (TAG, _TAG), (DIVERGENCE, _DIVERGENCE):
        if match := pattern.fullmatch(key):
            return Noted(kind, match[1], match[2])
    return None
