"""Commands that run and change a repository: ``serve``, ``tag``, ``rm``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from repo_service.cli import output
from repo_service.cli.options import (
    DEFAULT_REPO,
    REPO_VARIABLE,
    Json,
    Namespace,
    Ref,
    Repo,
    Token,
    expanded,
    open_named,
)
from repo_service.domain.errors import InvalidInput
from repo_service.domain.names import DEFAULT_NAMESPACE


def register(app: typer.Typer) -> None:
    app.command("serve", epilog="\b\nExample: kvgraft serve --repo file:///srv/kvgraft --port 8750")(serve)
    app.command("tag", epilog="\b\nExample: kvgraft tag sha256:3f9a1c0e handbook")(tag)
    app.command("rm", epilog="\b\nExample: kvgraft rm sha256:3f9a1c0e")(rm)


def serve(
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo",
            envvar=REPO_VARIABLE,
            metavar="URL",
            help="Repository to serve: file:///absolute/path, s3://bucket/prefix or memory:.",
            show_default=DEFAULT_REPO,
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index",
            metavar="URL",
            help="Index, which an S3 repository needs: sqlite:///absolute/path, or postgresql://….",
            show_default="KVGRAFT_INDEX",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on.", show_default="KVGRAFT_HOST, or 127.0.0.1")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="Port to listen on; 0 takes a free one.",
            show_default="KVGRAFT_PORT, or 8750",
        ),
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option(
            "--auth",
            metavar="MODE",
            help="none: loopback only; tokens: any address, and every request needs a token.",
            show_default="KVGRAFT_AUTH, or none",
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option("--tls-cert", metavar="FILE", help="Serve HTTPS with this certificate and its chain, a PEM file."),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's key, a PEM file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve a repository over HTTP until Ctrl-C or SIGTERM.

    Further settings are read from KVGRAFT_ environment variables.
    """
    from repo_service.api import serve as serve_repository
    from repo_service.settings import load_settings

    given: dict[str, Any] = {
        "repo": repo and expanded(repo),
        "index": index,
        "host": host,
        "port": port,
        "auth": auth,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
    }
    settings = load_settings(**{name: value for name, value in given.items() if value is not None})
    if not settings.repo:
        settings = settings.model_copy(update={"repo": expanded(DEFAULT_REPO)})

    def announce(url: str, guard: str) -> None:
        if as_json:
            output.print_json({"url": url, "repository": settings.repo})
        else:
            print(f"serving {settings.repo} at {url} ({guard})")

    serve_repository(settings, announce)


def tag(
    ref: Annotated[str | None, typer.Argument(metavar="REF", help="Artifact to tag.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Tag to set or move.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the tags.")] = False,
    delete: Annotated[
        str | None, typer.Option("--delete", metavar="NAME", help="Delete a tag; the artifact stays.")
    ] = None,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Set, move, list or delete tags."""
    if list_ + (delete is not None) + (ref is not None) != 1 or (ref is None) != (name is None):
        raise InvalidInput("give REF and NAME, or --list, or --delete NAME")
    with open_named(repo, token) as repository:
        if ref is not None and name is not None:
            info = repository.set_tag(namespace, name, repository.artifact(ref, namespace).id)
            output.print_either(info.model_dump(mode="json"), f"{info.name} is {info.artifact_id}", as_json)
        elif delete is not None:
            repository.delete_tag(namespace, delete)
            output.print_either({"namespace": namespace, "deleted": delete}, f"deleted the tag {delete}", as_json)
        else:
            tags = repository.tags(namespace)
            if as_json:
                output.print_json({"items": [info.model_dump(mode="json") for info in tags]})
            else:
                rows = [(info.name, info.artifact_id, output.moment(info.updated_at)) for info in tags]
                output.print_table(("tag", "artifact", "updated"), rows)


def rm(
    ref: Ref,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Delete an artifact with its tags.

    Bytes that nothing else needs are freed. To remove only a tag: kvgraft tag --delete NAME.
    """
    with open_named(repo, token) as repository:
        report = repository.delete(repository.artifact(ref, namespace).id, namespace)
    tags = f", its tags {', '.join(report.tags)}" if report.tags else ""
    freed = f"{output.count(report.chunks, 'chunk')} freed, {output.size(report.bytes)}"
    output.print_either(report.model_dump(mode="json"), f"deleted {report.artifact_id}{tags}; {freed}", as_json)
