"""Garbage collection: everything that no artifact and no running push needs goes, and nothing else.

What needs nothing any more is decided by rows, under the write lock, and never by a clock: a push that was told not to
send a chunk holds it by its row. Leases end pushes of clients that vanished; the grace only spares
young objects that no row knows, and a lock tells a temp file's dead writer from a live one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import islice
from typing import TypeVar

from repo_service.domain.digest import BLAKE3, SHA256
from repo_service.domain.errors import UNREADABLE, Unavailable
from repo_service.domain.views import GarbageReport, Removed
from repo_service.index import ENTRY, Index, LetGo, Noted, Objects
from repo_service.services.audit import record
from repo_service.services.documents import (
    ARTIFACTS,
    BLOCKS,
    CHUNKS,
    ENTRIES,
    QUARANTINE,
    TAGS,
    block_record_key,
    chunk_key,
    manifest_key,
)
from repo_service.services.read import read_entry
from repo_service.services.retention import apply_policies
from repo_service.services.settle import key_of, noted_at, settle
from repo_service.services.uploads import given_up
from repo_service.storage import Store

GRACE_S = 3600.0

_BATCH = 500
_QUARANTINED_S = 30 * 24 * 3600.0
_STUCK_MOST = 100
_STUCK_S = 1.0
_LISTED = 1000
_UNNEEDED = "nothing refers to it"
_UNKNOWN = "no row knows it"

_CHUNK = re.compile(rf"{CHUNKS}/([0-9a-f]{{2}})/([0-9a-f]{{62}})")
_MANIFEST = re.compile(rf"{ARTIFACTS}/([0-9a-f]{{2}})/([0-9a-f]{{62}})\.json")
_RECORD = re.compile(rf"{BLOCKS}/([^/]+)/([0-9a-f]{{2}})/([0-9a-f]{{62}})\.json")

T = TypeVar("T")


def collect_garbage(
    store: Store,
    index: Index,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    sweep: bool = True,
    now: datetime | None = None,
    withdrawn: Callable[[str, str], None] = lambda *_: None,
) -> GarbageReport:
    """Recover what crashes left, apply the policies, end abandoned pushes, and remove what nothing needs.

    Parameters
    ----------
    grace_s
        Objects that no row knows are removed when they are older, in seconds.
    dry_run
        Only say what would be done.
    sweep
        Also go through all of the store for objects that no row knows.
    now
        The time that ages of artifacts are measured by.
    withdrawn
        Called with namespace and id of each artifact that a policy let go of.
    """
    removed = _Tally(dry_run)
    settled, unread = (0, []) if dry_run else removed.settled(store, index)
    today = datetime.now(UTC)

    def gone(artifact: LetGo) -> None:
        removed.note("artifact", artifact.id, artifact.reason, artifact.namespace)
        if not dry_run:
            withdrawn(artifact.namespace, artifact.id)

    let_go, unread_policies = apply_policies(store, index, now or today, gone, dry_run=dry_run)
    size = 0
    if dry_run:
        found = index.reclaimable(today)
        freed = index.freed([artifact.row for artifact in let_go])
        chunks = found.chunks + freed.chunks
        expired, size = found.expired_pushes, sum(n for _, n in chunks)
        names = [digest for digest, _ in chunks]
        removed.remove(store, Objects(names, found.records + freed.records, freed.manifests), _UNNEEDED)
    else:
        expired = index.expire_pushes(today)
        _, size = removed.reclaim(store, index)
        for artifacts in _batches(iter(let_go)):
            removed.sweep(store, index, Objects(manifests=[artifact.id for artifact in artifacts]))
    unreadable = set(unread)
    if sweep:
        adopted, damaged = _adopt(store, index, dry_run=dry_run)
        settled += adopted
        unreadable.update(damaged)
        # What entries need that are yet to be indexed has no rows either.
        if not unreadable and not (dry_run and adopted):
            _sweep(store, index, grace_s, removed)
        _empty_quarantine(store, removed)
    _empty_uploads(store, index, grace_s, removed)
    for name in store.remove_leftovers(dry_run=dry_run):
        removed.note("temp file", name, "its writer is gone")
    return GarbageReport(
        dry_run=dry_run,
        settled=settled,
        expired_pushes=expired,
        artifacts=removed.counts["artifact"],
        chunks=removed.counts["chunk"],
        block_records=removed.counts["block record"],
        manifests=removed.counts["manifest"],
        temp_files=removed.counts["temp file"],
        quarantined=removed.counts["quarantined copy"],
        bytes=size,
        unreadable=sorted(unreadable) + unread_policies,
        stuck=removed.stuck,
        removed=removed.first,
    )


def remove_unneeded(store: Store, index: Index, artifact_id: str, namespace: str) -> tuple[int, int]:
    """Free what nothing refers to now that an artifact is unpublished.

    Returns the number of chunks that the namespace gave up, and their bytes.
    """
    removed = _Tally(dry_run=False)
    freed = removed.reclaim(store, index, namespace)
    removed.sweep(store, index, Objects(manifests=[artifact_id]))
    return freed


def remove_loose(store: Store, index: Index) -> None:
    """Free the chunks and block records that nothing refers to."""
    _Tally(dry_run=False).reclaim(store, index)


class _Tally:
    """What was removed: counted, the first listed, all of it written to the audit log."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        kinds = "artifact", "block record", "chunk", "manifest", "quarantined copy", "temp file"
        self.counts = dict.fromkeys(kinds, 0)
        self.first: list[Removed] = []
        self.stuck: list[str] = []

    def note(self, kind: str, name: str, reason: str, namespace: str | None = None) -> None:
        self.counts[kind] += 1
        removed = Removed.model_validate({"kind": kind, "name": name, "namespace": namespace, "reason": reason})
        if len(self.first) < _LISTED:
            self.first.append(removed)
        if not self.dry_run:
            record(removed=removed.model_dump(exclude_none=True))

    def remove(self, store: Store, objects: Objects, reason: str) -> None:
        """Remove those of the objects that are there, or, in a dry run, say so."""
        named = _named(objects)
        # Others wait for the write lock meanwhile, and a far store takes its time for each.
        with ThreadPoolExecutor(store.concurrency) as pool:
            removed = list(pool.map(lambda key: self._remove_one(store, key), named))
        for (kind, namespace, name), gone in zip(named.values(), removed, strict=True):
            if gone:
                self.note(kind, name, reason, namespace)

    def reclaim(self, store: Store, index: Index, namespace: str | None = None) -> tuple[int, int]:
        """Remove the chunks and block records that nothing refers to; returns what `Index.reclaim` does."""
        _, unread = self.settled(store, index)
        if unread:
            return 0, 0
        return index.reclaim(lambda records, chunks: self.remove(store, Objects(chunks, records), _UNNEEDED), namespace)

    def sweep(self, store: Store, index: Index, objects: Objects) -> None:
        """Remove those of the objects that no row knows."""
        if not self.settled(store, index)[1]:
            index.sweep(objects, lambda unknown: self.remove(store, unknown, _UNNEEDED))

    @staticmethod
    def settled(store: Store, index: Index) -> tuple[int, list[str]]:
        """Settle what crashes left; returns the number of documents and the keys of entries that can't be read.

        These may need anything that no artifact seems to need any more.
        """
        found = settle(store, index)
        return len(found.documents), [key_of(noted) for noted in found.unread]

    def _remove_one(self, store: Store, key: str) -> bool:
        """Remove an object, or in a dry run look for it; one that can't be removed is passed over and named."""
        began = time.monotonic()
        try:
            if not store.exists(key):
                return False
            if not self.dry_run:
                # Brought back by a power loss it is garbage again.
                store.delete(key, durable=False)
        except Unavailable:
            # A store that does not answer is not asked for every object in turn.
            if len(self.stuck) == _STUCK_MOST or time.monotonic() - began > _STUCK_S:
                raise
            self.stuck.append(key)
            return False
        return True


