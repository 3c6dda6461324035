"""Commands that look: ``ls``, ``query``, ``show``, ``stats``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repo_service.cli import output
from repo_service.cli.options import (
    DEFAULT_REPO,
    Annotations,
    Json,
    Namespace,
    Ref,
    Repo,
    Token,
    open_named,
    pairs,
    spread,
)
from repo_service.domain.errors import InvalidInput
from repo_service.domain.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from repo_service.domain.layout import LayerGroup
    from repo_service.domain.manifest import Manifest
    from repo_service.domain.views import ArtifactInfo, ArtifactPage


class ExactnessClass(StrEnum):
    EXACT = "exact"
    LOSSY = "lossy"


class Sort(StrEnum):
    CREATED_AT = "created_at"
    TOKEN_COUNT = "token_count"
    TOTAL_BYTES = "total_bytes"


@dataclass(frozen=True)
class Listing:
    """Options of ``ls`` and ``query``: a page of which repository's artifacts, and how it is written."""

    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Artifacts on a page.")] = 50
    cursor: Annotated[str | None, typer.Option("--cursor", help="Where the page before ended.")] = None
    repo: Repo = DEFAULT_REPO
    namespace: Namespace = DEFAULT_NAMESPACE
    token: Token = None
    as_json: Json = False


def register(app: typer.Typer) -> None:
    app.command("ls", epilog="\b\nExample: kvgraft ls --limit 20")(spread(ls))
    app.command("query", epilog="\b\nExample: kvgraft query --text 'tide mill' --min-tokens 4096 --sort token_count")(
        spread(query)
    )
    app.command("show", epilog="\b\nExample: kvgraft show handbook --fingerprint")(show)
    app.command("stats", epilog="\b\nExample: kvgraft stats --divergences --json")(stats)


def ls(listing: Listing) -> None:
    """List artifacts, the newest first."""
    _print_page(listing, {})


def query(
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", metavar="DIGEST", help="Made under this fingerprint.")
    ] = None,
    model_id: Annotated[str | None, typer.Option("--model-id", metavar="DIGEST", help="Of this model.")] = None,
    min_tokens: Annotated[int | None, typer.Option("--min-tokens", help="At least so many tokens.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="At most so many tokens.")] = None,
    covers: Annotated[
        str | None, typer.Option("--covers", metavar="START:STOP", help="Holding the tokens from START up to STOP.")
    ] = None,
    block_key: Annotated[
        str | None, typer.Option("--block-key", metavar="DIGEST", help="Holding the block of this key.")
    ] = None,
    chunk: Annotated[str | None, typer.Option("--chunk", metavar="DIGEST", help="Holding this chunk.")] = None,
    token_prefix: Annotated[
        str | None, typer.Option("--token-prefix", metavar="IDS", help="Beginning with these token ids: 1,2,3.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Under this tag.")] = None,
    annotation: Annotations = None,
    exactness: Annotated[ExactnessClass | None, typer.Option("--exactness", help="exact or lossy.")] = None,
    created_after: Annotated[
        str | None,
        typer.Option(
            "--created-after", metavar="TIME", help="Newer than this, in ISO 8601; local time unless it has an offset."
        ),
    ] = None,
    created_before: Annotated[
        str | None, typer.Option("--created-before", metavar="TIME", help="Older than this.")
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="Words that the artifact's text holds, at most 64.")
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="created_at, token_count or total_bytes.")] = Sort.CREATED_AT,
    ascending: Annotated[bool, typer.Option("--ascending", help="The smallest or oldest first.")] = False,
    *,
    listing: Listing,
) -> None:
    """List the artifacts that meet all conditions."""
    conditions = {
        "fingerprint_id": fingerprint,
        "model_id": model_id,
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
        "covers": None if covers is None else _span(covers),
        "block_key": block_key,
        "chunk": chunk,
        "token_prefix": None if token_prefix is None else _ids(token_prefix),
        "tag": tag,
        "annotations": pairs(annotation, "--annotation"),
        "exactness": exactness,
        "created_after": None if created_after is None else _time(created_after, "--created-after"),
        "created_before": None if created_before is None else _time(created_before, "--created-before"),
        "text": text,
        "sort": sort,
        "descending": not ascending,
    }
    _print_page(listing, conditions)


