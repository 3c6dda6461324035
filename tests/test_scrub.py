"""Scrub: whatever is damaged is found, named with the artifacts it belongs to, and healed where it can be."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from places import Place
from pushing import Artifact, push
from serving import served
from sqlalchemy import insert
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.client.repair import repair
from repo_service.domain.errors import ChunkCorrupt, Conflict, DocumentCorrupt, InvalidInput, QuotaExceeded
from repo_service.domain.policy import Policy
from repo_service.domain.repository import Repository
from repo_service.index.models import Unsettled
from repo_service.services import scrub as scrubbing
from repo_service.services.opening import open_local
from repo_service.storage import local

pytestmark = pytest.mark.everywhere

MADE_WITH = fingerprint()
KINDS = {
    "chunks": "chunk",
    "blocks": "block record",
    "artifacts": "manifest",
    "entries": "entry",
    "tags": "tag",
    "divergences": "divergence",
}


def made(seed: int, count: int = 40, state: int = 0) -> Artifact:
    return artifact(random.Random(seed).choices(range(1000), k=count), MADE_WITH, seed=state)


def filled(repository: Repository) -> str:
    """One artifact with a tag and a divergence."""
    info, _ = push(repository, made(1))
    repository.set_tag("default", "name", info.id)
    with pytest.raises(Exception, match="other bytes"):
        push(repository, made(1, state=1))
    return info.id


def files(root: Place, kind: str) -> list[Any]:
    return sorted(path for path in (root / kind).rglob("*") if path.is_file())


def damage(path: Place, how: str) -> None:
    data = path.read_bytes()
    if how == "altered":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif how == "truncated":
        path.write_bytes(data[:-1])
    else:
        path.unlink()


def test_a_whole_repository_has_no_damage(repository: Repository) -> None:
    filled(repository)
    report = repository.scrub()
    assert report.damage == []
    assert (report.artifacts, report.block_records) == (1, 3)
    assert report.chunks == repository.stats("default").chunks
    assert report.bytes == repository.stats("default").unique_bytes
    assert report.stored_bytes > 0


@pytest.mark.parametrize("how", ["altered", "truncated", "lost"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_named_and_healed(root: Place, kind: str, how: str, tmp_path: Path) -> None:
    with open_repository(root.as_uri()) as repository, open_repository(f"file://{tmp_path}/whole") as whole:
        push(whole, made(1))
        find_and_heal(repository, filled(repository), whole, root, kind, how)


@pytest.mark.everywhere(always=True)
def test_a_service_finds_and_heals_damage_too(root: Place, tmp_path: Path) -> None:
    with (
        served(root.as_uri()) as url,
        open_repository(url) as repository,
        open_repository(f"file://{tmp_path}/whole") as whole,
    ):
        push(whole, made(1))
        artifact_id = filled(repository)
        for kind in KINDS:
            find_and_heal(repository, artifact_id, whole, root, kind, "altered")


def find_and_heal(
    repository: Repository, artifact_id: str, whole: Repository, root: Place, kind: str, how: str
) -> None:
    path = files(root, kind)[0]
    before = path.read_bytes()
    damage(path, how)
    (found,) = repository.scrub().damage
    assert found.kind == KINDS[kind]
    aside = root / "quarantine" / path.relative_to(root)
    assert (found.quarantined is None) == (how == "lost")
    assert aside.exists() == (how != "lost")
    if kind in ("entries", "tags", "divergences"):
        assert found.healed
    else:
        assert found.artifacts == [("default", artifact_id)]
        with pytest.raises((ChunkCorrupt, DocumentCorrupt)):
            read(repository, artifact_id)
        (healed,) = repair(whole, repository, [("default", artifact_id)])
        assert healed.healed, healed.reason
        if kind == "chunks":
            digest = f"blake3:{path.parent.name}{path.name}"
            assert healed.bytes_sent == len(made(1)[2][digest]), "only what is damaged is sent"
    assert path.read_bytes() == before
    assert repository.scrub().damage == []
    read(repository, artifact_id)
    assert repository.reindex().corrupt == []


def read(repository: Repository, artifact_id: str) -> None:
    report = repository.check(artifact_id, "default")
    if report.corrupt:
        raise ChunkCorrupt(report.corrupt[0])


def test_a_damaged_chunk_that_a_reader_met_is_sent_again_by_the_next_push(repository: Repository, root: Place) -> None:
    one = made(1)
    info, _ = push(repository, one)
    path = files(root, "chunks")[3]
    damage(path, "altered")
    digest = f"blake3:{path.parent.name}{path.name}"
    with pytest.raises(ChunkCorrupt):
        read(repository, info.id)
    again, sent = push(repository, one)
    assert again == info
    assert sent == [digest]
    read(repository, info.id)
    _, sent = push(repository, one)
    assert sent == []


def test_a_damaged_chunk_survives_the_end_of_a_push_and_goes_with_its_artifact(root: Place) -> None:
    with open_local(root.as_uri()) as repository:
        info, _ = push(repository, made(1))
        path = files(root, "chunks")[0]
        damage(path, "altered")
        repository.scrub()
        running = repository.begin_push(MADE_WITH, "default")
        assert len(running.offer(made(1)[1])) == 1
        running.abort()
        repository.collect_garbage(grace_s=0)
        assert path.exists(), "its artifact still refers to it"
        assert repository.reindex().corrupt == []
        repository.delete(info.id, "default")
        assert not path.exists()


def test_damage_without_a_source_is_left_and_said(repository: Repository, root: Place, tmp_path: Path) -> None:
    info, _ = push(repository, made(1))
    damage(files(root, "chunks")[0], "altered")
    with open_repository(f"file://{tmp_path}/empty") as empty:
        (left,) = repair(empty, repository, [("default", info.id)])
        assert not left.healed
        assert "artifact_not_found" in str(left.reason)


def test_the_command_heals_and_says_by_its_exit_code_whether_damage_is_left(root: Place, tmp_path: Path) -> None:
    for place in (root, tmp_path / "whole"):
        with open_repository(place.as_uri()) as repository:
            push(repository, made(1))
    damage(files(root, "chunks")[0], "lost")
    command = [sys.executable, "-m", "repo_service.cli", "scrub", "--repo", root.as_uri(), "--json"]
    left = subprocess.run(command, check=False, capture_output=True, text=True)
    assert left.returncode == 1, left.stderr
    assert len(json.loads(left.stdout)["damage"]) == 1
    command += ["--repair-from", f"file://{tmp_path}/whole"]
    healed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert healed.returncode == 0, healed.stderr
    assert [one["healed"] for one in json.loads(healed.stdout)["repairs"]] == [True]


@pytest.mark.everywhere(but={"s3": "no disk that fails to read lies under a bucket"})
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_disk_cannot_read_is_damage_and_heals(
    root: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_local(root.as_uri()) as repository, open_repository(f"file://{tmp_path}/whole") as whole:
        push(whole, made(1))
        artifact_id = filled(repository)
        path = files(root, kind)[0]
        lose(path, monkeypatch)
        (found,) = repository.scrub().damage
        assert (found.kind, found.quarantined) == (KINDS[kind], None)
        if not found.healed:
            with pytest.raises((ChunkCorrupt, DocumentCorrupt)):
                read(repository, artifact_id)
            (healed,) = repair(whole, repository, [("default", artifact_id)])
            assert healed.healed, healed.reason
        assert repository.scrub().damage == []
        read(repository, artifact_id)


def lose(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the file that lies there now fails with EIO; one put in its place can be read."""
    lost = path.stat().st_ino
    # Its inode is not to be given to another.
    os.link(path, path.with_name("-lost"))
    real_open, real_readv = open, os.readv

    def failing_open(name: str, *rest: Any, **named: Any) -> Any:
        if os.path.exists(name) and os.stat(name).st_ino == lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_open(name, *rest, **named)

    def failing_readv(fd: int, buffers: Any) -> int:
        if os.fstat(fd).st_ino == lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_readv(fd, buffers)

    monkeypatch.setattr(local, "open", failing_open, raising=False)
    monkeypatch.setattr(os, "readv", failing_readv)


