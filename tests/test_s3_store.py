"""What an S3 bucket adds to the storage contract: URLs, refusals, forks, and answers that are always fresh."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers import READER, S3Server

from repo_service.domain.errors import MalformedUrl, StorageFull, Unavailable
from repo_service.storage import S3Store, parse_s3_url
from repo_service.storage.s3_answers import Refused, advice

ROOT = Path(__file__).parent.parent


@pytest.fixture
def store(s3: S3Server) -> Iterator[S3Store]:
    store = S3Store(s3.bucket, s3.prefix(), seconds=20)
    yield store
    store.close()


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://my.bucket-1/a", ("my.bucket-1", "a")),
        ("s3://bucket/a/B_c/d.e/", ("bucket", "a/B_c/d.e")),
    ],
)
def test_a_url_names_a_bucket_and_a_prefix(url: str, place: tuple[str, str]) -> None:
    assert parse_s3_url(url) == place


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///a",
        "s3://ab",
        "s3://Bucket/a",
        "s3://bucket:9000/a",
        "s3://key:secret@bucket/a",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a?versionId=1",
        "s3://bucket/a#b",
        "s3://bucket/a b",
        "s3://bucket/a\n",
        "s3://bucket/\u0430",
        f"s3://bucket/{'a/' * 300}",
        "S3://bucket",
    ],
)
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(MalformedUrl, match="s3://"):
        parse_s3_url(url)


def everything(store: S3Store) -> dict[str, Callable[[], Any]]:
    return {
        "get": lambda: store.get("a/b"),
        "read_into": lambda: store.read_into("a/b", memoryview(bytearray(4)), len),
        "put": lambda: store.put("a/b", b"x"),
        "put_if_absent": lambda: store.put_if_absent("a/c", b"x"),
        "delete": lambda: store.delete("a/b"),
        "exists": lambda: store.exists("a/b"),
        "list": lambda: list(store.list("a")),
    }


def test_what_credentials_do_not_allow_is_refused_at_once(
    s3: S3Server, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/b", b"data")
    for name, value in READER.items():
        monkeypatch.setenv(name, value)
    reader = S3Store(s3.bucket, store._root.rstrip("/"))
    assert reader.get("a/b") == b"data"
    assert list(reader.list("a")) == ["a/b"]
    for name in ("put", "put_if_absent", "delete"):
        with pytest.raises(Unavailable, match=r"403 AccessDenied.*AWS_SECRET_ACCESS_KEY"):
            everything(reader)[name]()
    reader.close()
    assert store.get("a/b") == b"data"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = S3Store(s3.bucket)
    for name in everything(stranger):
        with pytest.raises(Unavailable, match=r"403.*AWS_SECRET_ACCESS_KEY"):
            everything(stranger)[name]()
    stranger.close()


def test_without_credentials_the_error_says_what_to_set(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    store = S3Store(s3.bucket)
    with pytest.raises(Unavailable, match=r"credentials.*AWS_ACCESS_KEY_ID"):
        store.get("a")
    store.close()


@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_is_no_missing_object() -> None:
    store = S3Store("no-such-bucket")
    for read in ("get", "read_into", "exists"):
        with pytest.raises(Unavailable, match=r"NoSuchBucket.*Make the bucket no-such-bucket"):
            everything(store)[read]()
    store.close()


@pytest.mark.usefixtures("s3")
def test_a_server_that_is_not_there_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = S3Store("bucket", seconds=2)
    with pytest.raises(Unavailable, match=r"within 2 s.*Connect"):
        store.put("a/b", b"x")
    store.close()


@pytest.mark.parametrize(
    ("status", "code", "kind", "hint"),
    [
        (507, "InsufficientStorage", StorageFull, "quota"),
        (403, "QuotaExceeded", StorageFull, "quota"),
        (400, "AuthorizationHeaderMalformed", Unavailable, "AWS_DEFAULT_REGION"),
        (501, "NotImplemented", Unavailable, "If-None-Match"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, code: str, kind: type[Exception], hint: str) -> None:
    refused = Refused(status, code, "no")
    assert not refused.may_pass
    error = advice(refused, "write s3://bucket/a", "bucket")
    assert isinstance(error, kind)
    assert hint in error.message


def test_an_answer_is_always_fresh(s3: S3Server, store: S3Store) -> None:
    client = s3.client()
    place = {"Bucket": s3.bucket, "Key": f"{store._root}a/b"}
    for data in (b"one", b"two"):
        client.put_object(Body=data, **place)
        assert store.get("a/b") == data
        assert list(store.list("a")) == ["a/b"]
        client.delete_object(**place)
        assert store.get("a/b") is None
        assert not store.exists("a/b")
        assert list(store.list("a")) == []
    assert store.put_if_absent("a/b", b"three")
    assert client.get_object(**place)["Body"].read() == b"three"


def test_a_long_listing_goes_on_page_by_page(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repo_service.storage.s3._PAGE", 3)
    for number in range(10):
        store.put(f"a/{number // 4}/{number}", b"")
    store.put("b/1", b"")
    assert sorted(store.list("a")) == [f"a/{number // 4}/{number}" for number in range(10)]
    assert list(store.list("a/2")) == ["a/2/8", "a/2/9"]


def test_stores_of_one_bucket_do_not_see_each_other(s3: S3Server, store: S3Store) -> None:
    other = S3Store(s3.bucket, store._root.rstrip("/") + "-2")
    assert other.is_empty()
    store.put("a/b", b"x")
    assert other.get("a/b") is None
    assert list(other.list("a")) == []
    assert other.is_empty()
    assert not store.is_empty()
    other.close()


def test_many_threads_use_one_store(store: S3Store) -> None:
    data = {f"a/{number}": os.urandom(200_000) for number in range(40)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(store.put, data, data.values()))
        assert list(pool.map(store.get, data)) == list(data.values())


def test_a_store_works_in_the_process_and_in_its_forks(store: S3Store) -> None:
    store.put("a/parent", b"before")
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            store.get("a/parent")

    thread = threading.Thread(target=busy)
    thread.start()
    children = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                same = store.get("a/parent") == b"before"
                code = 0 if same and store.put_if_absent(f"a/{number}", b"child") else 2
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    stop.set()
    thread.join()
    assert ended == [0, 0, 0]
    assert [store.get(f"a/{number}") for number in range(3)] == [b"child"] * 3


_FORKED = """
import os, sys
from repo_service.storage import S3Store
store = S3Store(sys.argv[1], sys.argv[2])
store.put("a", b"x")
child = os.fork()
assert store.get("a") == b"x"
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("a") == b"x"
"""


def test_processes_that_end_without_closing_are_silent(s3: S3Server) -> None:
    command = [sys.executable, "-W", "error", "-c", _FORKED, s3.bucket, s3.prefix()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
