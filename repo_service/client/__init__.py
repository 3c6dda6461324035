"""One door to a repository, embedded or through the service."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from repo_service.client.cache import NodeCache
from repo_service.client.cached import CachedRepository
from repo_service.client.http import HttpRepository
from repo_service.client.settings import node_cache
from repo_service.domain.errors import MalformedUrl
from repo_service.domain.repository import Repository
from repo_service.services.repository import MEMORY_URL, open_local

__all__ = ["NodeCache", "open_repository"]


def open_repository(
    url: str,
    token: str | None = None,
    *,
    create: bool = True,
    cache: NodeCache | str | os.PathLike[str] | None = None,
) -> Repository:
    """Open a repository.

    Parameters
    ----------
    url
        ``file:///absolute/path`` or ``memory:`` for one on this machine, ``http://host:port`` or
        ``https://host:port`` for one behind a service, which is not contacted yet.
    token
        Sent to a service as a bearer token; a repository on this machine needs none.
    create
        Make a new repository where a ``file:`` URL has none.
    cache
        Where chunks that come from another machine are kept on this one: a `NodeCache`, a directory, or ``off``; by
        default what ``KVGRAFT_CACHE_DIR`` says.

    Raises
    ------
    MalformedUrl, NotARepository, NewerFormat, InvalidInput
        ``InvalidInput`` for a token that no header can carry, or a bound of the cache that is no number.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise MalformedUrl(f"{url!r} is no URL: {error}", url=url) from None
    if url == MEMORY_URL or parts.scheme == "file":
        return open_local(url, create=create)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise MalformedUrl(
            f"{url!r} is no repository's URL: give file:///absolute/path, memory:, http://host:port or https://host:port",
            url=url,
        )
    if parts.path not in {"", "/"} or parts.query or parts.fragment or "@" in parts.netloc:
        raise MalformedUrl(
            f"{url!r} has more than a scheme, host and port: give http://host:port or https://host:port", url=url
        )
    return _cached(HttpRepository(parts, token), node_cache(cache))


def _cached(repository: Repository, cache: NodeCache | None) -> Repository:
    return repository if cache is None else CachedRepository(repository, cache)
