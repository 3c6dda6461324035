"""Garbage collection: everything that no artifact and no running push needs goes, and nothing else.

What needs nothing any more is decided by rows, under the write lock, and never by a clock: a push that was told not to
send a chunk holds it by its row. Leases end pushes of clients that vanished; the grace only spares
young objects that no row knows, and a lock tells a temp file's dead writer from a live one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TypeVar

from repo_service.domain.digest import BLAKE3, SHA256
from repo_service.domain.errors import UNREADABLE
from repo_service.domain.views import GarbageReport, Removed
from repo_service.index import ENTRY, TAG, Index, LetGo, Noted, Objects
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
from repo_service.services.settle import settle
from repo_service.storage import Store

GRACE_S = 3600.0

_BATCH = 500
_QUARANTINED_S = 30 * 24 * 3600.0
_LISTED = 1000
_UNNEEDED = "nothing refers to it"
_UNKNOWN = "no row knows it"

_CHUNK = re.compile(rf"{CHUNKS}/([0-9a-f]{{2}})/([0-9a-f]{{62}})")
_MANIFEST = re.compile(rf"{ARTIFACTS}/([0-9a-f]{{2}})/([0-9a-f]{{62}})\.json")
_RECORD = re.compile(rf"{BLOCKS}/([^/]+)/([0-9a-f]{{2}})/([0-9a-f]{{62}})\.json")
_ENTRY = re.compile(rf"{ENTRIES}/([^/]+)/([0-9a-f]{{64}})\.json")
_TAG = re.compile(rf"{TAGS}/([^/]+)/([^/]+)\.json")

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
    settled = 0 if dry_run else settle(store, index)
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
    unreadable: list[str] = []
    if sweep:
        adopted, unreadable = _adopt(store, index, dry_run=dry_run)
        settled += adopted
        # What entries need that are yet to be indexed has no rows either.
        if not unreadable and not (dry_run and adopted):
            _sweep(store, index, grace_s, removed)
        _empty_quarantine(store, removed)
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
        unreadable=unreadable + unread_policies,
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

    def note(self, kind: str, name: str, reason: str, namespace: str | None = None) -> None:
        self.counts[kind] += 1
        removed = Removed.model_validate({"kind": kind, "name": name, "namespace": namespace, "reason": reason})
        if len(self.first) < _LISTED:
            self.first.append(removed)
        if not self.dry_run:
            record(removed=removed.model_dump(exclude_none=True))

    def remove(self, store: Store, objects: Objects, reason: str) -> None:
        """Remove those of the objects that are there, or, in a dry run, say so."""
        for key, (kind, namespace, name) in _named(objects).items():
            if not store.exists(key):
                continue
            if not self.dry_run:
                # Brought back by a power loss it is garbage again.
                store.delete(key, durable=False)
            self.note(kind, name, reason, namespace)

    def reclaim(self, store: Store, index: Index, namespace: str | None = None) -> tuple[int, int]:
        """Remove the chunks and block records that nothing refers to; returns what `Index.reclaim` does."""
        # An entry that a crash left without rows still needs what it names.
        settle(store, index)
        return index.reclaim(lambda records, chunks: self.remove(store, Objects(chunks, records), _UNNEEDED), namespace)

    def sweep(self, store: Store, index: Index, objects: Objects) -> None:
        """Remove those of the objects that no row knows."""
        index.sweep(objects, lambda unknown: self.remove(store, unknown, _UNNEEDED))


def _adopt(store: Store, index: Index, *, dry_run: bool) -> tuple[int, list[str]]:
    """Index the entries and tags that no row stands for; returns their number and the keys that can't be read."""
    unreadable: list[str] = []
    adopted = 0
    for kind, prefix in ((ENTRY, ENTRIES), (TAG, TAGS)):
        for keys in _batches(store.list(prefix)):
            documents = {noted: key for key in keys if (noted := _noted(kind, key)) is not None}
            missing = index.unindexed(list(documents))
            if kind == ENTRY:
                damaged = [noted for noted in missing if not _is_readable(store, documents[noted])]
                unreadable += [documents[noted] for noted in damaged]
                missing = [noted for noted in missing if noted not in damaged]
            # One at a time: nobody else writes while an entry is read and indexed.
            adopted += len(missing) if dry_run else sum(settle(store, index, [noted]) for noted in missing)
    return adopted, unreadable


def _is_readable(store: Store, key: str) -> bool:
    try:
        read_entry(store, key)
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


def _noted(kind: str, key: str) -> Noted | None:
    match = (_ENTRY if kind == ENTRY else _TAG).fullmatch(key)
    if match is None:
        return None
    return Noted(kind, match[1], f"{SHA256}:{match[2]}" if kind == ENTRY else match[2])


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _BATCH)):
        yield batch
