"""What the index knows about itself."""

from __future__ import annotations

import uuid

from sqlalchemy import Connection, delete, insert, select

from repo_service.domain.errors import NotARepository
from repo_service.index.models import Meta

_REPOSITORY_ID = "repository_id"
_INDEX_ID = "index_id"
_COMPLETE = "complete"


def claimed(connection: Connection, repository_id: str) -> str | None:
    """The index's own id, or None until it is tied to a repository.

    Raises
    ------
    NotARepository
        If it is another repository's index.
    """
    owner, index_id = _value(connection, _REPOSITORY_ID), _value(connection, _INDEX_ID)
    if owner not in (None, repository_id):
        raise NotARepository(
            f"the index belongs to the repository {owner}, the store to {repository_id}: give each its own index",
            repository_id=repository_id,
            index_repository_id=owner,
        )
    return index_id if owner is not None else None


def claim(connection: Connection, repository_id: str) -> str:
    """Tie the index to a repository, once, and return the id it has for itself; raises as `claimed` does."""
    index_id = claimed(connection, repository_id)
    if index_id is None:
        index_id = uuid.uuid4().hex
        for name, value in ((_REPOSITORY_ID, repository_id), (_INDEX_ID, index_id)):
            if _value(connection, name) is None:
                connection.execute(insert(Meta).values(name=name, value=value))
    return index_id


def is_complete(connection: Connection) -> bool:
    """True once the index knows all that the store held when it was made, or rebuilt."""
    return _value(connection, _COMPLETE) is not None


def set_complete(connection: Connection, *, complete: bool) -> None:
    if complete != is_complete(connection):
        change = (
            insert(Meta).values(name=_COMPLETE, value="") if complete else delete(Meta).where(Meta.name == _COMPLETE)
        )
        connection.execute(change)


def _value(connection: Connection, name: str) -> str | None:
    return connection.execute(select(Meta.value).where(Meta.name == name)).scalar()
