"""Where tests keep repositories: a store on a disk or in S3, and an index in SQLite or PostgreSQL.

A test marked ``everywhere`` that asks for `root` (or `module_root`) runs on each of `KINDS` where
``KVGRAFT_TEST_MATRIX=full`` is set, and else on the first, with ``everywhere(always=True)`` on the last too. Parts that
it makes no sense on are named with the reason, and it is skipped there: ``everywhere(but={"s3": "objects have no links"})``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import postgres
import pytest
from botocore.exceptions import ClientError
from index_support import empty_index

from repo_service.services.opening import open_local

KINDS = ("disk-sqlite", "disk-postgres", "s3-sqlite", "s3-postgres")
"""Stores and indexes that a repository may consist of."""

INSIDE = "only an index that lies in the directory is made again by opening it"
"""Why a test is for the first kind alone."""

FULL = os.environ.get("KVGRAFT_TEST_MATRIX") == "full"

WAYS = ("embedded", "service") if FULL else ("embedded",)
"""Ways to a repository, for tests of whatever uses one; tests of the repository itself take both."""


def kinds(*, always: bool = False, but: Mapping[str, str] | None = None) -> list[Any]:
    """The kinds of place that a test marked ``everywhere`` runs on, as parameters."""
    chosen = KINDS if FULL else (KINDS[0], KINDS[-1]) if always else KINDS[:1]
    why = {kind: [reason for part, reason in (but or {}).items() if part in kind.split("-")] for kind in chosen}
    return [pytest.param(kind, marks=[pytest.mark.skip(reason=one) for one in why[kind][:1]]) for kind in chosen]


class BucketPath:
    """A key or a prefix in a bucket, with those of pathlib's methods that tests use."""

    def __init__(self, client: Any, bucket: str, path: PurePosixPath) -> None:
        self._client = client
        self._bucket = bucket
        self._path = path

    def _at(self, path: PurePosixPath) -> BucketPath:
        return BucketPath(self._client, self._bucket, path)

    def __truediv__(self, name: str | BucketPath | PurePosixPath) -> BucketPath:
        return self._at(self._path / str(name))

    def __repr__(self) -> str:
        return self.as_uri()

    def __str__(self) -> str:
        return str(self._path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and other._path == self._path

    def __hash__(self) -> int:
        return hash(self._path)

    def __lt__(self, other: BucketPath) -> bool:
        return self._path < other._path

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def parts(self) -> tuple[str, ...]:
        return self._path.parts

    @property
    def parent(self) -> BucketPath:
        return self._at(self._path.parent)

    def as_uri(self) -> str:
        return f"s3://{self._bucket}/{self._path}"

    def relative_to(self, other: BucketPath) -> PurePosixPath:
        return self._path.relative_to(other._path)

    def with_name(self, name: str) -> BucketPath:
        return self._at(self._path.with_name(name))

    def rglob(self, pattern: str) -> Iterator[BucketPath]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=f"{self._path}/")
        keys = sorted(item["Key"] for page in pages for item in page.get("Contents", ()))
        return (self._at(path) for key in keys if (path := PurePosixPath(key)).match(pattern))

    def iterdir(self) -> Iterator[BucketPath]:
        return (path for path in self.rglob("*") if path.parent == self)

    def is_file(self) -> bool:
        try:
            self._client.head_object(Bucket=self._bucket, Key=str(self._path))
        except ClientError:
            return False
        return True

    exists = is_file

    def read_bytes(self) -> bytes:
        data: bytes = self._client.get_object(Bucket=self._bucket, Key=str(self._path))["Body"].read()
        return data

    def write_bytes(self, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=str(self._path), Body=data)

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def unlink(self) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=str(self._path))

    def rename(self, target: BucketPath) -> None:
        target.write_bytes(self.read_bytes())
        self.unlink()

    def mkdir(self, **_: bool) -> None:
        """There are no directories."""


Place = Path | BucketPath


@contextmanager
def place_of(kind: str, directory: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place for a new repository; the environment names its index, unless that lies in the place itself."""
    store, index = kind.split("-")
    with ExitStack() as stack, mock.patch.dict(os.environ):
        # A place that tests of a module share may have left its own there.
        os.environ.pop("KVGRAFT_INDEX", None)
        url = stack.enter_context(postgres.index()) if index == "postgres" else None
        if store == "disk":
            place: Place = directory / "repository"
            if url is not None:
                # From then on the directory looks for its index elsewhere.
                open_local(place.as_uri(), index_url=url).close()
        else:
            server = request.getfixturevalue("_s3")
            os.environ.update(server.environment)
            place = BucketPath(server.client(), server.bucket, PurePosixPath(server.prefix()))
            url = url or empty_index(directory / "index-of-a-bucket")
        if url is not None:
            os.environ["KVGRAFT_INDEX"] = url
        yield place
