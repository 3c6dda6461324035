"""Reclaiming: nothing that is needed goes, nothing is promised that is going."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pytest
from index_support import DAY, begin, empty_index, entry, keys, publish, send
from synthetic import fingerprint

from repo_service.domain.errors import ArtifactNotFound, ChunksMissing
from repo_service.index import Entry, Index, reclaim


@pytest.fixture
def index(tmp_path: Path, index_kind: str) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path, index_kind)) as opened:
        yield opened


@dataclass
class Store:
    """The chunks and block records that a store would hold."""

    chunks: set[str]
    records: set[tuple[str, str]]

    @classmethod
    def of(cls, *entries: Entry) -> Self:
        return cls(
            {digest for what in entries for digest in what.specs()},
            {(what.namespace, key) for what in entries for key in keys(what)},
        )

    def remove(self, records: list[tuple[str, str]], chunks: list[str]) -> None:
        self.records -= set(records)
        self.chunks -= set(chunks)


def size(*entries: Entry) -> int:
    return sum({digest: spec.size for what in entries for digest, spec in what.specs().items()}.values())


def test_what_an_unpublished_artifact_alone_needed_is_freed(index: Index) -> None:
    short, long = entry(range(32)), entry(range(64))
    store = Store.of(short, long)
    publish(index, short)
    publish(index, long)
    assert index.reclaim(store.remove) == (0, 0)
    index.unpublish("default", long.manifest.id)
    only_long = set(long.specs()) - set(short.specs())
    assert index.reclaim(store.remove) == (len(only_long), size(short, long) - size(short))
    assert store == Store.of(short)
    assert index.reclaim(store.remove) == (0, 0)


def with_chunks_of(what: Entry, other: Entry) -> Entry:
    """``what`` with the bytes of another's first block, as two blocks that begin alike have in their first layers."""
    record = replace(what.records[0], chunks=other.records[0].chunks)
    manifest = replace(what.manifest, blocks=((record.key, record.digest), *what.manifest.blocks[1:]))
    return replace(what, manifest=manifest, records=[record, *what.records[1:]])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(entry(range(40), fingerprint(numerics={"torch": "2.10"})), id="equal tokens on another machine"),
        pytest.param(with_chunks_of(entry(range(60, 90)), entry(range(40))), id="equal chunks in other blocks"),
    ],
)
def test_a_chunk_stays_while_anything_of_another_artifact_needs_it(index: Index, other: Entry) -> None:
    what = entry(range(40))
    store = Store.of(what, other)
    shared = set(what.specs()) & set(other.specs())
    assert shared
    publish(index, what)
    publish(index, other)
    index.unpublish("default", what.manifest.id)
    index.reclaim(store.remove)
    assert store == Store.of(other)
    assert index.offer(begin(index), [], {digest: what.specs()[digest] for digest in shared}).missing == []


def test_what_a_running_push_of_any_namespace_needs_stays(index: Index) -> None:
    what = entry(range(40))
    store = Store.of(what)
    publish(index, what)
    mine, theirs = begin(index), begin(index, "theirs")
    index.offer(mine, what.records, what.specs())
    index.offer(theirs, what.records, what.specs())
    index.unpublish("default", what.manifest.id)
    assert index.reclaim(store.remove) == (0, 0)
    index.end_push(mine)
    assert index.reclaim(store.remove) == (0, 0)
    assert store.chunks == set(what.specs())
    assert store.records == set()
    index.end_push(theirs)
    index.reclaim(store.remove)
    assert store.chunks == set()


def test_a_chunk_that_two_pushes_await_is_awaited_until_both_end(index: Index) -> None:
    what = entry(range(40))
    store = Store.of(what)
    ended, running = begin(index), begin(index)
    index.offer(ended, what.records, what.specs())
    index.offer(running, what.records, what.specs())
    index.end_push(ended)
    assert index.reclaim(store.remove) == (0, 0)
    assert store == Store.of(what)
    send(index, running, what)
    index.publish(what)


def test_a_push_that_was_told_a_chunk_is_there_can_commit_after_its_artifact_is_gone(index: Index) -> None:
    what = entry(range(40))
    store = Store.of(what)
    publish(index, what)
    push = begin(index)
    assert index.offer(push, what.records, what.specs()).missing == []
    index.unpublish("default", what.manifest.id)
    index.reclaim(store.remove)
    assert index.unarrived(push, list(what.specs())) == []
    index.publish(what)
    assert store == Store.of(what)


def test_bytes_that_two_namespaces_published_stay_until_both_let_go(index: Index) -> None:
    mine, theirs = entry(range(40)), entry(range(40), namespace="theirs")
    store = Store.of(mine, theirs)
    for what in (mine, theirs):
        publish(index, what)
    index.unpublish("default", mine.manifest.id)
    assert index.reclaim(store.remove) == (0, 0)
    assert store == Store.of(theirs)
    index.unpublish("theirs", theirs.manifest.id)
    assert index.reclaim(store.remove) == (len(mine.specs()), size(mine))
    assert store == Store.of()


