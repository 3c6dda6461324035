"""Commands that keep a repository in order: ``gc``, ``scrub``, ``reindex``, ``migrate``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from repo_service.cli import errors, output, progress
from repo_service.cli.copying import FROM_TOKEN_VARIABLE
from repo_service.cli.options import DEFAULT_REPO, Json, Repo, Token, open_named

INDEX_VARIABLE = "KVGRAFT_INDEX"

if TYPE_CHECKING:
    from repo_service.client.repair import Repair
    from repo_service.domain.views import GarbageReport, ScrubReport


def register(app: typer.Typer) -> None:
    app.command("gc", epilog="\b\nExample: kvgraft gc --dry-run --repo file:///srv/kvgraft")(gc)
    app.command("scrub", epilog="\b\nExample: kvgraft scrub --repair-from https://mirror.example:8750")(scrub)
    app.command("reindex", epilog="\b\nExample: kvgraft reindex --repo file:///srv/kvgraft")(reindex)
    app.command("migrate", epilog="\b\nExample: kvgraft migrate --index sqlite:////srv/kvgraft/index.sqlite")(migrate)


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="SECONDS", min=0, help="Objects that the index does not know go when they are older."
        ),
    ] = 3600.0,
    repo: Repo = DEFAULT_REPO,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Collect garbage: remove what no artifact and no running push needs.

    Also recovers what crashed processes left, and ends pushes that were abandoned. Safe while others
    push and pull. Exits with 1 if something in the store could not be read or removed.
    """
    with open_named(repo, token) as repository, progress.shown("collecting garbage"):
        report = repository.collect_garbage(grace_s=grace, dry_run=dry_run)
    output.print_either(report.model_dump(mode="json"), _garbage(report), as_json)
    if report.unreadable or report.stuck:
        raise typer.Exit(errors.INEXACT)


def _garbage(report: GarbageReport) -> str:
    counted = [
        output.count(report.artifacts, "artifact"),
        f"{output.count(report.chunks, 'chunk')} ({output.size(report.bytes)})",
        output.count(report.block_records, "block record"),
        output.count(report.manifests, "manifest"),
        output.count(report.temp_files, "temp file"),
    ]
    lines = [f"{'would remove' if report.dry_run else 'removed'} {', '.join(counted)}"]
    if report.expired_pushes:
        lines.append(f"abandoned pushes ended: {report.expired_pushes:,}")
    if report.quarantined:
        lines.append(f"copies of damaged objects that were old: {report.quarantined:,}")
    if report.settled:
        lines.append(f"corrected the index after {output.count(report.settled, 'document')}")
    lines += [f"unreadable: {key}" for key in report.unreadable]
    if report.unreadable:
        lines.append("nothing else was removed: it may belong to what can't be read; heal that, or kvgraft rm its id")
    lines += [f"not removed: {key}" for key in report.stuck]
    return "\n".join(lines)


def scrub(
    repair_from: Annotated[
        str | None,
        typer.Option("--repair-from", metavar="URL", help="Repository to heal damaged artifacts from."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="MIB", min=0.001, help="Most MiB to read in a second.")
    ] = None,
    repo: Repo = DEFAULT_REPO,
    token: Token = None,
    from_token: Annotated[
        str | None,
        typer.Option(
            "--from-token", envvar=FROM_TOKEN_VARIABLE, metavar="TEXT", help="Bearer token for --repair-from."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read and verify everything that is stored, and heal what can be healed.

    Damaged bytes are never served; copies of them are kept below quarantine/ in the store. Exits with
    1 if damage is left.
    """
    from repo_service.client.repair import repair

    with open_named(repo, token) as repository, ExitStack() as stack:
        source = stack.enter_context(open_named(repair_from, from_token)) if repair_from else None
        with progress.shown("scrubbing"):
            report = repository.scrub(bytes_per_s=None if rate is None else rate * 2**20)
        repairs: list[Repair] = []
        if source is not None and report.touched:
            with progress.shown("repairing") as say:
                repairs = repair(source, repository, report.touched, say)
    value = report.model_dump(mode="json") | {"repairs": [one.model_dump(mode="json") for one in repairs]}
    output.print_either(value, _damage(report, repairs), as_json)
    left = [item for item in report.damage if not item.healed and not item.artifacts]
    repaired = len([one for one in repairs if one.healed]) == len(report.touched)
    if left or not repaired or report.damaged > len(report.damage):
        raise typer.Exit(errors.INEXACT)


def _damage(report: ScrubReport, repairs: list[Repair]) -> str:
    encoded = report.stored_bytes not in (0, report.bytes)
    read = [
        output.count(report.artifacts, "artifact"),
        output.count(report.block_records, "block record"),
        f"{output.count(report.chunks, 'chunk')} ({output.size(report.bytes)}"
        f"{f', stored in {output.size(report.stored_bytes)}' if encoded else ''})",
    ]
    lines = [f"verified {', '.join(read)}: {output.count(report.damaged, 'damaged object')}"]
    for item in report.damage:
        whose = ", ".join(f"{artifact} in {namespace}" for namespace, artifact in item.artifacts)
        needed = f"needed by {whose}" if whose else "to be set anew"
        lines.append(f"{item.kind} {item.name}: {'healed' if item.healed else needed}")
    if report.damaged > len(report.damage):
        lines.append(f"and {report.damaged - len(report.damage):,} more: run it again when these are healed")
    for one in repairs:
        state = f"healed, {output.size(one.bytes_sent)} sent" if one.healed else f"not healed: {one.reason}"
        lines.append(f"artifact {one.artifact_id} in {one.namespace}: {state}")
    return "\n".join(lines)


def reindex(
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Make the index that KVGRAFT_INDEX names an S3 repository's, in place of another."
        ),
    ] = False,
    repo: Repo = DEFAULT_REPO,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Rebuild the SQL index from the store.

    Stop whoever uses the other index before --take-over.

    Exits with 1 if something in the store could not be read; the rest is indexed.
    """
    with open_named(repo, token, take_over=take_over) as repository, progress.shown("rebuilding the index"):
        report = repository.reindex()
    found = f"{output.count(report.artifacts, 'artifact')}, {output.count(report.blocks, 'block')}, {output.count(report.chunks, 'chunk')}, {output.count(report.tags, 'tag')}, {output.count(report.divergences, 'divergence')}"
    unread = "".join(f"\nunreadable: {key}" for key in report.corrupt)
    output.print_either(report.model_dump(mode="json"), f"indexed {found}{unread}", as_json)
    if report.corrupt:
        raise typer.Exit(errors.INEXACT)


def migrate(
    index: Annotated[str, typer.Option("--index", envvar=INDEX_VARIABLE, metavar="URL", help="URL of the index.")],
    as_json: Json = False,
) -> None:
    """Bring an index to this version's schema.

    Opening a repository does so too; a deployment runs this once before its replicas start. Nothing is
    changed where the schema is that of a later version.
    """
    from repo_service.services.schema import migrate_index

    report = migrate_index(index)
    if report.before is None:
        text = f"made an index with schema {report.after}"
    elif report.before == report.after:
        text = f"the index has schema {report.after}: nothing to do"
    else:
        text = f"brought the index from schema {report.before} to {report.after}"
    output.print_either(report.model_dump(mode="json"), text, as_json)
