"""Who may do what: scopes, access tokens, and what a caller's token allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import Field

from repo_service.domain.errors import AccessDenied, InvalidInput, MalformedName
from repo_service.domain.names import check_namespace
from repo_service.domain.views import View

ALL_NAMESPACES = "*"
"""In place of a token's list of namespaces: those that are there and those to come."""

DEFAULT_LIFETIME_S = 90 * 86400
MAX_LIFETIME_S = 100 * 365 * 86400
MAX_NAMESPACES = 256
MAX_NOTE_CHARACTERS = 200

_TOKEN_ID = re.compile(r"[0-9a-f]{12}", re.ASCII)
_TOKEN = re.compile(r"kvg_([0-9a-f]{12})_([0-9a-f]{64})", re.ASCII)


class Scope(StrEnum):
    """What a token is for; each scope includes those before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    def includes(self, other: Scope) -> bool:
        order = list(Scope)
        return order.index(self) >= order.index(other)


class AccessToken(View):
    """A token of the service, without its secret."""

    id: str
    scope: Scope
    namespaces: list[str] = Field(description="Where it is valid; `*` alone for every namespace.")
    note: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    def is_valid(self, now: datetime) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class NewAccessToken(View):
    """A token that was just made."""

    token: str = Field(repr=False, description="The token itself. It is shown this once and kept nowhere.")
    info: AccessToken


@dataclass(frozen=True)
class Access:
    """What one caller may do.

    Parameters
    ----------
    token_id
        The caller's token; None where nobody is asked for one.
    scope
        The caller's rights.
    namespaces
        Where they hold; None for everywhere.
    """

    token_id: str | None
    scope: Scope
    namespaces: frozenset[str] | None

    def reaches(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces

    def require_namespace(self, namespace: str) -> None:
        """Raises `AccessDenied` by the token alone: whether the namespace exists plays no part (I7)."""
        if not self.reaches(namespace):
            raise AccessDenied(
                f"this token has no rights in the namespace {namespace[:100]!r}: use a token made for it",
                namespace=namespace[:100],
            )

    def require_everywhere(self) -> None:
        """Raises `AccessDenied` for a token of some namespaces only."""
        if self.namespaces is not None:
            raise AccessDenied(
                f"this concerns every namespace, and this token is valid in some: use one made for {ALL_NAMESPACES!r}"
            )

    def require_scope(self, scope: Scope) -> None:
        """Raises `AccessDenied` if the token's scope is less."""
        if not self.scope.includes(scope):
            raise AccessDenied(
                f"this needs the scope {scope}, and this token has {self.scope}: use a token with more rights",
                needed=scope.value,
                scope=self.scope.value,
            )


ANYONE = Access(None, Scope.ADMIN, None)
"""Every caller of a service that asks for no tokens."""


def parse_token(text: str) -> tuple[str, str] | None:
    """A token's id and secret, or None if the text is no token."""
    match = _TOKEN.fullmatch(text)
    return (match[1], match[2]) if match else None


def format_token(token_id: str, secret: str) -> str:
    return f"kvg_{token_id}_{secret}"


def check_token_id(token_id: str) -> str:
    """Return a valid token id unchanged; raises `MalformedName`, which shows no secret."""
    if not _TOKEN_ID.fullmatch(token_id):
        raise MalformedName("this is no token id: 12 hexadecimal digits, those after kvg_ in the token")
    return token_id


def check_grant(namespaces: Sequence[str], lifetime_s: int | None, note: str) -> None:
    """Check what a token is to be made with.

    Raises
    ------
    InvalidInput, MalformedName
    """
    if not namespaces or len(namespaces) > MAX_NAMESPACES:
        raise InvalidInput(
            f"a token is valid in 1 to {MAX_NAMESPACES} namespaces, or in {ALL_NAMESPACES!r}; {len(namespaces)} were given"
        )
    if list(namespaces) != [ALL_NAMESPACES]:
        for namespace in namespaces:
            check_namespace(namespace)
    if lifetime_s is not None and not 0 < lifetime_s <= MAX_LIFETIME_S:
        raise InvalidInput(
            f"a token can't be valid for {lifetime_s} s: give 1 s to 100 years, or no limit", lifetime_s=lifetime_s
        )
    if len(note) > MAX_NOTE_CHARACTERS or not note.isprintable():
        raise InvalidInput(f"a note has at most {MAX_NOTE_CHARACTERS} printable characters")
