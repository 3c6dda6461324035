"""Documents of the store that were about to change together with rows, noted before.

Store and index have no common commit. A process that ends between the two leaves its note, and the
index is made to follow the store where the note says.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from sqlalchemy import Connection, delete, insert, select

from repo_service.domain.errors import UNREADABLE, KvgraftError, TagNotFound
from repo_service.domain.views import TagInfo
from repo_service.index import publishing, tags, times
from repo_service.index.engine import Database
from repo_service.index.entry import Entry
from repo_service.index.models import Unsettled

T = TypeVar("T")

ENTRY = "entry"
TAG = "tag"


class Noted(NamedTuple):
    """An artifact's entry, whose name is its id, or a tag."""

    kind: str
    namespace: str
    name: str


Look = Callable[[Noted], Entry | TagInfo | None]
"""What the store holds of a document; raises one of `UNREADABLE` if that can't be read, which changes nothing."""


class Both:
    """A transaction of the index and what its caller writes to the store with it.

    Attributes
    ----------
    connection
        Under the write lock.
    begun
        True once the store may have changed.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.begun = False

    def write(self, write: Callable[[T], None], what: T) -> None:
        """Have the store changed; nothing but the commit comes after this."""
        self.begun = True
        write(what)


@contextmanager
def noted(database: Database, *documents: Noted) -> Iterator[Both]:
    """A durable transaction in which the caller also writes ``documents`` to the store."""
    operation = uuid.uuid4().hex
    both = None
    try:
        while both is None:
            with database.write_durably() as connection:
                connection.execute(insert(Unsettled), [{"operation": operation, **d._asdict()} for d in documents])
            with database.write_durably() as connection:
                # Gone with the commit. Where another process settled it meanwhile, nothing was written: once more.
                if _forget(connection, operation) == len(documents):
                    both = Both(connection)
                    yield both
    except BaseException:
        if both is None or not both.begun:
            with suppress(KvgraftError), database.write() as connection:
                _forget(connection, operation)
        raise


def _forget(connection: Connection, operation: str) -> int:
    return connection.execute(delete(Unsettled).where(Unsettled.operation == operation)).rowcount


def left(connection: Connection) -> bool:
    """True if a note was left, or is about to be used."""
    return connection.execute(select(Unsettled.operation).limit(1)).first() is not None


def settle(
    connection: Connection, look: Look, remove: Callable[[Noted], None], found: Iterable[Noted] = ()
) -> list[Noted]:
    """Make rows say what the store's documents say, under the write lock; returns what was looked at.

    That is what was noted, and ``found``.

    ``remove`` deletes the document of a tag whose artifact is gone.
    """
    columns = (Unsettled.kind, Unsettled.namespace, Unsettled.name)
    noted = (Noted(*row) for row in connection.execute(select(*columns).distinct()))
    # Entries before tags, which point to them.
    documents = sorted({*noted, *found})
    for document in documents:
        try:
            content = look(document)
        except UNREADABLE:
            continue
        if document.kind == ENTRY:
            _settle_entry(connection, document, content, remove)
        else:
            _settle_tag(connection, document, content, remove)
    connection.execute(delete(Unsettled))
    return documents


def _settle_entry(
    connection: Connection, document: Noted, found: Entry | TagInfo | None, remove: Callable[[Noted], None]
) -> None:
    if isinstance(found, Entry):
        # When it was last used is not known any more: it may have been a moment ago.
        publishing.restore(connection, found, times.now())
    elif publishing.artifact_row_id(connection, document.namespace, document.name) is not None:
        for name in publishing.unpublish(connection, document.namespace, document.name):
            remove(Noted(TAG, document.namespace, name))


def _settle_tag(
    connection: Connection, document: Noted, found: Entry | TagInfo | None, remove: Callable[[Noted], None]
) -> None:
    if isinstance(found, TagInfo):
        if publishing.artifact_row_id(connection, found.namespace, found.artifact_id) is None:
            remove(document)
        else:
            tags.set_tag(connection, found.namespace, found.name, found.artifact_id, found.updated_at)
        return
    with suppress(TagNotFound):
        tags.delete_tag(connection, document.namespace, document.name)
