"""Tags: movable names for artifacts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, select

from repo_service.domain.digest import SHA256, format_digest
from repo_service.domain.errors import TagNotFound
from repo_service.domain.views import TagInfo
from repo_service.index import times
from repo_service.index.dialect import insert_many
from repo_service.index.models import Artifact, Tag
from repo_service.index.publishing import require_artifact

_TAGS = select(Tag.namespace, Tag.name, Artifact.digest, Tag.updated_at).join(Artifact, Artifact.id == Tag.artifact_id)


def of(connection: Connection, namespace: str) -> list[TagInfo]:
    rows = connection.execute(_TAGS.where(Tag.namespace == namespace).order_by(Tag.name))
    return [view(row, row.digest) for row in rows]


def of_all(connection: Connection) -> list[TagInfo]:
    """The tags of all namespaces."""
    return [view(row, row.digest) for row in connection.execute(_TAGS)]


def view(row: Row[*tuple[Any, ...]], artifact: bytes) -> TagInfo:
    """The tag in a row with ``namespace``, ``name`` and ``updated_at``, of the artifact with a digest."""
    return TagInfo(
        namespace=row.namespace,
        name=row.name,
        artifact_id=format_digest(SHA256, artifact),
        updated_at=times.from_microseconds(row.updated_at),
    )


def set_tag(connection: Connection, namespace: str, name: str, artifact_id: str, updated_at: datetime) -> TagInfo:
    row_id = require_artifact(connection, namespace, artifact_id)
    microseconds = times.to_microseconds(updated_at)
    insert_many(
        connection,
        (Tag.namespace, Tag.name, Tag.artifact_id, Tag.updated_at),
        [(namespace, name, row_id, microseconds)],
        overwrite=True,
    )
    return TagInfo(
        namespace=namespace,
        name=name,
        artifact_id=artifact_id,
        updated_at=times.from_microseconds(microseconds),
    )


def require(connection: Connection, namespace: str, name: str) -> None:
    """Raises `TagNotFound`."""
    if connection.execute(select(Tag.name).where(Tag.namespace == namespace, Tag.name == name)).first() is None:
        raise tag_not_found(namespace, name)


def delete_tag(connection: Connection, namespace: str, name: str) -> None:
    if not connection.execute(delete(Tag).where(Tag.namespace == namespace, Tag.name == name)).rowcount:
        raise tag_not_found(namespace, name)


def tag_not_found(namespace: str, name: str) -> TagNotFound:
    return TagNotFound(
        f"no tag {name} in the namespace {namespace}: check the name and the namespace", tag=name, namespace=namespace
    )
