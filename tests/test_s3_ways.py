"""Reads of S3 by either way, signed here or sent by botocore: deadlines, broken bodies, and which way is taken when."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import pytest
from rawhttp import Say, answer, raw_server

from repo_service.domain.errors import DocumentCorrupt, Unavailable
from repo_service.storage import S3Store
from repo_service.storage import s3_reads as reads
from repo_service.storage.s3_ways import ByBotocore, Signed

DATA = os.urandom(1_000_000)

by_either_way = pytest.mark.parametrize("way", ["signed", "botocore"])


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@contextmanager
def answered(say: Say, aws: pytest.MonkeyPatch, way: str = "signed", seconds: float = 6) -> Iterator[S3Store]:
    with raw_server(say) as url:
        if way == "botocore":
            # The server takes a request line with the whole URL, as a proxy does.
            aws.setenv("AWS_ENDPOINT_URL", "http://s3.invalid")
            aws.setenv("HTTP_PROXY", url)
            aws.setenv("NO_PROXY", "")
        else:
            aws.setenv("AWS_ENDPOINT_URL", url)
        store = S3Store("bucket", seconds=seconds)
        yield store
        store.close()


def refusal(code: str, status: str = "400 Bad Request") -> bytes:
    return answer(f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode(), status)


def way_of(store: S3Store) -> type[object]:
    return type(store._bucket.reader._way)


@by_either_way
@pytest.mark.parametrize("part", ["head", "body"])
def test_an_answer_that_drips_is_given_up_at_the_deadline(aws: pytest.MonkeyPatch, way: str, part: str) -> None:
    def drip(_: str, __: int, ___: dict[str, str], out: BinaryIO) -> None:
        out.write(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 400\r\n' + (b"\r\n" if part == "body" else b""))
        for _ in range(80):
            time.sleep(0.1)
            out.write(b"x" if part == "body" else b"X: y\r\n")

    with answered(drip, aws, way, seconds=1) as store:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"within 1 s"):
            store.get("key")
        assert time.monotonic() - began < 5


@by_either_way
@pytest.mark.parametrize("fault", ["cut", "reset", "stall"])
def test_a_body_that_breaks_is_read_on(aws: pytest.MonkeyPatch, way: str, fault: str) -> None:
    def say(_: str, number: int, headers: dict[str, str], out: BinaryIO) -> bool:
        if number == 1:
            out.write(answer(DATA, ETag='"e"')[:-400_000])
            if fault == "reset":
                # What was asked and never read is answered with a reset.
                out._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # type: ignore[attr-defined]
            if fault == "stall":
                time.sleep(3)
            return False
        # A reset may take with it what has come.
        if (asked := re.fullmatch(r"bytes=(\d+)-999999", headers.get("range", ""))) is None:
            out.write(answer(DATA, ETag='"e"'))
        else:
            start, part = int(asked[1]), f"bytes {asked[1]}-999999/1000000"
            out.write(answer(DATA[start:], "206 Partial Content", ETag='"e"', Content_Range=part))
        return True

    with answered(say, aws, way) as store:
        assert store.get("key") == DATA
        assert way_of(store) is (ByBotocore if way == "botocore" else Signed)


def test_a_bad_request_does_not_change_the_way(aws: pytest.MonkeyPatch) -> None:
    def say(_: str, number: int, __: dict[str, str], out: BinaryIO) -> None:
        out.write(refusal("InvalidArgument") if number == 2 else answer(b"ok", ETag='"e"'))

    with answered(say, aws) as store:
        assert store.get("key") == b"ok"
        with pytest.raises(Unavailable, match="400 InvalidArgument"):
            store.get("key")
        assert store.get("key") == b"ok"
        assert way_of(store) is Signed


def test_a_bucket_that_was_elsewhere_is_asked_directly_again_later(aws: pytest.MonkeyPatch) -> None:
    def say(_: str, number: int, __: dict[str, str], out: BinaryIO) -> None:
        out.write(refusal("AuthorizationHeaderMalformed") if number == 1 else answer(b"ok", ETag='"e"'))

    with answered(say, aws) as store:
        assert store.get("key") == b"ok"
        assert way_of(store) is ByBotocore
        aws.setattr(reads, "time", _Later(reads._ELSEWHERE_SECONDS + 1))
        assert store.get("key") == b"ok"
        assert way_of(store) is Signed


class _Later:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._seconds

    sleep = staticmethod(time.sleep)


@by_either_way
def test_no_memory_is_taken_for_an_object_of_any_size(aws: pytest.MonkeyPatch, way: str) -> None:
    def say(_: str, __: int, ___: dict[str, str], out: BinaryIO) -> None:
        out.write(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 99999999999999\r\n\r\nabc')

    with answered(say, aws, way) as store, pytest.raises(DocumentCorrupt, match="key has 99999999999999 bytes"):
        store.get("key")


@pytest.mark.parametrize("digits", [23, 5000])
def test_a_length_beyond_all_numbers_is_asked_for_again(aws: pytest.MonkeyPatch, digits: int) -> None:
    def say(_: str, number: int, __: dict[str, str], out: BinaryIO) -> bool:
        out.write(answer(b"ok", ETag='"e"', **({"Content_Length": "9" * digits} if number == 1 else {})))
        return False

    with answered(say, aws) as store:
        assert store.get("key") == b"ok"


# What a first answer, and the answer to a resumed read, may not be.
WRONG_AT_FIRST = {
    "part of it": answer(b"part", "206 Partial Content", ETag='"e"', Content_Range="bytes 5-8/100"),
    "packed": answer(b"packed", ETag='"e"', Content_Encoding="gzip"),
    "a page": answer(b"<html>", ETag='"e"', Content_Type="text/html; charset=utf-8"),
    "no etag": answer(b"ok"),
    "no content": answer(b"", "204 No Content", ETag='"e"'),
}
WRONG_LATER = {
    "another object": {"ETag": '"f"'},
    "no etag": {"ETag": ""},
    "packed": {"Content_Encoding": "gzip"},
    "from elsewhere on": {"Content_Range": "bytes 5-999999/1000000"},
    "of another size": {"Content_Range": "bytes {start}-999999/2000000"},
    "shorter": {"Content_Range": "bytes {start}-999990/1000000"},
}


@by_either_way
@pytest.mark.parametrize("wrong", WRONG_AT_FIRST)
def test_an_answer_that_is_not_the_whole_object_is_asked_for_again(
    aws: pytest.MonkeyPatch, way: str, wrong: str
) -> None:
    def say(_: str, number: int, __: dict[str, str], out: BinaryIO) -> None:
        out.write(WRONG_AT_FIRST[wrong] if number == 1 else answer(b"ok", ETag='"e"'))

    with answered(say, aws, way) as store:
        assert store.get("key") == b"ok"


@by_either_way
@pytest.mark.parametrize("wrong", [*WRONG_LATER, "the whole"])
def test_a_read_does_not_go_on_with_anything_but_the_rest(aws: pytest.MonkeyPatch, way: str, wrong: str) -> None:
    def say(_: str, number: int, headers: dict[str, str], out: BinaryIO) -> bool:
        if "range" not in headers:
            out.write(answer(DATA, ETag='"e"')[:-400_000])
            time.sleep(0.2)
            return False
        start = headers["range"].removeprefix("bytes=").partition("-")[0]
        named = {"ETag": '"e"', "Content_Range": f"bytes {start}-999999/1000000"}
        rest = DATA[int(start) :]
        if number == 2 and wrong == "the whole":
            out.write(answer(rest, **named))
        elif number == 2:
            other = {name: value.format(start=start) for name, value in WRONG_LATER[wrong].items()}
            out.write(answer(b"?" * len(rest), "206 Partial Content", **named | other))
        else:
            out.write(answer(rest, "206 Partial Content", **named))
        return False

    with answered(say, aws, way) as store:
        assert store.get("key") == DATA


@pytest.mark.parametrize("method", ["get", "put"])
def test_credentials_that_have_expired_are_looked_for_again(aws: pytest.MonkeyPatch, method: str) -> None:
    def say(_: str, __: int, headers: dict[str, str], out: BinaryIO) -> bool:
        expired = "Credential=old/" in headers["authorization"]
        if expired:
            aws.setenv("AWS_ACCESS_KEY_ID", "new")
        out.write(refusal("ExpiredToken") if expired else answer(b"", ETag='"e"'))
        return False

    aws.setenv("AWS_ACCESS_KEY_ID", "old")
    with answered(say, aws) as store:
        if method == "get":
            assert store.get("key") == b""
            assert way_of(store) is Signed
        else:
            store.put("key", b"x")


_SLOW_PROCESS = """#!/bin/sh
[ -e {0}/slow ] && exec sleep 8
echo '{{"Version":1,"AccessKeyId":"a","SecretAccessKey":"b","SessionToken":"t","Expiration":"{1}"}}'
"""


@by_either_way
@pytest.mark.parametrize("begun", [True, False])
def test_credentials_that_are_not_renewed_do_not_outlast_the_deadline(
    aws: pytest.MonkeyPatch, tmp_path: Path, way: str, begun: bool
) -> None:
    soon = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
    (tmp_path / "process").write_text(_SLOW_PROCESS.format(tmp_path, soon))
    (tmp_path / "process").chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {tmp_path}/process\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        aws.delenv(name)
    aws.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    aws.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with answered(lambda _, __, ___, out: out.write(answer(b"ok", ETag='"e"')), aws, way, seconds=2) as store:
        if begun:
            assert store.get("key") == b"ok"
        (tmp_path / "slow").touch()
        began = time.monotonic()
        with pytest.raises(Unavailable, match="within 2 s"):
            store.get("key")
        assert time.monotonic() - began < 6


@by_either_way
def test_credentials_that_stay_expired_are_refused(aws: pytest.MonkeyPatch, way: str) -> None:
    with (
        answered(lambda _, __, ___, out: out.write(refusal("ExpiredToken")), aws, way) as store,
        pytest.raises(Unavailable, match=r"ExpiredToken.*Renew the credentials"),
    ):
        store.get("key")
