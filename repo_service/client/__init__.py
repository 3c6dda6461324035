"""One door to a repository, embedded or through the service."""

from __future__ import annotations

from urllib.parse import urlsplit

from repo_service.client.http import HttpRepository
from repo_service.domain.errors import MalformedUrl
from repo_service.domain.repository import Repository
from repo_service.services.repository import MEMORY_URL, open_local

__all__ = ["open_repository"]


def open_repository(url: str, token: str | None = None, *, create: bool = True) -> Repository:
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

    Raises
    ------
    MalformedUrl, NotARepository, NewerFormat, InvalidInput
        ``InvalidInput`` for a token that no header can carry.
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
    if "@" in parts.netloc:
        raise MalformedUrl("the URL holds a user name or a password, and services take neither: give a token instead")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise MalformedUrl(
            f"{url!r} has more than a scheme, host and port: give http://host:port or https://host:port", url=url
        )
    return HttpRepository(parts, token)
