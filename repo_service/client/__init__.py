"""One door to a repository, embedded or through the service."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from repo_service.client.cache import NodeCache
from repo_service.client.cached import CachedRepository
from repo_service.client.http import HttpRepository
from repo_service.client.settings import node_cache
from repo_service.domain.errors import InvalidInput, MalformedUrl
from repo_service.domain.repository import Repository
from repo_service.services.opening import open_local
from repo_service.services.places import MEMORY_URL, S3_SCHEME

__all__ = ["NodeCache", "open_repository"]


def open_repository(
    url: str,
    token: str | None = None,
    *,
    create: bool = True,
    index: str | None = None,
    cache: NodeCache | str | os.PathLike[str] | None = None,
    take_over: bool = False,
) -> Repository:
    """Open a repository.

    Parameters
    ----------
    url
        ``file:///absolute/path``, ``s3://bucket/prefix`` or ``memory:`` for one that this process reaches
        itself, ``http://host:port`` or ``https://host:port`` for one behind a service, which is not contacted yet.
    token
        Sent to a service as a bearer token; a repository on this machine needs none.
    create
        Make a new repository where a ``file:`` or ``s3:`` URL has none.
    index
        URL of the index of an ``s3:`` repository, or of a directory that has it elsewhere; ``KVGRAFT_INDEX`` by
        default. ``sqlite:///path`` where one machine uses it.
    cache
        Where chunks that come from another machine are kept on this one: a `NodeCache`, a directory, or ``off``; by
        default what ``KVGRAFT_CACHE_DIR`` says.
    take_over
        Make this index the repository's, whichever it had; `Repository.reindex` is to follow.

    Raises
    ------
    MalformedUrl, NotARepository, NewerFormat, InvalidInput
        ``InvalidInput`` for a token that no header can carry, an index that is missing, or a bound of the cache
        that is no number.
    Conflict
        If the repository belongs to another index.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise MalformedUrl(f"{url!r} is no URL: {error}", url=url) from None
    if url == MEMORY_URL or parts.scheme in {"file", S3_SCHEME}:
        local = open_local(url, create=create, index_url=index, take_over=take_over)
        return _cached(local, node_cache(cache)) if parts.scheme == S3_SCHEME else local
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise MalformedUrl(
            f"{url!r} is no repository's URL: give file:///absolute/path, s3://bucket/prefix, memory:, http://host:port or https://host:port",
            url=url,
        )
    if "@" in parts.netloc:
        raise MalformedUrl("the URL holds a user name or a password, and services take neither: give a token instead")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise MalformedUrl(
            f"{url!r} has more than a scheme, host and port: give http://host:port or https://host:port", url=url
        )
    if index is not None or take_over:
        raise InvalidInput(f"the service at {url} has its own index: name it where the service runs", url=url)
    return _cached(HttpRepository(parts, token), node_cache(cache))


def _cached(repository: Repository, cache: NodeCache | None) -> Repository:
    return repository if cache is None else CachedRepository(repository, cache)
