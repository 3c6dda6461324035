"""The part of the index's door that keeps a repository in order: recovery, reclaiming, rebuilding, damage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime

from repo_service.domain.policy import Policy
from repo_service.domain.views import Divergence, TagInfo
from repo_service.index import damage, divergences, meta, orphans, pushes, rebuild, reclaim, retention, unsettled
from repo_service.index.damage import Holder, PublishedArtifact, PublishedChunk, PublishedRecord
from repo_service.index.engine import Database
from repo_service.index.entry import Entry
from repo_service.index.orphans import Objects
from repo_service.index.rebuild import Rebuilt
from repo_service.index.reclaim import Reclaimable, Remove
from repo_service.index.retention import Freed, LetGo
from repo_service.index.unsettled import Look, Noted, Settled
from repo_service.index.uses import Uses

USES_S = 1.0
"""How long it may take to write down uses that readers could not."""


class _Undone(Exception):
    """Takes a transaction back."""


class Upkeep:
    """Each method is one transaction, or one for each batch."""

    _database: Database
    _uses: Uses

    def alone(self, job: str) -> AbstractContextManager[bool]:
        """True inside the block if nobody else who shares the database is inside one for the same job."""
        return self._database.alone(job)

    def unsettled(self) -> bool:
        """True if a process may have ended between writing to the store and to the index."""
        with self._database.read() as connection:
            return unsettled.left(connection)

    def is_complete(self) -> bool:
        """True if the index knows all that the store holds; False in a new one, until `rebuild`."""
        with self._database.read() as connection:
            return meta.is_complete(connection)

    def set_incomplete(self) -> None:
        """Have the index rebuilt before it is used."""
        with self._database.write_durably() as connection:
            meta.set_complete(connection, complete=False)

    def unread_entries(self) -> list[Noted]:
        """Entries that could not be read when they were to be settled, and those about to be published."""
        with self._database.read() as connection:
            return unsettled.noted_entries(connection)

    def drop(self, document: Noted, remove: Callable[[Noted], None]) -> bool:
        """Have an entry removed that can't be read and has no row; False if it is not such a one."""
        with self._database.write_durably() as connection:
            if not orphans.unindexed(connection, [document]) or not unsettled.forget(connection, document):
                return False
            remove(document)
            return True

    def settle(self, look: Look, remove: Callable[[Noted], None], found: Iterable[Noted] = ()) -> Settled:
        """Make the index say what the store says, wherever a process ended between the two.

        Parameters
        ----------
        look
            Reads a document, or None if there is none; called under the write lock.
        remove
            Deletes a tag's document whose artifact is gone.
        found
            Documents to look at besides those where a process ended.
        """
        with self._database.write_durably() as connection:
            return unsettled.settle(connection, look, remove, found)

    def reclaim(self, remove: Remove, namespace: str | None = None) -> tuple[int, int]:
        """Free the chunks and block records that no artifact and no running push of any namespace needs.

        Parameters
        ----------
        remove
            Called, maybe several times, with ``(namespace, key)`` of block records and with chunk
            digests to remove from the store, while the write lock is held; it must not use the index.
            If it raises, what was listed stays reclaimable.
        namespace
            Whose chunks to count; by default what left the store.

        Returns
        -------
        tuple
            Number of chunks freed, or given up by the namespace, and their bytes.
        """
        with self._database.write_durably() as connection:
            reclaim.doom(connection)
        count = size = 0
        more = True
        while more:
            with self._database.write_durably() as connection:
                batch = reclaim.reclaim(connection, remove, namespace)
            count, size, more = count + batch.chunks, size + batch.bytes, batch.more
        return count, size

    def reclaimable(self, now: datetime) -> Reclaimable:
        """What `expire_pushes` and `reclaim` would do; nothing is changed."""
        with suppress(_Undone), self._database.write() as connection:
            expired = pushes.expire(connection, now)
            reclaim.doom(connection)
            found = reclaim.listed(connection, expired)
            raise _Undone
        return found

    def let_go(self, namespace: str, policy: Policy, now: datetime) -> list[LetGo]:
        """The artifacts that the policy's rules let go of."""
        self._uses.write(USES_S)
        with self._database.read() as connection:
            return retention.let_go(connection, namespace, policy, now)

    def freed(self, rows: Sequence[int]) -> Freed:
        """What would be freed if the artifacts of these rows were gone."""
        with self._database.read() as connection:
            return retention.freed(connection, rows)

    def unindexed(self, documents: Sequence[Noted]) -> list[Noted]:
        """Those of the store's documents that no row stands for."""
        with self._database.read() as connection:
            return orphans.unindexed(connection, documents)

    def orphans(self, objects: Objects) -> Objects:
        """Those of the store's objects that no row knows: no artifact, no running push, nothing about to be reclaimed."""
        with self._database.read() as connection:
            return orphans.unknown(connection, objects)

    def sweep(self, objects: Objects, remove: Callable[[Objects], None]) -> None:
        """Have those of the objects removed that no row knows, part by part, while the write lock is held."""
        with self._database.write() as connection:
            unknown = orphans.unknown(connection, objects)
            for chunks in reclaim.while_locked(connection, unknown.chunks):
                remove(Objects(chunks=chunks))
            for records in reclaim.while_locked(connection, unknown.records):
                remove(Objects(records=records))
            for manifests in reclaim.while_locked(connection, unknown.manifests):
                remove(Objects(manifests=manifests))

    def rebuild(
        self,
        entries: Iterable[Entry],
        tags: Iterable[TagInfo],
        divergences: Iterable[Divergence],
        unread: Iterable[Noted] = (),
        keep: Collection[Noted] = (),
    ) -> Rebuilt:
        """Replace everything that is derived from the store, in one transaction.

        ``unread``, iterated last, are documents that could not be read, and ``keep`` those of them whose artifacts
        keep their rows.

        Pass generators that list the store only when iterated: that happens under the write lock,
        and a listing made before it could miss an artifact published meanwhile. They must not use
        the index.

        Raises
        ------
        Divergence, MalformedDocument
            If two entries contradict each other; the index is then unchanged.
        Unkept
            If ``keep`` must be another; the index is then unchanged, too.
        """
        with self._database.write_durably() as connection:
            return rebuild.rebuild(connection, entries, tags, divergences, unread, keep)

    def complete(
        self,
        entries: Iterable[Entry],
        tags: Iterable[TagInfo],
        divergences: Iterable[Divergence],
        unread: Iterable[Noted],
    ) -> None:
        """`rebuild`, unless somebody else has done so meanwhile."""
        with self._database.write_durably() as connection:
            if not meta.is_complete(connection):
                rebuild.rebuild(connection, entries, tags, divergences, unread)

    def with_row(self, document: Noted, write: Callable[[], None]) -> bool:
        """Call ``write`` under the write lock if a row still stands for the document; False if none does."""
        with self._database.write() as connection:
            if orphans.unindexed(connection, [document]):
                return False
            write()
            return True

    def mark_damaged(self, digests: Sequence[str]) -> None:
        """Await chunks again whose bytes are damaged or gone, so that the next push of one sends it."""
        with self._database.write() as connection:
            damage.mark(connection, digests)

    def running_pushes(self) -> int:
        """The number of pushes of all namespaces whose lease has not run out."""
        with self._database.read() as connection:
            return pushes.running(connection)

    def artifacts_after(self, row: int, limit: int) -> list[PublishedArtifact]:
        """The published artifacts of all namespaces, page by page; begin with row 0."""
        with self._database.read() as connection:
            return damage.artifacts_after(connection, row, limit)

    def records_after(self, row: int, limit: int) -> list[PublishedRecord]:
        """The published blocks of all namespaces, page by page; begin with row 0."""
        with self._database.read() as connection:
            return damage.records_after(connection, row, limit)

    def mark_whole(self, digests: Sequence[str]) -> None:
        """Take back that chunks are damaged, whose bytes have been read and verified."""
        with self._database.write() as connection:
            damage.mark_whole(connection, digests)

    def divergences_after(self, last: Divergence | None, limit: int) -> list[Divergence]:
        """The divergences of all namespaces, page by page; begin with None."""
        with self._database.read() as connection:
            return divergences.after(connection, last, limit)

    def chunks_after(self, digest: str | None, limit: int) -> list[PublishedChunk]:
        """The chunks that artifacts refer to, each once, page by page; begin with None."""
        with self._database.read() as connection:
            return damage.chunks_after(connection, digest, limit)

    def holders_of_chunk(self, digest: str) -> list[Holder]:
        """The artifacts that refer to a chunk, in every namespace."""
        with self._database.read() as connection:
            return damage.holders_of_chunk(connection, digest)

    def holders_of_block(self, row: int) -> list[Holder]:
        """The artifacts that refer to a block, by its row."""
        with self._database.read() as connection:
            return damage.holders_of_block(connection, row)
