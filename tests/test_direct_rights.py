"""What the holder of an upload URL can't do with it: read others' chunks, or lay by more than a quota allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest
import urllib3
from botocore.exceptions import NoCredentialsError
from faulty import Faults
from pushing import offer, push
from servers import S3Server
from sqlalchemy import update
from synthetic import artifact
from test_direct import NS

from repo_service.domain.errors import ChunkNotFound, DigestMismatch, Unavailable
from repo_service.domain.policy import policy_of
from repo_service.index import times
from repo_service.index.models import PushRecord
from repo_service.services import push as push_module
from repo_service.services.documents import chunk_key
from repo_service.services.opening import open_local
from repo_service.services.push import LocalPush
from repo_service.services.repository import LocalRepository
from repo_service.storage import s3_probe
from repo_service.storage.s3_reads import Reader

MADE = artifact(range(20), seed=4)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_probe, "_warned", set())


@pytest.fixture
def faults(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Faults:
    # Bytes are stored as they are, and could be copied as they are.
    monkeypatch.setenv("KVGRAFT_CODEC", "none")
    return faults


@pytest.fixture
def repository(s3: S3Server, faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRepository]:  # noqa: ARG001
    index = tmp_path_factory.mktemp("index") / "index.sqlite"
    with open_local(f"s3://{s3.bucket}/{s3.prefix()}", index_url=f"sqlite:///{index}") as opened:
        yield opened


def in_s3(repository: LocalRepository, key: str) -> str:
    return f"{repository.url.removeprefix('s3://')}/{key}"


def obeying(s3: S3Server, faults: Faults, header: str) -> None:
    """Let the server do what ``header`` of a presigned PUT says, signed or not."""

    def obey(method: str, path: str, headers: dict[str, str]) -> bool:
        if method != "PUT" or "X-Amz-Signature" not in path or header not in headers:
            return False
        target = path.partition("?")[0].removeprefix(f"/{s3.bucket}/")
        if header == "x-amz-copy-source":
            s3.client().copy_object(Bucket=s3.bucket, Key=target, CopySource=headers[header].removeprefix("/"))
        else:
            # An archive's members take its place.
            s3.client().put_object(Bucket=s3.bucket, Key=target.replace("target", "unpacked"), Body=b"x")
        return True

    faults.obey = obey


@pytest.mark.parametrize("header", ["x-amz-copy-source", "x-amz-meta-snowball-auto-extract"])
def test_i7_a_server_that_obeys_unsigned_headers_gets_no_uploads(
    s3: S3Server, faults: Faults, repository: LocalRepository, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, records, chunks = MADE
    push(repository, MADE, "victim")
    obeying(s3, faults, header)
    attacker = repository.begin_push(manifest.fingerprint, "attacker")
    missing = offer(attacker, manifest, records)
    assert missing
    for _ in range(2):
        assert attacker.upload_urls(missing, 60) == {}
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert header in warning
    assert "Signature" not in caplog.text
    # A push goes through the service, as ever.
    for digest in missing:
        attacker.put(digest, chunks[digest])
    attacker.commit(manifest)


def test_i7_no_upload_url_reads_another_tenants_chunk(repository: LocalRepository) -> None:
    manifest, records, chunks = MADE
    push(repository, MADE, "victim")
    attacker = repository.begin_push(manifest.fingerprint, "attacker")
    digest = offer(attacker, manifest, records)[0]
    url = attacker.upload_urls([digest], 60)[digest]
    headers = {"x-amz-copy-source": f"/{in_s3(repository, chunk_key(digest))}"}
    urllib3.request("PUT", url, body=bytes(len(chunks[digest])), headers=headers)
    with pytest.raises((DigestMismatch, ChunkNotFound), match=digest):
        attacker.take(digest, memoryview(bytearray(len(chunks[digest]))))


def test_a_server_that_is_busy_when_it_is_tried_is_tried_again(faults: Faults, repository: LocalRepository) -> None:
    manifest, records, _ = MADE
    pushing = repository.begin_push(manifest.fingerprint, NS)
    missing = offer(pushing, manifest, records)
    faults.choose = lambda _, path: "error" if "X-Amz-Signature" in path else None
    with pytest.raises(Unavailable):
        pushing.upload_urls(missing[:1], 60)
    faults.choose = lambda *_: None
    assert set(pushing.upload_urls(missing, 60)) == set(missing)
    # Once is enough, and nothing stays of it.
    faults.requests.clear()
    assert set(pushing.upload_urls(missing, 60)) == set(missing)
    assert faults.requests == []
    assert list(repository._store.list("uploads")) == []


def put_at_url(running: LocalPush, digest: str, data: bytes) -> None:
    assert urllib3.request("PUT", running.upload_urls([digest], 60)[digest], body=data).status == 200


@pytest.mark.parametrize("moment", ["before", "after"])
def test_i4_an_upload_that_vanishes_while_it_is_taken_is_never_counted_without_its_bytes(
    repository: LocalRepository, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Garbage is collected with no grace just before its bytes are read back, or just after."""
    manifest, records, chunks = MADE
    pushing = repository.begin_push(manifest.fingerprint, NS)
    missing = offer(pushing, manifest, records)
    store = repository._store
    read_into = store.read_into

    def collecting(key: str, out: memoryview, seen: Callable[[memoryview], object]) -> int | None:
        if moment == "before":
            assert repository.collect_garbage(grace_s=0).temp_files == 1
        size = read_into(key, out, seen)
        if moment == "after":
            assert repository.collect_garbage(grace_s=0).temp_files == 1
        return size

    for digest in missing:
        put_at_url(pushing, digest, chunks[digest])
        with monkeypatch.context() as patch:
            patch.setattr(store, "read_into", collecting)
            try:
                pushing.take(digest, memory_of(chunks[digest]))
                assert moment == "after"
            except ChunkNotFound:
                assert moment == "before"
                pushing.put(digest, chunks[digest])
    info = pushing.commit(manifest)
    assert repository.check(info.id, NS).ok


