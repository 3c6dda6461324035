"""Divergences: refused pushes of other bytes under an existing block key (I2)."""

from __future__ import annotations

import json

from sqlalchemy import Connection, select

from repo_service.domain.digest import SHA256, format_digest, parse_digest
from repo_service.domain.views import Divergence
from repo_service.index import times
from repo_service.index.dialect import insert_new
from repo_service.index.models import DivergenceRow

MAX_LISTED = 1000


def record(connection: Connection, divergence: Divergence) -> None:
    connection.execute(
        insert_new(DivergenceRow),
        {
            "namespace": divergence.namespace,
            "id": divergence.id,
            "block_key": parse_digest(divergence.block_key, SHA256),
            "stored_record": parse_digest(divergence.stored_record, SHA256),
            "offered_record": parse_digest(divergence.offered_record, SHA256),
            "chunks": json.dumps(divergence.chunks),
            "created_at": times.to_microseconds(divergence.created_at),
        },
    )


def newest(connection: Connection, namespace: str) -> list[Divergence]:
    rows = connection.execute(
        select(*DivergenceRow.__table__.columns)
        .where(DivergenceRow.namespace == namespace)
        .order_by(DivergenceRow.created_at.desc(), DivergenceRow.id)
        .limit(MAX_LISTED)
    )
    return [
        Divergence(
            id=row.id,
            namespace=row.namespace,
            block_key=format_digest(SHA256, row.block_key),
            stored_record=format_digest(SHA256, row.stored_record),
            offered_record=format_digest(SHA256, row.offered_record),
            chunks=json.loads(row.chunks),
            created_at=times.from_microseconds(row.created_at),
        )
        for row in rows
    ]
