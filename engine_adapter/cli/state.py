"""Commands on the state of a model: ``deposit``, ``match``, ``verify``, ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine_adapter.cli.models import (
    Attention,
    AttentionOption,
    BlockTokens,
    Device,
    DevicePages,
    Dtype,
    DtypeOption,
    Model,
    OptionalModel,
    Sliding,
    SlidingOption,
    engine_session,
    load_model,
    require_engine,
    shown,
)
from repo_service.cli import errors, inputs, output, progress, storage
from repo_service.cli.options import DEFAULT_REPO, Annotations, Json, Namespace, Ref, Repo, Token, open_named, pairs
from repo_service.domain.errors import InvalidInput
from repo_service.domain.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from engine_adapter.session import GraftSession
    from engine_adapter.verify import VerifyReport

_TOKENS_HELP = "File of token ids: a JSON list, or numbers apart by white space; - is standard input."
TokensFile = Annotated[str | None, typer.Option("--tokens-file", metavar="FILE", help=_TOKENS_HELP)]


def register(app: typer.Typer) -> None:
    """Add the commands to ``kvgraft``."""
    app.command("deposit", epilog="\b\nExample: kvgraft deposit handbook.txt --model smollm2 --tag handbook")(deposit)
    app.command("match", epilog="\b\nExample: kvgraft match --text 'Chapter 1' --model smollm2")(match)
    app.command("verify", epilog="\b\nExample: kvgraft verify handbook --model smollm2")(verify)
    app.command("demo", epilog="\b\nExample: kvgraft demo --json")(demo)
    app.command("demo-reader", hidden=True)(demo_reader)


def deposit(
    model: Model,
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="Text, in UTF-8; - is standard input.")] = None,
    tokens_file: TokensFile = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Only the first so many tokens.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="NAME", help="Tag to set.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Text to find the artifact by; it is published.")] = None,
    index_text: Annotated[bool, typer.Option("--index-text", help="The same with the text of FILE.")] = False,
    annotation: Annotations = None,
    private_tokens: Annotated[bool, typer.Option("--private-tokens", help="Do not publish the token ids.")] = False,
    sliding: SlidingOption = Sliding.ALL,
    block_tokens: BlockTokens = 256,
    dtype: DtypeOption = Dtype.AUTO,
    attention: AttentionOption = Attention.SDPA,
    device: Device = None,
    device_pages: DevicePages = None,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Compute the state of a text or of token ids, and publish it."""
    if (file is None) == (tokens_file is None):
        raise InvalidInput("give FILE or --tokens-file")
    if index_text and (file is None or text is not None or private_tokens):
        raise InvalidInput(
            "--index-text publishes the text of FILE: it excludes --text, --tokens-file and --private-tokens"
        )
    annotations = pairs(annotation, "--annotation")
    require_engine()
    source: str | list[int] = inputs.read_text(file) if file is not None else inputs.read_tokens(tokens_file or "-")
    with (
        open_named(repo, token, create=True, cached=True) as repository,
        engine_session(repository, namespace, model, dtype, attention, device, block_tokens, device_pages) as session,
        shown("computing", session) as report,
    ):
        tokens = session.encode(_cut(source, max_tokens, session))
        published = source if index_text and isinstance(source, str) else text
        info = session.deposit(tokens, tag, published, annotations, private_tokens, sliding=sliding, progress=report)
    if as_json:
        output.print_json(info.model_dump(mode="json"))
    else:
        print(f"deposited {info.id}: {output.count(info.token_count, 'token')}, {output.size(info.total_bytes)}")


