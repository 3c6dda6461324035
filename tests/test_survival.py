"""What must outlive interruptions in the middle of recovery itself, and disks that fail in part."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from beside import beside, forked
from places import INSIDE, Place
from pushing import Artifact, expire_pushes, push
from synthetic import artifact, fingerprint

from repo_service.domain.errors import Divergence as DivergenceError
from repo_service.domain.errors import DocumentCorrupt, KvgraftError, Unavailable
from repo_service.domain.views import Divergence
from repo_service.index import Entry, Index, Rebuilt
from repo_service.services import opening
from repo_service.services import reindex as reindexing
from repo_service.services.documents import divergence_place, entry_key, manifest_key, policy_key
from repo_service.services.opening import open_local
from repo_service.services.read import read_entry
from repo_service.services.repository import LocalRepository
from repo_service.storage import S3Store, Store

pytestmark = pytest.mark.everywhere

SHARED = random.Random(1).choices(range(1000), k=32)
X, Y = (artifact([*SHARED, *range(n, n + 20)], fingerprint()) for n in (0, 500))


@pytest.fixture
def url(root: Place) -> str:
    return root.as_uri()


def lose_index(root: Place) -> None:
    for path in root.glob("index.sqlite*"):
        path.unlink()


def whole(repository: LocalRepository, made: Artifact) -> bool:
    return repository.check(made[0].id, "default").ok


@contextmanager
def unreadable(root: Place, made: Artifact) -> Iterator[None]:
    """The artifact's manifest can't be read for a while."""
    with unreadable_document(root, manifest_key(made[0].id)):
        yield


@contextmanager
def unreadable_document(root: Place, key: str) -> Iterator[None]:
    path = root / key
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    try:
        yield
    finally:
        path.write_bytes(data)


@pytest.mark.everywhere(but={"postgres": INSIDE, "s3": INSIDE})
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_the_rebuild_of_a_lost_index_that_did_not_finish_is_done_again(
    root: Place, url: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next opening served an empty index, and deletions took the chunks of what it did not know."""
    with open_local(url) as repository:
        push(repository, X)
    lose_index(root)

    def die(*_: object, **__: object) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Unavailable("the disk is away")

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(opening, "complete", die)
        try:
            open_local(url)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    with open_local(url) as repository:
        assert whole(repository, X)
        push(repository, Y)
        repository.delete(Y[0].id, "default")
        assert whole(repository, X)


@pytest.mark.everywhere(but={"postgres": INSIDE, "s3": INSIDE})
def test_whoever_opens_while_a_lost_index_is_rebuilt_waits_for_it(root: Place, url: str) -> None:
    with open_local(url) as repository:
        push(repository, X)
    lose_index(root)
    seen: list[bool] = []

    def look() -> None:
        with open_local(url) as repository:
            seen.append(whole(repository, X))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


def test_an_artifact_keeps_its_rows_while_it_cannot_be_read(root: Place, url: str) -> None:
    """A reindex on a disk that failed left out what the index knew."""
    with open_local(url) as repository:
        push(repository, X)
        push(repository, Y)
        repository.set_tag("default", "kept", X[0].id)
        repository.set_tag("default", "other", Y[0].id)
        index = repository._index
        before = index.dump()
        with unreadable(root, X), unreadable_document(root, "tags/default/other.json"):
            assert len(repository.reindex().corrupt) == 2, "the entry and a tag"
            assert index.dump() == before
            repository.delete(Y[0].id, "default")
            report = repository.collect_garbage(grace_s=0)
            assert report.unreadable == [], "rows tell what the artifact needs"
            (found,) = repository.scrub().damage
            assert (found.kind, found.artifacts) == ("manifest", [("default", X[0].id)])
        assert repository.artifact("kept", "default").id == X[0].id
        assert whole(repository, X)
        assert repository.scrub().damage == []


def test_i2_a_divergence_keeps_its_row_while_it_cannot_be_read(root: Place, url: str) -> None:
    """A reindex dropped it, and a scrub could not write it again."""
    with open_local(url) as repository:
        push(repository, artifact([7] * 40, fingerprint()))
        with pytest.raises(DivergenceError):
            push(repository, artifact([7] * 40, fingerprint(), seed=1))
        (divergence,) = repository.divergences("default")
        (root / divergence_place(divergence)).write_bytes(b"{")
        assert repository.reindex().corrupt == [divergence_place(divergence)]
        assert repository.divergences("default") == [divergence]
        (found,) = repository.scrub().damage
        assert (found.kind, found.healed) == ("divergence", True)
        assert repository.reindex().corrupt == []


