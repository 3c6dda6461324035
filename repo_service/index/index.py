"""The index's door: each method is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Self

from repo_service.domain.access import AccessToken
from repo_service.domain.digest import SHA256, format_digest
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.record import BlockRecord
from repo_service.domain.views import (
    ArtifactInfo,
    ArtifactPage,
    ArtifactQuery,
    Divergence,
    Match,
    SchemaReport,
    Stats,
    TagInfo,
)
from repo_service.index import (
    access,
    divergences,
    dump,
    lookup,
    meta,
    migrate,
    namespaces,
    publishing,
    pushes,
    search,
    stats,
    tags,
    unsettled,
)
from repo_service.index.engine import Database
from repo_service.index.entry import Entry
from repo_service.index.pushes import Offered, PushRow
from repo_service.index.sqlite import SqliteDatabase
from repo_service.index.unsettled import ENTRY, TAG, Noted, Undo
from repo_service.index.upkeep import USES_S, Upkeep
from repo_service.index.uses import Uses


def open_database(url: str) -> Database:
    """The database that a URL names; see `Index.open`."""
    if url.startswith("postgres"):
        from repo_service.index.postgres import PostgresDatabase

        return PostgresDatabase(url)
    return SqliteDatabase(url)


def _nothing(*_: Any) -> None:
    """What is written down, and undone, where a caller keeps no store."""


class Index(Upkeep):
    """What is known about a repository, in SQL; it can be rebuilt from the store (I5).

    Safe to use from several threads and processes at once. Besides the errors each method lists,
    any may raise `Unavailable`, `StorageFull` or `DocumentCorrupt`, and with a malformed digest
    `MalformedDigest`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._uses = Uses(database)

    @classmethod
    def open(cls, url: str) -> Self:
        """Open an index, made if it does not exist and upgraded to the current schema.

        Parameters
        ----------
        url
            ``sqlite:///<path>``, the path taken literally, ``sqlite://`` for one in memory, or
            ``postgresql://user:password@host:port/database``.

        Raises
        ------
        MalformedUrl, NewerFormat, Unavailable, DocumentCorrupt
        """
        database = open_database(url)
        try:
            migrate.upgrade(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    @classmethod
    def migrate(cls, url: str) -> SchemaReport:
        """Upgrade an index to the current schema, as `open` does, and say what that changed.

        Raises
        ------
        MalformedUrl, NewerFormat, Unavailable, DocumentCorrupt
        """
        database = open_database(url)
        try:
            return SchemaReport(before=migrate.upgrade(database), after=migrate.HEAD)
        finally:
            database.close()

    def close(self) -> None:
        self._uses.write(USES_S)
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def claim(self, repository_id: str) -> str:
        """Tie the index to a repository and return the index's own id; raises `NotARepository` if it is another's."""
        with self._database.read() as connection:
            if (index_id := meta.claimed(connection, repository_id)) is not None:
                return index_id
        with self._database.write_durably() as connection:
            return meta.claim(connection, repository_id)

    def begin_push(self, push_id: str, namespace: str, fingerprint: Fingerprint, expires_at: datetime) -> None:
        """Start a push; while it sends something its lease, up to ``expires_at``, is renewed.

        Raises
        ------
        Conflict
            If the id is taken.
        """
        with self._database.write() as connection:
            pushes.begin(connection, push_id, namespace, fingerprint, expires_at)

    def push(self, push_id: str, namespace: str | None = None) -> PushRow:
        """A running push, of ``namespace`` if one is given; raises `PushNotFound` if there is none or it has expired."""
        with self._database.read() as connection:
            return pushes.find(connection, push_id, namespace)

    def offer(
        self,
        push_id: str,
        records: Sequence[BlockRecord],
        specs: Mapping[str, ChunkSpec],
        quota: int | None = None,
    ) -> Offered:
        """Remember what a push will commit, and say which chunks it must send.

        A chunk is missing unless it arrived before in this namespace and is still there. If a record
        diverges nothing is remembered.

        Parameters
        ----------
        records
            Block records; none where only the chunks of a ``tokens`` array are offered.
        specs
            Every chunk offered, those of ``records`` included, in the order they are to be sent.
        quota
            Most bytes that the namespace may hold, if there is a limit.

        Raises
        ------
        PushNotFound
        QuotaExceeded
            If something is missing that would not fit; nothing of this offer is remembered.
        MalformedDocument
            If a chunk is there with another dtype or shape.
        """
        with self._database.write() as connection:
            return pushes.offer(connection, push_id, records, specs, quota)

    def wanted(self, push_id: str, digest: str, namespace: str | None = None) -> ChunkSpec:
        """What a chunk of a push must be; raises as `push` does, or `ChunkNotFound` if no offer named it."""
        with self._database.read() as connection:
            return pushes.wanted(connection, push_id, digest, namespace)

    def arrived(self, push_id: str, digest: str) -> None:
        """Note that a chunk is in the store; raises as `wanted` does. Call it once the bytes are durable."""
        with self._database.write() as connection:
            pushes.arrived(connection, push_id, digest)

    def push_records(self, push_id: str, keys: Sequence[str]) -> list[bytes]:
        """The offered block records' documents, in order.

        Raises
        ------
        PushNotFound
        MalformedDocument
            Names a key that was not offered.
        """
        with self._database.read() as connection:
            return pushes.records(connection, push_id, keys)

    def unarrived(self, push_id: str, digests: Sequence[str]) -> list[str]:
        """Those of the chunks that the push's namespace does not have; raises `PushNotFound`."""
        with self._database.read() as connection:
            return pushes.unarrived(connection, push_id, digests)

    def end_push(self, push_id: str, namespace: str | None = None) -> bool:
        """Forget a push, committed or given up; False if there is none, or none in ``namespace``."""
        with self._database.write() as connection:
            return pushes.end(connection, push_id, namespace)

    def expire_pushes(self, now: datetime) -> int:
        """Forget the pushes whose lease has run out; returns their number."""
        with self._database.write() as connection:
            return pushes.expire(connection, now)

    def publish(
        self, entry: Entry, write: Callable[[ArtifactInfo], None] = _nothing, undo: Undo = _nothing
    ) -> ArtifactInfo:
        """Make an artifact visible, durably; publishing it again returns the first one unchanged.

        ``write``, here and in the other methods that take one, puts down in the store what the rows
        say. It is called under the write lock before the rows are committed, so that store and index
        have one order of events; if it raises, nothing changes here. It must not use the index. That
        it was about to be called is noted durably before, for `settle`; ``undo`` is called under the lock
        where the commit failed after that, with what the rows say then.

        Raises
        ------
        ChunksMissing
            If a chunk did not arrive in this namespace or was reclaimed since, or if a block is
            neither published nor offered by a running push.
        Divergence
            If a block is published with another record.
        """
        with unsettled.noted(self._database, Noted(ENTRY, entry.namespace, entry.manifest.id), undo) as both:
            publishing.publish(both.connection, entry)
            info = lookup.artifact(both.connection, entry.namespace, entry.manifest.id)
            both.write(write, info)
            return info

    def unpublish(
        self,
        namespace: str,
        artifact_id: str,
        write: Callable[[ArtifactInfo], None] = _nothing,
        undo: Undo = _nothing,
    ) -> list[str]:
        """Remove an artifact and return the names of the tags that went with it; ``write`` is told what it was.

        Raises
        ------
        ArtifactNotFound
        """
        with unsettled.noted(self._database, Noted(ENTRY, namespace, artifact_id), undo) as both:
            publishing.require_artifact(both.connection, namespace, artifact_id)
            info = lookup.artifact(both.connection, namespace, artifact_id)
            publishing.unpublish(both.connection, namespace, artifact_id)
            both.write(write, info)
            return info.tags

    def artifact(self, namespace: str, ref: str) -> ArtifactInfo:
        """The artifact with an id, a shortened id, or a tag.

        Raises
        ------
        ArtifactNotFound, TagNotFound, Ambiguous, MalformedName
        """
        with self._database.read() as connection:
            return lookup.artifact(connection, namespace, ref)

    def artifact_id(self, namespace: str, ref: str, *, used: bool = False) -> str:
        """The whole id of the artifact with an id, a shortened id, or a tag.

        Parameters
        ----------
        used
            Note that the artifact is used.

        Raises
        ------
        ArtifactNotFound, TagNotFound, Ambiguous, MalformedName
        """
        with self._database.read() as connection:
            row = lookup.find(connection, namespace, ref)
        if used:
            self._uses.note(namespace, row.digest, row.last_used_at)
        return format_digest(SHA256, row.digest)

    def published_record(self, namespace: str, key: str) -> str | None:
        """Digest of the record that a block key is published with, if any."""
        with self._database.read() as connection:
            return lookup.published_record(connection, namespace, key)

    def holds_chunk(self, namespace: str, artifact_id: str, digest: str) -> ChunkSpec:
        """What a chunk is, if the artifact holds it; `ChunkNotFound` otherwise, whichever of the two is unknown."""
        with self._database.read() as connection:
            return lookup.holds_chunk(connection, namespace, artifact_id, digest)

    def match(self, namespace: str, keys: Sequence[str]) -> Match | None:
        """The longest published prefix among the chained block keys of one token sequence, in one query.

        The artifact that holds it is noted as used.
        """
        with self._database.read() as connection:
            row = lookup.match(connection, namespace, keys)
        if row is None:
            return None
        self._uses.note(namespace, row.digest, row.last_used_at)
        return Match(artifact_id=format_digest(SHA256, row.digest), blocks=row.low, tokens=row.stop)

    def query(self, query: ArtifactQuery) -> ArtifactPage:
        """One page of the artifacts that meet every condition.

        ``created_after`` is inclusive and ``created_before`` is not. The totals are those of the
        first page. A private artifact meets no ``token_prefix``.

        Raises
        ------
        MalformedRequest
            For a cursor that is none or another query's, an empty span, or a time without a zone.
        InvalidTokens
        """
        with self._database.read() as connection:
            return search.query(connection, query)

    def namespaces(self) -> list[str]:
        """Those with an artifact, a tag or a divergence, by name."""
        with self._database.read() as connection:
            return namespaces.of(connection)

    def tags(self, namespace: str) -> list[TagInfo]:
        """All tags, by name."""
        with self._database.read() as connection:
            return tags.of(connection, namespace)

    def set_tag(
        self,
        namespace: str,
        name: str,
        artifact_id: str,
        updated_at: datetime,
        write: Callable[[TagInfo], None] = _nothing,
        undo: Undo = _nothing,
    ) -> TagInfo:
        """Make a tag, or move it; raises `ArtifactNotFound`."""
        with unsettled.noted(self._database, Noted(TAG, namespace, name), undo) as both:
            tag = tags.set_tag(both.connection, namespace, name, artifact_id, updated_at)
            both.write(write, tag)
            return tag

    def delete_tag(
        self, namespace: str, name: str, write: Callable[[None], None] = _nothing, undo: Undo = _nothing
    ) -> None:
        """Remove a tag; raises `TagNotFound`."""
        with self._database.read() as connection:
            tags.require(connection, namespace, name)
        with unsettled.noted(self._database, Noted(TAG, namespace, name), undo) as both:
            tags.delete_tag(both.connection, namespace, name)
            both.write(write, None)

    def record_divergence(self, divergence: Divergence) -> None:
        """Keep a divergence; one with an id that is kept already changes nothing."""
        with self._database.write_durably() as connection:
            divergences.record(connection, divergence)

    def divergences(self, namespace: str) -> list[Divergence]:
        """Recorded divergences, newest first, at most 1,000."""
        with self._database.read() as connection:
            return divergences.newest(connection, namespace)

    def add_token(self, token: AccessToken, secret_digest: bytes) -> None:
        """Keep an access token, with the SHA-256 of its secret; reindexing leaves it alone."""
        with self._database.write_durably() as connection:
            access.add(connection, token, secret_digest)

    def token(self, token_id: str) -> tuple[AccessToken, bytes] | None:
        """An access token, valid or not, and the SHA-256 of its secret."""
        with self._database.read() as connection:
            return access.find(connection, token_id)

    def tokens(self) -> list[AccessToken]:
        """Access tokens, newest first, at most 1,000."""
        with self._database.read() as connection:
            return access.newest(connection)

    def revoke_token(self, token_id: str, at: datetime) -> AccessToken:
        """End a token now, for good; raises `TokenNotFound`. One that is revoked already stays as it is."""
        with self._database.write_durably() as connection:
            return access.revoke(connection, token_id, at)

    def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row derived from the store, without row numbers: equal indexes give equal dumps."""
        with self._database.read() as connection:
            return dump.dump(connection)

    def stats(self, namespace: str) -> Stats:
        """Counts and bytes of a namespace."""
        with self._database.read() as connection:
            return stats.of(connection, namespace)
