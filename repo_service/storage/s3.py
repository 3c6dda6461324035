"""A store in an S3 bucket: one PUT per object, conditional where it must be, and nothing kept between calls."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from typing_extensions import Buffer

from repo_service.domain.errors import MalformedUrl
from repo_service.storage.s3_answers import Missing, Refused, Transient
from repo_service.storage.s3_client import SECONDS, Bucket
from repo_service.storage.s3_probe import is_strict
from repo_service.storage.store import MAX_KEY_CHARACTERS, MAX_OBJECT_BYTES, Store, check_key, check_size, is_key

# Keys in one answer to a listing, at most.
_PAGE = 1000

# Name of the metadata that tells which operation wrote an object.
_MARK = "kvgraft-write"

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*?))?/?", re.ASCII)


class S3Store(Store):
    """Objects under ``prefix`` in a bucket, read by the caller's thread, and written, listed and removed through s3fs.

    Credentials and endpoint are those that botocore finds.
    Every operation has a deadline. Within it, what may be tried again is tried again, a read from where it
    broke off. An object is created by one conditional PUT; where its answer is lost, the bytes that
    are there say what became of it.

    Parameters
    ----------
    bucket, prefix
        As `parse_s3_url` gives them.
    seconds
        Deadline of each operation.
    """

    concurrency = 8

    def __init__(self, bucket: str, prefix: str = "", *, seconds: float = SECONDS) -> None:
        self._bucket = Bucket(bucket, seconds)
        self._root = f"{prefix}/" if prefix else ""
        self._is_strict: bool | None = None

    def get(self, key: str, limit: int = MAX_OBJECT_BYTES) -> bytes | None:
        held = bytearray()

        def room(size: int) -> memoryview:
            nonlocal held
            held = bytearray(check_size(key, size, limit))
            return memoryview(held)

        size = self._bucket.reader.read(self._path(key), room)
        return None if size is None else bytes(held)

    def read_into(self, key: str, out: memoryview, seen: Callable[[memoryview], object]) -> int | None:
        return self._bucket.reader.read(self._path(key), lambda size: out[:size], seen)

    def url_of(self, key: str, seconds: int) -> str:
        return self._bucket.reader.url_of(self._path(key), seconds)

    def upload_url_of(self, key: str, size: int, seconds: int) -> str | None:
        reader = self._bucket.reader
        if not reader.is_plain:
            return None
        if self._is_strict is None:

            def put(key: str, body: bytes, headers: Mapping[str, str]) -> int:
                url = reader.url_of(self._path(key), 60, "put_object", ContentLength=len(body))
                return reader.put_at(url, body, headers)

            self._is_strict = is_strict(self, key, lambda key: f"{self._bucket.name}/{self._path(key)}", put)
        if not self._is_strict:
            return None
        return reader.url_of(self._path(key), seconds, "put_object", ContentLength=size)

    def put(self, key: str, data: Buffer) -> None:
        path, body, mark = self._path(key), _as_bytes(data), _new_mark()

        def put() -> Coroutine[Any, Any, None]:
            return self._put(path, body, mark)

        self._bucket.run(self._bucket.until_done(f"write {self._named(path)}", put))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        path, body = self._path(key), _as_bytes(data)
        return self._bucket.run(self._create(path, body))

    def delete(self, key: str, *, durable: bool = True) -> None:  # noqa: ARG002
        path = self._path(key)

        async def delete() -> None:
            with suppress(Missing):
                answer = (await self._bucket.call("delete_object", Key=path))["ResponseMetadata"]
                if answer["HTTPStatusCode"] != 204 and "x-amz-request-id" not in answer["HTTPHeaders"]:
                    raise Transient("the answer to a DELETE is not S3's")

        self._bucket.run(self._bucket.until_done(f"delete {self._named(path)}", delete))

    def exists(self, key: str) -> bool:
        path = self._path(key)
        return self._bucket.run(self._bucket.until_done(f"look for {self._named(path)}", lambda: self._is_there(path)))

    def age_s(self, key: str) -> float | None:
        path = self._path(key)

        async def age() -> float | None:
            answer = await self._begun(path)
            if answer is None:
                return None
            now = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
            written: datetime | None = answer.get("LastModified")
            if now is None or written is None:
                raise Transient("the answer lacks its date or the object's")
            return max(0.0, (parsedate_to_datetime(now) - written).total_seconds())

        return self._bucket.run(self._bucket.until_done(f"look at {self._named(path)}", age))

    def remove_leftovers(self, *, dry_run: bool = False) -> Iterator[str]:  # noqa: ARG002
        # An interrupted PUT leaves nothing.
        return iter(())

    def list(self, prefix: str) -> Iterator[str]:
        return self._below(f"{self._path(prefix)}/")

    def is_empty(self, *, but: str = "") -> bool:
        """True if nothing at all, be it an object of this store or not, lies under the prefix, or only what is below ``but``."""
        passed_over = f"{self._path(but)}/" if but else None
        keys, _ = self._page(self._root, MaxKeys=_PAGE)
        return all(passed_over is not None and key.startswith(passed_over) for key in keys)

    def close(self) -> None:
        self._bucket.close()

    def _path(self, key: str) -> str:
        return f"{self._root}{check_key(key)}"

    def _named(self, path: str) -> str:
        return f"s3://{self._bucket.name}/{path}"

    def _below(self, path: str) -> Iterator[str]:
        more: dict[str, Any] = {}
        while True:
            keys, token = self._page(path, MaxKeys=_PAGE, **more)
            yield from filter(is_key, (key.removeprefix(self._root) for key in keys))
            if token is None:
                return
            more = {"ContinuationToken": token}

    def _page(self, path: str, **arguments: Any) -> tuple[Sequence[str], str | None]:
        """Keys of objects below ``path``, and the token that asks for more, if there are more."""

        async def page() -> tuple[Sequence[str], str | None]:
            answer = await self._bucket.call("list_objects_v2", Prefix=path, **arguments)
            keys = [item.get("Key", "") for item in answer.get("Contents", ())]
            token = answer.get("NextContinuationToken")
            more = answer.get("IsTruncated")
            # Whatever XML came is taken for a listing, and what it lacks is left out.
            goes_on = not more or (token and token != arguments.get("ContinuationToken"))
            if more is None or not goes_on or not all(key.startswith(path) for key in keys):
                raise Transient("the answer is no listing of what was asked for")
            return keys, token if more else None

        return self._bucket.run(self._bucket.until_done(f"list {self._named(path)}", page))

    # Coroutines, all of which run in fsspec's loop.

    async def _put(self, path: str, body: bytes, mark: str, **condition: str) -> None:
        """One PUT. The object bears the mark of the operation that wrote it."""
        _check_etag(await self._bucket.call("put_object", Key=path, Body=body, Metadata={_MARK: mark}, **condition))

    async def _create(self, path: str, body: bytes) -> bool:
        mark = _new_mark()

        async def attempt() -> bool:
            try:
                await self._put(path, body, mark, IfNoneMatch="*")
                return True
            except Refused as refused:
                if refused.status != 412:
                    raise
            # It may have been this PUT all the same, at a try whose answer was lost, or sent twice by
            # aiohttp, which does so, unasked, when a connection breaks.
            found = await self._marked(path, len(body))
            if found is None:
                raise Transient("it was removed while it was written")
            data, found_mark = found
            # A server that keeps no metadata leaves the bytes to tell by.
            return data == body and found_mark in (mark, None)

        return await self._bucket.until_done(f"create {self._named(path)}", attempt)

    async def _is_there(self, path: str) -> bool:
        return await self._begun(path) is not None

    async def _begun(self, path: str) -> dict[str, Any] | None:
        """What comes before an object's bytes, or None if there is none.

        The answer to a HEAD has no body that would tell a missing object from anything else that is missing.
        """
        try:
            answer: dict[str, Any] = await self._bucket.call("get_object", Key=path, Range="bytes=0-0")
        except Missing:
            return None
        except Refused as refused:
            if refused.status != 416:
                raise
            # It has no byte.
            answer = await self._bucket.call("get_object", Key=path)
        async with answer["Body"] as body:
            _check_etag(answer)
            await body.read(1)
        return answer

    async def _marked(self, path: str, size: int) -> tuple[bytes | None, str | None] | None:
        """An object's bytes, or none of them if they are not ``size``, and the mark of whoever wrote them."""
        try:
            answer = await self._bucket.call("get_object", Key=path)
        except Missing:
            return None
        async with answer["Body"] as body:
            _check_etag(answer)
            data = await body.read() if answer.get("ContentLength") == size else None
        return data, answer["Metadata"].get(_MARK)


def parse_s3_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of ``s3://bucket[/prefix]``; the prefix is empty or a storage key.

    Raises
    ------
    MalformedUrl
    """
    match = _URL.fullmatch(url)
    if match is None or "/" in match[1]:
        raise MalformedUrl(
            f"{url[:200]!r} is not s3://bucket/prefix: a bucket is 3 to 63 small letters, digits, '-' and '.'; "
            f"credentials and endpoint are read from AWS_ variables",
            url=url[:200],
        )
    bucket, prefix = match[1], match[2] or ""
    if prefix and not (is_key(prefix) and len(prefix) <= MAX_KEY_CHARACTERS):
        raise MalformedUrl(
            f"{url[:200]!r}: a prefix is parts of letters, digits, '.', '_' and '-', joined by '/'", url=url[:200]
        )
    return bucket, prefix


def _check_etag(answer: Mapping[str, Any]) -> None:
    """Refuse an answer that says nothing of an object, though it says that all is well."""
    if not answer.get("ETag"):
        raise Transient("the answer lacks the object's ETag")


def _as_bytes(data: Buffer) -> bytes:
    return data if isinstance(data, bytes) else bytes(memoryview(data))


def _new_mark() -> str:
    return uuid.uuid4().hex
