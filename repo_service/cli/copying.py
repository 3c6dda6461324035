"""Commands that move artifacts: ``push``, ``pull``, ``mirror``, ``export``, ``import``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repo_service.cli import cache, errors, output, progress
from repo_service.cli.options import (
    DEFAULT_REPO,
    REPO_VARIABLE,
    TOKEN_VARIABLE,
    Json,
    Namespace,
    Ref,
    Repo,
    Token,
    open_named,
    spread,
)
from repo_service.domain.errors import InvalidInput
from repo_service.domain.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from repo_service.client.mirror import MirrorReport

TO_TOKEN_VARIABLE = "KVGRAFT_TO_TOKEN"
FROM_TOKEN_VARIABLE = "KVGRAFT_FROM_TOKEN"


@dataclass(frozen=True)
class Copying:
    """Options of ``push`` and ``pull``: how an artifact is copied, whichever way."""

    tag: Annotated[
        str | None, typer.Option("--tag", metavar="NAME", help="Tag to set; by default REF, if that is one.")
    ] = None
    no_tag: Annotated[bool, typer.Option("--no-tag", help="Set no tag.")] = False
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Chunks in transfer at once.")] = 4
    namespace: Namespace = DEFAULT_NAMESPACE
    as_json: Json = False


def register(app: typer.Typer) -> None:
    app.command("push", epilog="\b\nExample: kvgraft push handbook --to http://127.0.0.1:8750")(spread(push))
    app.command(
        "pull", epilog="\b\nExample: kvgraft pull handbook --from http://127.0.0.1:8750 --to file:///srv/kvgraft"
    )(spread(pull))
    app.command("mirror", epilog="\b\nExample: kvgraft mirror file:///srv/kvgraft http://127.0.0.1:8750")(mirror)
    app.command("export", epilog="\b\nExample: kvgraft export handbook ./handbook.zarr")(export)
    app.command("import", epilog="\b\nExample: kvgraft import ./handbook.zarr --tag handbook")(import_)


def push(
    ref: Ref,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Repository to copy to.")],
    source: Annotated[
        str, typer.Option("--from", "--repo", envvar=REPO_VARIABLE, metavar="URL", help="Repository to copy from.")
    ] = DEFAULT_REPO,
    to_namespace: Annotated[
        str | None,
        typer.Option("--to-namespace", metavar="NAME", help="Namespace to copy into; by default that of --namespace."),
    ] = None,
    from_token: Annotated[
        str | None,
        typer.Option("--from-token", "--token", envvar=TOKEN_VARIABLE, metavar="TEXT", help="Bearer token for --from."),
    ] = None,
    to_token: Annotated[
        str | None,
        typer.Option("--to-token", envvar=TO_TOKEN_VARIABLE, metavar="TEXT", help="Bearer token for --to."),
    ] = None,
    *,
    how: Copying,
) -> None:
    """Copy an artifact to another repository.

    Only what that one lacks is sent, so an interrupted copy goes on where it stopped.
    """
    _copy(ref, (source, from_token, how.namespace), (to, to_token, to_namespace or how.namespace), how)


def pull(
    ref: Ref,
    source: Annotated[str, typer.Option("--from", metavar="URL", help="Repository to copy from.")],
    to: Annotated[
        str, typer.Option("--to", "--repo", envvar=REPO_VARIABLE, metavar="URL", help="Repository to copy to.")
    ] = DEFAULT_REPO,
    from_namespace: Annotated[
        str | None,
        typer.Option(
            "--from-namespace", metavar="NAME", help="Namespace to copy out of; by default that of --namespace."
        ),
    ] = None,
    from_token: Annotated[
        str | None,
        typer.Option("--from-token", envvar=FROM_TOKEN_VARIABLE, metavar="TEXT", help="Bearer token for --from."),
    ] = None,
    to_token: Annotated[
        str | None,
        typer.Option("--to-token", "--token", envvar=TOKEN_VARIABLE, metavar="TEXT", help="Bearer token for --to."),
    ] = None,
    *,
    how: Copying,
) -> None:
    """Copy an artifact from another repository.

    Only what is missing here is fetched, so an interrupted copy goes on where it stopped.
    """
    _copy(ref, (source, from_token, from_namespace or how.namespace), (to, to_token, how.namespace), how, cached=True)


def mirror(
    source: Annotated[str, typer.Argument(metavar="SRC", help="URL of the repository to copy from.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="URL of the repository to copy to.")],
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace", metavar="NAME", help="Namespace to mirror; may be repeated. By default all are mirrored."
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Also delete tags and artifacts at DST that SRC does not have.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also read and hash what DST has, and send again what is damaged.")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Chunks in transfer at once.")] = 4,
    from_token: Annotated[
        str | None,
        typer.Option("--from-token", envvar=FROM_TOKEN_VARIABLE, metavar="TEXT", help="Bearer token for SRC."),
    ] = None,
    to_token: Annotated[
        str | None, typer.Option("--to-token", envvar=TO_TOKEN_VARIABLE, metavar="TEXT", help="Bearer token for DST.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy every artifact and tag to another repository.

    Only what that one lacks is sent, so it can be run again at any time, also after an interruption. An artifact that
    can't be copied is named and the others are copied; the command then exits with 1.
    """
    from repo_service.client.mirror import mirror as mirror_repository

    began = time.perf_counter()
    with (
        open_named(source, from_token) as there,
        open_named(destination, to_token, create=True) as here,
        progress.shown("mirroring") as report,
    ):
        done = mirror_repository(
            there, here, namespaces=namespaces or None, delete=delete, verify=verify, workers=workers, progress=report
        )
    if as_json:
        output.print_json(done.model_dump(mode="json"))
    else:
        _print_mirror(done, here.url, output.seconds(time.perf_counter() - began))
    if done.artifacts_failed:
        raise typer.Exit(errors.INEXACT)


