"""Rebuild the index from the store alone (I5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from repo_service.domain.errors import UNREADABLE, Unavailable
from repo_service.domain.views import Divergence, ReindexReport, TagInfo, View
from repo_service.index import Entry, Index, Noted, Unkept
from repo_service.services.documents import (
    DIVERGENCES,
    ENTRIES,
    TAGS,
    divergence_place,
    tag_place,
    unseal,
)
from repo_service.services.read import read_ahead, read_entry
from repo_service.services.retention import stored_policies
from repo_service.services.settle import noted_at, settle
from repo_service.storage import Store

V = TypeVar("V", bound=View)


# Disks fail for a moment; one that reads a document now and then only must be seen to.
_TRIES = 5

# Larger artifacts are read one at a time, for their documents and tokens take memory.
_AHEAD_BLOCKS = 512


def reindex(store: Store, index: Index) -> ReindexReport:
    """Read every entry, tag and divergence and replace the index's rows in one transaction.

    What can't be read or does not verify is named in the report, policies too. An artifact or tag that
    the index knows already keeps its rows then; what it does not know is left out and noted, so that it is
    indexed once it can be read, and what an entry needs is not taken for garbage.

    Raises
    ------
    Unavailable
        If what can be read differs from moment to moment.
    """
    keep: Collection[Noted] = ()
    for _ in range(_TRIES):
        survey = _Survey(store, keep)
        try:
            rebuilt = index.rebuild(survey.entries(), survey.tags(), survey.divergences(), survey.unread, keep)
        except Unkept as unkept:
            keep = unkept.entries
            continue
        # What could not be read for a moment only is back at once.
        settle(store, index)
        bad_policies = [key for key, policy in stored_policies(store) if policy is None]
        return ReindexReport(**asdict(rebuilt), corrupt=sorted(survey.corrupt + bad_policies))
    names = ", ".join(sorted(entry.name for entry in keep)[:3])
    raise Unavailable(
        f"the store reads the entries of artifacts at one moment and not at the next, the last time not those of "
        f"{len(keep)}: {names or 'none'}; see what is wrong with it, then try again"
    )


def complete(store: Store, index: Index) -> None:
    """Fill an index that is new, or was lost or left behind, unless somebody else has done so by now."""
    survey = _Survey(store)
    index.complete(survey.entries(), survey.tags(), survey.divergences(), survey.unread)


class _Survey:
    """What a store holds, read when iterated: entries first, then tags and divergences.

    Attributes
    ----------
    corrupt, unread
        Keys that could not be read so far, and which of them are documents that the index can note.
    """

    def __init__(self, store: Store, keep: Collection[Noted] = ()) -> None:
        self.corrupt: list[str] = []
        self.unread: list[Noted] = []
        self._store = store
        self._published = {(entry.namespace, entry.name) for entry in keep}

    def entries(self) -> Iterator[Entry]:
        small = partial(read_entry, self._store, most_blocks=_AHEAD_BLOCKS)
        for key, read in read_ahead(self._store, small, self._store.list(ENTRIES)):
            try:
                entry = read() or read_entry(self._store, key)
            except UNREADABLE:
                self._left_out(key)
                continue
            if entry is not None:
                self._published.add((entry.namespace, entry.manifest.id))
                yield entry

    def tags(self) -> Iterator[TagInfo]:
        for tag in self._documents(TAGS, TagInfo, tag_place):
            if (tag.namespace, tag.artifact_id) in self._published:
                yield tag
            else:
                self._left_out(tag_place(tag))

    def divergences(self) -> Iterator[Divergence]:
        return self._documents(DIVERGENCES, Divergence, divergence_place)

    def _documents(self, prefix: str, kind: type[V], place: Callable[[V], str]) -> Iterator[V]:
        for key, read in read_ahead(self._store, self._store.get, self._store.list(prefix)):
            try:
                yield unseal(key, read() or b"", kind, place)
            except UNREADABLE:
                self._left_out(key)

    def _left_out(self, key: str) -> None:
        self.corrupt.append(key)
        if (noted := noted_at(key)) is not None:
            self.unread.append(noted)
