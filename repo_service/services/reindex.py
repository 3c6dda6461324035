"""Rebuild the index from the store alone (I5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from repo_service.domain.errors import UNREADABLE
from repo_service.domain.views import Divergence, ReindexReport, TagInfo, View
from repo_service.index import Entry, Index, Noted
from repo_service.services.documents import (
    DIVERGENCES,
    ENTRIES,
    TAGS,
    divergence_place,
    tag_place,
    unseal,
)
from repo_service.services.read import read_entry
from repo_service.services.retention import stored_policies
from repo_service.services.settle import noted_at
from repo_service.storage import Store

V = TypeVar("V", bound=View)


def reindex(
    store: Store, index: Index, progress: Callable[[int], None] | None = None, *, again: bool = True
) -> ReindexReport:
    """Read every entry, tag and divergence and replace the index's rows in one transaction.

    What can't be read or does not verify is left out and named in the report, policies too. Entries and tags
    are noted, so that they are indexed once they can be read, and what an entry needs is not taken for
    garbage. Without ``again`` an index that is complete by then stays as it is.
    """
    corrupt: list[str] = []
    unread: list[Noted] = []
    blocks: set[tuple[str, str]] = set()
    chunks: set[str] = set()
    published: set[tuple[str, str]] = set()

    def left_out(key: str) -> None:
        corrupt.append(key)
        if (noted := noted_at(key)) is not None:
            unread.append(noted)

    def documents(prefix: str, kind: type[V], place: Callable[[V], str]) -> Iterator[V]:
        for key in store.list(prefix):
            try:
                yield unseal(key, store.get(key) or b"", kind, place)
            except UNREADABLE:
                left_out(key)

    def entries() -> Iterator[Entry]:
        for key in store.list(ENTRIES):
            try:
                entry = read_entry(store, key)
            except UNREADABLE:
                left_out(key)
                continue
            if entry is None:
                continue
            published.add((entry.namespace, entry.manifest.id))
            blocks.update((entry.namespace, record.key) for record in entry.records)
            chunks.update(entry.specs())
            if progress is not None:
                progress(len(published))
            yield entry

    def tags() -> Iterator[TagInfo]:
        for tag in documents(TAGS, TagInfo, tag_place):
            if (tag.namespace, tag.artifact_id) in published:
                counts["tags"] += 1
                yield tag
            else:
                left_out(tag_place(tag))

    def divergences() -> Iterator[Divergence]:
        for divergence in documents(DIVERGENCES, Divergence, divergence_place):
            counts["divergences"] += 1
            yield divergence

    counts = {"tags": 0, "divergences": 0}
    index.rebuild(entries(), tags(), divergences(), unread, again=again)
    corrupt += [key for key, policy in stored_policies(store) if policy is None]
    return ReindexReport(
        artifacts=len(published), blocks=len(blocks), chunks=len(chunks), corrupt=sorted(corrupt), **counts
    )
