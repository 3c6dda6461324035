"""Which index a store belongs to: two indexes on one store would each take what the other needs for garbage."""

from __future__ import annotations

from repo_service.domain.errors import Conflict, DocumentCorrupt
from repo_service.domain.views import View
from repo_service.services.documents import OWNER, seal, unseal
from repo_service.storage import Store

TAKE_OVER = "kvgraft reindex --take-over"


class OwnerDocument(View):
    """The index that a store belongs to."""

    index: str
    """Id that the index gave itself."""


class Ownership:
    """What an index claims of a store.

    Parameters
    ----------
    where
        The store's URL, for messages.
    index_id
        The index's own id.
    """

    def __init__(self, store: Store, where: str, index_id: str) -> None:
        self._store = store
        self._where = where
        self._index_id = index_id

    def claim(self) -> None:
        """Claim the store if it is nobody's yet.

        Raises
        ------
        Conflict
            If it is another index's.
        """
        if self._read() is None:
            self._store.put_if_absent(OWNER, self._document())
        self.check()

    def check(self) -> None:
        """Raise `Conflict` if the store has become another index's."""
        document = self._read()
        if document is None or document.index != self._index_id:
            owner = "no index, since its index.json is gone" if document is None else f"the index {document.index}"
            raise Conflict(
                f"the repository {self._where} belongs to {owner}; this is the index {self._index_id}. Name the one "
                f"it belongs to (KVGRAFT_INDEX), or, if nobody uses that any more, run {TAKE_OVER}",
                index=self._index_id,
                owner=None if document is None else document.index,
            )

    def take_over(self) -> None:
        """Make the store this index's, whose it may be."""
        self._store.put(OWNER, self._document())

    def _document(self) -> bytes:
        return seal(OwnerDocument(index=self._index_id))

    def _read(self) -> OwnerDocument | None:
        data = self._store.get(OWNER)
        if data is None:
            return None
        try:
            return unseal(OWNER, data, OwnerDocument, lambda _: OWNER)
        except DocumentCorrupt as error:
            raise Conflict(
                f"nobody can tell which index the repository {self._where} belongs to: {error.message}. Run {TAKE_OVER} "
                f"with the one to use",
                index=self._index_id,
            ) from None
