"""Rows of ``chunks``: what a namespace knows about bytes in the store, and which of them may go.

`ChunkState` says what each state promises. All changes of state happen under the write lock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, bindparam, case, exists, select, update

from repo_service.domain.digest import BLAKE3, format_digest, parse_digest
from repo_service.domain.errors import MalformedDocument
from repo_service.domain.layout import ChunkSpec
from repo_service.index.dialect import bound, bound_ids, digest_list, id_list, insert_many
from repo_service.index.models import HELD, PRESENT, ArtifactTokenChunk, BlockChunk, Chunk, ChunkState, PushChunk


class KnownChunk(NamedTuple):
    """A chunk's row."""

    id: int
    state: int
    dtype: str
    shape: str

    @property
    def present(self) -> bool:
        """True where the bytes are in the store and this namespace has proved that it has them."""
        return self.state in PRESENT


_DIGESTS = digest_list()
_KNOWN = select(Chunk.digest, Chunk.id, Chunk.state, Chunk.dtype, Chunk.shape).join(
    _DIGESTS, (Chunk.namespace == bindparam("namespace")) & (Chunk.digest == _DIGESTS.c.digest)
)
_SET_STATE = update(Chunk).where(Chunk.id.in_(id_list())).values(state=bindparam("new_state"))
IS_PUBLISHED = exists().where(BlockChunk.chunk_id == Chunk.id) | exists().where(ArtifactTokenChunk.chunk_id == Chunk.id)
IS_PUSHED = exists().where(PushChunk.chunk_id == Chunk.id)
_DESCRIBE = (
    update(Chunk)
    .where(Chunk.id == bindparam("chunk_id"))
    .values(dtype=bindparam("of_dtype"), shape=bindparam("of_shape"), size=bindparam("of_size"))
)
_STORE = _DESCRIBE.values(state=case((IS_PUBLISHED, ChunkState.PUBLISHED), else_=ChunkState.STORED))
_UNPUBLISH = (
    update(Chunk)
    .where(Chunk.id.in_(id_list()), ~IS_PUBLISHED)
    .values(
        state=case(
            (IS_PUSHED & (Chunk.state == ChunkState.DAMAGED), ChunkState.AWAITED),
            (IS_PUSHED, ChunkState.STORED),
            # Nobody is to take it up again.
            (Chunk.state == ChunkState.DAMAGED, ChunkState.ABANDONED),
            else_=ChunkState.LOOSE,
        )
    )
)
_OTHER = PushChunk.__table__.alias("other")
_UNPUSH = (
    update(Chunk)
    .where(
        Chunk.id.in_(select(PushChunk.chunk_id).where(PushChunk.push_id == bindparam("push"))),
        # Not by the index on states, which would visit the chunks of every running push.
        (Chunk.state + 0).in_((ChunkState.AWAITED, ChunkState.STORED)),
        ~exists().where(_OTHER.c.chunk_id == Chunk.id, _OTHER.c.push_id != bindparam("push")),
    )
    .values(state=case((Chunk.state == ChunkState.STORED, ChunkState.LOOSE), else_=ChunkState.ABANDONED))
)


def ensure(
    connection: Connection, namespace: str, specs: Mapping[str, ChunkSpec], *, proven: bool = False
) -> dict[bytes, KnownChunk]:
    """Rows for all chunks, by digest; those that are new are AWAITED.

    With ``proven``, the specs replace what was said of chunks that are not present; else the larger one stands there.

    Raises
    ------
    MalformedDocument
        If a chunk is present with another dtype or shape, to which its digest commits.
    """
    wanted = {parse_digest(digest, BLAKE3): spec for digest, spec in specs.items()}
    known = lookup(connection, namespace, list(wanted))
    larger: list[dict[str, Any]] = []
    for digest, chunk in known.items():
        spec = wanted[digest]
        if (chunk.dtype, chunk.shape) == (spec.dtype, shape_text(spec.shape)):
            continue
        if chunk.present:
            raise MalformedDocument(
                f"the chunk {format_digest(BLAKE3, digest)} is listed as {spec.dtype} {list(spec.shape)}; its digest "
                f"commits to {chunk.dtype} {chunk.shape}"
            )
        if proven:
            store(connection, chunk.id, spec)
        elif chunk.state not in HELD and spec.size > spec_of(chunk).size:
            larger.append({"chunk_id": chunk.id, **_of(spec)})
    if larger:
        # Until the bytes come, a quota counts them as the most that any push may send.
        connection.execute(_DESCRIBE, larger)
    absent = [digest for digest in wanted if digest not in known]
    insert_many(
        connection,
        (Chunk.namespace, Chunk.digest, Chunk.dtype, Chunk.shape, Chunk.size, Chunk.state),
        (
            (namespace, digest, spec.dtype, shape_text(spec.shape), spec.size, ChunkState.AWAITED)
            for digest, spec in ((digest, wanted[digest]) for digest in absent)
        ),
    )
    return known | lookup(connection, namespace, absent)


def lookup(connection: Connection, namespace: str, digests: Sequence[bytes]) -> dict[bytes, KnownChunk]:
    """Rows of the chunks that have one, by digest."""
    if not digests:
        return {}
    rows = connection.execute(_KNOWN, bound(digests) | {"namespace": namespace}).all()
    return {row[0]: KnownChunk(*row[1:]) for row in rows}


def spec_of(row: Row[*tuple[Any, ...]] | KnownChunk) -> ChunkSpec:
    """The spec in a row with ``dtype`` and ``shape``."""
    return ChunkSpec(row.dtype, tuple(json.loads(row.shape)))


@lru_cache(256)
def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as it stands in a row."""
    return json.dumps(shape)


def store(connection: Connection, chunk_id: int, spec: ChunkSpec) -> None:
    """Note that bytes with a chunk's digest, which proves its dtype and shape, are in the store."""
    connection.execute(_STORE, {"chunk_id": chunk_id, **_of(spec)})


def _of(spec: ChunkSpec) -> dict[str, Any]:
    return {"of_dtype": spec.dtype, "of_shape": shape_text(spec.shape), "of_size": spec.size}


def set_state(connection: Connection, ids: Sequence[int], state: ChunkState) -> None:
    if ids:
        connection.execute(_SET_STATE, bound_ids(ids) | {"new_state": state})


def release_unpublished(connection: Connection, ids: Sequence[int]) -> None:
    """Take back PUBLISHED and DAMAGED from the chunks that no artifact refers to any more."""
    connection.execute(_UNPUBLISH, bound_ids(ids))


def release_pushed(connection: Connection, push: int) -> None:
    """Let go of the chunks that only this push, about to be deleted, refers to."""
    connection.execute(_UNPUSH, {"push": push})
