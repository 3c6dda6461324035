"""The command ``retain``: what a namespace keeps and how much it may hold."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

import typer

from repo_service.cli import output
from repo_service.cli.options import DEFAULT_REPO, Json, Namespace, Repo, Token, open_named
from repo_service.domain.errors import InvalidInput
from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.domain.policy import Policy, policy_of

NONE = "none"

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([A-Za-z]{0,3})", re.ASCII)


def register(app: typer.Typer) -> None:
    app.command("retain", epilog="\b\nExample: kvgraft retain --keep-tag 'release-*' --max-idle 30d --quota 200GB")(
        retain
    )


def retain(
    keep_tag: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-tag",
            metavar="PATTERN",
            help="Keep what has such a tag, whatever the rules; may be repeated, replaces the patterns set before, "
            "'' for none. Without a policy every tag keeps.",
        ),
    ] = None,
    max_age: Annotated[
        str | None, typer.Option("--max-age", metavar="TIME", help="Let go of what was published longer ago: 30d.")
    ] = None,
    max_idle: Annotated[
        str | None, typer.Option("--max-idle", metavar="TIME", help="Let go of what was not used for longer: 7d.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes", metavar="SIZE", help="Let go of the least recently used until the rest fits: 100GB."
        ),
    ] = None,
    quota: Annotated[
        str | None, typer.Option("--quota", metavar="SIZE", help="Refuse pushes beyond this: 200GB.")
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Take away the policy the namespace has; other options make a new one.")
    ] = False,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Set or show what a namespace keeps and how much it may hold.

    Without options the policy is shown. TIME is a number with s, m, h, d or w, SIZE one of bytes or
    with KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB or TiB (of 1024); none takes a rule away. Rules
    are applied by garbage collection: kvgraft gc --dry-run says what they would let go of.
    """
    changes: dict[str, Any] = {}
    if keep_tag is not None:
        changes["keep_tags"] = [pattern for pattern in keep_tag if pattern]
    for name, text, parse, option in (
        ("max_age_s", max_age, seconds, "--max-age"),
        ("max_idle_s", max_idle, seconds, "--max-idle"),
        ("max_bytes", max_bytes, octets, "--max-bytes"),
        ("quota_bytes", quota, octets, "--quota"),
    ):
        if text is not None:
            changes[name] = None if text == NONE else parse(text, option)
    policy_of(changes)
    with open_named(repo, token) as repository:
        policy = Policy() if clear else repository.policy(namespace)
        if clear or changes:
            policy = repository.set_policy(namespace, policy_of(policy.model_dump() | changes))
    if as_json:
        output.print_json({"namespace": namespace} | policy.model_dump(mode="json"))
    else:
        output.print_facts(_facts(namespace, policy))


def seconds(text: str, option: str) -> int:
    """A duration as ``30d``, in seconds.

    Raises
    ------
    InvalidInput
    """
    match = _AMOUNT.fullmatch(text.strip())
    unit = _SECONDS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InvalidInput(f"{text[:100]!r} is no time for {option}: write 90s, 45m, 12h, 30d or 2w, or none")
    return int(Decimal(match[1]) * unit)


def octets(text: str, option: str) -> int:
    """A size as ``100GB``, in bytes.

    Raises
    ------
    InvalidInput
    """
    match = _AMOUNT.fullmatch(text.strip())
    unit = _BYTES.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InvalidInput(f"{text[:100]!r} is no size for {option}: write 1048576, 500MB, 100GB or 64GiB, or none")
    return int(Decimal(match[1]) * unit)


def _facts(namespace: str, policy: Policy) -> list[tuple[str, str]]:
    return [
        ("namespace", namespace),
        ("tags that keep", ", ".join(policy.keep_tags) or NONE),
        ("longest age", _duration(policy.max_age_s)),
        ("longest without use", _duration(policy.max_idle_s)),
        ("most bytes kept", NONE if policy.max_bytes is None else output.size(policy.max_bytes)),
        ("quota", NONE if policy.quota_bytes is None else output.size(policy.quota_bytes)),
    ]


def _duration(value: int | None) -> str:
    if value is None:
        return NONE
    unit, length = next((u, n) for u, n in sorted(_SECONDS.items(), key=lambda item: -item[1]) if value % n == 0)
    return f"{value // length}{unit}"
