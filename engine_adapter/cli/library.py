"""Commands of libraries: ``library add``, ``library list`` and ``ask``."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_adapter.cli.models import (
    Attention,
    AttentionOption,
    BlockTokens,
    Device,
    Dtype,
    DtypeOption,
    Model,
    Sliding,
    SlidingOption,
    engine_session,
    require_engine,
)
from repo_service.cli import errors, output, progress
from repo_service.cli.options import DEFAULT_REPO, Json, Namespace, Repo, Token, open_named
from repo_service.domain.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from engine_adapter.ask import Answer
    from engine_adapter.documents import Documents
    from engine_adapter.library import Added


class RouterName(StrEnum):
    LEXICAL = "lexical"
    DENSE = "dense"
    BOTH = "both"


Window = Annotated[
    int | None,
    typer.Option("--window", min=2, help="Use so many tokens at a time, instead of the model's native window."),
]
MaxFileMib = Annotated[int, typer.Option("--max-file-mib", min=1, help="Skip files that are larger.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``kvgraft``."""
    library = typer.Typer(help="Documents as artifacts that fill the window, for kvgraft ask.", no_args_is_help=True)
    library.command("add", epilog="\b\nExample: kvgraft library add handbook/ notes.pdf --model smollm2")(add)
    library.command("list", epilog="\b\nExample: kvgraft library list --json")(list_)
    app.add_typer(library, name="library")
    app.command("ask", epilog="\b\nExample: kvgraft ask 'What is the pressure of the valve?' --model smollm2")(ask)


