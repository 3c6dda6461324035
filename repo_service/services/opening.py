"""Opening a repository that this process reaches itself: its place, marker, index and owner, and what a crash left."""

from __future__ import annotations

from contextlib import ExitStack

from repo_service.domain.errors import InvalidInput
from repo_service.index import Index
from repo_service.services.marker import open_marker
from repo_service.services.ownership import Ownership
from repo_service.services.places import find_place
from repo_service.services.reindex import complete
from repo_service.services.repository import LocalRepository
from repo_service.services.settle import settle


def open_local(
    url: str, *, create: bool = True, index_url: str | None = None, take_over: bool = False
) -> LocalRepository:
    """Open a repository that this process reaches itself.

    Parameters
    ----------
    url
        ``file:///path``, ``s3://bucket/prefix`` or ``memory:``.
    create
        Make a new repository if there is none, and nothing else.
    index_url
        The index. A directory holds its own unless told otherwise; an S3 repository needs one, here or
        in ``KVGRAFT_INDEX``, and so does a directory whose index was once elsewhere.
    take_over
        Make this index the repository's, whichever it had; `LocalRepository.reindex` is to follow.

    Raises
    ------
    MalformedUrl, NotARepository, NewerFormat
    InvalidInput
        If an index is missing, or nothing can be taken over.
    Conflict
        If the repository belongs to another index.
    """
    place = find_place(url, create=create, index_url=index_url)
    with ExitStack() as stack:
        stack.callback(place.store.close)
        # The marker comes first: another process that opens the place now must know it for a repository.
        marker = open_marker(place.store, url, place.codec)
        index = stack.enter_context(Index.open(place.index_url))
        owner = Ownership(place.store, url, index.claim(marker.repository_id)) if place.has_owner else None
        if owner is None:
            if take_over:
                raise InvalidInput(f"{url} has its index inside: there is nothing to take over", url=url)
        elif take_over:
            owner.take_over()
            index.set_incomplete()
        else:
            owner.claim()
        repository = LocalRepository(url, marker, place.store, index, place.reserve, owner)
        if not take_over and not index.is_complete():
            # It is new, or was lost or left behind; the store is the truth (I5).
            complete(place.store, index)
        settle(place.store, index)
        place.reserve.keep()
        stack.pop_all()
    return repository
