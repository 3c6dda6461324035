"""Which model a command works with: the options that say so, and a session on it.

The engine is imported where it is first needed, so that help is quick and stays complete where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repo_service.cli import errors, output, progress

if TYPE_CHECKING:
    from engine_adapter.session import GraftSession
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


class Sliding(StrEnum):
    ALL = "all"
    RESUME = "resume"


_MODEL_HELP = "smollm2, gemma3, a local directory, or a name on the model hub."

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
SlidingOption = Annotated[
    Sliding,
    typer.Option("--sliding", help="Store all state of sliding layers, or only what a resume at the end needs."),
]
BlockTokens = Annotated[int, typer.Option("--block-tokens", min=1, max=65536, help="Tokens per block.")]


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
def shown(task: str, session: GraftSession) -> Iterator[progress.Report]:
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
