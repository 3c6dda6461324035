"""Options that commands share, and the repository they name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repo_service.domain.errors import InvalidInput

if TYPE_CHECKING:
    from repo_service.domain.repository import Repository

REPO_VARIABLE = "KVGRAFT_REPO"
NAMESPACE_VARIABLE = "KVGRAFT_NAMESPACE"
TOKEN_VARIABLE = "KVGRAFT_TOKEN"

DEFAULT_REPO = "file://~/.local/share/kvgraft/repository"

Json = Annotated[bool, typer.Option("--json", help="Write the result as JSON to standard output.")]
Repo = Annotated[
    str,
    typer.Option(
        "--repo",
        envvar=REPO_VARIABLE,
        metavar="URL",
        help="Repository: file:///absolute/path, s3://bucket/prefix or http://host:port.",
    ),
]
Namespace = Annotated[
    str, typer.Option("--namespace", envvar=NAMESPACE_VARIABLE, metavar="NAME", help="Namespace in the repository.")
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", envvar=TOKEN_VARIABLE, metavar="TEXT", help="Bearer token for a repository behind a service."
    ),
]
Ref = Annotated[
    str, typer.Argument(metavar="REF", help="Artifact id, sha256: and at least its first 8 digits, or a tag.")
]
Annotations = Annotated[
    list[str] | None, typer.Option("--annotation", metavar="NAME=VALUE", help="An annotation; may be repeated.")
]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for each field of those of its parameters that are dataclasses."""
    sets: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            sets[parameter.name] = parameter.annotation
            parameters += inspect.signature(sets[parameter.name], eval_str=True).parameters.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in sets.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return run


def open_named(
    url: str, token: str | None = None, *, create: bool = False, cached: bool = False, take_over: bool = False
) -> Repository:
    """Open the repository at a URL.

    Parameters
    ----------
    create
        Make a repository where a ``file:`` or ``s3:`` URL has none. Only commands that write to it do, so that
        a mistyped URL is an error and not a new repository.
    cached
        Read chunks from the node's cache, and keep them there. Commands that look after a repository, or go
        through all of it, don't.
    take_over
        Make the index that ``KVGRAFT_INDEX`` names the repository's.

    Raises
    ------
    MalformedUrl, NotARepository, NewerFormat, InvalidInput, Conflict
    """
    from repo_service.client import open_repository

    cache = None if cached else "off"
    return open_repository(expanded(url), token, create=create, cache=cache, take_over=take_over)


def expanded(url: str) -> str:
    """A URL with the home directory in place of a leading ``~``, as in ``file://~/repository``."""
    prefix, home, path = url.partition("file://~/")
    return f"{Path.home().as_uri()}/{path}" if home and not prefix else url


def pairs(values: list[str] | None, option: str) -> dict[str, str]:
    """``name=value`` arguments as a dictionary.

    Raises
    ------
    InvalidInput
    """
    result: dict[str, str] = {}
    for text in values or ():
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise InvalidInput(f"{text[:100]!r} is not NAME=VALUE, which {option} takes")
        if name in result:
            raise InvalidInput(f"{option} {name[:100]} was given twice")
        result[name] = value
    return result
