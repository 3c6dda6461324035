"""What the index knows about itself."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select

from repo_service.domain.errors import NotARepository
from repo_service.index.models import Meta

_REPOSITORY_ID = "repository_id"


def claimed(connection: Connection, repository_id: str) -> bool:
    """True if the index is tied to this repository, False if it is tied to none.

    Raises
    ------
    NotARepository
        If it is another repository's index.
    """
    owner = connection.execute(select(Meta.value).where(Meta.name == _REPOSITORY_ID)).scalar()
    if owner not in (None, repository_id):
        raise NotARepository(
            f"the index belongs to the repository {owner}, the store to {repository_id}: give each its own index",
            repository_id=repository_id,
            index_repository_id=owner,
        )
    return owner is not None


def claim(connection: Connection, repository_id: str) -> None:
    """Tie the index to a repository, once; raises as `claimed` does."""
    if not claimed(connection, repository_id):
        connection.execute(insert(Meta).values(name=_REPOSITORY_ID, value=repository_id))