def test_bytes_that_two_namespaces_let_go_of_at_once_are_freed_once(index: Index) -> None:
    both = [entry(range(40), namespace=namespace) for namespace in ("one", "two")]
    store = Store.of(*both)
    for what in both:
        publish(index, what)
    for what in both:
        index.unpublish(what.namespace, what.manifest.id)
    assert index.reclaim(store.remove) == (len(both[0].specs()), size(both[0]))
    assert store == Store.of()


def test_what_an_expired_push_sent_is_freed(index: Index) -> None:
    what = entry(range(40))
    store = Store.of(what)
    send(index, begin(index), what)
    index.expire_pushes(datetime.now(UTC) + 2 * DAY)
    assert index.reclaim(store.remove) == (len(what.specs()), size(what))
    assert store == Store.of()


def test_bytes_that_came_without_being_noted_are_freed_but_not_counted(index: Index) -> None:
    """A crash between writing a chunk and noting its arrival."""
    what = entry(range(40))
    store = Store.of(what)
    push = begin(index)
    index.offer(push, what.records, what.specs())
    index.end_push(push)
    assert index.reclaim(store.remove) == (0, 0)
    assert store == Store.of()


def test_what_a_committed_push_sent_stays(index: Index) -> None:
    what = entry(range(40))
    store = Store.of(what)
    publish(index, what)
    assert index.reclaim(store.remove) == (0, 0)
    assert store == Store.of(what)


def test_many_batches_free_everything(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "_VICTIMS", reclaim._VICTIMS.limit(7))
    monkeypatch.setattr(reclaim, "_RECORDS", reclaim._RECORDS.limit(7))
    monkeypatch.setattr(reclaim, "BATCH", 7)
    what = entry(range(200))
    store = Store.of(what)
    publish(index, what)
    index.unpublish("default", what.manifest.id)
    assert index.reclaim(store.remove) == (len(what.specs()), size(what))
    assert store == Store.of()


def test_chunks_whose_removal_was_cut_short_are_promised_to_nobody(index: Index) -> None:
    """I4: some of the bytes are gone, the transaction was undone, as a crash would leave it."""
    what = entry(range(40))
    store = Store.of(what)
    publish(index, what)
    index.unpublish("default", what.manifest.id)

    def cut_short(records: list[tuple[str, str]], chunks: list[str]) -> None:
        store.remove(records[:1], chunks[:1])
        raise OSError("the disk went away")

    with pytest.raises(OSError, match="went away"):
        index.reclaim(cut_short)
    with pytest.raises(ChunksMissing):
        index.publish(what)
    push = begin(index)
    assert index.offer(push, what.records, what.specs()).missing == list(what.specs())
    index.end_push(push)
    index.reclaim(store.remove)
    assert store == Store.of()


def test_an_offer_during_reclaiming_is_told_that_what_goes_is_missing_quay_6318(index: Index) -> None:
    """The offer waits for the write lock, so it never sees a row whose bytes are on their way out."""
    what = entry(range(40))
    store = Store.of(what)
    publish(index, what)
    index.unpublish("default", what.manifest.id)
    push, answers, offering = begin(index), [], threading.Event()

    def offer() -> None:
        offering.set()
        answers.append(index.offer(push, what.records, what.specs()).missing)

    racer = threading.Thread(target=offer)

    def remove(records: list[tuple[str, str]], chunks: list[str]) -> None:
        if not offering.is_set():
            racer.start()
            offering.wait()
        racer.join(0.2)
        assert answers == []
        store.remove(records, chunks)

    index.reclaim(remove)
    racer.join()
    assert answers == [list(what.specs())]


def test_pushes_and_reclaiming_at_once_lose_nothing_that_was_promised_quay_6318(index: Index) -> None:
    """Several pushers of the same content, one deleting and reclaiming: what is published is in the store."""
    what = entry(range(32))
    store, lock, errors = Store.of(), threading.Lock(), []
    done = threading.Event()

    def remove(records: list[tuple[str, str]], chunks: list[str]) -> None:
        with lock:
            store.remove(records, chunks)

    def push_repeatedly() -> None:
        try:
            for _ in range(5):
                push = begin(index)
                for digest in index.offer(push, what.records, what.specs()).missing:
                    with lock:
                        store.chunks.add(digest)
                    index.arrived(push, digest)
                assert index.unarrived(push, list(what.specs())) == []
                index.publish(what)
                index.end_push(push)
        except BaseException as error:
            errors.append(error)

    def delete_repeatedly() -> None:
        try:
            while not done.is_set():
                with suppress(ArtifactNotFound):
                    index.unpublish("default", what.manifest.id)
                index.reclaim(remove)
        except BaseException as error:
            errors.append(error)

    pushers = [threading.Thread(target=push_repeatedly) for _ in range(3)]
    deleter = threading.Thread(target=delete_repeatedly)
    for thread in (*pushers, deleter):
        thread.start()
    for thread in pushers:
        thread.join()
    done.set()
    deleter.join()
    assert errors == []
    push = begin(index)
    sent = index.offer(push, what.records, what.specs()).missing
    assert store.chunks >= set(what.specs()) - set(sent)
