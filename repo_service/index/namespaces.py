"""The namespaces that anything is kept in."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from repo_service.index.models import Artifact, DivergenceRow, Tag


def of(connection: Connection) -> list[str]:
    found: set[str] = set()
    for column in (Artifact.namespace, Tag.namespace, DivergenceRow.namespace):
        # One lookup for each namespace: its rows, which may be many, are passed over.
        smallest = select(func.min(column))
        name = connection.scalars(smallest).one()
        while name is not None:
            found.add(name)
            name = connection.scalars(smallest.where(column > name)).one()
    return sorted(found)
