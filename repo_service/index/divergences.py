"""Divergences: refused pushes of other bytes under an existing block key (I2)."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, Row, select, tuple_

from repo_service.domain.digest import SHA256, format_digest, parse_digest
from repo_service.domain.views import Divergence
from repo_service.index import times
from repo_service.index.dialect import insert_new
from repo_service.index.models import DivergenceRow

MAX_LISTED = 1000

_ROWS = select(*DivergenceRow.__table__.columns)


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


def rows(connection: Connection) -> list[Divergence]:
    """Those of all namespaces."""
    return [_view(row) for row in connection.execute(_ROWS)]


def newest(connection: Connection, namespace: str) -> list[Divergence]:
    found = connection.execute(
        _ROWS.where(DivergenceRow.namespace == namespace)
        .order_by(DivergenceRow.created_at.desc(), DivergenceRow.id)
        .limit(MAX_LISTED)
    )
    return [_view(row) for row in found]


def after(connection: Connection, last: Divergence | None, limit: int) -> list[Divergence]:
    """Those of all namespaces that follow ``last``, by namespace and id."""
    page = _ROWS.order_by(DivergenceRow.namespace, DivergenceRow.id).limit(limit)
    if last is not None:
        page = page.where(tuple_(DivergenceRow.namespace, DivergenceRow.id) > (last.namespace, last.id))
    return [_view(row) for row in connection.execute(page)]


def _view(row: Row[*tuple[Any, ...]]) -> Divergence:
    return Divergence(
        id=row.id,
        namespace=row.namespace,
        block_key=format_digest(SHA256, row.block_key),
        stored_record=format_digest(SHA256, row.stored_record),
        offered_record=format_digest(SHA256, row.offered_record),
        chunks=json.loads(row.chunks),
        created_at=times.from_microseconds(row.created_at),
    )
