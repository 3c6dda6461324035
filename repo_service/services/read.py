"""Reading: manifests, records and chunks, each verified before it is handed on (I3)."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile, islice
from typing import TypeVar

from repo_service.domain.digest import ChunkHasher
from repo_service.domain.errors import ChunkCorrupt, ChunkNotFound, Corrupt, DocumentCorrupt
from repo_service.domain.frame import NONE, decode_chunk, longest_frame
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.manifest import Manifest, require_digest
from repo_service.domain.record import BlockRecord
from repo_service.domain.tokens import read_token_chunks
from repo_service.domain.views import StorageReport
from repo_service.index import Entry, Index
from repo_service.services.documents import EntryDocument, block_record_key, chunk_key, manifest_key, unseal
from repo_service.storage import Store

K = TypeVar("K")
T = TypeVar("T")

_HOLDINGS_KEPT = 32
_HOLDINGS_TRUSTED_S = 1.0


def read_manifest(store: Store, artifact_id: str) -> Manifest:
    """Raises
    ------
    DocumentCorrupt
    """
    data = store.get(manifest_key(artifact_id))
    if data is None:
        raise DocumentCorrupt(f"the manifest of {artifact_id} is missing from the store", digest=artifact_id)
    return Manifest.parse(require_digest(data, artifact_id, "manifest"))


def read_records(store: Store, manifest: Manifest, namespace: str) -> list[BlockRecord]:
    """Raises
    ------
    DocumentCorrupt
    """

    def read(block: tuple[str, str]) -> BlockRecord:
        return read_record(store, namespace, *block)

    records = [record() for _, record in read_ahead(store, read, manifest.blocks)]
    manifest.check_records(records)
    return records


def read_record(store: Store, namespace: str, key: str, digest: str) -> BlockRecord:
    """Raises
    ------
    DocumentCorrupt
    """
    data = store.get(block_record_key(namespace, key))
    if data is None:
        raise DocumentCorrupt(f"the record of block {key} is missing from the store", block_key=key, digest=digest)
    return BlockRecord.parse(require_digest(data, digest, "block record"))


def read_chunk(store: Store, digest: str, spec: ChunkSpec, out: memoryview) -> int:
    """Read a chunk into ``out``, decoded and verified; returns in how many bytes it is stored.

    Raises
    ------
    ChunkCorrupt
    """
    if store.codec == NONE:
        return _read_raw(store, digest, spec, out[: spec.size])
    return _read_frame(store, digest, spec, out[: spec.size])


def _read_raw(store: Store, digest: str, spec: ChunkSpec, out: memoryview) -> int:
    hasher = ChunkHasher(spec.dtype, spec.shape)
    size = _read_object(store, digest, out, hasher.update)
    if size != spec.size:
        raise ChunkCorrupt(f"the chunk {digest} has {size} bytes; it must have {spec.size}", digest=digest)
    found = hasher.digest()
    if found != digest:
        raise ChunkCorrupt(
            f"the chunk {digest} reads as {found}: its stored bytes were altered", digest=digest, found=found
        )
    return size


def _read_frame(store: Store, digest: str, spec: ChunkSpec, out: memoryview) -> int:
    memory = memoryview(bytearray(longest_frame(spec)))
    size = _read_object(store, digest, memory, lambda _: None)
    if size > len(memory):
        raise ChunkCorrupt(
            f"the chunk {digest} is stored in {size} bytes; its frame can't have more than {len(memory)}", digest=digest
        )
    decode_chunk(memory[:size], digest, spec, out)
    return size


def _read_object(store: Store, digest: str, out: memoryview, seen: Callable[[memoryview], object]) -> int:
    try:
        size = store.read_into(chunk_key(digest), out, seen)
    except DocumentCorrupt as error:
        raise ChunkCorrupt(f"the chunk {digest} can't be read: {error.message}", digest=digest) from error
    if size is None:
        raise ChunkCorrupt(f"the chunk {digest} is missing from the store", digest=digest)
    return size


def read_tokens(store: Store, manifest: Manifest) -> list[int] | None:
    """The artifact's token ids, or None where they are private.

    Raises
    ------
    ChunkCorrupt
    """
    if manifest.tokens is None:
        return None
    return read_token_chunks(manifest.tokens, manifest.token_count, partial(read_chunk, store))


def read_entry(store: Store, key: str, most_blocks: float = math.inf) -> Entry | None:
    """What is published under a key of `ENTRIES`, with all that the index keeps of it; None if nothing is.

    None as well for an artifact of more than ``most_blocks``.

    Raises one of `UNREADABLE` where any of it is damaged.
    """
    data = store.get(key)
    if data is None:
        return None
    document = unseal(key, data, EntryDocument, lambda entry: entry.key)
    manifest = read_manifest(store, document.artifact_id)
    if len(manifest.blocks) > most_blocks:
        return None
    records = read_records(store, manifest, document.namespace)
    return Entry(document.namespace, manifest, records, read_tokens(store, manifest), document.created_at)


def read_ahead(store: Store, read: Callable[[K], T], names: Iterable[K]) -> Iterator[tuple[K, Callable[[], T]]]:
    """Each name in order with what gives the outcome of ``read``; as many are read at once as is faster on the store."""
    if store.concurrency == 1:
        yield from ((name, partial(read, name)) for name in names)
        return
    running: deque[tuple[K, Future[T]]] = deque()
    pool = ThreadPoolExecutor(store.concurrency)
    try:
        for name in names:
            running.append((name, pool.submit(read, name)))
            if len(running) > store.concurrency:
                first, outcome = running.popleft()
                yield first, outcome.result
        for first, outcome in running:
            yield first, outcome.result
    finally:
        # Where this is given up, it may be the garbage collector that ends it, in the middle of anything: waiting for
        # threads there can wait for ever.
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class _Holding:
    chunks: dict[str, ChunkSpec]
    checked_at: float


class Holdings:
    """Which chunks an artifact may be asked for (I7).

    An artifact never changes, so its chunks are read once; that it is still published is
    asked of the index again after a second.
    """

    def __init__(self, store: Store, index: Index) -> None:
        self._store = store
        self._index = index
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], _Holding] = OrderedDict()

    def require(self, namespace: str, artifact_id: str, digest: str) -> ChunkSpec:
        """Raises
        ------
        ArtifactNotFound, ChunkNotFound
        """
        spec = self._holding(namespace, artifact_id).chunks.get(digest)
        if spec is None:
            raise ChunkNotFound(f"the artifact {artifact_id} holds no chunk {digest}", digest=digest)
        return spec

    def from_on(self, namespace: str, artifact_id: str, digest: str, count: int) -> list[str]:
        """A chunk of an artifact and those that follow it there, ``count`` at most.

        Raises
        ------
        ArtifactNotFound, ChunkNotFound
        """
        self.require(namespace, artifact_id, digest)
        chunks = self._holding(namespace, artifact_id).chunks
        return list(islice(dropwhile(lambda one: one != digest, chunks), count))

    def forget(self, namespace: str, artifact_id: str) -> None:
        with self._lock:
            self._kept.pop((namespace, artifact_id), None)

    def keep(self, namespace: str, manifest: Manifest, records: Iterable[BlockRecord]) -> None:
        """Remember what was just read of an artifact that was just looked up."""
        self._keep((namespace, manifest.id), _Holding(manifest.stored_chunks(records), time.monotonic()))

    def _holding(self, namespace: str, artifact_id: str) -> _Holding:
        name = (namespace, artifact_id)
        with self._lock:
            holding = self._kept.get(name)
            if holding is not None and time.monotonic() - holding.checked_at < _HOLDINGS_TRUSTED_S:
                self._kept.move_to_end(name)
                return holding
        try:
            self._index.artifact_id(namespace, artifact_id, used=True)
        except BaseException:
            self.forget(namespace, artifact_id)
            raise
        if holding is None:
            manifest = read_manifest(self._store, artifact_id)
            holding = _Holding(manifest.stored_chunks(read_records(self._store, manifest, namespace)), 0.0)
        holding.checked_at = time.monotonic()
        self._keep(name, holding)
        return holding

    def _keep(self, name: tuple[str, str], holding: _Holding) -> None:
        with self._lock:
            self._kept[name] = holding
            self._kept.move_to_end(name)
            while len(self._kept) > _HOLDINGS_KEPT:
                self._kept.popitem(last=False)


def check_artifact(store: Store, artifact_id: str, namespace: str, workers: int) -> StorageReport:
    """Read and hash everything an artifact holds."""
    try:
        manifest = read_manifest(store, artifact_id)
    except Corrupt:
        return StorageReport(artifact_id=artifact_id, chunks=0, bytes=0, corrupt=[artifact_id])
    records, corrupt = [], []
    for key, digest in manifest.blocks:
        try:
            records.append(read_record(store, namespace, key, digest))
        except Corrupt:
            corrupt.append(digest)
    held = manifest.stored_chunks(records)
    local = threading.local()

    def damaged(item: tuple[str, ChunkSpec]) -> str | None:
        digest, spec = item
        if getattr(local, "size", 0) < spec.size:
            local.buffer, local.size = bytearray(spec.size), spec.size
        try:
            read_chunk(store, digest, spec, memoryview(local.buffer)[: spec.size])
        except ChunkCorrupt:
            return digest
        return None

    with ThreadPoolExecutor(workers) as pool:
        corrupt += [digest for digest in pool.map(damaged, held.items()) if digest]
    total = sum(spec.size for spec in held.values())
    return StorageReport(artifact_id=artifact_id, chunks=len(held), bytes=total, corrupt=corrupt)
