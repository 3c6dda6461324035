"""The command ``token``: who may use a repository through a service."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from repo_service.cli import output
from repo_service.cli.options import DEFAULT_REPO, Json, Repo, Token, open_named
from repo_service.cli.retain import seconds
from repo_service.domain.access import Scope
from repo_service.domain.errors import InvalidInput

if TYPE_CHECKING:
    from repo_service.domain.access import AccessToken

NEVER = "never"


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Make, list and revoke the tokens of kvgraft serve --auth tokens.", rich_markup_mode=None)
    group.command("create", epilog="\b\nExample: kvgraft token create --scope write --namespace team-a --expires 30d")(
        create
    )
    group.command("ls", epilog="\b\nExample: kvgraft token ls --repo file:///srv/kvgraft")(ls)
    group.command("revoke", epilog="\b\nExample: kvgraft token revoke 0123456789ab")(revoke)
    app.add_typer(group, name="token")


def create(
    scope: Annotated[
        str,
        typer.Option(
            "--scope",
            metavar="SCOPE",
            help="read: look, pull, match; write: also push and tag; admin: also delete and set policies, and with "
            "--namespace '*' what concerns the whole repository.",
        ),
    ],
    namespaces: Annotated[
        list[str],
        typer.Option(
            "--namespace", metavar="NAME", help="Where the token is valid; may be repeated, '*' for every namespace."
        ),
    ],
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="How long it is valid: 12h, 30d, 4w, or never.")
    ] = "90d",
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="What it is for.")] = "",
    repo: Repo = DEFAULT_REPO,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it, this once.

    Only a digest of it is kept. Works on a repository of this machine, and through a service with an
    admin token for '*'.
    """
    if scope not in list(Scope):
        raise InvalidInput(f"{scope[:100]!r} is no scope: give {', '.join(Scope)}")
    lifetime = None if expires == NEVER else seconds(expires, "--expires")
    with open_named(repo, token) as repository:
        made = repository.create_access_token(Scope(scope), namespaces, lifetime_s=lifetime, note=note)
    output.print_either(made.model_dump(mode="json"), made.token, as_json)


def ls(repo: Repo = DEFAULT_REPO, token: Token = None, as_json: Json = False) -> None:
    """List the tokens, newest first, without their secrets."""
    with open_named(repo, token) as repository:
        tokens = repository.access_tokens()
    if as_json:
        output.print_json({"items": [one.model_dump(mode="json") for one in tokens]})
    else:
        header = ("token", "scope", "namespaces", "made", "state", "note")
        output.print_table(header, [_row(one) for one in tokens])


def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="The token's id: the 12 digits after kvg_, as ls shows them.")
    ],
    repo: Repo = DEFAULT_REPO,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Revoke a token, for good; services take it for at most 5 seconds more."""
    with open_named(repo, token) as repository:
        revoked = repository.revoke_access_token(token_id)
    output.print_either(revoked.model_dump(mode="json"), f"revoked {revoked.id}", as_json)


def _row(token: AccessToken) -> tuple[str, ...]:
    made = output.moment(token.created_at)
    return (token.id, token.scope.value, ",".join(token.namespaces), made, _state(token), token.note)


def _state(token: AccessToken) -> str:
    if token.revoked_at is not None:
        return f"revoked {output.moment(token.revoked_at)}"
    if token.expires_at is None:
        return "valid"
    until = output.moment(token.expires_at)
    return f"valid until {until}" if token.is_valid(datetime.now(UTC)) else f"expired {until}"
