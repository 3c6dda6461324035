"""The demo: a service, a process that deposits a real text, another that grafts it and answers a question."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_adapter.demo_models import DEMO_MODELS, fetch
from repo_service.cli import output
from repo_service.cli.children import Children
from repo_service.domain.errors import Conflict, InvalidInput
from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.domain.schedule import DECODE

if TYPE_CHECKING:
    from torch import Tensor

    from engine_adapter.run import Run
    from engine_adapter.session import GraftSession

TEXT = "data/demo.txt"
QUESTION = "What is the combination of the sluice house lock?"
READER = "demo-reader"

_PROMPT_END = f"\n\nQuestion: {QUESTION}\nAnswer:"
_TAG = "demo"


def run_demo(
    model: str, dtype: str, tokens: int, samples: int, keep: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the demo and return what it measured.

    Parameters
    ----------
    model
        A demo model, a directory, or a name on the model hub.
    tokens
        How many tokens of the text to deposit.
    samples
        Positions whose logits are compared: the prompt's end and a greedy continuation of it.
    keep
        A new directory for the two repositories, or None to remove them in the end.
    say
        Told what happens, a line at a time.

    Raises
    ------
    CommandFailed
        If one of the processes failed, with that one's code, message and exit code.
    ModelUnavailable, InvalidInput, Conflict
    """
    began = time.perf_counter()
    if model in DEMO_MODELS:
        fetch(model, progress=say)
    with _ended_by_sigterm(), _directory(keep) as directory, Children() as children:
        say("starting the service")
        service = (directory / "service").as_uri()
        url = children.begin("serve", "--repo", service, "--port", "0", log=directory / "service.log")["url"]
        say(f"process A loads {model} and deposits {tokens:,} tokens of text")
        options = ("--model", model, "--dtype", dtype, "--repo", url)
        with resources.as_file(resources.files("engine_adapter") / TEXT) as text:
            artifact = children.ask("deposit", str(text), "--max-tokens", str(tokens), "--tag", _TAG, *options)
        if artifact["token_count"] < tokens:
            raise InvalidInput(f"the demo's text has {artifact['token_count']:,} tokens for this model, not {tokens:,}")
        stored = children.ask("stats", "--repo", url)["stats"]
        say("process B loads the model, pulls the artifact, grafts it, and computes everything afresh")
        cache = (directory / "reader").as_uri()
        found = children.ask(READER, "--cache", cache, "--samples", str(samples), *options)
        return {
            **found,
            "tokens": artifact["token_count"],
            "bytes_pushed": stored["unique_bytes"],
            "artifact_id": artifact["id"],
            "model": model,
            "total_s": time.perf_counter() - began,
        }


def print_side_by_side(result: dict[str, Any]) -> None:
    """Print what `run_demo` returned, fresh and grafted in columns."""
    fresh, grafted = (output.short(result[f"logits_sha256_{way}"]) for way in ("fresh", "grafted"))
    output.print_table(
        ("", "fresh", "grafted"),
        [
            ("SHA-256 of the logits", fresh, grafted),
            ("tokens computed", f"{result['prompt_tokens']:,}", f"{result['computed_tokens']:,}"),
            ("time to first token", output.seconds(result["ttft_fresh_s"]), output.seconds(result["ttft_grafted_s"])),
            ("with the pull over HTTP", "", output.seconds(result["ttft_grafted_with_pull_s"])),
        ],
    )
    print()
    pushed, pulled = (output.size(result[name]) for name in ("bytes_pushed", "bytes_pulled"))
    output.print_facts(
        [
            ("exact", "yes, bit for bit" if result["exact"] else "NO"),
            ("speedup", f"{result['speedup']:.1f}x, {result['speedup_with_pull']:.1f}x with the pull"),
            ("largest KL", f"{result['kl_max']:.3g}"),
            ("argmax equal", f"{result['argmax_agree']} of {result['samples']}"),
            ("bytes moved", f"{pushed} pushed, {pulled} pulled"),
            ("question", result["question"]),
            ("answer", result["answer"]),
            ("model", f"{result['model']}, {result['dtype']}"),
            ("machine", ", ".join(f"{name} {value}" for name, value in result["machine"].items())),
            ("whole demo", output.seconds(result["total_s"])),
        ]
    )


