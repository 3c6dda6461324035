"""Answers that are not S3's: of an ingress, a page in place of an object, XML that says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from faulty import Faults
from pushing import push
from rawhttp import answer, raw_server
from servers import S3Server
from synthetic import artifact, fingerprint

from repo_service.domain.errors import Unavailable
from repo_service.index import ENTRY, Noted, unsettled
from repo_service.services.opening import open_local
from repo_service.storage import S3Store

NOT_FOUND = (404, "text/plain", b"404 page not found\n")
PAGE = (200, "text/html", b"<html><body>Back soon</body></html>")
STRANGE = [
    NOT_FOUND,
    PAGE,
    (404, "", b""),
    (404, "application/xml", b"<Error><Code>NotFound</Code><Message>no backend</Message></Error>"),
    (200, "", b""),
    (200, "application/xml", b"<Status>starting</Status>"),
]


def for_once(method: str, stranger: tuple[int, str, bytes]) -> Callable[[str, str], tuple[int, str, bytes] | None]:
    left = [stranger]
    return lambda asked, _: left.pop() if asked == method and left else None


@pytest.mark.parametrize("strange", STRANGE)
def test_an_answer_that_is_not_s3s_is_asked_for_again(
    faults: Faults, store: S3Store, strange: tuple[int, str, bytes]
) -> None:
    out = bytearray(4)
    steps: list[tuple[str, Callable[[], object], object]] = [
        ("PUT", lambda: store.put("a/b", b"data"), None),
        ("GET", lambda: store.get("a/b"), b"data"),
        ("GET", lambda: store.read_into("a/b", memoryview(out), len), 4),
        ("GET", lambda: store.exists("a/b"), True),
        ("GET", lambda: store.age_s("a/b") is None, False),
        ("GET", lambda: list(store.list("a")), ["a/b"]),
        ("GET", store.is_empty, False),
        ("PUT", lambda: store.put_if_absent("a/d", b"new"), True),
        ("PUT", lambda: store.put_if_absent("a/b", b"new"), False),
        ("DELETE", lambda: store.delete("a/b"), None),
    ]
    for method, step, expected in steps:
        faults.instead = for_once(method, strange)
        assert step() == expected
        assert faults.instead(method, "") is None, "the answer was not met"
    assert store.get("a/b") is None
    assert store.get("a/d") == b"new"
    assert store.age_s("a/b") is None


def test_a_404_that_stays_is_no_missing_object(faults: Faults, s3: S3Server) -> None:
    faults.instead = lambda *_: NOT_FOUND
    store = S3Store(s3.bucket, s3.prefix(), seconds=2)
    calls: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: store.exists("a"),
        lambda: store.age_s("a"),
        lambda: store.delete("a"),
    ]
    for call in calls:
        with pytest.raises(Unavailable, match=r"within 2 s.*404"):
            call()
    store.close()


def test_a_listing_that_does_not_go_on_is_given_up(faults: Faults, s3: S3Server) -> None:
    page = b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken></ListBucketResult>"
    faults.instead = lambda *_: (200, "application/xml", page)
    store = S3Store(s3.bucket, s3.prefix(), seconds=0.5)
    with pytest.raises(Unavailable, match="no listing of what was asked for"):
        list(store.list("a"))
    store.close()


def test_a_listing_of_other_keys_is_none_of_what_was_asked_for(faults: Faults, store: S3Store) -> None:
    page = b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>other/key</Key></Contents></ListBucketResult>"
    store.put("a/b", b"x")
    faults.instead = for_once("GET", (200, "application/xml", page))
    assert list(store.list("a")) == ["a/b"]


def test_an_age_without_a_date_is_asked_for_again(aws_like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_like)
    store = S3Store("bucket", seconds=6)
    age = store.age_s("a")
    assert age is not None
    assert round(age) == 60
    store.close()


@pytest.fixture
def aws_like(s3: S3Server) -> Iterator[str]:  # noqa: ARG001
    dates = {"Date": "Mon, 30 Nov 2026 12:01:00 GMT", "Last_Modified": "Mon, 30 Nov 2026 12:00:00 GMT"}

    def say(_: str, number: int, __: dict[str, str], out: BinaryIO) -> None:
        out.write(answer(b"x", ETag='"e"', **(dates if number > 1 else {})))

    with raw_server(say) as url:
        yield url


def test_an_empty_object_has_an_age(store: S3Store) -> None:
    store.put("a", b"")
    age = store.age_s("a")
    assert age is not None
    assert 0 <= age < 60


def test_a_404_of_an_ingress_unpublishes_nothing(faults: Faults, s3: S3Server, tmp_path: Path) -> None:
    url = f"s3://{s3.bucket}/{s3.prefix()}"
    with open_local(url, index_url=f"sqlite:///{tmp_path}/index.sqlite") as repository:
        info, _ = push(repository, artifact(list(range(20)), fingerprint()))
        with repository._index._database.write() as connection:
            unsettled.note(connection, Noted(ENTRY, "default", info.id))
        left = [NOT_FOUND]
        faults.instead = lambda method, path: left.pop() if left and method == "GET" and "/entries/" in path else None
        repository.collect_garbage(grace_s=0)
        assert not left
        assert repository.artifact(info.id, "default") == info
        left.append(NOT_FOUND)
        repository.reindex()
        assert not left
        assert repository.artifact(info.id, "default") == info