@pytest.mark.everywhere(but={"s3": "no disk that fails to read lies under a bucket"})
def test_a_repository_opens_although_an_unsettled_document_cannot_be_read(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_local(root.as_uri()) as repository:
        info, _ = push(repository, made(1))
        other, _ = push(repository, made(2))
        with repository._index._database.write_durably() as connection:
            noted = {"operation": "cut", "kind": "entry", "namespace": "default", "name": info.id}
            connection.execute(insert(Unsettled).values(**noted))
    lose(files(root, f"artifacts/{info.id.removeprefix('sha256:')[:2]}")[0], monkeypatch)
    with open_local(root.as_uri()) as repository:
        read(repository, other.id)
        push(repository, made(3))


def test_damage_that_is_known_outlives_a_reindex(repository: Repository, root: Place) -> None:
    tokens = random.Random(1).choices(range(1000), k=40)
    shared, longer = artifact(tokens[:32], MADE_WITH), artifact(tokens, MADE_WITH)
    push(repository, shared)
    path = files(root, "chunks")[0]
    digest = f"blake3:{path.parent.name}{path.name}"
    damage(path, "altered")
    assert repository.scrub().damaged == 1
    repository.reindex()
    _, sent = push(repository, longer)
    assert digest in sent, "an artifact must not be published on a damaged chunk"
    assert repository.scrub().damaged == 0


def test_a_quota_that_is_used_up_lets_damage_be_healed(repository: Repository, root: Place) -> None:
    info, _ = push(repository, made(1))
    repository.set_policy("default", Policy(quota_bytes=repository.stats("default").unique_bytes - 1))
    damage(files(root, "chunks")[0], "lost")
    repository.scrub()
    _, sent = push(repository, made(1))
    assert len(sent) == 1
    read(repository, info.id)
    with pytest.raises(QuotaExceeded):
        push(repository, made(2))


def test_a_scrub_lists_so_much_damage_and_counts_all(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "_LISTED", 2)
    with open_local(root.as_uri()) as repository:
        push(repository, made(1))
        for path in files(root, "chunks"):
            damage(path, "truncated")
        report = repository.scrub()
    assert len(report.damage) == 2
    assert report.damaged == report.chunks == len(files(root, "chunks"))


@pytest.mark.everywhere(but={"s3": "an object's date is not set back"})
def test_old_copies_of_damaged_objects_are_collected(repository: Repository, root: Place) -> None:
    push(repository, made(1))
    first, second = files(root, "chunks")[:2]
    damage(first, "altered")
    damage(second, "altered")
    repository.scrub()
    aside = root / "quarantine" / first.relative_to(root)
    then = time.time() - 31 * 24 * 3600
    os.utime(aside, (then, then))
    assert repository.collect_garbage(dry_run=True).quarantined == 1
    report = repository.collect_garbage()
    assert report.quarantined == 1
    assert [one.name for one in report.removed] == [str(aside.relative_to(root))]
    assert files(root, "quarantine") == [root / "quarantine" / second.relative_to(root)]


def test_a_scrub_that_is_ended_says_so(root: Place) -> None:
    with open_local(root.as_uri()) as repository:
        push(repository, made(1))
        assert repository.scrub().complete
        for steps in range(10):
            left = iter(range(steps))
            report = repository.scrub(ended=lambda _, left=left: next(left, None) is None)  # type: ignore[misc]
            assert not report.complete
            assert report.artifacts + report.block_records + report.chunks == steps + 1


def test_a_slow_scrub_that_was_asked_for_ends_with_the_service_and_runs_alone(root: Place) -> None:
    """A rate of one byte a second held the service for ever."""
    with served(root.as_uri()) as url, open_repository(url) as repository, ThreadPoolExecutor(1) as thread:
        push(repository, made(1))
        slow = thread.submit(repository.scrub, bytes_per_s=1)
        refused = False
        while not refused:
            try:
                repository.scrub()
            except Conflict:
                refused = True
            if slow.done():
                # It came while the other ran.
                slow, refused = thread.submit(repository.scrub, bytes_per_s=1), False
        began = time.monotonic()
        process = next(iter(running_services(root)))
        os.kill(process, signal.SIGTERM)
        assert not slow.result().complete
        assert time.monotonic() - began < 20


def running_services(root: Place) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if root.as_uri().encode() in process.read_bytes():
                yield int(process.parent.name)


def test_a_rate_is_kept_and_a_scrub_can_be_ended(root: Place) -> None:
    with open_local(root.as_uri()) as repository:
        push(repository, made(1))
        size = repository.stats("default").unique_bytes
        began = time.monotonic()
        assert repository.scrub(bytes_per_s=size / 0.5).bytes == size
        assert time.monotonic() - began > 0.4
        with pytest.raises(InvalidInput):
            repository.scrub(bytes_per_s=0)
