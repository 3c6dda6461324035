"""Scrub: read and verify everything that is stored, keep a copy of what is damaged, and say whose it was.

Entries, tags and divergences are written again from the index. Chunks, block records and manifests
come back by a push of an artifact that needs them, from a repository that has it whole: a damaged
chunk is awaited again, and documents are healed by every commit. Until then the damaged bytes stay
where they are, which no reader gets: taking them away could take what a push has just put there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from repo_service.domain.errors import UNREADABLE, ChunkCorrupt, DocumentCorrupt, StorageFull, Unavailable
from repo_service.domain.views import Damage, ScrubReport, View
from repo_service.index import ENTRY, TAG, Index, Noted, PublishedChunk
from repo_service.services.documents import (
    QUARANTINE,
    EntryDocument,
    block_record_key,
    chunk_key,
    divergence_place,
    holds,
    manifest_key,
    seal,
    tag_place,
    unseal,
)
from repo_service.services.read import read_chunk, read_entry, read_manifest, read_record
from repo_service.services.retention import stored_policies
from repo_service.services.settle import key_of
from repo_service.storage import Store

_PAGE = 500
_LISTED = 1000

V = TypeVar("V", bound=View)


class _Ended(Exception):
    """The scrub is to stop where it is."""


class _Pace:
    """Keeps reading below a rate."""

    def __init__(self, bytes_per_s: float | None, ended: Callable[[float], bool]) -> None:
        self._rate = bytes_per_s
        self._ended = ended
        self._began = time.monotonic()
        self._bytes = 0

    def moved(self, size: int) -> None:
        """Wait until as many bytes may have been read; raises `_Ended` if the scrub is to end."""
        self._bytes += size
        due = self._bytes / self._rate - (time.monotonic() - self._began) if self._rate else 0.0
        if self._ended(max(0.0, due)):
            raise _Ended


def scrub(
    store: Store,
    index: Index,
    *,
    bytes_per_s: float | None = None,
    ended: Callable[[float], bool] | None = None,
) -> ScrubReport:
    """Verify every document and chunk that a published artifact needs.

    Parameters
    ----------
    bytes_per_s
        Most bytes to read in a second.
    ended
        Waits for the seconds it is given and returns True if the scrub is to stop where it is.
    """
    run = _Scrub(store, index, _Pace(bytes_per_s, ended or _sleep))
    complete = False
    with suppress(_Ended):
        run.documents()
        run.records()
        run.chunks()
        complete = True
    return ScrubReport(
        artifacts=run.counts["artifact"],
        block_records=run.counts["block record"],
        chunks=run.counts["chunk"],
        bytes=run.bytes,
        stored_bytes=run.stored_bytes,
        complete=complete,
        damaged=run.damaged,
        damage=run.damage,
    )


def _sleep(seconds: float) -> bool:
    if seconds:
        time.sleep(seconds)
    return False


class _Scrub:
    def __init__(self, store: Store, index: Index, pace: _Pace) -> None:
        self._store = store
        self._index = index
        self._pace = pace
        self.bytes = 0
        self.stored_bytes = 0
        self.damaged = 0
        self.counts = {"artifact": 0, "block record": 0, "chunk": 0}
        self.damage: list[Damage] = []

    def documents(self) -> None:
        """Manifests, entries and tags of every artifact, and the divergences."""
        row = 0
        while page := self._index.artifacts_after(row, _PAGE):
            row = page[-1].row
            for item in page:
                self.counts["artifact"] += 1
                entry = Noted(ENTRY, item.namespace, item.id)
                size = 0
                try:
                    size = len(read_manifest(self._store, item.id).data)
                except UNREADABLE:
                    # Whoever deleted the artifact meanwhile took the manifest with it.
                    if not self._index.unindexed([entry]):
                        self._report("manifest", item.id, None, [(item.namespace, item.id)], manifest_key(item.id))
                self._pace.moved(size)
                document = EntryDocument(namespace=item.namespace, artifact_id=item.id, created_at=item.created_at)
                self._sealed("entry", entry, document, lambda e: e.key)
                for tag in item.tags:
                    self._sealed("tag", Noted(TAG, tag.namespace, tag.name), tag, tag_place)
        for noted in self._index.unread_entries():
            self._unread(noted)
        last = None
        while found := self._index.divergences_after(last, _PAGE):
            last = found[-1]
            for divergence in found:
                self._sealed("divergence", None, divergence, divergence_place)
                self._pace.moved(0)
        for key, policy in stored_policies(self._store):
            if policy is None:
                self._add("policy", key, None, [], self._copy_aside(key), healed=False)

    def _unread(self, noted: Noted) -> None:
        """An entry that was to be indexed and could not be read; the artifact is known by its name only."""
        key = key_of(noted)
        try:
            read_entry(self._store, key)
        except UNREADABLE:
            self._add(
                "entry", key, noted.namespace, [(noted.namespace, noted.name)], self._copy_aside(key), healed=False
            )

    def records(self) -> None:
        row = 0
        while page := self._index.records_after(row, _PAGE):
            row = page[-1].row
            for block in page:
                self.counts["block record"] += 1
                size = 0
                try:
                    size = len(read_record(self._store, block.namespace, block.key, block.record).data)
                except UNREADABLE:
                    key = block_record_key(block.namespace, block.key)
                    holders = self._index.holders_of_block(block.row)
                    self._report("block record", block.key, block.namespace, holders, key)
                self._pace.moved(size)

    def chunks(self) -> None:
        buffer = memoryview(bytearray(0))
        for digest, spec, damaged in self._published_chunks():
            if len(buffer) < spec.size:
                buffer = memoryview(bytearray(spec.size))
            self.counts["chunk"] += 1
            stored = spec.size
            try:
                stored = read_chunk(self._store, digest, spec, buffer[: spec.size])
            except ChunkCorrupt:
                holders = self._index.holders_of_chunk(digest)
                # Whoever deleted the artifacts meanwhile took the chunk with them.
                if holders:
                    self._index.mark_damaged([digest])
                    self._report("chunk", digest, None, holders, chunk_key(digest))
            else:
                if damaged:
                    self._index.mark_whole([digest])
            self.bytes += spec.size
            self.stored_bytes += stored
            self._pace.moved(stored)

    def _published_chunks(self) -> Iterator[PublishedChunk]:
        digest = None
        while page := self._index.chunks_after(digest, _PAGE):
            digest = page[-1].digest
            yield from page

    def _sealed(self, kind: str, row: Noted | None, view: V, place: Callable[[V], str]) -> None:
        """Check a document that says what a row says; write it again if it does not verify and the row is there."""
        key = place(view)
        if self._verifies(key, type(view), place):
            return
        quarantined = self._copy_aside(key)

        def write() -> None:
            if not self._verifies(key, type(view), place):
                self._store.put(key, seal(view))

        namespace = None if row is None else row.namespace
        try:
            if row is None:
                write()
            elif not self._index.with_row(row, write):
                return
        except Unavailable:
            # Something lies there that can't be replaced.
            self._add(kind, key, namespace, [], quarantined, healed=False)
        else:
            self._add(kind, key, namespace, [], quarantined, healed=True)

    def _verifies(self, key: str, kind: type[V], place: Callable[[V], str]) -> bool:
        try:
            data = self._store.get(key)
            return data is not None and unseal(key, data, kind, place) is not None
        except UNREADABLE:
            return False

    def _report(self, kind: str, name: str, namespace: str | None, holders: list[tuple[str, str]], key: str) -> None:
        if holders:
            self._add(kind, name, namespace, holders, self._copy_aside(key), healed=False)

    def _copy_aside(self, key: str) -> str | None:
        aside = f"{QUARANTINE}/{key}"
        # What the disk can't read can't be copied, and finding and healing the rest is worth more than a copy.
        with suppress(DocumentCorrupt, StorageFull):
            data = self._store.get(key)
            if data is not None:
                # What was kept before is as old as it is.
                if not holds(self._store, aside, data):
                    self._store.put(aside, data)
                return aside
        return None

    def _add(
        self,
        kind: str,
        name: str,
        namespace: str | None,
        artifacts: list[tuple[str, str]],
        quarantined: str | None,
        *,
        healed: bool,
    ) -> None:
        self.damaged += 1
        if len(self.damage) == _LISTED:
            return
        self.damage.append(
            Damage.model_validate(
                {
                    "kind": kind,
                    "name": name,
                    "namespace": namespace,
                    "artifacts": artifacts,
                    "quarantined": quarantined,
                    "healed": healed,
                }
            )
        )
