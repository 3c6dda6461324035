"""Access tokens: made, listed, revoked, and recognised."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from repo_service.domain.access import (
    ALL_NAMESPACES,
    Access,
    AccessToken,
    NewAccessToken,
    Scope,
    check_grant,
    format_token,
    parse_token,
)
from repo_service.domain.errors import Unauthenticated
from repo_service.index import Index

REMEMBERED_S = 5.0
"""How long a token that was revoked may still be taken, at most."""

_REMEMBERED = 1024
_NOBODY = bytes(32)


def create_token(
    index: Index, scope: Scope, namespaces: Sequence[str], *, lifetime_s: int | None, note: str
) -> NewAccessToken:
    """Make a token of 256 random bits, of which only the SHA-256 is kept.

    Raises
    ------
    InvalidInput, MalformedName
    """
    check_grant(namespaces, lifetime_s, note)
    secret = secrets.token_hex(32)
    now = datetime.now(UTC)
    token = AccessToken(
        id=secrets.token_hex(6),
        scope=scope,
        namespaces=sorted(set(namespaces)),
        note=note,
        created_at=now,
        expires_at=None if lifetime_s is None else now + timedelta(seconds=lifetime_s),
        revoked_at=None,
    )
    index.add_token(token, _digest(secret))
    return NewAccessToken(token=format_token(token.id, secret), info=token)


@dataclass(frozen=True)
class _Known:
    token: AccessToken
    secret_digest: bytes
    access: Access
    until: float


class Recognition:
    """Tells who a token belongs to; what the index says is remembered for `REMEMBERED_S`.

    Methods may be called from several threads.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def remembered(self, text: str) -> Access | None:
        """What the token allows, or None if the index must be asked; never waits.

        Raises
        ------
        Unauthenticated
        """
        token_id, secret = _parsed(text)
        known = self._known.get(token_id)
        if known is None or known.until <= time.monotonic():
            return None
        return _recognised(known, secret)

    def recognise(self, text: str) -> Access:
        """What the token allows, as the index says now.

        Raises
        ------
        Unauthenticated
            The same for a token that is malformed, unknown, expired, or revoked.
        """
        token_id, secret = _parsed(text)
        asked = time.monotonic()
        row = self._index.token(token_id)
        if row is None:
            hmac.compare_digest(_digest(secret), _NOBODY)
            raise unauthenticated()
        token, digest = row
        everywhere = token.namespaces == [ALL_NAMESPACES]
        access = Access(token.id, token.scope, None if everywhere else frozenset(token.namespaces))
        known = _Known(token, digest, access, asked + REMEMBERED_S)
        self._remember(known)
        return _recognised(known, secret)

    def _remember(self, known: _Known) -> None:
        self._known.pop(known.token.id, None)
        self._known[known.token.id] = known
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def unauthenticated() -> Unauthenticated:
    """One answer, whatever is wrong with a token."""
    return Unauthenticated(
        "a valid token is needed: none came, or it is malformed, unknown, expired or revoked; whoever runs the service "
        "makes one with kvgraft token create, and clients take it as --token or KVGRAFT_TOKEN"
    )


def _recognised(known: _Known, secret: str) -> Access:
    if not hmac.compare_digest(_digest(secret), known.secret_digest) or not known.token.is_valid(datetime.now(UTC)):
        raise unauthenticated()
    return known.access


def _parsed(text: str) -> tuple[str, str]:
    parsed = parse_token(text)
    if parsed is None:
        raise unauthenticated()
    return parsed


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
