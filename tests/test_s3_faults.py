"""S3 behind a network that breaks: right answers within deadlines, or an error that says so."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from faulty import Faults
from pushing import push
from servers import S3Server
from synthetic import artifact, fingerprint

from repo_service.domain.errors import Unavailable
from repo_service.services.opening import open_local
from repo_service.storage import S3Store

BIG = 4 * 2**20


def read(store: S3Store, size: int) -> bytes:
    """What `read_into` says it has seen, which is what it has left in memory."""
    out, pieces = bytearray(size), []
    assert store.read_into("key", memoryview(out), lambda piece: pieces.append(bytes(piece))) == size
    assert b"".join(pieces) == out
    return bytes(out)


@pytest.mark.parametrize("kind", ["error", "reset", "body-stall", "stall"])
def test_a_read_goes_on_after_a_fault(faults: Faults, store: S3Store, kind: str) -> None:
    data = os.urandom(BIG)
    store.put("key", data)
    times = 1 if "stall" in kind else 3
    faults.once(kind, "GET", times)
    assert read(store, BIG) == data
    assert faults.met[kind] == times
    faults.once("reset", "GET")
    assert store.get("key") == data


def test_a_read_that_was_cut_goes_on_where_it_broke_off(faults: Faults, store: S3Store) -> None:
    data = os.urandom(BIG)
    store.put("key", data)
    faults.requests.clear()
    faults.once("body-stall", "GET")
    assert read(store, BIG) == data
    assert [place for _, _, place in faults.requests] == [None, f"bytes={BIG // 2}-{BIG - 1}"]


def test_an_object_that_is_replaced_in_the_middle_is_never_mixed(faults: Faults, store: S3Store, s3: S3Server) -> None:
    store.put("key", b"a" * BIG)
    client = s3.client()

    def replace(method: str, _: str) -> str | None:
        if method != "GET" or faults.met["body-stall"]:
            return None
        return "body-stall"

    faults.choose = replace
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, store, BIG)
        while not faults.met["body-stall"]:
            time.sleep(0.01)
        time.sleep(0.2)
        client.put_object(Bucket=s3.bucket, Key=f"{store._root}key", Body=b"b" * BIG)
        with pytest.raises(Unavailable, match="replaced while it was read"):
            reading.result()
    assert store.get("key") == b"b" * BIG


@pytest.mark.parametrize("kind", ["error", "applied-error", "lost", "late"])
@pytest.mark.parametrize("put", ["put", "put_if_absent"])
def test_a_write_is_done_once_whatever_becomes_of_its_answer(
    faults: Faults, store: S3Store, put: str, kind: str
) -> None:
    times = 1 if kind == "late" else 2
    faults.once(kind, "PUT", times)
    assert getattr(store, put)("key", b"mine" * 1000) in (None, True)
    assert faults.met[kind] == times
    assert store.get("key") == b"mine" * 1000


@pytest.mark.parametrize("kind", ["applied-error", "lost"])
def test_a_write_in_doubt_does_not_take_anothers_object_for_its_own(
    faults: Faults, store: S3Store, s3: S3Server, kind: str
) -> None:
    s3.client().put_object(Bucket=s3.bucket, Key=f"{store._root}key", Body=b"theirs")
    faults.once(kind, "PUT")
    assert store.put_if_absent("key", b"mine") is False
    assert store.get("key") == b"theirs"


@pytest.mark.parametrize("kind", ["error", "drop"])
def test_other_operations_go_on_after_a_fault(faults: Faults, store: S3Store, kind: str) -> None:
    store.put("a/b", b"x")
    faults.once(kind, "GET")
    assert list(store.list("a")) == ["a/b"]
    faults.once(kind, "GET")
    assert store.exists("a/b")
    faults.once(kind, "GET")
    age = store.age_s("a/b")
    assert age is not None
    assert 0 <= age < 60
    faults.once(kind, "DELETE")
    store.delete("a/b")
    assert store.get("a/b") is None
    assert faults.met[kind] == 4


@pytest.mark.parametrize("kind", ["error", "stall"])
def test_what_never_gets_better_ends_at_the_deadline(faults: Faults, s3: S3Server, kind: str) -> None:
    store = S3Store(s3.bucket, s3.prefix(), seconds=0.5)
    faults.choose = lambda *_: kind
    calls: list[Callable[[], object]] = [
        lambda: store.read_into("key", memoryview(bytearray(BIG)), len),
        lambda: store.put_if_absent("other", b"z"),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"within 0.5 s.*try again"):
            call()
        assert time.monotonic() - began < 5
    store.close()


def test_memory_that_was_given_back_is_not_written_to(faults: Faults, s3: S3Server) -> None:
    prefix = s3.prefix()
    store, patient = S3Store(s3.bucket, prefix, seconds=0.6), S3Store(s3.bucket, prefix)
    s3.client().put_object(Bucket=s3.bucket, Key=f"{store._root}key", Body=b"x" * BIG)
    faults.choose = lambda *_: "body-stall"
    out = bytearray(BIG)
    with suppress(Unavailable):
        store.read_into("key", memoryview(out), len)
    before = bytes(out)
    faults.choose = lambda *_: None
    # Through connections of its own, which take the time they need on a busy machine.
    assert read(patient, BIG) == b"x" * BIG
    assert out == before
    store.close()
    patient.close()


def test_a_repository_works_behind_one_error_in_five(
    faults: Faults, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGRAFT_S3_SECONDS", "30")
    choice = random.Random(5)
    kinds = ["error", "applied-error", "drop", "lost", "reset"]
    faults.choose = lambda *_: choice.choice(kinds) if choice.random() < 0.2 else None
    url = f"s3://{s3.bucket}/{s3.prefix()}"
    with open_local(url, index_url=f"sqlite:///{tmp_path}/index.sqlite") as repository:
        info, _ = push(repository, artifact(list(range(20)), fingerprint()))
        repository.set_tag("default", "kept", info.id)
        assert repository.check(info.id, "default").ok
        assert repository.scrub().damage == []
        assert repository.collect_garbage(grace_s=0).removed == []
        assert repository.artifact("kept", "default") == repository.artifact(info.id, "default")
    assert sum(faults.met.values()) > 10
