"""Access tokens: the one thing in the index that is not derived from the store."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from repo_service.domain.access import AccessToken, Scope
from repo_service.domain.errors import TokenNotFound
from repo_service.index import times
from repo_service.index.models import TokenRow

_LISTED = 1000

_TOKENS = select(*TokenRow.__table__.columns)


def add(connection: Connection, token: AccessToken, secret_digest: bytes) -> None:
    connection.execute(
        insert(TokenRow).values(
            name=token.id,
            secret_digest=secret_digest,
            scope=token.scope.value,
            namespaces=json.dumps(token.namespaces),
            note=token.note,
            created_at=times.to_microseconds(token.created_at),
            expires_at=None if token.expires_at is None else times.to_microseconds(token.expires_at),
        )
    )


def find(connection: Connection, token_id: str) -> tuple[AccessToken, bytes] | None:
    row = connection.execute(_TOKENS.where(TokenRow.name == token_id)).first()
    return None if row is None else (_token(row), row.secret_digest)


def newest(connection: Connection) -> list[AccessToken]:
    rows = connection.execute(_TOKENS.order_by(TokenRow.created_at.desc(), TokenRow.id.desc()).limit(_LISTED))
    return [_token(row) for row in rows]


def revoke(connection: Connection, token_id: str, at: datetime) -> AccessToken:
    connection.execute(
        update(TokenRow)
        .where(TokenRow.name == token_id, TokenRow.revoked_at.is_(None))
        .values(revoked_at=times.to_microseconds(at))
    )
    found = find(connection, token_id)
    if found is None:
        raise TokenNotFound(f"there is no token {token_id}: kvgraft token ls lists them", token_id=token_id)
    return found[0]


def _token(row: Row[*tuple[Any, ...]]) -> AccessToken:
    return AccessToken(
        id=row.name,
        scope=Scope(row.scope),
        namespaces=json.loads(row.namespaces),
        note=row.note,
        created_at=times.from_microseconds(row.created_at),
        expires_at=None if row.expires_at is None else times.from_microseconds(row.expires_at),
        revoked_at=None if row.revoked_at is None else times.from_microseconds(row.revoked_at),
    )
