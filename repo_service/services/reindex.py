"""Rebuild the index from the store alone (I5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from repo_service.domain.errors import Corrupt, InvalidInput, TooLarge
from repo_service.domain.views import Divergence, ReindexReport, TagInfo, View
from repo_service.index import Entry, Index
from repo_service.services.documents import (
    DIVERGENCES,
    ENTRIES,
    TAGS,
    EntryDocument,
    divergence_place,
    tag_place,
    unseal,
)
from repo_service.services.read import held_chunks, read_manifest, read_records, read_tokens
from repo_service.storage import Store

V = TypeVar("V", bound=View)


def reindex(store: Store, index: Index, progress: Callable[[int], None] | None = None) -> ReindexReport:
    """Read every entry, tag and divergence and replace the index's rows in one transaction.

    What can't be read or does not verify is left out and named in the report.
    """
    corrupt: list[str] = []
    blocks: set[tuple[str, str]] = set()
    chunks: set[str] = set()
    published: set[tuple[str, str]] = set()

    def documents(prefix: str, kind: type[V], place: Callable[[V], str]) -> Iterator[V]:
        for key in store.list(prefix):
            try:
                yield unseal(key, store.get(key) or b"", kind, place)
            except Corrupt:
                corrupt.append(key)

    def entries() -> Iterator[Entry]:
        for document in documents(ENTRIES, EntryDocument, lambda e: e.key):
            try:
                manifest = read_manifest(store, document.artifact_id)
                records = read_records(store, manifest, document.namespace)
                tokens = read_tokens(store, manifest)
            except (Corrupt, InvalidInput, TooLarge):
                corrupt.append(document.key)
                continue
            published.add((document.namespace, document.artifact_id))
            blocks.update((document.namespace, record.key) for record in records)
            chunks.update(held_chunks(manifest, records))
            if progress is not None:
                progress(len(published))
            yield Entry(document.namespace, manifest, records, tokens, document.created_at)

    def tags() -> Iterator[TagInfo]:
        for tag in documents(TAGS, TagInfo, tag_place):
            if (tag.namespace, tag.artifact_id) in published:
                counts["tags"] += 1
                yield tag
            else:
                corrupt.append(tag_place(tag))

    def divergences() -> Iterator[Divergence]:
        for divergence in documents(DIVERGENCES, Divergence, divergence_place):
            counts["divergences"] += 1
            yield divergence

    counts = {"tags": 0, "divergences": 0}
    index.rebuild(entries(), tags(), divergences())
    return ReindexReport(
        artifacts=len(published), blocks=len(blocks), chunks=len(chunks), corrupt=sorted(corrupt), **counts
    )