def show(
    ref: Ref,
    fingerprint: Annotated[bool, typer.Option("--fingerprint", help="Also every field of the fingerprint.")] = False,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show what an artifact is made of."""
    with open_named(repo, token) as repository:
        info = repository.artifact(ref, namespace)
        manifest = repository.manifest(info.id, namespace)
    if as_json:
        shown: dict[str, Any] = {
            "artifact": info.model_dump(mode="json"),
            "layer_groups": [group.to_json() for group in manifest.layout.groups],
            "state_bytes": manifest.state_bytes,
            "resume_from": manifest.resume_from,
            "exactness": manifest.exactness.to_json(),
            "text": manifest.text,
        }
        if fingerprint:
            shown["fingerprint"] = manifest.fingerprint.sections
        output.print_json(shown)
        return
    output.print_facts(_facts(info, manifest))
    print()
    output.print_table(("layer group", "kind", "layers", "arrays"), [_group(g) for g in manifest.layout.groups])
    if fingerprint:
        print()
        output.print_facts(list(_fields("", manifest.fingerprint.sections)))


def stats(
    divergences: Annotated[bool, typer.Option("--divergences", help="Also list the recorded divergences.")] = False,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show counts and bytes of a namespace.

    Divergences are pushes that were refused because they brought other bytes under a stored block key.
    """
    with open_named(repo, token) as repository:
        info = repository.info()
        counts = repository.stats(namespace)
        recorded = repository.divergences(namespace) if divergences else []
        url = repository.url
    if as_json:
        value: dict[str, Any] = {
            "url": url,
            "repository": info.model_dump(mode="json"),
            "stats": counts.model_dump(mode="json"),
        }
        if divergences:
            value["divergences"] = [divergence.model_dump(mode="json") for divergence in recorded]
        output.print_json(value)
        return
    facts = [
        ("repository", f"{url} ({info.repository_id}, format {info.format_version}, kvgraft {info.server_version})"),
        ("codec", info.codec),
    ]
    for name, count in counts:
        text = output.size(count) if name.endswith("_bytes") else f"{count:,}" if isinstance(count, int) else str(count)
        facts.append((name.replace("_", " "), text))
    output.print_facts(facts)
    if counts.divergences and not divergences:
        print("\nEqual fingerprints gave unequal state: see kvgraft stats --divergences.")
    for divergence in recorded:
        print()
        output.print_facts(
            [
                ("diverged at", output.moment(divergence.created_at)),
                ("block key", divergence.block_key),
                ("stored record", divergence.stored_record),
                ("offered record", divergence.offered_record),
                ("differing arrays", ", ".join(divergence.chunks)),
            ]
        )


def _print_page(listing: Listing, conditions: dict[str, Any]) -> None:
    from pydantic import ValidationError

    from repo_service.domain.views import ArtifactQuery

    page_of = {"namespace": listing.namespace, "limit": listing.limit, "cursor": listing.cursor}
    try:
        asked = ArtifactQuery.model_validate(conditions | page_of)
    except ValidationError as error:
        problems = {".".join(map(str, e["loc"])): e["msg"] for e in error.errors()}
        listed = "; ".join(f"{name}: {message}" for name, message in problems.items())
        raise InvalidInput(f"the query is not valid: {listed}", problems=problems) from None
    with open_named(listing.repo, listing.token) as repository:
        page = repository.query(asked)
    if listing.as_json:
        output.print_json(page.model_dump(mode="json"))
        return
    output.print_table(("artifact", "tokens", "size", "created", "tags"), [_row(info) for info in page.items])
    output.note(_summary(page))


def _row(info: ArtifactInfo) -> tuple[str, ...]:
    return (
        output.short(info.id),
        f"{info.token_count:,}",
        output.size(info.total_bytes),
        output.moment(info.created_at),
        ", ".join(info.tags),
    )


def _summary(page: ArtifactPage) -> str:
    counted = f"{output.count(page.count, 'artifact')}, {output.size(page.total_bytes)}, {output.size(page.unique_bytes)} of them unique"
    return f"{counted}; more with --cursor {page.next_cursor}" if page.next_cursor else counted


def _facts(info: ArtifactInfo, manifest: Manifest) -> list[tuple[str, str]]:
    blocks = output.count(info.block_count, "block")
    exactness = manifest.exactness
    facts = [
        ("artifact", info.id),
        ("namespace", info.namespace),
        ("tags", ", ".join(info.tags) or "none"),
        ("created", output.moment(info.created_at)),
        ("last used", "never" if info.last_used_at is None else output.moment(info.last_used_at)),
        ("tokens", f"{info.token_count:,} in {blocks} of {info.block_tokens}{', ids private' * info.private_tokens}"),
        ("size", f"{output.size(info.total_bytes)}, {output.size(manifest.state_bytes)} of it state"),
        ("exactness", exactness.kind if exactness.codec is None else f"lossy: {exactness.codec}, {exactness.error}"),
        ("fingerprint", info.fingerprint_id),
        ("model", info.model_id),
    ]
    if manifest.resume_from:
        facts.insert(7, ("resumed", f"from token {manifest.resume_from:,} on; sliding layers are stored for that only"))
    if info.parent is not None:
        facts.append(("continues", info.parent))
    facts += [(f"annotation {name}", value) for name, value in sorted(info.annotations.items())]
    return facts if manifest.text is None else [*facts, ("text", f"{len(manifest.text):,} characters, in the index")]


def _group(group: LayerGroup) -> tuple[str, ...]:
    arrays = ", ".join(f"{a.name} {a.dtype} {a.heads}x{a.dim}" for a in group.arrays)
    window = "" if group.window is None else f"({group.window})"
    return group.name, f"{group.kind}{window}", f"{len(group.layers)}", arrays


def _fields(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _fields(f"{path}.{name}" if path else name, item)
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _span(text: str) -> tuple[int, int]:
    start, sign, stop = text.partition(":")
    if not (sign and start.isdecimal() and stop.isdecimal()):
        raise InvalidInput(f"{text[:100]!r} is not START:STOP, which --covers takes")
    return int(start), int(stop)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(f"{text[:100]!r} is no list of token ids: 1,2,3") from None


def _time(text: str, option: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInput(f"{text[:100]!r} is no time for {option}: write 2026-01-31 or 2026-01-31T14:05:00") from None
