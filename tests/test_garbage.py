"""Garbage collection and crash recovery: what nothing needs goes, and a crash leaves nothing half done."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from places import Place
from pushing import Artifact, expire_pushes, offer, push
from serving import served
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.domain.errors import ArtifactNotFound, ChunksMissing, PushNotFound, StorageFull
from repo_service.domain.repository import Repository
from repo_service.domain.views import GarbageReport
from repo_service.services.opening import open_local
from repo_service.services.repository import LocalRepository
from repo_service.services.reserve import Reserve
from repo_service.storage import Store

pytestmark = pytest.mark.everywhere

MADE_WITH = fingerprint()


def made(seed: int, count: int = 40) -> Artifact:
    return artifact(random.Random(seed).choices(range(1000), k=count), MADE_WITH)


def stored(root: Place) -> set[str]:
    """Every file of the store but the marker and the index."""
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {
        name for name in files if name not in {"kvgraft.json", "index.json"} and not name.startswith("index.sqlite")
    }


def test_a_repository_without_garbage_stays_as_it_is(repository: Repository, root: Place) -> None:
    info, _ = push(repository, made(1))
    repository.set_tag("default", "kept", info.id)
    before = stored(root)
    report = repository.collect_garbage(grace_s=0)
    assert stored(root) == before
    assert report == GarbageReport(
        dry_run=False, settled=0, expired_pushes=0, artifacts=0, chunks=0, block_records=0, manifests=0,
        temp_files=0, quarantined=0, bytes=0, unreadable=[], stuck=[], removed=[],
    )  # fmt: skip
    assert repository.check(info.id, "default").ok


@pytest.mark.everywhere(always=True)
def test_what_a_running_push_was_told_not_to_send_stays_until_it_ends(repository: Repository, root: Place) -> None:
    one = made(1)
    info, sent = push(repository, one)
    running = repository.begin_push(MADE_WITH, "default")
    assert offer(running, one[0], one[1]) == []
    repository.delete(info.id, "default")
    assert repository.collect_garbage(grace_s=0).chunks == 0
    assert running.commit(one[0]).id == info.id
    assert repository.check(info.id, "default").ok
    repository.delete(info.id, "default")
    assert repository.collect_garbage(grace_s=0).chunks == 0, "a deletion frees by itself"
    assert len(sent) > 0
    assert stored(root) == set(), "not even the manifest"


def test_an_abandoned_push_gives_its_space_back_when_its_lease_is_over(repository: Repository, root: Place) -> None:
    one = made(1)
    running = repository.begin_push(MADE_WITH, "default")
    for digest in offer(running, one[0], one[1])[:3]:
        running.put(digest, one[2][digest])
    assert repository.collect_garbage(grace_s=0).chunks == 0
    assert len(stored(root)) == 3
    expire_pushes(root)
    rehearsed = repository.collect_garbage(grace_s=0, dry_run=True)
    assert rehearsed.dry_run
    assert len(stored(root)) == 3
    report = repository.collect_garbage(grace_s=0)
    assert report.chunks == rehearsed.chunks == 3
    assert report.bytes == rehearsed.bytes > 0
    assert stored(root) == set()
    with pytest.raises(PushNotFound):
        running.commit(one[0])


@pytest.mark.everywhere(always=True)
def test_objects_that_no_row_knows_go_after_the_grace(repository: Repository, root: Place) -> None:
    kept, _ = push(repository, made(1))
    gone, _ = push(repository, made(2))
    before = stored(root)
    inside = isinstance(repository, LocalRepository) and (root / "index.sqlite").exists()
    if inside:
        (root / "index.sqlite").rename(root.parent / "aside")
    manifest = root / "artifacts" / gone.id[7:9] / f"{gone.id[9:]}.json"
    copies = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "index" not in path.name}
    if inside:
        (root.parent / "aside").rename(root / "index.sqlite")
    repository.delete(gone.id, "default")
    for path, data in copies.items():
        if not path.exists() and "entries" not in path.parts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (root / "chunks" / "not-ours").write_text("left alone")
    assert repository.collect_garbage(grace_s=3600).removed == []
    report = repository.collect_garbage(grace_s=0)
    assert report.manifests == 1
    assert report.chunks > 0
    assert report.block_records > 0
    assert not manifest.exists()
    assert stored(root) < before | {"chunks/not-ours"}
    assert repository.check(kept.id, "default").ok
    assert (root / "chunks" / "not-ours").exists()


def test_an_entry_that_the_index_lost_is_indexed_again_not_collected(repository: Repository, root: Place) -> None:
    info, _ = push(repository, made(1))
    repository.set_tag("default", "kept", info.id)
    entry = next((root / "entries" / "default").iterdir())
    tag = root / "tags" / "default" / "kept.json"
    copies = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "index" not in path.name}
    repository.delete(info.id, "default")
    for path, data in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert entry.exists()
    assert tag.exists()
    rehearsed = repository.collect_garbage(grace_s=0, dry_run=True)
    assert (rehearsed.settled, rehearsed.removed) == (2, [])
    report = repository.collect_garbage(grace_s=0)
    assert report.settled == 2
    assert report.removed == []
    assert repository.check("kept", "default").ok


def test_while_an_entry_cannot_be_read_nothing_of_its_goes(repository: Repository, root: Place) -> None:
    info, _ = push(repository, made(1))
    path = root / "artifacts" / info.id[7:9] / f"{info.id[9:]}.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert repository.reindex().corrupt
    before = stored(root)
    assert repository.collect_garbage(grace_s=0).unreadable == [], "its rows are kept"
    assert stored(root) == before
    path.write_bytes(whole)
    assert repository.collect_garbage(grace_s=0).settled == 0
    assert repository.check(info.id, "default").ok


@pytest.mark.everywhere(but={"s3": "nothing half written is seen in a bucket"})
def test_temp_files_of_dead_writers_go_and_those_of_live_ones_stay(repository: Repository, root: Place) -> None:
    push(repository, made(1))
    writer = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from repo_service.storage.local import LocalStore
        with LocalStore(Path(sys.argv[1]))._written(b"data"):
            print("written", flush=True)
            time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", writer, str(root)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert repository.collect_garbage(grace_s=0).temp_files == 0
        assert len(os.listdir(root / "tmp")) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert repository.collect_garbage(dry_run=True).temp_files == 1
        assert repository.collect_garbage().temp_files == 1
    assert os.listdir(root / "tmp") == []


def test_everything_removed_has_a_line_in_the_audit_log(root: Place, caplog: pytest.LogCaptureFixture) -> None:
    with open_repository(root.as_uri()) as repository, caplog.at_level(logging.INFO, "kvgraft.audit"):
        info, sent = push(repository, made(1))
        report = repository.delete(info.id, "default")
        lines = [record.getMessage() for record in caplog.records if record.name == "kvgraft.audit"]
        assert sum('"kind": "chunk"' in line for line in lines) == report.chunks == len(sent)
        assert any("manifest" in line for line in lines), "its manifest too"


@pytest.mark.parametrize("operation", ["publish", "delete", "tag", "untag"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_dies_between_store_and_index_leaves_them_in_agreement(
    root: Place, operation: str, moment: str
) -> None:
    """``moment``: around the write to the store, the commit of the index never comes."""
    url = root.as_uri()
    with open_repository(url) as repository:
        old, _ = push(repository, made(1))
        repository.set_tag("default", "name", old.id)
        new, _ = push(repository, made(2))
        if operation == "publish":
            repository.delete(new.id, "default")
    program = textwrap.dedent("""
        import os, random, signal, sys
        sys.path.insert(0, "tests")
        from pushing import push
        from test_garbage import made
        from repo_service.services.opening import open_local
        url, operation, moment, old, new = sys.argv[1:]
        repository = open_local(url)
        def dying(method):
            def call(self, key, *data, **options):
                hit = key.startswith(("entries/", "tags/"))
                if hit and moment == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                method(self, key, *data, **options)
                if hit:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call
        store = type(repository._store)
        store.put, store.delete = dying(store.put), dying(store.delete)
        {
            "publish": lambda: push(repository, made(2)),
            "delete": lambda: repository.delete(old, "default"),
            "tag": lambda: repository.set_tag("default", "name", new),
            "untag": lambda: repository.delete_tag("default", "name"),
        }[operation]()
    """)
    command = [sys.executable, "-c", program, url, operation, moment, old.id, new.id]
    ended = subprocess.run(command, check=False, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with open_local(url) as repository:
        before = repository._index.dump()
        report = repository.reindex()
        assert report.corrupt == []
        assert repository._index.dump() == before
        happened = moment == "after"
        if operation == "publish":
            assert (repository.stats("default").artifacts == 2) is happened
        if operation == "delete":
            assert (repository.stats("default").artifacts == 1) is happened
            assert repository.stats("default").tags == (0 if happened else 1)
        if operation == "tag":
            assert repository.artifact("name", "default").id == (new.id if happened else old.id)
        if operation == "untag":
            assert repository.stats("default").tags == (0 if happened else 1)
        expire_pushes(root)
        repository.collect_garbage(grace_s=0)
        for item in (old, new):
            try:
                assert repository.check(item.id, "default").ok
            except ArtifactNotFound:
                assert happened == (operation == "delete" and item is old) or operation == "publish"


def test_a_service_collects_and_scrubs_by_itself(root: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"GC_SECONDS": "0.1", "GC_GRACE_SECONDS": "0", "SCRUB_SECONDS": "0.1", "AUDIT_LOG": f"{tmp_path}/audit"}
    for name, value in settings.items():
        monkeypatch.setenv(f"KVGRAFT_{name}", value)
    with served(root.as_uri()) as url, open_repository(url) as repository:
        info, _ = push(repository, made(1))
        orphan = root / "chunks" / "00" / ("0" * 62)
        orphan.parent.mkdir(parents=True, exist_ok=True)
        orphan.write_bytes(b"left")
        (entry,) = (root / "entries" / "default").iterdir()
        whole = entry.read_bytes()
        entry.write_bytes(whole[:-1])
        deadline = time.monotonic() + 120
        while orphan.exists() or entry.read_bytes() != whole:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert repository.check(info.id, "default").ok
    pushed, collected = map(json.loads, (tmp_path / "audit").read_text().splitlines())
    assert pushed["did"] == "push"
    assert collected["removed"] == {"kind": "chunk", "name": f"blake3:{'0' * 64}", "reason": "no row knows it"}


def failing_after(repository: LocalRepository, method: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next write below ``prefix`` happens, and then says that the disk is full."""
    store = type(repository._store)
    original = getattr(store, method)
    left = [1]

    def call(self: Store, key: str, *data: bytes, **options: bool) -> None:
        original(self, key, *data, **options)
        if key.startswith(prefix) and left:
            left.pop()
            raise StorageFull("no space")

    monkeypatch.setattr(store, method, call)