def match(
    tokens: Annotated[list[int] | None, typer.Argument(metavar="TOKENS", help="Token ids.")] = None,
    tokens_file: TokensFile = None,
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", metavar="DIGEST", help="Fingerprint id that the token ids are meant for."),
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="A text in place of token ids; needs --model.")] = None,
    model: OptionalModel = None,
    block_tokens: BlockTokens = 256,
    dtype: DtypeOption = Dtype.AUTO,
    attention: AttentionOption = Attention.SDPA,
    device: Device = None,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Find the longest stored prefix of token ids or of a text.

    A model measures the fingerprint; where --fingerprint gives it, none is needed. Exits with 0 also
    where nothing is stored.
    """
    if sum(given is not None for given in (tokens or None, tokens_file, text)) != 1:
        raise InvalidInput("give token ids, --tokens-file or --text")
    if (fingerprint is None) == (model is None):
        raise InvalidInput("give --fingerprint or --model")
    if text is not None and model is None:
        raise InvalidInput("--text needs --model, since matching is on token ids")
    source: str | list[int] = text if text is not None else tokens or inputs.read_tokens(tokens_file or "-")
    with open_named(repo, token) as repository:
        if model is not None:
            with engine_session(repository, namespace, model, dtype, attention, device, block_tokens) as session:
                ids, fingerprint = session.encode(source), session.fingerprint.id
        else:
            ids = list(source)  # type: ignore[arg-type]
        found = storage.longest_prefix(repository, namespace, fingerprint or "", ids)
    if as_json:
        output.print_json({"match": found and found.model_dump(mode="json"), "tokens": len(ids)})
    elif found is None:
        print(f"none of {output.count(len(ids), 'token')} is stored")
    else:
        blocks = output.count(found.blocks, "block")
        print(f"{found.tokens:,} of {output.count(len(ids), 'token')} ({blocks}) are stored in {found.artifact_id}")


def verify(
    ref: Ref,
    model: OptionalModel = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Positions whose logits are compared.")] = 50,
    inexact: Annotated[
        bool, typer.Option("--inexact", help="Also measure a full prefill and moved positions, which are not exact.")
    ] = False,
    storage_only: Annotated[
        bool, typer.Option("--storage-only", help="Only hash what is stored, where it is; needs no model.")
    ] = False,
    tokens_file: TokensFile = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Instead of the artifact's own dtype.")] = None,
    attention: Annotated[
        Attention | None, typer.Option("--attention", help="Instead of the artifact's own attention backend.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Instead of the artifact's own kind of device.")
    ] = None,
    device_pages: DevicePages = None,
    repo: Repo = DEFAULT_REPO,
    namespace: Namespace = DEFAULT_NAMESPACE,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Replay an artifact on a model and compare every bit.

    Exits with 0 only if every block's bytes and every sample's logits are those of the replay. Where the
    pusher kept the token ids private, --tokens-file gives them.
    """
    if (model is None) != storage_only:
        raise InvalidInput("give --model, or --storage-only to check without one")
    with open_named(repo, token) as repository:
        if model is None:
            exact = storage.check(repository, ref, namespace, as_json)
        else:
            manifest = repository.manifest(repository.artifact(ref, namespace).id, namespace)
            numerics, made = manifest.fingerprint.sections["numerics"], manifest.fingerprint.sections["model"]
            settings = (
                dtype or str(made.get("dtype", Dtype.AUTO)).removeprefix("torch."),
                attention or str(numerics.get("attention", Attention.SDPA)),
                # An artifact made on a GPU is refused on a machine without one, and the refusal names the device.
                device or ("cpu" if numerics.get("device") == "cpu" else None),
                manifest.layout.block_tokens,
                device_pages,
            )
            tokens = None if tokens_file is None else inputs.read_tokens(tokens_file)
            with (
                engine_session(repository, namespace, model, *settings) as session,
                shown("replaying", session) as report,
            ):
                result = session.verify(manifest.id, samples, tokens=tokens, inexact=inexact, progress=report)
            exact = result.exact
            if as_json:
                output.print_json(result.to_json())
            else:
                _print_replay(result)
    if not exact:
        raise typer.Exit(errors.INEXACT)


def demo(
    model: Model = "smollm2",
    dtype: DtypeOption = Dtype.AUTO,
    tokens: Annotated[int, typer.Option("--tokens", min=257, help="Tokens of the text to deposit.")] = 4096,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Positions whose logits are compared.")] = 50,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIRECTORY", help="Keep both repositories in this new directory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the whole way on a real model and a real text.

    One process deposits the text at a service, another pulls the artifact, grafts it and answers a question
    about the text, then computes everything afresh. Exits with 0 only if both gave the same bits.
    """
    require_engine()
    from engine_adapter.demo import print_side_by_side, run_demo

    result = run_demo(model, dtype, tokens, samples, keep, progress.say)
    if as_json:
        output.print_json(result)
    else:
        print_side_by_side(result)
    if not result["exact"]:
        raise typer.Exit(errors.INEXACT)


def demo_reader(
    cache: Annotated[str, typer.Option("--cache", metavar="URL", help="Repository to pull into.")],
    model: Model,
    dtype: DtypeOption = Dtype.AUTO,
    samples: Annotated[int, typer.Option("--samples", min=1)] = 50,
    repo: Repo = DEFAULT_REPO,
    as_json: Json = False,  # noqa: ARG001
) -> None:
    """The second process of ``kvgraft demo``; not for use alone."""
    from engine_adapter.demo import read

    loaded, tokenizer = load_model(model, dtype, Attention.SDPA, None)
    output.print_json(read(repo, cache, loaded, tokenizer, samples))


def _print_replay(report: VerifyReport) -> None:
    equal = sum(block.equal for block in report.blocks)
    print(
        f"{report.artifact_id}: {output.count(report.tokens, 'token')}, {equal} of {output.count(len(report.blocks), 'block')} equal"
    )
    for block in report.blocks:
        if not block.equal:
            print(f"block {block.start} to {block.stop} differs in {', '.join(block.differing) or 'its key'}")
    header = ("way", "exact", "SHA-256 equal", "argmax equal", "largest KL", "mean KL", "largest difference")
    rows = [
        (
            way.name,
            "yes" if way.exact else "no",
            f"{way.equal} of {way.samples}",
            f"{way.argmax_agree} of {way.samples}",
            f"{way.kl_max:.3g}",
            f"{way.kl_mean:.3g}",
            f"{way.max_difference:.3g}",
        )
        for way in (report.grafted, *report.inexact)
    ]
    output.print_table(header, rows)
    print("exact" if report.exact else "NOT EXACT")


def _cut(source: str | list[int], limit: int | None, session: GraftSession) -> str | list[int]:
    if limit is None:
        return source
    return (session.tokenizer.encode(source) if isinstance(source, str) else source)[:limit]  # type: ignore[union-attr]