def test_an_upload_that_is_read_back_slowly_is_not_written_as_well(
    repository: LocalRepository, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for both would have given up."""
    manifest, records, chunks = MADE
    pushing = repository.begin_push(manifest.fingerprint, NS)
    digest = offer(pushing, manifest, records)[0]
    put_at_url(pushing, digest, chunks[digest])
    monkeypatch.setattr(push_module, "_READ_BACK_S", -1.0)
    faults.requests.clear()
    with pytest.raises(ChunkNotFound, match="slowly"):
        pushing.take(digest, memory_of(chunks[digest]))
    assert [method for method, _, _ in faults.requests] == ["GET"]


def test_a_chunk_is_taken_though_its_upload_cannot_be_removed(repository: LocalRepository, faults: Faults) -> None:
    manifest, records, chunks = MADE
    pushing = repository.begin_push(manifest.fingerprint, NS)
    digest = offer(pushing, manifest, records)[0]
    put_at_url(pushing, digest, chunks[digest])
    faults.requests.clear()
    pushing.take(digest, memory_of(chunks[digest]))
    # No more is waited for than a read, a write and a removal.
    assert [method for method, _, _ in faults.requests] == ["GET", "PUT", "DELETE"]
    put_at_url(pushing, digest, chunks[digest])
    with patch_deletions(repository):
        pushing.take(digest, memory_of(chunks[digest]))


def memory_of(data: bytes) -> memoryview:
    return memoryview(bytearray(len(data)))


@contextmanager
def patch_deletions(repository: LocalRepository) -> Iterator[None]:
    """Let the store refuse to remove anything."""
    with mock.patch.object(repository._store, "delete", side_effect=Unavailable("S3 is away")):
        yield


def staged(repository: LocalRepository) -> list[str]:
    return list(repository._store.list("uploads"))


@pytest.mark.parametrize("end", ["abort", "commit", "expiry"])
def test_what_was_put_past_a_quota_does_not_outlive_its_push(repository: LocalRepository, end: str) -> None:
    manifest, records, chunks = MADE
    repository.set_policy(NS, policy_of({"quota_bytes": sum(map(len, chunks.values()))}))
    pushing = repository.begin_push(manifest.fingerprint, NS)
    missing = offer(pushing, manifest, records)
    urls = pushing.upload_urls(missing, 60)
    for digest in missing:
        assert urllib3.request("PUT", urls[digest], body=chunks[digest]).status == 200
        # As often as it is put, it lies there once.
        assert urllib3.request("PUT", urls[digest], body=chunks[digest]).status == 200
    assert len(staged(repository)) == len(missing)
    # Nobody else ends it.
    repository.resume_push(pushing.id, "team-b").abort()
    assert len(staged(repository)) == len(missing)
    if end == "abort":
        pushing.abort()
    elif end == "commit":
        for digest in missing:
            pushing.put(digest, chunks[digest])
        pushing.commit(manifest)
    else:
        expires = datetime.now(UTC) - timedelta(seconds=1)
        with repository._index._database.write() as connection:
            connection.execute(update(PushRecord).values(expires_at=times.to_microseconds(expires)))
        repository.begin_push(manifest.fingerprint, NS)
    assert staged(repository) == []
    # Its URLs are good for a while yet; what comes by them goes without a grace.
    assert urllib3.request("PUT", urls[missing[0]], body=chunks[missing[0]]).status == 200
    assert repository.collect_garbage(sweep=False).temp_files == 1
    assert staged(repository) == []


def test_a_push_ends_though_what_was_put_for_it_cannot_be_listed(repository: LocalRepository) -> None:
    manifest, records, chunks = MADE
    pushing = repository.begin_push(manifest.fingerprint, NS)
    for digest in offer(pushing, manifest, records):
        pushing.put(digest, chunks[digest])
    with mock.patch.object(repository._store, "list", side_effect=Unavailable("S3 is away")):
        info = pushing.commit(manifest)
    assert repository.check(info.id, NS).ok


def test_no_signature_of_an_upload_reaches_a_log_an_error_or_the_audit(
    repository: LocalRepository, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, records, chunks = MADE
    said: list[str] = []
    with caplog.at_level("DEBUG", "repo_service"):
        pushing = repository.begin_push(manifest.fingerprint, NS)
        digest = offer(pushing, manifest, records)[0]
        faults.choose = lambda _, path: "error" if "X-Amz-Signature" in path else None
        with pytest.raises(Unavailable) as busy:
            pushing.upload_urls([digest], 60)
        faults.choose = lambda *_: None
        put_at_url(pushing, digest, bytes(len(chunks[digest])))
        with pytest.raises(DigestMismatch) as altered:
            pushing.take(digest, memory_of(chunks[digest]))
        with pytest.raises(ChunkNotFound) as absent:
            pushing.take(digest, memory_of(chunks[digest]))
        put_at_url(pushing, digest, chunks[digest])
        pushing.abort()
        said += [f"{error.value} {error.value.details}" for error in (busy, altered, absent)]
    for text in (*said, caplog.text):
        assert "X-Amz" not in text
        assert "://127" not in text


def test_without_credentials_no_upload_url_is_an_answer_and_no_crash(
    repository: LocalRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, records, _ = MADE
    pushing = repository.begin_push(manifest.fingerprint, NS)
    digest = offer(pushing, manifest, records)[0]
    repository._store.close()
    monkeypatch.setattr(Reader, "_session", mock.Mock(side_effect=NoCredentialsError()))
    with pytest.raises(Unavailable, match="credentials"):
        pushing.upload_urls([digest], 60)
