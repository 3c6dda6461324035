"""Documents of the store that were about to change together with rows, noted before.

Store and index have no common commit. A process that ends between the two leaves its note, and the
index is made to follow the store where the note says.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import NamedTuple, TypeVar

from sqlalchemy import Connection, delete, insert, select

from repo_service.domain.digest import SHA256, parse_digest
from repo_service.domain.errors import UNREADABLE, KvgraftError, TagNotFound
from repo_service.domain.views import TagInfo
from repo_service.index import publishing, tags, times
from repo_service.index.engine import Database
from repo_service.index.entry import Entry
from repo_service.index.models import Artifact, Tag, Unsettled

T = TypeVar("T")

ENTRY = "entry"
TAG = "tag"
DIVERGENCE = "divergence"


class Noted(NamedTuple):
    """An artifact's entry, whose name is its id, a tag, or a divergence, which is not to be settled: its row says it all."""

    kind: str
    namespace: str
    name: str


Look = Callable[[Noted], Entry | TagInfo | None]
"""What the store holds of a document; raises one of `UNREADABLE` if that can't be read, which changes nothing."""


Undo = Callable[[Noted, datetime | None, list[TagInfo]], None]
"""Makes the store say what rows say of a document: when its artifact was published, and the tags."""


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
def noted(database: Database, document: Noted, undo: Undo) -> Iterator[Both]:
    """A durable transaction in which the caller also writes ``document`` to the store.

    If it fails when the store may have changed, ``undo`` makes the store say what the rows say by then,
    under the write lock. Where even that fails the note stays, for `settle`.
    """
    operation = uuid.uuid4().hex
    both = None
    try:
        while both is None:
            with database.write_durably() as connection:
                connection.execute(insert(Unsettled).values(operation=operation, **document._asdict()))
            with database.write_durably() as connection:
                # Gone with the commit. Where another process settled it meanwhile, nothing was written: once more.
                if _forget(connection, operation):
                    both = Both(connection)
                    yield both
    except BaseException:
        with suppress(KvgraftError), database.write() as connection:
            if both is not None and both.begun:
                undo(document, *_rows(connection, document))
            _forget(connection, operation)
        raise


def _rows(connection: Connection, document: Noted) -> tuple[datetime | None, list[TagInfo]]:
    """When an entry's artifact was published and its tags, or the tag; None and none where there is no row."""
    columns = (Artifact.digest, Artifact.created_at, Tag.namespace, Tag.name, Tag.updated_at)
    found = select(*columns).join_from(Artifact, Tag, Tag.artifact_id == Artifact.id, isouter=True)
    if document.kind == ENTRY:
        digest = parse_digest(document.name, SHA256)
        found = found.where(Artifact.namespace == document.namespace, Artifact.digest == digest)
    else:
        found = found.where(Tag.namespace == document.namespace, Tag.name == document.name)
    rows = connection.execute(found).all()
    tags_of = [tags.view(row, row.digest) for row in rows if row.name is not None]
    return (times.from_microseconds(rows[0].created_at) if rows else None), tags_of


def _forget(connection: Connection, operation: str) -> int:
    return connection.execute(delete(Unsettled).where(Unsettled.operation == operation)).rowcount


class Settled(NamedTuple):
    """What settling came to: documents that were looked at, and entries that can't be read, which stay noted."""

    documents: list[Noted]
    unread: list[Noted]


def note(connection: Connection, document: Noted) -> None:
    """Have a document settled, once it can be."""
    connection.execute(insert(Unsettled).values(operation=uuid.uuid4().hex, **document._asdict()))


def noted_entries(connection: Connection) -> list[Noted]:
    """Entries that are to be settled."""
    columns = (Unsettled.kind, Unsettled.namespace, Unsettled.name)
    return [Noted(*row) for row in connection.execute(select(*columns).where(Unsettled.kind == ENTRY).distinct())]


def forget(connection: Connection, document: Noted) -> bool:
    """Take a document's notes away; False if there was none."""
    found = delete(Unsettled).where(
        Unsettled.kind == document.kind, Unsettled.namespace == document.namespace, Unsettled.name == document.name
    )
    return connection.execute(found).rowcount > 0


def left(connection: Connection) -> bool:
    """True if a note was left, or is about to be used."""
    return connection.execute(select(Unsettled.operation).limit(1)).first() is not None


def settle(connection: Connection, look: Look, remove: Callable[[Noted], None], found: Iterable[Noted] = ()) -> Settled:
    """Make rows say what the store's documents say, under the write lock: those that were noted, and ``found``.

    ``remove`` deletes the document of a tag whose artifact is gone.
    """
    columns = (Unsettled.kind, Unsettled.namespace, Unsettled.name)
    noted = [Noted(*row) for row in connection.execute(select(*columns).distinct())]
    unread: list[Noted] = []
    # Entries before tags, which point to them.
    documents = sorted({*noted, *found})
    for document in documents:
        try:
            content = look(document)
        except UNREADABLE:
            unread.append(document)
            continue
        if document.kind == ENTRY:
            _settle_entry(connection, document, content, remove)
        else:
            _settle_tag(connection, document, content, look, remove)
    for document in set(noted) - set(unread):
        forget(connection, document)
    entries = [document for document in unread if document.kind == ENTRY]
    for document in set(entries) - set(noted):
        note(connection, document)
    return Settled([document for document in documents if document not in unread], entries)


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
    connection: Connection,
    document: Noted,
    found: Entry | TagInfo | None,
    look: Look,
    remove: Callable[[Noted], None],
) -> None:
    if isinstance(found, TagInfo):
        if publishing.artifact_row_id(connection, found.namespace, found.artifact_id) is None:
            try:
                entry = look(Noted(ENTRY, found.namespace, found.artifact_id))
            except UNREADABLE:
                # Its artifact can't be read just now, but is not gone.
                return
            if entry is None:
                remove(document)
        else:
            tags.set_tag(connection, found.namespace, found.name, found.artifact_id, found.updated_at)
        return
    with suppress(TagNotFound):
        tags.delete_tag(connection, document.namespace, document.name)
