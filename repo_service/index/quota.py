"""How much a namespace may hold, checked before anything is sent."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select

from repo_service.domain.errors import QuotaExceeded
from repo_service.index.dialect import total
from repo_service.index.models import PRESENT, WANTED, Chunk, ChunkState, PushChunk

_SIZE = total(Chunk.size)
_TAKEN = select(_SIZE).where(Chunk.state.in_((*WANTED, *PRESENT)), Chunk.namespace == bindparam("namespace"))
_WANTED = (
    select(_SIZE)
    .join(PushChunk, PushChunk.chunk_id == Chunk.id)
    # Not by the index on states, which would visit the chunks of every running push.
    .where(PushChunk.push_id == bindparam("push"), (Chunk.state + 0) == ChunkState.AWAITED)
)


def check(connection: Connection, namespace: str, push: int, quota: int) -> None:
    """Refuse what a push has just offered if the namespace would hold more than its quota.

    What running pushes are yet to send counts as if it were there, so that all that was accepted fits.
    What only heals damage adds nothing.

    Raises
    ------
    QuotaExceeded
    """
    taken = connection.scalars(_TAKEN, {"namespace": namespace}).one()
    if taken <= quota:
        return
    wanted = connection.scalars(_WANTED, {"push": push}).one()
    if not wanted:
        return
    used = taken - wanted
    raise QuotaExceeded(
        f"the namespace {namespace} has a quota of {quota:,} bytes; it holds {used:,}, with what other pushes are "
        f"sending, and this push would add {wanted:,}: delete artifacts there (kvgraft rm, kvgraft gc) or raise the "
        "quota (kvgraft retain --quota)",
        namespace=namespace,
        quota=quota,
        used=used,
        wanted=wanted,
    )