def _print_mirror(done: MirrorReport, url: str, took: str) -> None:
    counted = [
        f"{output.count(number, noun)} {what}"
        for number, noun, what in (
            (done.artifacts_copied, "artifact", "copied"),
            (done.artifacts_present, "artifact", "there before"),
            (done.artifacts_healed, "artifact", "healed"),
            (done.artifacts_deleted, "artifact", "deleted"),
            (done.extra_artifacts, "artifact", "there only"),
            (done.tags_set, "tag", "set"),
            (done.tags_deleted, "tag", "deleted"),
        )
        if number
    ]
    sent = f"{output.count(done.chunks_sent, 'chunk')}, {output.size(done.bytes_sent)} sent in {took}"
    print(f"mirrored {output.count(len(done.namespaces), 'namespace')} to {url}: {', '.join([*counted, sent])}")
    for failure in done.artifacts_failed:
        what = f"{failure.namespace} {failure.artifact_id}: {failure.message} [{failure.code}]"
        print(f"failed: {output.printable(what)}")


def export(
    ref: Ref,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Zarr directory to make.")],
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Write an artifact as a plain Zarr directory.

    It opens in any Zarr v3 reader, with no kvgraft installed.
    """
    from repo_service.services.export import export_artifact

    began = time.perf_counter()
    with open_named(repo, token, cached=True) as repository, progress.shown(f"exporting {ref}") as report:
        done = export_artifact(repository, ref, namespace, directory, lambda n, total: report("bytes", n, total))
    if as_json:
        output.print_json(
            {
                "artifact_id": done.artifact_id,
                "directory": str(directory.absolute()),
                "chunks": done.chunks,
                "bytes": done.bytes,
                "cache": cache.use(repository),
            }
        )
    else:
        took = output.seconds(time.perf_counter() - began)
        print(f"exported {done.artifact_id} to {directory}: {output.size(done.bytes)} in {took}")


def import_(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Zarr directory that an export made.")],
    tag: Annotated[str | None, typer.Option("--tag", metavar="NAME", help="Tag to set.")] = None,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Publish the artifact that an export holds.

    It keeps its id; every file is verified.
    """
    from repo_service.services.export import import_artifact

    with open_named(repo, token, create=True) as repository, progress.shown(f"importing {directory}") as report:
        info = import_artifact(repository, directory, namespace, tag, lambda n, total: report("bytes", n, total))
    if as_json:
        output.print_json(info.model_dump(mode="json"))
    else:
        print(f"imported {info.id}: {output.count(info.token_count, 'token')}, {output.size(info.total_bytes)}")


def _copy(
    ref: str,
    source: tuple[str, str | None, str],
    destination: tuple[str, str | None, str],
    how: Copying,
    *,
    cached: bool = False,
) -> None:
    """Copy between two repositories, each given as URL, token and namespace."""
    from repo_service.client.transfer import copy_artifact

    if how.tag is not None and how.no_tag:
        raise InvalidInput("give --tag or --no-tag, not both")
    began = time.perf_counter()
    with (
        open_named(source[0], source[1], cached=cached) as there,
        open_named(destination[0], destination[1], create=True) as here,
        progress.shown(f"copying {ref}") as report,
    ):
        done = copy_artifact(
            there, here, ref, source[2], destination[2], how.tag, how.workers, report, carry_tag=not how.no_tag
        )
    if how.as_json:
        output.print_json(done.model_dump(mode="json") | ({"cache": cache.use(there)} if cached else {}))
    else:
        sent = f"{output.size(done.bytes_sent)} of {output.size(done.bytes_total)} sent"
        print(f"{done.artifact.id} is at {here.url}: {sent} in {output.seconds(time.perf_counter() - began)}")