def test_rows_of_an_artifact_that_is_gone_are_not_kept_for_its_being_unreadable_before(
    root: Place, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removed it did so while the store was read once more."""
    with open_local(url) as repository:
        push(repository, X)
        push(repository, Y)
        entry = root / entry_key("default", X[0].id)
        rebuild = Index.rebuild
        kept: list[int] = []

        def once_more(index: Index, *surveyed: Any) -> Rebuilt:
            kept.append(len(surveyed[-1]))
            if len(kept) == 2:
                entry.unlink()
            return rebuild(index, *surveyed)

        monkeypatch.setattr(Index, "rebuild", once_more)
        with unreadable(root, X):
            report = repository.reindex()
        assert kept == [0, 1, 0]
        assert (report.artifacts, report.corrupt) == (1, [])


def test_large_artifacts_are_indexed_one_at_a_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(url) as repository:
        push(repository, X)
        push(repository, artifact(range(16), fingerprint()))
        before = repository._index.dump()
        monkeypatch.setattr(reindexing, "_AHEAD_BLOCKS", 1)
        assert repository.reindex().artifacts == 2
        assert repository._index.dump() == before


def test_a_store_that_reads_now_and_then_only_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(url) as repository:
        push(repository, X)
        before = repository._index.dump()
        calls = itertools.count()

        def now_and_then(store: Store, key: str, **more: int) -> Entry | None:
            if next(calls) % 2 == 0:
                raise DocumentCorrupt("the disk is dying")
            return read_entry(store, key, **more)

        monkeypatch.setattr(reindexing, "read_entry", now_and_then)
        with pytest.raises(Unavailable, match="one moment and not at the next"):
            repository.reindex()
        assert repository._index.dump() == before


@pytest.mark.everywhere(but={"postgres": INSIDE, "s3": INSIDE})
def test_what_an_artifact_needs_stays_while_it_cannot_be_read(root: Place, url: str) -> None:
    """A new index did not know it, and a deletion took what it shares with another."""
    with open_local(url) as repository:
        push(repository, X)
        push(repository, Y)
        repository.set_tag("default", "kept", X[0].id)
    lose_index(root)
    with unreadable(root, X), open_local(url) as repository:
        repository.delete(Y[0].id, "default")
        report = repository.collect_garbage(grace_s=0)
        assert report.unreadable
        assert (report.chunks, report.block_records, report.manifests) == (0, 0, 0)
        (found,) = repository.scrub().damage
        assert (found.kind, found.artifacts) == ("entry", [("default", X[0].id)])
    with open_local(url) as repository:
        report = repository.collect_garbage(grace_s=0)
        assert report.unreadable == []
        assert report.chunks > 0, "what only the other needed"
        assert repository.artifact("kept", "default").id == X[0].id
        assert whole(repository, X)
        assert repository.scrub().damage == []


def test_a_note_whose_entry_cannot_be_read_keeps_what_the_entry_needs(
    root: Place, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process died between entry and index; then the manifest could not be read for a while."""
    open_local(url).close()
    child = os.fork()
    if child == 0:
        try:
            repository = open_local(url)
            store = type(repository._store)
            put = store.put

            def last(self: Store, key: str, data: bytes) -> None:
                put(self, key, data)
                if key.startswith("entries/"):
                    os.kill(os.getpid(), signal.SIGKILL)

            monkeypatch.setattr(store, "put", last)
            push(repository, X)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    with unreadable(root, X):
        expire_pushes(root)
        with open_local(url) as repository:
            assert repository.collect_garbage(grace_s=0).unreadable
    with open_local(url) as repository:
        assert whole(repository, X)
        assert repository.collect_garbage(grace_s=0).unreadable == []


def test_an_artifact_that_cannot_be_read_can_be_removed(root: Place, url: str) -> None:
    with open_local(url) as repository:
        push(repository, X)
        (root / manifest_key(X[0].id)).unlink()
        repository.reindex()
        with pytest.raises(KvgraftError):
            repository.delete("sha256:" + 64 * "0", "default")
        repository.delete(X[0].id, "default")
        report = repository.collect_garbage(grace_s=0)
        assert report.unreadable == []
        assert not [path for path in (root / "chunks").rglob("*") if path.is_file()]


def test_what_cannot_be_removed_is_named_and_the_rest_goes(
    root: Place, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file that could not be unlinked stopped all reclaiming."""
    with open_local(url) as repository:
        push(repository, X)
        stuck = next(path for path in sorted((root / "chunks").rglob("*")) if path.is_file())
        unlink, delete = os.unlink, S3Store.delete

        def fail(path: str, **options: int) -> None:
            if str(path) == str(stuck):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            unlink(path, **options)

        def refuse(store: S3Store, key: str, **options: bool) -> None:
            if key == str(stuck.relative_to(root)):
                raise Unavailable("403 AccessDenied")
            delete(store, key, **options)

        monkeypatch.setattr(os, "unlink", fail)
        monkeypatch.setattr(S3Store, "delete", refuse)
        repository.delete(X[0].id, "default")
        assert [path for path in (root / "chunks").rglob("*") if path.is_file()] == [stuck]
        report = repository.collect_garbage(grace_s=0)
        assert report.stuck == [str(stuck.relative_to(root))]
        monkeypatch.undo()
        report = repository.collect_garbage(grace_s=0)
        assert (report.chunks, report.stuck) == (1, [])


@pytest.mark.everywhere(but={"s3": "a bucket holds nothing but objects"})
@pytest.mark.parametrize("what", ["loop", "pipe", "directory"])
@pytest.mark.parametrize("kind", ["chunks", "blocks", "artifacts", "entries"])
def test_something_else_in_a_files_place_is_damage(root: Place, url: str, kind: str, what: str) -> None:
    with open_local(url) as repository:
        push(repository, X)
        push(repository, Y)
        path = next(path for path in sorted((root / kind).rglob("*")) if path.is_file())
        path.unlink()
        if what == "loop":
            path.symlink_to(path)
        elif what == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
        found = repository.scrub().damage
        assert len(found) == 1
        if what != "directory":
            push(repository, X)
            push(repository, Y)
            assert whole(repository, X)
            assert whole(repository, Y)
            assert repository.scrub().damage == []
        repository.reindex()


def test_a_scrub_reads_policies_and_every_divergence(root: Place, url: str) -> None:
    with open_local(url) as repository:
        push(repository, X)
        now = datetime.now(UTC)
        made = [
            Divergence(
                id=f"{n:064x}", namespace="default", block_key=X[1][0].key, stored_record=X[1][0].digest,
                offered_record=X[1][1].digest, chunks=[], created_at=now - timedelta(seconds=n),
            )
            for n in range(1200)
        ]  # fmt: skip
        for divergence in made:
            repository._index.record_divergence(divergence)
        assert repository.scrub().damaged == len(made), "none is in the store yet"
        assert repository.scrub().damaged == 0
        (root / divergence_place(made[-1])).unlink()
        (root / "policies").mkdir()
        (root / policy_key("default")).write_bytes(b"{}")
        assert {item.kind for item in repository.scrub().damage} == {"divergence", "policy"}


def test_a_scrub_takes_back_damage_that_is_none(root: Place, url: str) -> None:
    with open_local(url) as repository:
        push(repository, X)
        path = next(path for path in (root / "chunks").rglob("*") if path.is_file())
        data = path.read_bytes()
        path.write_bytes(b"")
        assert repository.scrub().damaged == 1
        path.write_bytes(data)
        assert repository.scrub().damaged == 0
        _, sent = push(repository, Y)
        assert f"blake3:{path.parent.name}{path.name}" not in sent


def test_a_child_writes_although_its_parent_wrote_when_it_was_born(url: str) -> None:
    """It inherited the lock of a transaction that was not its own, and was locked out."""
    with open_local(url) as repository:

        def write(stop: threading.Event) -> None:
            n = 0
            while not stop.is_set():
                n += 1
                push(repository, artifact([n, n + 1, n + 2], fingerprint()))

        with beside(write):
            for n in range(12):
                made = artifact([1000 + n] * 3, fingerprint())
                assert forked(partial(push, repository, made), 120) == 0


@pytest.mark.everywhere(but={"postgres": "its locks are no files", "s3": INSIDE})
def test_a_job_runs_where_its_lock_file_cannot_be_made(root: Place, url: str) -> None:
    with open_local(url) as repository:
        (root / "index.sqlite-gc").mkdir()
        with repository.alone("gc") as ours:
            assert ours
