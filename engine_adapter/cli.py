"""Commands that need a model: ``deposit``, ``match``, ``verify``, ``demo``.

Registered with ``kvgraft`` through the entry-point group ``kvgraft.commands``. The engine is imported
where a command first needs it, so that help is quick and stays complete where there is no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repo_service.cli import errors, inputs, output, progress, storage
from repo_service.cli.options import DEFAULT_REPO, Annotations, Json, Namespace, Ref, Repo, Token, open_named, pairs
from repo_service.domain.errors import InvalidInput
from repo_service.domain.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from engine_adapter.session import GraftSession
    from engine_adapter.verify import VerifyReport
    from repo_service.domain.repository import Repository


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Attention(StrEnum):
    EAGER = "eager"
    SDPA = "sdpa"
    PAGED = "kvgraft_paged_256"


_MODEL_HELP = "smollm2, gemma3, a local directory, or a name on the model hub."
_TOKENS_HELP = "File of token ids: a JSON list, or numbers apart by white space; - is standard input."

Model = Annotated[str, typer.Option("--model", metavar="NAME", help=_MODEL_HELP)]
OptionalModel = Annotated[str | None, typer.Option("--model", metavar="NAME", help=_MODEL_HELP)]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="float32, bfloat16, float16, or auto: that of the weights.")
]
AttentionOption = Annotated[
    Attention, typer.Option("--attention", help="Attention backend: eager, sdpa, or kvgraft_paged_256.")
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1, ...; by default a GPU where there is one."),
]
DevicePages = Annotated[
    int | None,
    typer.Option(
        "--device-pages", min=1, help="Keep only so many pages of the state on the device; needs kvgraft_paged_256."
    ),
]
BlockTokens = Annotated[int, typer.Option("--block-tokens", min=1, max=65536, help="Tokens per block.")]
TokensFile = Annotated[str | None, typer.Option("--tokens-file", metavar="FILE", help=_TOKENS_HELP)]


def register(app: typer.Typer) -> None:
    """Add the commands to ``kvgraft``."""
    app.command("deposit", epilog="\b\nExample: kvgraft deposit handbook.txt --model smollm2 --tag handbook")(deposit)
    app.command("match", epilog="\b\nExample: kvgraft match --text 'Chapter 1' --model smollm2")(match)
    app.command("verify", epilog="\b\nExample: kvgraft verify handbook --model smollm2")(verify)
    app.command("demo", epilog="\b\nExample: kvgraft demo --json")(demo)
    app.command("demo-reader", hidden=True)(demo_reader)
    from engine_adapter import library_cli

    library_cli.register(app)


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
        _shown("computing", session) as report,
    ):
        tokens = session.encode(_cut(source, max_tokens, session))
        published = source if index_text and isinstance(source, str) else text
        info = session.deposit(tokens, tag, published, annotations, private_tokens, progress=report)
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
                _shown("replaying", session) as report,
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
    model: Annotated[str, typer.Option("--model", metavar="NAME", help=_MODEL_HELP)] = "smollm2",
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


def load_model(name: str, dtype: str, attention: str, device: str | None) -> tuple[Any, Any]:
    """A causal model in eval mode, and its tokenizer.

    Parameters
    ----------
    name
        A demo model, a directory, or a name on the model hub.
    dtype
        ``auto``, or a dtype's name without ``torch.``.
    device
        None takes a GPU where there is one.

    Raises
    ------
    CommandFailed
        If the engine is not installed.
    ModelUnavailable
        If there is no such model, or it can't be loaded.
    """
    require_engine()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from engine_adapter.demo_models import DEMO_MODELS, fetch
    from engine_adapter.paged_attention import register_named
    from repo_service.domain.errors import ModelUnavailable

    register_named(attention)
    path = str(fetch(name, progress=progress.say)) if name in DEMO_MODELS else name
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
        return model.to(place).eval(), AutoTokenizer.from_pretrained(path)
    except Exception as error:  # A damaged or foreign model fails in as many ways as there are models.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelUnavailable(
            f"the model {name!r} can't be loaded on {place} as {dtype}: {reason}", model=name
        ) from None


def require_engine() -> None:
    """Import the engine, whose own bars and warnings would come between a command's.

    Raises
    ------
    CommandFailed
    """
    try:
        import torch  # noqa: F401
        from transformers.utils import logging
    except ImportError as error:
        raise errors.CommandFailed(
            "engine_missing",
            f"this command needs an engine, and {error.name or error} can't be imported: pip install 'kvgraft[engine]'",
            errors.MISSING,
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def engine_session(
    repository: Repository,
    namespace: str,
    model: str,
    dtype: str,
    attention: str,
    device: str | None,
    block_tokens: int,
    device_pages: int | None = None,
) -> Iterator[GraftSession]:
    """A session on a model by its name; arguments as of `load_model` and `GraftSession`."""
    with progress.shown(f"loading {model}"):
        loaded, tokenizer = load_model(model, dtype, attention, device)
        from engine_adapter.session import GraftSession

        session = GraftSession(
            loaded,
            tokenizer,
            repository,
            block_tokens=block_tokens,
            namespace=namespace,
            device_pages=device_pages,
        )
    with session:
        yield session


@contextmanager
def _shown(task: str, session: GraftSession) -> Iterator[progress.Report]:
    """Show progress; of a paged session also how many of its pages were found on the device, and what the others cost."""
    with progress.shown(task) as report:
        if session.paging is None:
            yield report
            return
        pager = session.paging.pager

        def both(kind: str, done: int, total: int) -> None:
            report(kind, done, total)
            report("pages found", pager.counters.hits, pager.counters.hits + pager.counters.misses)

        yield both
    done = pager.counters
    read, pool = output.size(done.bytes_read), output.size(done.peak_bytes)
    progress.say(f"{read} of pages read into {pool} of the device, waiting {output.seconds(done.stall_s)} for them")


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
