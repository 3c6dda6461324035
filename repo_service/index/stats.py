"""Counts and bytes of a namespace."""

from __future__ import annotations

from sqlalchemy import Connection, Select, func, select

from repo_service.domain.views import Stats
from repo_service.index import times
from repo_service.index.dialect import total
from repo_service.index.models import HELD, Artifact, Block, Chunk, DivergenceRow, PushRecord, Tag


def of(connection: Connection, namespace: str) -> Stats:
    artifacts = connection.execute(
        select(
            func.count().label("artifacts"),
            func.count(Artifact.fingerprint_id.distinct()).label("fingerprints"),
            total(Artifact.token_count).label("tokens"),
            total(Artifact.total_bytes).label("bytes"),
        ).where(Artifact.namespace == namespace)
    ).one()
    chunks = connection.execute(
        select(func.count().label("chunks"), total(Chunk.size).label("bytes")).where(
            Chunk.state.in_(HELD), Chunk.namespace == namespace
        )
    ).one()

    def count(statement: Select[int]) -> int:
        return connection.scalars(statement).one()

    rows = select(func.count())
    return Stats(
        namespace=namespace,
        artifacts=artifacts.artifacts,
        blocks=count(select(func.count(Block.key.distinct())).where(Block.namespace == namespace)),
        chunks=chunks.chunks,
        tags=count(rows.where(Tag.namespace == namespace)),
        fingerprints=artifacts.fingerprints,
        tokens=artifacts.tokens,
        total_bytes=artifacts.bytes,
        unique_bytes=chunks.bytes,
        divergences=count(rows.where(DivergenceRow.namespace == namespace)),
        running_pushes=count(rows.where(PushRecord.namespace == namespace, PushRecord.expires_at > times.now())),
    )
