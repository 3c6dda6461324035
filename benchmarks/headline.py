"""The published headline with an open model: 2,854,766 tokens in 88 artifacts, each a native window of Gemma 3 270M.

Takes hours and is gone on with: artifacts are in a repository that stays, and what was measured of each is a line of
``results/headline.jsonl``. One fact is hidden in each artifact, and a question is asked about it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.haystack import Hidden, haystack
from benchmarks.lines import Lines
from benchmarks.needles import Needle, multi_key
from benchmarks.record import machine
from benchmarks.restore import read_file
from engine_adapter import GraftSession, open_repository
from engine_adapter.ask import ask
from engine_adapter.cache import take_memory
from engine_adapter.demo_models import resolve
from engine_adapter.documents import read_documents
from engine_adapter.library import Held, Library, Plan
from engine_adapter.library_router import LibraryRouter
from engine_adapter.routers import Router
from engine_adapter.tensors import host_bytes
from repo_service.services.documents import chunk_key

RESULTS = Path(__file__).parent / "results" / "headline.jsonl"
ARTIFACTS = 88
TOKENS = 2_854_766
MODEL = "gemma3"

_RESERVE = 192
_ROUNDS = 5
_SAMPLES = 4
_ANSWER_TOKENS = 24


def usual_directory() -> Path:
    """Where the repository stays between runs: 9 GB."""
    return Path(os.environ.get("KVGRAFT_CACHE") or "~/.cache/kvgraft").expanduser() / "headline"


def run(
    directory: Path, artifacts: int = ARTIFACTS, window: int | None = None, results: Path = RESULTS
) -> dict[str, Any]:
    """Make the artifacts that are missing, then verify, time and ask what has no line yet.

    Parameters
    ----------
    directory
        Where repository and documents stay.
    window
        The native window by default.
    """
    path = resolve(MODEL)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    directory.mkdir(parents=True, exist_ok=True)
    lines = Lines(results, ("step", "document"))
    with (
        open_repository(f"file://{directory}/repository") as repository,
        GraftSession(model, tokenizer, repository) as session,
    ):
        library = Library(session, window=window, reserve=_RESERVE)
        needles = _write_documents(library, directory / "documents", artifacts)
        _make(library, directory / "documents", lines)
        held = {Path(each.parts[0].source).name: each for each in library.artifacts()}
        for name, each in sorted(held.items()):
            if {"step": "verify", "document": name} not in lines:
                lines.append({"step": "verify", "document": name} | _verified(session, each))
                _say(f"{name}: verified")
        for name, each in sorted(held.items()):
            if {"step": "access", "document": name} not in lines:
                lines.append({"step": "access", "document": name} | _accessed(session, directory / "repository", each))
        with LibraryRouter(library) as router:
            for name in sorted(held):
                if {"step": "ask", "document": name} not in lines:
                    answer = _asked(library, router, needles[name], held[name])
                    lines.append({"step": "ask", "document": name} | answer)
                    _say(f"{name}: {answer}")
    return summary(lines)


def _write_documents(library: Library, directory: Path, artifacts: int) -> dict[str, Needle]:
    """A document that fills an artifact each, with a needle in it; by file name."""
    needles = multi_key(artifacts, seed=1)
    names = [f"{number:03d}.txt" for number in range(artifacts)]
    # Each document has its name before it.
    room = library.room - len(library.prompt.document("")) - 32
    if not directory.is_dir():
        hidden = [
            Hidden(needle, (int((number + 0.1 + 0.8 * (number * 7 % 10) / 10) * room),))
            for number, needle in enumerate(needles)
        ]
        whole = haystack(library.prompt.tokenizer, artifacts * room, hidden, seed=1)
        parts = list(whole.parts(room))[:artifacts]
        fresh = directory.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        for name, part in zip(names, parts, strict=True):
            (fresh / name).write_text(part.text)
        fresh.rename(directory)
    return dict(zip(names, needles, strict=True))


def _make(library: Library, directory: Path, lines: Lines) -> None:
    plan = library.plan(read_documents([str(directory)]), whole=True)
    for packed in plan.packed:
        name = Path(packed.parts[0].source).name
        began = time.perf_counter()
        library.add(Plan([], [], [packed], 0))
        seconds = round(time.perf_counter() - began, 1)
        # After an interruption only what was left of it is timed.
        lines.append(
            {"step": "make", "document": name, "tokens": packed.token_count, "s": seconds, "cpu": machine()["cpu"]}
        )
        _say(f"{name}: {packed.token_count:,} tokens in {seconds} s")


def _verified(session: GraftSession, held: Held) -> dict[str, Any]:
    began = time.perf_counter()
    report = session.verify(held.info.id, _SAMPLES)
    return {
        "exact": report.exact,
        "tokens": report.tokens,
        "blocks_equal": sum(check.equal for check in report.blocks),
        "blocks": len(report.blocks),
        "logits_equal": sum(sample.equal for sample in report.samples),
        "s": round(time.perf_counter() - began, 1),
    }


def _accessed(session: GraftSession, repository: Path, held: Held) -> dict[str, Any]:
    """A verified graft, and a raw read of the same bytes into reused memory, in turn, the page cache warm."""
    manifest = session.repository.manifest(held.info.id, session.namespace)
    records = session.repository.records(manifest, session.namespace)
    files = [(repository / chunk_key(digest), spec.size) for digest, spec in manifest.stored_chunks(records).items()]
    memory = host_bytes(take_memory((max(size for _, size in files),), torch.uint8, torch.device("cpu")))
    grafts, reads, device_bytes = [], [], 0
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run = session.graft(held.info.id)
        grafts.append(time.perf_counter() - began)
        layers: Sequence[Any] = run.cache.layers
        device_bytes = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
        del run
        began = time.perf_counter()
        for file, size in files:
            read_file(file, memory[:size])
        reads.append(time.perf_counter() - began)
    return {
        "graft_s": round(statistics.median(grafts), 4),
        "raw_read_s": round(statistics.median(reads), 4),
        "stored_bytes": sum(size for _, size in files),
        "whole_bytes": manifest.layout.stored_bytes(len(manifest.blocks), 0),
        "device_bytes": device_bytes,
    }


def _asked(library: Library, router: Router, needle: Needle, held: Held) -> dict[str, Any]:
    answer = ask(library, router, needle.question.strip().split("?")[0] + "?", max_new_tokens=_ANSWER_TOKENS)
    return {
        "first": answer.routing.routes[0].artifact_id == held.info.id,
        "among_five": held.info.id in [route.artifact_id for route in answer.routing.routes],
        "confidence": round(answer.routing.confidence, 3),
        "right": needle.share(answer.text) == 1,
        "answer": answer.text,
        "route_s": round(answer.route_s, 4),
        "graft_s": round(answer.graft_s, 4),
        "answer_s": round(answer.answer_s, 3),
    }


def summary(lines: Lines) -> dict[str, Any]:
    """What all lines come to."""
    steps: dict[str, list[dict[str, Any]]] = {"make": [], "verify": [], "access": [], "ask": []}
    for line in lines:
        steps[line["step"]].append(line)
    verified, accessed, asked = steps["verify"], steps["access"], steps["ask"]

    def median(of: Sequence[Mapping[str, Any]], name: str) -> float | None:
        return statistics.median(line[name] for line in of) if of else None

    return {
        "artifacts": len(verified),
        "tokens": sum(line["tokens"] for line in verified),
        "of_published_tokens": round(sum(line["tokens"] for line in verified) / TOKENS, 4),
        "exact": sum(line["exact"] for line in verified),
        "access": {
            "graft_s": median(accessed, "graft_s"),
            "of_raw_read": median([{"of": line["raw_read_s"] / line["graft_s"]} for line in accessed], "of"),
            "device_bytes": max((line["device_bytes"] for line in accessed), default=None),
        },
        "stored_bytes": sum(line["stored_bytes"] for line in accessed),
        "stored_bytes_with_whole_sliding_state": sum(line["whole_bytes"] for line in accessed),
        "asked": len(asked),
        "right_artifact_first": sum(line["first"] for line in asked),
        "right_artifact_among_five": sum(line["among_five"] for line in asked),
        "answered_right": sum(line["right"] for line in asked),
        "route_s": median(asked, "route_s"),
    }


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.headline", description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=usual_directory(), help="where the repository stays between runs"
    )
    parser.add_argument("--artifacts", type=int, default=ARTIFACTS)
    parser.add_argument("--window", type=int, help="smaller than the native one, for a try")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are read and written")
    arguments = parser.parse_args()
    found = run(arguments.directory.absolute(), arguments.artifacts, arguments.window, arguments.results)
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