def add(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, and folders with all below them.")],
    model: Model,
    whole: Annotated[
        bool, typer.Option("--whole", help="Keep each document in one artifact; one that is too long is refused.")
    ] = False,
    reserve: Annotated[
        int, typer.Option("--reserve", min=1, help="Tokens of the window to leave to a question and its answer.")
    ] = 512,
    window: Window = None,
    max_file_mib: MaxFileMib = 16,
    stage_tokens: Annotated[
        int,
        typer.Option("--stage-tokens", min=1, help="After an interruption at most so many tokens are computed again."),
    ] = 2048,
    sliding: SlidingOption = Sliding.RESUME,
    block_tokens: BlockTokens = 256,
    dtype: DtypeOption = Dtype.AUTO,
    attention: AttentionOption = Attention.SDPA,
    device: Device = None,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Make the library hold what lies under the paths: text, Markdown, code, and the text of PDFs.

    What it holds already is not computed again, what was changed or removed there is replaced, and an
    interrupted command goes on where it stopped.
    """
    read = read_paths(paths, max_file_mib)
    with (
        open_named(repo, token, create=True) as repository,
        engine_session(repository, namespace, model, dtype, attention, device, block_tokens) as session,
    ):
        from engine_adapter.library import Library

        library = Library(session, window=window, reserve=reserve)
        with progress.shown("packing"):
            plan = library.plan(read, whole=whole)
        with progress.shown("computing") as report:
            added = library.add(plan, stage_tokens=stage_tokens, sliding=sliding, progress=report)
    if as_json:
        output.print_json(_added_json(read, added))
    else:
        _print_added(read, added)


def list_(
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List the artifacts of the libraries in a namespace, of all models, and the documents they hold."""
    require_engine()
    from engine_adapter.library import library_artifacts

    with open_named(repo, token) as repository:
        found = library_artifacts(repository, namespace)
    if as_json:
        output.print_json(
            [
                {
                    "artifact_id": held.info.id,
                    "fingerprint_id": held.info.fingerprint_id,
                    "token_count": held.info.token_count,
                    "total_bytes": held.info.total_bytes,
                    "documents": [asdict(part) for part in held.parts],
                }
                for held in found
            ]
        )
        return
    rows = []
    for held in found:
        named = [part.name for part in held.parts]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        rows.append(
            (
                output.short(held.info.id),
                output.short(held.info.fingerprint_id),
                f"{held.info.token_count:,}",
                output.size(held.info.total_bytes),
                ", ".join(named[:3]) + more,
            )
        )
    output.print_table(("artifact", "fingerprint", "tokens", "size", "documents"), rows)


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question.")],
    model: Model,
    show_route: Annotated[bool, typer.Option("--show-route", help="Also show what the router found.")] = False,
    router: Annotated[
        RouterName, typer.Option("--router", help="Find the artifact by words, by meaning (dense), or by both.")
    ] = RouterName.LEXICAL,
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold",
            min=0,
            max=1,
            help="Below this confidence, from 0 to 1, the model answers without the library.",
        ),
    ] = 0.5,
    max_new_tokens: MaxNewTokens = 64,
    window: Window = None,
    block_tokens: BlockTokens = 256,
    dtype: DtypeOption = Dtype.AUTO,
    attention: AttentionOption = Attention.SDPA,
    device: Device = None,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Ask the library: graft the artifact that the question is about, and let the model answer from there.

    The answer is, bit for bit, that of a fresh run over the artifact's tokens and the question.
    """
    with (
        open_named(repo, token, cached=True) as repository,
        engine_session(repository, namespace, model, dtype, attention, device, block_tokens) as session,
    ):
        from engine_adapter import ask as asking
        from engine_adapter.library import Library
        from engine_adapter.library_router import LibraryRouter

        library = Library(session, window=window, reserve=1)
        with progress.shown("reading the library") as report:
            found = LibraryRouter(library, router, report)
        with found, progress.shown("answering"):
            answer = asking.ask(library, found, question, threshold=threshold, max_new_tokens=max_new_tokens)
    if as_json:
        output.print_json(_answer_json(answer, router))
    else:
        _print_answer(answer, show_route)


def read_paths(paths: list[str], max_file_mib: int) -> Documents:
    """Read what lies under paths.

    Raises
    ------
    CommandFailed
        If the engine or the readers are not installed.
    PathNotFound
    """
    require_engine()
    for name in ("charset_normalizer", "pathspec", "pypdf"):
        if find_spec(name) is None:
            raise errors.CommandFailed(
                "readers_missing",
                f"this command needs readers of documents, and {name} is not installed: "
                "pip install 'kvgraft[engine,library]'",
                errors.MISSING,
            )
    from engine_adapter.documents import read_documents

    return read_documents(paths, max_file_mib * 2**20)


def note_skipped(read: Documents) -> None:
    """Say on standard error which files were left out, and why."""
    for item in read.skipped:
        output.note(f"skipped {output.printable(item.source)}: {item.reason}")


def read_json(read: Documents) -> dict[str, Any]:
    """What was read, and what was left out."""
    return {
        "documents": len(read.documents),
        "hidden": read.hidden,
        "skipped": [asdict(item) for item in read.skipped],
    }


def _added_json(read: Documents, added: Added) -> dict[str, Any]:
    return {
        "made": [info.model_dump(mode="json") for info in added.made],
        "kept": added.kept,
        "replaced": added.replaced,
        "tokens": added.tokens,
        "duplicates": added.duplicates,
        **read_json(read),
    }


def _print_added(read: Documents, added: Added) -> None:
    note_skipped(read)
    facts = [
        ("documents", f"{len(read.documents):,}"),
        ("skipped", f"{len(read.skipped):,}, and {read.hidden:,} hidden or ignored"),
        ("made", f"{output.count(len(added.made), 'artifact')}, {output.count(added.tokens, 'token')}"),
        ("kept", output.count(added.kept, "artifact")),
        ("replaced", output.count(added.replaced, "artifact")),
    ]
    if added.duplicates:
        facts.insert(1, ("held once", f"{output.count(added.duplicates, 'document')} with the text of another"))
    output.print_facts(facts)


def _answer_json(answer: Answer, router: RouterName) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "exact": True,
        "grafted": answer.artifact_id is not None,
        "artifact_id": answer.artifact_id,
        "source": answer.source and asdict(answer.source),
        "router": str(router),
        "confidence": answer.routing.confidence,
        "threshold": answer.threshold,
        "routes": [asdict(route) for route in answer.routing.routes],
        "grafted_tokens": answer.grafted_tokens,
        "question_tokens": answer.question_tokens,
        "tokens": answer.generation.tokens,
        "logits_sha256": answer.generation.logits_sha256,
        "route_s": answer.route_s,
        "graft_s": answer.graft_s,
        "answer_s": answer.answer_s,
    }


def _print_answer(answer: Answer, show_route: bool) -> None:
    output.print_text(answer.text)
    print()
    source = answer.source
    if source is None:
        where = "none: the confidence is below the threshold, so the model answered without the library"
    else:
        where = f"{source.name}, characters {source.start:,} to {source.stop:,}"
    facts = [("source", where), ("confidence", f"{answer.routing.confidence:.2f}, threshold {answer.threshold:.2f}")]
    if show_route:
        facts += [
            ("artifact", answer.artifact_id or "none"),
            ("grafted", output.count(answer.grafted_tokens, "token")),
            ("question", output.count(answer.question_tokens, "token")),
            ("routing", output.seconds(answer.route_s)),
            ("graft", output.seconds(answer.graft_s)),
            ("answer", output.seconds(answer.answer_s)),
        ]
    output.print_facts(facts)
    if show_route and answer.routing.routes:
        print()
        rows = [
            (output.short(r.artifact_id), f"{r.score:.3f}", f"{r.start:,} to {r.stop:,}") for r in answer.routing.routes
        ]
        output.print_table(("route", "score", "passage"), rows)
