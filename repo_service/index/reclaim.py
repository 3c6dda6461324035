"""Freeing what nothing refers to any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, bindparam, delete, exists, literal, select, update

from repo_service.domain.digest import BLAKE3, SHA256, format_digest
from repo_service.index import chunks
from repo_service.index.dialect import bound, digest_list
from repo_service.index.models import (
    Block,
    Chunk,
    ChunkState,
    LooseRecord,
    PushBlock,
    PushRecord,
)

BATCH = 250

PART = 8
"""Objects that may be on their way out of the store when the write lock is lost."""

T = TypeVar("T")

Remove = Callable[[list[tuple[str, str]], list[str]], None]
"""Removes block records, by (namespace, key), and chunks, by digest, from the store; either may be gone already."""


@dataclass(frozen=True)
class Reclaimed:
    """One batch: chunks whose bytes were there, their bytes, and whether more may be left."""

    chunks: int
    bytes: int
    more: bool


@dataclass(frozen=True)
class Reclaimable:
    """What a dry run found: chunks with their bytes, and block records by (namespace, key)."""

    expired_pushes: int
    chunks: list[tuple[str, int]]
    records: list[tuple[str, str]]


_OTHER = Chunk.__table__.alias("other")
_VICTIMS = select(
    Chunk.namespace,
    Chunk.digest,
    Chunk.size,
    Chunk.state,
    # Another namespace that needs the bytes, or is about to send them, keeps them.
    exists().where(_OTHER.c.digest == Chunk.digest, _OTHER.c.state < ChunkState.DOOMED).label("kept"),
).where(Chunk.state >= ChunkState.DOOMED)
_STILL_THERE = select(literal(1))
_DIGESTS = digest_list()
_FORGET = delete(Chunk).where(Chunk.digest.in_(select(_DIGESTS.c.digest)), Chunk.state >= ChunkState.DOOMED)
_RECORDS = select(
    LooseRecord.namespace,
    LooseRecord.key,
    (
        exists().where(Block.namespace == LooseRecord.namespace, Block.key == LooseRecord.key)
        | exists().where(
            PushBlock.key == LooseRecord.key,
            PushRecord.id == PushBlock.push_id,
            PushRecord.namespace == LooseRecord.namespace,
        )
    ).label("kept"),
)


def while_locked(connection: Connection, items: Sequence[T]) -> Iterator[list[T]]:
    """The items in parts, each of them only while the transaction still has the write lock.

    A server that ends a connection lets the lock go. Others may then send again what was about to be removed.
    """
    for start in range(0, len(items), PART):
        connection.execute(_STILL_THERE)
        yield list(items[start : start + PART])


def doom(connection: Connection) -> None:
    """Withdraw the promise of every chunk that nothing refers to; to be durable before any byte goes."""
    connection.execute(update(Chunk).where(Chunk.state == ChunkState.LOOSE).values(state=ChunkState.DOOMED))
    unneeded = (Chunk.state == ChunkState.AWAITED) & ~chunks.IS_PUSHED
    connection.execute(update(Chunk).where(unneeded).values(state=ChunkState.ABANDONED))


def listed(connection: Connection, expired_pushes: int) -> Reclaimable:
    """What `reclaim` would remove, all of it."""
    victims = [row for row in connection.execute(_VICTIMS) if not row.kept]
    sizes = {row.digest: row.size for row in victims if row.state == ChunkState.DOOMED}
    return Reclaimable(
        expired_pushes,
        [(format_digest(BLAKE3, digest), size) for digest, size in sorted(sizes.items())],
        [(row.namespace, format_digest(SHA256, row.key)) for row in connection.execute(_RECORDS) if not row.kept],
    )


def reclaim(connection: Connection, remove: Remove, namespace: str | None = None) -> Reclaimed:
    """Remove one batch from the store and from the index, all under the write lock.

    Counted is what left the store, or, for a namespace, what it gave up, whether or not others keep the
    bytes: it must not learn that from the difference (I7).

    An offer waits for the lock, then finds no row and is told that the chunk is missing; one that
    came before has turned the row back to AWAITED, which keeps the bytes.
    """
    victims = connection.execute(_VICTIMS.limit(BATCH)).all()
    records = connection.execute(_RECORDS.limit(BATCH)).all()
    # Several namespaces may have let go of the same bytes.
    given_up = [row for row in victims if (not row.kept if namespace is None else row.namespace == namespace)]
    sizes = {row.digest: row.size for row in given_up if row.state == ChunkState.DOOMED}
    digests = {row.digest for row in victims if not row.kept}
    keys = [(row.namespace, format_digest(SHA256, row.key)) for row in records if not row.kept]
    for gone in while_locked(connection, sorted(format_digest(BLAKE3, digest) for digest in digests)):
        remove([], gone)
    for unheld in while_locked(connection, keys):
        remove(unheld, [])
    connection.execute(_FORGET, bound([row.digest for row in victims]))
    if records:
        # A record that is kept comes back when its artifact or its push goes.
        connection.execute(
            delete(LooseRecord).where(
                LooseRecord.namespace == bindparam("of"), LooseRecord.key == bindparam("loose_key")
            ),
            [{"of": row.namespace, "loose_key": row.key} for row in records],
        )
    return Reclaimed(len(sizes), sum(sizes.values()), BATCH in (len(victims), len(records)))
