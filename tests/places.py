"""Where tests keep repositories: in a directory, or, seen through the same methods, in a bucket.

A test marked ``on_s3`` that asks for `root` (or `module_root`) also runs on S3: always with
``on_s3(always=True)``, and else where ``KVGRAFT_TEST_MATRIX=full`` is set, but for ``on_s3(never=True)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

from botocore.exceptions import ClientError
from servers import S3Server

FULL = os.environ.get("KVGRAFT_TEST_MATRIX") == "full"


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
def in_a_bucket(server: S3Server, directory: Path) -> Iterator[BucketPath]:
    """A place for a repository in a bucket; its index, in ``directory``, and credentials are in the environment."""
    index = {"KVGRAFT_INDEX": f"sqlite:///{directory}/index-of-a-bucket.sqlite"}
    with mock.patch.dict(os.environ, server.environment | index):
        yield BucketPath(server.client(), server.bucket, PurePosixPath(server.prefix()))
