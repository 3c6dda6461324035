"""Access tokens: make, list, revoke. Only by a token: what a service that asks for none is told, it must not keep."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import Field

from repo_service.api.access import Over, access_of, needs
from repo_service.api.audit import note
from repo_service.api.bodies import DocumentRoute
from repo_service.api.context import ContextOf
from repo_service.api.errors import error_answers
from repo_service.api.models import Body
from repo_service.domain.access import (
    DEFAULT_LIFETIME_S,
    MAX_LIFETIME_S,
    MAX_NAMESPACES,
    MAX_NOTE_CHARACTERS,
    AccessToken,
    NewAccessToken,
    Scope,
)
from repo_service.domain.errors import AccessDenied, InvalidInput, MalformedName, TokenNotFound

router = APIRouter(route_class=DocumentRoute, prefix="/v1/tokens", tags=["tokens"])


class TokenRequest(Body):
    """What a token is to be good for."""

    scope: Scope
    namespaces: list[str] = Field(
        min_length=1, max_length=MAX_NAMESPACES, description="Where it is valid; `*` alone for every namespace."
    )
    lifetime_s: int | None = Field(
        DEFAULT_LIFETIME_S, gt=0, le=MAX_LIFETIME_S, description="Seconds until it expires; null for never."
    )
    note: str = Field("", max_length=MAX_NOTE_CHARACTERS, description="What it is for.")


@router.post("", status_code=201, responses=error_answers(AccessDenied, InvalidInput, MalformedName))
@needs(Scope.ADMIN, Over.ALL, act="create token")
def create_token(request: Request, context: ContextOf, body: TokenRequest) -> NewAccessToken:
    """Make a token. The answer is the only place where its secret is ever seen."""
    _require_token(request)
    note(request, scope=body.scope.value, namespaces=[name[:63] for name in body.namespaces])
    made = context.repository.create_access_token(
        body.scope, body.namespaces, lifetime_s=body.lifetime_s, note=body.note
    )
    note(request, token_id=made.info.id)
    return made


@router.get("", responses=error_answers(AccessDenied))
@needs(Scope.ADMIN, Over.ALL)
def get_tokens(request: Request, context: ContextOf) -> list[AccessToken]:
    """Tokens without their secrets, newest first, at most 1,000; those that are no longer valid too."""
    _require_token(request)
    return context.repository.access_tokens()


@router.delete("/{token_id}", responses=error_answers(AccessDenied, TokenNotFound, MalformedName))
@needs(Scope.ADMIN, Over.ALL, act="revoke token")
def revoke_token(
    request: Request, context: ContextOf, token_id: Annotated[str, Path(description="The public part of a token.")]
) -> AccessToken:
    """Revoke a token; it is taken for at most 5 seconds more."""
    _require_token(request)
    return context.repository.revoke_access_token(token_id)


def _require_token(request: Request) -> None:
    """What anyone could plant here would be valid once tokens are asked for."""
    if access_of(request).token_id is None:
        raise AccessDenied(
            "this service asks for no tokens, so anyone could make one: run kvgraft token with --repo file:///…, where "
            "the repository is"
        )
