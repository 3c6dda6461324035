"""The ways to ask S3 for an object: signed here and read by the calling thread, or sent by botocore."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from ssl import create_default_context
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from botocore.exceptions import ClientError
from botocore.httpsession import get_cert_path
from botocore.parsers import create_parser
from botocore.session import Session
from botocore.utils import get_environ_proxies

from repo_service.connections import Answer, Pool
from repo_service.storage.s3_answers import Missing, refusal
from repo_service.storage.s3_signing import Signer

CONNECTIONS = 64
CONNECT_SECONDS = 5.0

# Of an operation's time: the longest silence.
SILENCE_SHARE = 1 / 6

MAX_ERROR_BYTES = 64 * 1024

_ERRORS = create_parser("rest-xml")

Headers = Mapping[str, Any]

# `Bucket.call` and `Bucket.run`.
Call = Callable[..., Coroutine[Any, Any, Any]]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Overdue(Exception):
    """The time of an operation is over."""


class Deadline:
    """The time of one operation, in which no silence may be longer than a share of it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._silence_s = seconds * SILENCE_SHARE

    def rest_s(self) -> float:
        rest = self._end - time.monotonic()
        if rest <= 0:
            raise Overdue
        return rest

    def wait_s(self) -> float:
        return min(self._silence_s, self.rest_s())

    def late(self) -> Exception:
        return TimeoutError("nothing came for too long")

    def moved(self, count: int) -> None:
        pass

    def sent(self) -> None:
        pass


class Way(Protocol):
    """How an object is asked for."""

    def open(
        self, key: str, conditions: Mapping[str, str], deadline: Deadline
    ) -> AbstractContextManager[tuple[int, Headers, Answer]]:
        """The answer's status and headers, and what gives its body."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Signed:
    """Requests signed and sent from here; ``path`` is the part of the bucket's URL after the host."""

    pool: Pool
    path: str
    signer: Signer

    @contextmanager
    def open(
        self, key: str, conditions: Mapping[str, str], deadline: Deadline
    ) -> Iterator[tuple[int, Headers, Answer]]:
        path = f"{self.path}/{key}"
        headers = {**self.signer.headers(path, deadline.wait_s()), **conditions}
        with self.pool.ask("GET", path, headers, deadline, connect_s=CONNECT_SECONDS) as answer:
            if answer.status // 100 != 2:
                raise _refusal(answer.status, dict(answer.headers), answer.read(MAX_ERROR_BYTES))
            # It finds a header whatever its case.
            yield answer.status, answer.headers, answer  # type: ignore[misc]

    def close(self) -> None:
        self.pool.close()


@dataclass(frozen=True)
class ByBotocore:
    """Requests sent by botocore in the loop, which knows proxies, redirections and every kind of bucket."""

    call: Call
    run: Run

    @contextmanager
    def open(
        self, key: str, conditions: Mapping[str, str], deadline: Deadline
    ) -> Iterator[tuple[int, Headers, Answer]]:
        named = {name.replace("-", ""): value for name, value in conditions.items()}
        answer = self.run(_within(deadline.wait_s(), self.call("get_object", Key=key, **named)))
        said, body = answer["ResponseMetadata"], answer["Body"]
        try:
            yield said["HTTPStatusCode"], said["HTTPHeaders"], _Streamed(body, self.run, deadline)
        finally:
            self.run(body.__aexit__(None, None, None))

    def close(self) -> None:
        """The bucket closes them."""


@dataclass(frozen=True)
class _Streamed:
    """The body of an answer to botocore, read piece by piece as it comes."""

    body: Any
    run: Run
    deadline: Deadline

    def readinto(self, out: memoryview) -> int:
        data: bytes = self.run(_within(self.deadline.wait_s(), self.body.read(len(out))))
        out[: len(data)] = data
        return len(data)


async def _within(seconds: float, awaited: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await awaited


def signed_way(session: Session, client: Any, bucket: str) -> Signed | None:
    """What botocore would send to the bucket, or None if it is more than a signed request to its server."""
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "key"}, ExpiresIn=60)
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    scope = query.get("X-Amz-Credential", [""])[0].split("/")[1:]
    plain = parts.path.endswith("/key") and all(name.startswith("X-Amz-") for name in query)
    if query.get("X-Amz-Algorithm") != ["AWS4-HMAC-SHA256"] or scope[2:] != ["s3", "aws4_request"] or not plain:
        return None
    if client.meta.config.proxies or get_environ_proxies(url):
        return None
    context = None
    if parts.scheme == "https":
        bundle = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE") or True
        context = create_default_context(cafile=get_cert_path(bundle))
    pool = Pool(parts.hostname or "", parts.port, context, keep=CONNECTIONS)
    return Signed(pool, parts.path.removesuffix("/key"), Signer(parts.netloc, scope[1], session.get_credentials()))


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    parsed = _ERRORS.parse({"status_code": status, "headers": headers, "body": body}, None)
    refused = refusal(ClientError(parsed, "GetObject"))
    return Missing(refused) if refused.is_missing else refused