def read(url: str, cache: str, model: Any, tokenizer: Any, samples: int) -> dict[str, Any]:
    """What process B does: pull into a repository of its own, graft from there, compare with a fresh run.

    The grafted time to the first token holds the check that the model is unchanged, the match, reading
    and verifying the state, restoring it, and computing the question. What is read was written just
    before, so it comes from the page cache.

    Parameters
    ----------
    url, cache
        The service, and the repository to pull into.
    model, tokenizer
        As loaded by transformers.
    """
    from engine_adapter.session import GraftSession
    from repo_service.client import open_repository
    from repo_service.client.transfer import copy_artifact

    with open_repository(url) as service, open_repository(cache) as own:
        began = time.perf_counter()
        pulled = copy_artifact(service, own, _TAG, DEFAULT_NAMESPACE, DEFAULT_NAMESPACE)
        pull_s = time.perf_counter() - began
        with GraftSession(model, tokenizer, own) as session:
            ids = session.load(_TAG)[2]
            prompt = ids + list(tokenizer.encode(_PROMPT_END, add_special_tokens=False))
            grafted, grafted_s = _prefill(session, prompt, graft=True)
            counts = {"grafted_tokens": grafted.grafted_tokens, "computed_tokens": grafted.computed_tokens}
            logits, answer = _continue(session, grafted, samples)
            fresh, fresh_s = _prefill(session, prompt, graft=False)
            reference, _ = _continue(session, fresh, samples, answer)
            # The last block is grafted only if it is whole.
            graftable = len(ids) // session.layout.block_tokens * session.layout.block_tokens
    return {
        **_compare(reference, logits),
        **counts,
        "exact": _digest(reference) == _digest(logits) and counts["grafted_tokens"] == graftable,
        "ttft_fresh_s": fresh_s,
        "ttft_grafted_s": grafted_s,
        "ttft_grafted_with_pull_s": grafted_s + pull_s,
        "speedup": fresh_s / grafted_s,
        "speedup_with_pull": fresh_s / (grafted_s + pull_s),
        "pull_s": pull_s,
        "bytes_pulled": pulled.bytes_sent,
        "prompt_tokens": len(prompt),
        "question": QUESTION,
        "answer": tokenizer.decode(answer, skip_special_tokens=True).strip().partition("\n")[0],
        "dtype": str(model.dtype).removeprefix("torch."),
        "machine": _machine(session),
    }


def _prefill(session: GraftSession, prompt: list[int], *, graft: bool) -> tuple[Run, float]:
    """A prefill, and the seconds until its first token was known."""
    began = time.perf_counter()
    run = session.prefill(prompt, graft)
    int(run.logits.argmax())
    return run, time.perf_counter() - began


def _continue(
    session: GraftSession, run: Run, samples: int, given: Sequence[int] | None = None
) -> tuple[list[Tensor], list[int]]:
    """Logits at the run's end and after each token of a continuation, which is greedy unless given."""
    logits, tokens = [run.logits], list[int]()
    while True:
        tokens.append(int(logits[-1].argmax()) if given is None else given[len(tokens)])
        if len(logits) == samples:
            return logits, tokens
        logits.append(session.call(run, tokens[-1:], DECODE))


def _compare(fresh: Sequence[Tensor], grafted: Sequence[Tensor]) -> dict[str, Any]:
    from engine_adapter.verify import Comparison, compare

    comparison = Comparison.of("grafted", compare(0, fresh, grafted))
    return {
        "logits_sha256_fresh": _digest(fresh),
        "logits_sha256_grafted": _digest(grafted),
        "kl_max": comparison.kl_max,
        "argmax_agree": comparison.argmax_agree,
        "samples": comparison.samples,
    }


def _digest(logits: Sequence[Tensor]) -> str:
    """SHA-256 over the raw bytes of all samples' logits, in order."""
    from engine_adapter.tensors import host_bytes

    hasher = hashlib.sha256()
    for sample in logits:
        hasher.update(host_bytes(sample))
    return f"sha256:{hasher.hexdigest()}"


def _machine(session: GraftSession) -> dict[str, Any]:
    import torch

    numerics = session.fingerprint.sections["numerics"]
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": numerics.get("device_name") or numerics.get("cpu_capability"),
        "torch": torch.__version__,
        "transformers": numerics["engine_version"],
    }


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="kvgraft-demo-") as directory:
            yield Path(directory)
        return
    try:
        keep.mkdir(parents=True)
    except FileExistsError:
        raise Conflict(f"{keep} exists: choose another directory or remove it", path=str(keep)) from None
    except OSError as error:
        raise InvalidInput(f"{keep} can't be created: {error.strerror}", path=str(keep)) from None
    yield keep.absolute()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Leave by an exception on SIGTERM, so that processes end and directories go."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
