"""A router over a library, by an index on this node that follows what the repository holds."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

from engine_adapter.engine import Progress
from engine_adapter.library import Library
from engine_adapter.passages import PassageIndex
from engine_adapter.routers import Router, Routing, make_router

# Nodes that publish may disagree about the time by so much.
_CLOCKS = timedelta(hours=1)


class LibraryRouter:
    """Finds artifacts of a library that are there now.

    Opening one lists what was published since this node last did. Everything is listed when an artifact that was found
    is gone.

    Parameters
    ----------
    library
        Of a session.
    name
        A router's name; see `make_router`.
    progress
        Told how many passages are embedded, for dense.

    Raises
    ------
    LibraryEmpty, FingerprintMismatch
        As `Library.artifacts`.
    InvalidInput, ModelUnavailable
        As `PassageIndex.of` and `make_router`.
    """

    def __init__(self, library: Library, name: str = "lexical", progress: Progress | None = None) -> None:
        self._library = library
        session = library.session
        repository_id = session.repository.info().repository_id
        self._index = PassageIndex.of(repository_id, session.namespace, session.fingerprint.id)
        try:
            listed = self._index.listed
            if listed is None:
                self._list_all()
            else:
                news = library.published_since(listed - _CLOCKS)
                self._index.add({held.info.id: held.beginnings for held in news}, self._text)
                self._index.listed = max((held.info.created_at for held in news), default=listed)
            self._router: Router = make_router(name, self._index, progress)
        except BaseException:
            self._index.close()
            raise

    def route(self, question: str, limit: int = 5) -> Routing:
        """At most ``limit`` artifacts, all of which are there.

        Raises
        ------
        LibraryEmpty
            If none of the library is.
        """
        routing = self._router.route(question, limit)
        if any(self._library.held(route.artifact_id) is None for route in routing.routes):
            self._list_all()
            routing = self._router.route(question, limit)
        return routing

    def close(self) -> None:
        self._index.close()

    def __enter__(self) -> LibraryRouter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _list_all(self) -> None:
        held = self._library.artifacts()
        self._index.update({item.info.id: item.beginnings for item in held}, self._text)
        self._index.listed = held[-1].info.created_at

    def _text(self, artifact_id: str) -> str:
        session = self._library.session
        return session.repository.manifest(artifact_id, session.namespace).text or ""
