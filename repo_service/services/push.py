"""Push: negotiate, receive what is missing, publish (I2, I4)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NoReturn

from typing_extensions import Buffer

from repo_service.domain.digest import ChunkHasher, chunk_digest, sha256_digest
from repo_service.domain.errors import (
    ChunkCorrupt,
    ChunkNotFound,
    ChunksMissing,
    Corrupt,
    DigestMismatch,
    KvgraftError,
    MalformedDocument,
    QuotaExceeded,
    SizeMismatch,
    TooLarge,
    Unavailable,
)
from repo_service.domain.errors import Divergence as DivergenceError
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.frame import NONE, encode_chunk
from repo_service.domain.layout import ChunkSpec, Layout
from repo_service.domain.manifest import MAX_ARTIFACT_CHUNKS, Manifest
from repo_service.domain.names import check_namespace
from repo_service.domain.record import BlockRecord, stored_chunks
from repo_service.domain.repository import Push
from repo_service.domain.tokens import MAX_TOKENS, token_chunk_count, token_chunk_spec
from repo_service.domain.views import ArtifactInfo, Divergence
from repo_service.index import Entry, Index, Offered
from repo_service.services.documents import (
    EntryDocument,
    block_record_key,
    chunk_key,
    divergence_place,
    holds,
    manifest_key,
    seal,
    upload_key,
)
from repo_service.services.garbage import remove_loose
from repo_service.services.observer import Observer
from repo_service.services.read import read_record, read_tokens
from repo_service.services.reserve import Reserve
from repo_service.services.retention import read_policy
from repo_service.services.settle import settle
from repo_service.services.undo import follow_rows
from repo_service.services.uploads import remove_uploads
from repo_service.storage import Store

LEASE = timedelta(hours=1)

_RECORD_WRITERS = 8

# Longest read of an upload that is still written: whoever waits for it gives up before a second operation's time is over.
_READ_BACK_S = 20.0


def begin_push(store: Store, index: Index, fingerprint: Fingerprint, namespace: str) -> str:
    """Start a push of an artifact made under ``fingerprint``; returns its id.

    Raises
    ------
    MalformedName, MalformedDocument
        If the fingerprint describes no layout.
    """
    check_namespace(namespace)
    Layout.of(fingerprint)
    push_id = uuid.uuid4().hex
    now = datetime.now(UTC)
    # What a crash left unsettled may need what an expired push holds.
    settle(store, index)
    if index.expire_pushes(now):
        with suppress(KvgraftError):
            remove_uploads(store, index)
    index.begin_push(push_id, namespace, fingerprint, now + LEASE)
    return push_id


class LocalPush(Push):
    """A push whose whole state is in the index, so that any process can take it up by its id and namespace.

    Parameters
    ----------
    observer
        Told what happens to the push.
    reserve
        Room to end it in.
    ready
        Called before a commit; raises where the index may not publish.
    """

    def __init__(
        self,
        store: Store,
        index: Index,
        push_id: str,
        namespace: str,
        observer: Observer,
        reserve: Reserve,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        self.id = push_id
        self._namespace = namespace
        self._store = store
        self._index = index
        self._ready = ready
        self._observer = observer
        self._reserve = reserve

    def offer(self, records: Sequence[BlockRecord], resume_from: int = 0) -> list[str]:
        push = self._index.push(self.id, self._namespace)
        layout = Layout.of(push.fingerprint)
        for record in records:
            record.check(layout)
        specs = stored_chunks(records, layout, resume_from)
        offered = self._offer(push.namespace, records, specs)
        for record, stored_digest in offered.divergent:
            self._diverged(push.namespace, record, stored_digest)
        self._observer.offered(len(specs), len(offered.missing))
        return offered.missing

    def offer_tokens(self, token_count: int, chunks: Sequence[str]) -> list[str]:
        if not 0 < token_count <= MAX_TOKENS or len(chunks) != token_chunk_count(token_count):
            raise MalformedDocument(f"{len(chunks)} token chunks for {token_count} tokens")
        spec = token_chunk_spec(token_count)
        push = self._index.push(self.id, self._namespace)
        specs = dict.fromkeys(chunks, spec)
        missing = self._offer(push.namespace, [], specs).missing
        self._observer.offered(len(specs), len(missing))
        return missing

    def _offer(self, namespace: str, records: Sequence[BlockRecord], specs: Mapping[str, ChunkSpec]) -> Offered:
        """Offer within the namespace's quota; a push that would exceed it ends, and what it sent goes."""
        quota = read_policy(self._store, namespace).quota_bytes
        try:
            return self._index.offer(self.id, records, specs, quota)
        except QuotaExceeded:
            # What nothing needs counts only until it is gone.
            remove_loose(self._store, self._index)
        try:
            return self._index.offer(self.id, records, specs, quota)
        except QuotaExceeded:
            self.abort()
            remove_loose(self._store, self._index)
            raise

    def put(self, digest: str, data: Buffer) -> None:
        spec = self._index.wanted(self.id, digest, self._namespace)
        size = memoryview(data).nbytes
        _check_chunk(digest, spec, size, chunk_digest(data, spec.dtype, spec.shape) if size == spec.size else "")
        self._write(digest, spec, data)
        self._index.arrived(self.id, digest)
        self._observer.stored(size)

    def _write(self, digest: str, spec: ChunkSpec, data: Buffer) -> None:
        codec = self._store.codec
        self._store.put(chunk_key(digest), data if codec == NONE else encode_chunk(data, spec, codec))

    def upload_urls(self, digests: Sequence[str], seconds: int) -> dict[str, str]:
        """Where the pusher may put offered chunks itself for ``seconds``; empty for 0, or where the store has no such URLs.

        What is put there counts only once it was taken.

        Raises
        ------
        PushNotFound, ChunkNotFound, Unavailable
        """
        urls: dict[str, str] = {}
        for digest in digests:
            size = self._index.wanted(self.id, digest, self._namespace).size
            url = self._store.upload_url_of(upload_key(self.id, digest), size, seconds) if seconds else None
            if url is not None:
                urls[digest] = url
        self._observer.located(len(urls))
        return urls

    def take(self, digest: str, memory: memoryview) -> None:
        """Verify a chunk that the pusher has put at its URL, in ``memory``, and store it.

        Raises
        ------
        PushNotFound, ChunkNotFound, SizeMismatch, DigestMismatch
        """
        spec = self._index.wanted(self.id, digest, self._namespace)
        sent = upload_key(self.id, digest)
        began = time.monotonic()
        hasher = ChunkHasher(spec.dtype, spec.shape)
        # A URL may be used again at any time: what is hashed here is what is stored, and what lies there is not looked at again.
        data = memory[: spec.size]
        size = self._store.read_into(sent, data, hasher.update)
        if size is None:
            if not self._index.unarrived(self.id, [digest]):
                # It was taken before, and the answer lost.
                return
            raise ChunkNotFound(f"nothing was uploaded as {digest}: send it to the service", digest=digest)
        try:
            _check_chunk(digest, spec, size, hasher.digest())
            if time.monotonic() - began > _READ_BACK_S:
                raise ChunkNotFound(
                    f"what was uploaded as {digest} came too slowly from S3: send it to the service", digest=digest
                )
            self._write(digest, spec, data)
            self._index.arrived(self.id, digest)
            self._observer.stored(spec.size)
        finally:
            # A store that is as slow now is not waited for a third time: the end of the push removes it as well.
            if time.monotonic() - began <= _READ_BACK_S:
                with suppress(Unavailable):
                    self._store.delete(sent, durable=False)

    def commit(self, manifest: Manifest) -> ArtifactInfo:
        self._ready()
        push = self._index.push(self.id, self._namespace)
        if manifest.fingerprint.id != push.fingerprint.id:
            raise MalformedDocument(
                f"the manifest has the fingerprint {manifest.fingerprint.id}; the push began with {push.fingerprint.id}"
            )
        if manifest.chunk_count > MAX_ARTIFACT_CHUNKS:
            raise TooLarge(
                f"the blocks of the artifact name {manifest.chunk_count} chunks; the limit is {MAX_ARTIFACT_CHUNKS}: cut it "
                f"into larger chunks, or publish a shorter one",
                limit=MAX_ARTIFACT_CHUNKS,
            )
        # Renews the lease for as long as the commit takes.
        self._index.offer(self.id, [], {})
        keys = [key for key, _ in manifest.blocks]
        records = [BlockRecord.parse(data) for data in self._index.push_records(self.id, keys)]
        manifest.check_records(records)
        missing = self._index.unarrived(self.id, list(manifest.stored_chunks(records)))
        if missing:
            raise ChunksMissing(
                f"{len(missing)} chunks have not arrived, the first is {missing[0]}", missing=missing[:1000]
            )
        try:
            tokens = read_tokens(self._store, manifest)
        except ChunkCorrupt as error:
            digest = error.details["digest"]
            self._index.mark_damaged([digest])
            self._observer.damaged("commit", 1)
            raise ChunksMissing(
                f"the chunk {digest} was damaged in the store: send it again", missing=[digest]
            ) from None
        if tokens is not None:
            manifest.check_keys(records, tokens)
        documents = {block_record_key(push.namespace, record.key): record.data for record in records}
        with ThreadPoolExecutor(_RECORD_WRITERS) as pool:
            list(pool.map(self._store.put_if_absent, documents, documents.values()))
        # Namespaces share it: to leave it out where another has it would tell so by the time saved (I7).
        self._store.put(manifest_key(manifest.id), manifest.data)
        documents[manifest_key(manifest.id)] = manifest.data

        def write(info: ArtifactInfo) -> None:
            # No artifact is published with other records. What differs was left by a push that came to
            # nothing, comes from one that will find this artifact published, was taken for garbage, or is damaged.
            with ThreadPoolExecutor(_RECORD_WRITERS) as pool:
                same = pool.map(partial(holds, self._store), documents, documents.values())
                for key, is_same in zip(documents, same, strict=True):
                    if not is_same:
                        self._store.put(key, documents[key])
            document = EntryDocument(namespace=info.namespace, artifact_id=info.id, created_at=info.created_at)
            self._store.put(document.key, seal(document))

        entry = Entry(push.namespace, manifest, records, tokens, datetime.now(UTC))
        try:
            info = self._index.publish(entry, write, partial(follow_rows, self._store))
        except DivergenceError as error:
            refused = next(record for record in records if record.key == error.details["block_key"])
            self._diverged(push.namespace, refused, error.details["stored_record"])
        self._end()
        self._observer.committed()
        return info

    def abort(self) -> None:
        self._end()

    def _end(self) -> None:
        """Forget the push, and remove what was uploaded for it and not taken; what can't be now, garbage collection will."""
        if self._reserve.spent_on(lambda: self._index.end_push(self.id, self._namespace)):
            with suppress(KvgraftError):
                remove_uploads(self._store, self._index, self.id)

    def _diverged(self, namespace: str, record: BlockRecord, stored_digest: str) -> NoReturn:
        """Record a divergence and refuse the push."""
        known: Mapping[str, Sequence[str]] = {}
        with suppress(Corrupt):
            known = read_record(self._store, namespace, record.key, stored_digest).chunks
        divergence = Divergence(
            id=sha256_digest(f"{record.key} {stored_digest} {record.digest}".encode()).removeprefix("sha256:"),
            namespace=namespace,
            block_key=record.key,
            stored_record=stored_digest,
            offered_record=record.digest,
            chunks=sorted(name for name in record.chunks if record.chunks[name] != known.get(name)),
            created_at=datetime.now(UTC),
        )
        self._store.put_if_absent(divergence_place(divergence), seal(divergence))
        self._index.record_divergence(divergence)
        self._observer.diverged()
        raise DivergenceError(
            f"block {record.start} to {record.stop} ({record.key}) is already stored with other bytes in "
            f"{', '.join(divergence.chunks)}; nothing was published. Equal fingerprints gave unequal state: "
            f"look for a nondeterministic kernel, bad memory, or a fingerprint that leaves something out",
            block_key=record.key,
            stored_record=stored_digest,
            offered_record=record.digest,
            arrays=divergence.chunks,
        )


def _check_chunk(digest: str, spec: ChunkSpec, size: int, found: str) -> None:
    if size != spec.size:
        raise SizeMismatch(f"the chunk {digest} must have {spec.size} bytes; {size} came", digest=digest)
    if found != digest:
        raise DigestMismatch(f"the bytes sent as {digest} are {found}", digest=digest, found=found)