def test_a_commit_that_fails_after_the_entry_was_written_leaves_none(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_local(root.as_uri()) as repository:
        failing_after(repository, "put", "entries/", monkeypatch)
        with pytest.raises(StorageFull):
            push(repository, made(1))
        assert not list((root / "entries").rglob("*.json"))
        assert not repository._index.unsettled()
        info, _ = push(repository, made(1))
        assert repository.check(info.id, "default").ok


def test_a_commit_that_fails_takes_nothing_from_whoever_published_the_same(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_local(root.as_uri()) as repository:
        info, _ = push(repository, made(1))
        failing_after(repository, "put", "entries/", monkeypatch)
        with pytest.raises(StorageFull):
            push(repository, made(1))
        assert repository.reindex().corrupt == []
        repository.collect_garbage(grace_s=0)
        assert repository.check(info.id, "default").ok


def test_a_deletion_that_fails_leaves_the_artifact_with_its_tags(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(root.as_uri()) as repository:
        info, _ = push(repository, made(1))
        repository.set_tag("default", "name", info.id)
        before = stored(root)
        if (root / "index.sqlite-reserve").exists():
            (root / "index.sqlite-reserve").unlink()
        monkeypatch.setattr(Reserve, "keep", lambda _: None)
        failing_after(repository, "delete", "tags/", monkeypatch)
        with pytest.raises(StorageFull):
            repository.delete(info.id, "default")
        assert stored(root) == before
        assert repository.reindex().corrupt == []
        assert repository.artifact("name", "default").tags == ["name"]


def test_of_two_deletions_at_once_neither_brings_anything_back(root: Place) -> None:
    with open_local(root.as_uri()) as one, open_local(root.as_uri()) as other:
        for _ in range(10):
            info, _ = push(one, made(1))
            one.set_tag("default", "name", info.id)
            with ThreadPoolExecutor(2) as pool:
                ended = [pool.submit(r.delete, info.id, "default") for r in (one, other)]
            assert sum(future.exception() is None for future in ended) >= 1
            assert stored(root) == set()
            assert one.reindex().artifacts == 0


def test_the_tag_of_an_artifact_that_cannot_be_read_stays(root: Place) -> None:
    with open_local(root.as_uri()) as repository:
        info, _ = push(repository, made(1))
        repository.set_tag("default", "name", info.id)
        record = next(path for path in (root / "blocks").rglob("*.json"))
        whole = record.read_bytes()
        record.write_bytes(whole[:-1])
        repository.reindex()
        repository.collect_garbage(grace_s=0)
        record.write_bytes(whole)
        assert repository.reindex().tags == 1


def test_a_damaged_chunk_is_not_taken_up_by_a_push_after_its_artifact_went(root: Place) -> None:
    one = made(1)
    with open_local(root.as_uri()) as repository:
        info, sent = push(repository, one)
        digest = sent[0]
        repository._index.mark_damaged([digest])
        repository._index.unpublish("default", info.id)
        running = repository.begin_push(MADE_WITH, "default")
        assert digest in offer(running, one[0], one[1])


def test_a_damaged_token_chunk_is_sent_again(root: Place) -> None:
    one = made(1)
    with open_local(root.as_uri()) as repository:
        info, _ = push(repository, one)
        assert one[0].tokens is not None
        (digest,) = one[0].tokens
        path = root / "chunks" / digest[7:9] / digest[9:]
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(ChunksMissing, match=digest):
            push(repository, one)
        assert push(repository, one)[1] == [digest]
        assert repository.check(info.id, "default").ok