def _adopt(store: Store, index: Index, *, dry_run: bool) -> tuple[int, list[str]]:
    """Index the entries and tags that no row stands for; returns their number and the keys that can't be read."""
    unreadable: list[str] = []
    adopted = 0
    for prefix in (ENTRIES, TAGS):
        for keys in _batches(store.list(prefix)):
            missing = index.unindexed([noted for key in keys if (noted := noted_at(key)) is not None])
            if dry_run:
                unreadable += [key_of(noted) for noted in missing if not _is_readable(store, noted)]
                adopted += len(missing)
                continue
            for noted in missing:
                # One at a time: nobody else writes while an entry is read and indexed.
                found = settle(store, index, [noted])
                adopted += noted in found.documents
                unreadable += [key_of(noted) for noted in found.unread]
    return adopted, unreadable


def _is_readable(store: Store, noted: Noted) -> bool:
    try:
        if noted.kind == ENTRY:
            read_entry(store, key_of(noted))
    except UNREADABLE:
        return False
    return True


def _sweep(store: Store, index: Index, grace_s: float, removed: _Tally) -> None:
    for prefix in (CHUNKS, BLOCKS, ARTIFACTS):
        for keys in _batches(store.list(prefix)):
            unknown = index.orphans(_objects(keys))
            old = _objects([key for key in _named(unknown) if (age := store.age_s(key)) is not None and age >= grace_s])
            if any(old):
                index.sweep(old, lambda objects: removed.remove(store, objects, _UNKNOWN))


def _empty_quarantine(store: Store, removed: _Tally) -> None:
    for key in store.list(QUARANTINE):
        age = store.age_s(key)
        if age is not None and age >= _QUARANTINED_S:
            if not removed.dry_run:
                store.delete(key, durable=False)
            removed.note("quarantined copy", key, "kept for 30 days")


def _empty_uploads(store: Store, index: Index, grace_s: float, removed: _Tally) -> None:
    """Remove what was put and never taken; whoever comes to take it late is told to send it again."""
    for key in given_up(store, index, grace_s):
        if not removed.dry_run:
            store.delete(key, durable=False)
        removed.note("temp file", key, "its upload was given up")


def _objects(keys: Iterable[str]) -> Objects:
    """What lies under keys of chunks, block records and manifests; other keys are passed over."""
    chunks: list[str] = []
    records: list[tuple[str, str]] = []
    manifests: list[str] = []
    for key in keys:
        if match := _CHUNK.fullmatch(key):
            chunks.append(f"{BLAKE3}:{match[1]}{match[2]}")
        elif match := _MANIFEST.fullmatch(key):
            manifests.append(f"{SHA256}:{match[1]}{match[2]}")
        elif match := _RECORD.fullmatch(key):
            records.append((match[1], f"{SHA256}:{match[2]}{match[3]}"))
    return Objects(chunks, records, manifests)


def _named(objects: Objects) -> dict[str, tuple[str, str | None, str]]:
    """Kind, namespace and name by key; the keys are those of `_objects`."""
    return {
        **{chunk_key(digest): ("chunk", None, digest) for digest in objects.chunks},
        **{block_record_key(*record): ("block record", *record) for record in objects.records},
        **{manifest_key(name): ("manifest", None, name) for name in objects.manifests},
    }


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _BATCH)):
        yield batch
