"""Bookkeeping of running pushes: what was offered, what has arrived, what may be committed.

Whether a chunk is missing is decided by rows of the push's own namespace alone (I7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, Text, bindparam, delete, exists, func, insert, literal, select, update

from repo_service.domain.canonical import canonical_json, parse_loose_json
from repo_service.domain.digest import BLAKE3, SHA256, format_digest, parse_digest
from repo_service.domain.errors import ChunkNotFound, Conflict, MalformedDocument, PushNotFound
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.record import BlockRecord
from repo_service.index import chunks, quota, times
from repo_service.index.dialect import bound, digest_list, insert_many, insert_new
from repo_service.index.models import WANTED, Block, Chunk, ChunkState, LooseRecord, PushBlock, PushChunk, PushRecord


@dataclass(frozen=True)
class PushRow:
    """A running push."""

    namespace: str
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Offered:
    """Answer to an offer.

    Parameters
    ----------
    missing
        Digests of the chunks to send, in the order offered, each once.
    divergent
        Offered records whose key is published with another record, and that record's digest.
    """

    missing: list[str]
    divergent: list[tuple[BlockRecord, str]]


_KEYS = digest_list("keys")
_PUBLISHED = select(Block.key, Block.record).join(
    _KEYS, (Block.namespace == bindparam("namespace")) & (Block.key == _KEYS.c.digest)
)
_DOCUMENTS = select(PushBlock.key, PushBlock.document).join(
    _KEYS, (PushBlock.push_id == bindparam("push")) & (PushBlock.key == _KEYS.c.digest)
)

_PUSH = select(
    PushRecord.id, PushRecord.namespace, PushRecord.fingerprint, PushRecord.lease, PushRecord.expires_at
).where(
    PushRecord.name == bindparam("push"),
    # One of another namespace is not found, in as much time as one that is not there (I7).
    PushRecord.namespace == func.coalesce(bindparam("of", type_=Text), PushRecord.namespace),
)
_OFFERED = (
    select(Chunk.id, Chunk.state, PushChunk.dtype, PushChunk.shape)
    .join(PushChunk, PushChunk.chunk_id == Chunk.id)
    .where(
        Chunk.namespace == bindparam("namespace"),
        Chunk.digest == bindparam("digest"),
        PushChunk.push_id == bindparam("push"),
    )
)


def begin(connection: Connection, name: str, namespace: str, fingerprint: Fingerprint, expires_at: datetime) -> None:
    if connection.execute(select(PushRecord.id).where(PushRecord.name == name)).first():
        raise Conflict(f"the push {name} is already running; begin one under a new id", push_id=name)
    expires = times.to_microseconds(expires_at)
    connection.execute(
        insert(PushRecord).values(
            name=name,
            namespace=namespace,
            fingerprint=canonical_json(fingerprint.sections).decode(),
            lease=max(0, expires - times.now()),
            expires_at=expires,
        )
    )


def find(connection: Connection, name: str, namespace: str | None = None) -> PushRow:
    row = _live(connection, name, namespace)
    sections = parse_loose_json(row.fingerprint.encode(), what="fingerprint of the push")
    return PushRow(row.namespace, Fingerprint(sections))


def offer(
    connection: Connection,
    name: str,
    records: Sequence[BlockRecord],
    specs: Mapping[str, ChunkSpec],
    limit: int | None = None,
) -> Offered:
    push = _live(connection, name)
    divergent = _divergent(connection, push.namespace, records)
    if divergent:
        return Offered([], divergent)
    known = chunks.ensure(connection, push.namespace, specs)
    # Bytes that are there stay there from now on, because this push refers to them.
    chunks.set_state(connection, [c.id for c in known.values() if c.state == ChunkState.LOOSE], ChunkState.STORED)
    gone = [c.id for c in known.values() if c.state >= ChunkState.DOOMED]
    chunks.set_state(connection, gone, ChunkState.AWAITED)
    insert_many(
        connection,
        (PushChunk.push_id, PushChunk.chunk_id, PushChunk.dtype, PushChunk.shape),
        (
            (push.id, known[parse_digest(digest, BLAKE3)].id, spec.dtype, chunks.shape_text(spec.shape))
            for digest, spec in specs.items()
        ),
        overwrite=True,
    )
    insert_many(
        connection,
        (PushBlock.push_id, PushBlock.key, PushBlock.record, PushBlock.document),
        (
            (push.id, parse_digest(record.key, SHA256), parse_digest(record.digest, SHA256), record.data)
            for record in records
        ),
        overwrite=True,
    )
    _extend(connection, push)
    missing = [digest for digest in specs if not known[parse_digest(digest, BLAKE3)].present]
    if missing and limit is not None:
        quota.check(connection, push.namespace, push.id, limit)
    return Offered(missing, [])


def wanted(connection: Connection, name: str, digest: str, namespace: str | None = None) -> ChunkSpec:
    return chunks.spec_of(_offered(connection, _live(connection, name, namespace), digest))


def arrived(connection: Connection, name: str, digest: str) -> None:
    push = _live(connection, name)
    chunk = _offered(connection, push, digest)
    if chunk.state in WANTED:
        chunks.store(connection, chunk.id, chunks.spec_of(chunk))
    _extend(connection, push)


def records(connection: Connection, name: str, keys: Sequence[str]) -> list[bytes]:
    push = _live(connection, name)
    raw = [parse_digest(key, SHA256) for key in keys]
    rows = connection.execute(_DOCUMENTS, bound(raw, "keys") | {"push": push.id})
    documents: dict[bytes, bytes] = {row.key: row.document for row in rows}
    for key, digest in zip(keys, raw, strict=True):
        if digest not in documents:
            raise MalformedDocument(
                f"the block {key} was not offered in this push; offer its record before the commit", block_key=key
            )
    return [documents[digest] for digest in raw]


def unarrived(connection: Connection, name: str, digests: Sequence[str]) -> list[str]:
    push = _live(connection, name)
    raw = [parse_digest(digest, BLAKE3) for digest in digests]
    known = chunks.lookup(connection, push.namespace, raw)
    present = {digest for digest, chunk in known.items() if chunk.present}
    return [text for text, digest in zip(digests, raw, strict=True) if digest not in present]


def end(connection: Connection, name: str, namespace: str | None = None) -> bool:
    row = connection.execute(_PUSH, {"push": name, "of": namespace}).first()
    if row is None:
        return False
    chunks.release_pushed(connection, row.id)
    connection.execute(
        insert_new(LooseRecord).from_select(
            ["namespace", "key"],
            select(literal(row.namespace), PushBlock.key).where(
                PushBlock.push_id == row.id,
                ~exists().where(Block.namespace == row.namespace, Block.key == PushBlock.key),
            ),
        )
    )
    connection.execute(delete(PushRecord).where(PushRecord.id == row.id))
    return True


def expire(connection: Connection, now: datetime) -> int:
    names = connection.scalars(select(PushRecord.name).where(PushRecord.expires_at <= times.to_microseconds(now))).all()
    for name in names:
        end(connection, name)
    return len(names)


def running(connection: Connection) -> int:
    count = select(func.count()).select_from(PushRecord).where(PushRecord.expires_at > times.now())
    return connection.scalars(count).one()


def divergent_blocks(connection: Connection, namespace: str, blocks: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Of block keys and record digests, the keys that are published with another record, and that record."""
    rows = connection.execute(_PUBLISHED, bound(list(blocks), "keys") | {"namespace": namespace})
    return {row.key: row.record for row in rows if row.record != blocks[row.key]}


