"""Where a repository lies: its store and its index, by URL."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from repo_service.domain.errors import InvalidInput, MalformedUrl
from repo_service.domain.frame import BLOSC, NONE, check_codec
from repo_service.services.documents import OWNER
from repo_service.services.marker import prepare_bucket, prepare_directory
from repo_service.services.reserve import Reserve
from repo_service.storage import LocalStore, MemoryStore, S3Store, Store, parse_s3_url

MEMORY_URL = "memory:"
S3_SCHEME = "s3"

INDEX_VARIABLE = "KVGRAFT_INDEX"
SECONDS_VARIABLE = "KVGRAFT_S3_SECONDS"
CODEC_VARIABLE = "KVGRAFT_CODEC"

_INDEX_FILE = "index.sqlite"


@dataclass(frozen=True)
class Place:
    """A store that is or may become a repository, and the index that goes with it.

    Parameters
    ----------
    has_owner
        Whether the store says which index it belongs to.
    reserve
        Room for deletions, on a disk.
    codec
        What the chunks of a new repository are to be stored with.
    """

    store: Store
    index_url: str
    has_owner: bool
    reserve: Reserve
    codec: str


def find_place(url: str, *, create: bool, index_url: str | None = None) -> Place:
    """The place that a URL names; the parameters are those of `open_local`.

    Raises
    ------
    MalformedUrl, NotARepository, InvalidInput
    """
    if url == MEMORY_URL:
        if index_url is not None:
            raise InvalidInput(f"a repository in memory has its index there too: {index_url} can't be used with it")
        return Place(MemoryStore(), "sqlite://", has_owner=False, reserve=Reserve(None), codec=_codec(NONE))
    if urlsplit(url).scheme == S3_SCHEME:
        return _in_a_bucket(url, create=create, index_url=index_url or os.environ.get(INDEX_VARIABLE))
    root, codec = _directory(url), _codec(NONE)
    prepare_directory(root, create=create)
    return Place(
        LocalStore(root),
        index_url or f"sqlite:///{root}/{_INDEX_FILE}",
        has_owner=index_url is not None or (root / OWNER).exists(),
        reserve=Reserve(root / f"{_INDEX_FILE}-reserve"),
        codec=codec,
    )


def _in_a_bucket(url: str, *, create: bool, index_url: str | None) -> Place:
    bucket, prefix = parse_s3_url(url)
    if not index_url:
        raise InvalidInput(
            f"the repository {url} needs an index elsewhere: name it with {INDEX_VARIABLE} or --index. "
            f"sqlite:///path/of/a/file will do where one machine uses the repository; several need PostgreSQL",
            url=url,
        )
    # What is saved there is paid for twice, in space and on the wire.
    codec = _codec(BLOSC)
    store = S3Store(bucket, prefix, seconds=_seconds())
    try:
        prepare_bucket(store, url, codec, create=create)
    except BaseException:
        store.close()
        raise
    return Place(store, index_url, has_owner=True, reserve=Reserve(None), codec=codec)


def _codec(default: str) -> str:
    try:
        return check_codec(os.environ.get(CODEC_VARIABLE) or default)
    except InvalidInput as error:
        raise InvalidInput(f"{CODEC_VARIABLE}: {error.message}", **error.details) from None


def _seconds() -> float:
    text = os.environ.get(SECONDS_VARIABLE, "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400:
        raise InvalidInput(f"{SECONDS_VARIABLE} is {text[:40]!r}; it must be a number of seconds, up to 86400")
    return seconds


def _directory(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or parts.query or parts.fragment:
        raise MalformedUrl(f"{url!r} is not file:///absolute/path", url=url)
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path or path.strip("/") == "":
        raise MalformedUrl(f"{url!r} names no directory: file:///absolute/path", url=url)
    return Path(path)
