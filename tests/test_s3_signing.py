"""Requests are signed as botocore signs them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials

from repo_service.storage import s3_signing
from repo_service.storage.s3_signing import Signer


@pytest.mark.parametrize("token", [None, "a/session+token=="])
@pytest.mark.parametrize("host", ["bucket.s3.eu-central-1.amazonaws.com", "127.0.0.1:8333", "[::1]:8333"])
def test_a_signature_is_that_of_botocore(monkeypatch: pytest.MonkeyPatch, host: str, token: str | None) -> None:
    path = "/tests/some-prefix/chunks/blake3/00/0a.B_c-1"
    signer = Signer(host, "eu-central-1", Credentials("key", "secret/+", token))
    # The second is made with the day's key that the first has left.
    signer.headers("/other")
    ours = signer.headers(path)
    request = AWSRequest("GET", f"http://{host}{path}")
    auth = S3SigV4Auth(ReadOnlyCredentials("key", "secret/+", token), "s3", "eu-central-1")
    now = datetime.strptime(ours["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: now)
    auth.add_auth(request)
    theirs = dict(request.headers)
    assert {name.lower(): value for name, value in ours.items()} == {
        "host": host, **{name.lower(): value for name, value in theirs.items()}
    }  # fmt: skip


def test_the_key_follows_the_day_and_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = Credentials("key", "secret")
    signer = Signer("host", "region", credentials)

    def signature() -> str:
        return re.findall("Signature=(.*)", signer.headers("/a")["Authorization"])[0]

    monkeypatch.setattr(s3_signing.time, "gmtime", lambda: (2026, 11, 30, 0, 0, 0, 0, 334, 0))
    first = signature()
    credentials.secret_key = "other"
    second = signature()
    monkeypatch.setattr(s3_signing.time, "gmtime", lambda: (2026, 12, 1, 0, 0, 0, 1, 335, 0))
    third = signature()
    assert len({first, second, third}) == 3
    credentials.secret_key = "secret"
    monkeypatch.setattr(s3_signing.time, "gmtime", lambda: (2026, 11, 30, 0, 0, 0, 0, 334, 0))
    assert signature() == first