def _divergent(connection: Connection, namespace: str, records: Sequence[BlockRecord]) -> list[tuple[BlockRecord, str]]:
    by_key = {parse_digest(record.key, SHA256): record for record in records}
    offered = {key: parse_digest(record.digest, SHA256) for key, record in by_key.items()}
    stored = divergent_blocks(connection, namespace, offered)
    return [(by_key[key], format_digest(SHA256, record)) for key, record in stored.items()]


def _live(connection: Connection, name: str, namespace: str | None = None) -> Row[*tuple[Any, ...]]:
    row = connection.execute(_PUSH, {"push": name, "of": namespace}).first()
    if row is None or row.expires_at <= times.now():
        raise PushNotFound(
            f"no push {name} is running: it was committed or aborted, or it expired; begin a new one", push_id=name
        )
    return row


def _extend(connection: Connection, push: Row[*tuple[Any, ...]]) -> None:
    now = times.now()
    # Writing at every call would double the work of an arrival.
    if push.expires_at - now < push.lease // 2:
        connection.execute(update(PushRecord).where(PushRecord.id == push.id).values(expires_at=now + push.lease))


def _offered(connection: Connection, push: Row[*tuple[Any, ...]], digest: str) -> Row[*tuple[Any, ...]]:
    parameters = {"namespace": push.namespace, "digest": parse_digest(digest, BLAKE3), "push": push.id}
    row = connection.execute(_OFFERED, parameters).first()
    if row is None:
        raise ChunkNotFound(f"the chunk {digest} was not offered in this push; offer its block first", digest=digest)
    return row
