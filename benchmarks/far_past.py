"""A library of up to a billion tokens: matching among its blocks, and routing questions among its passages.

No model: blocks are rows, texts are made from a seed. Each phase has a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.babble import CHARACTERS_PER_TOKEN, Babble
from benchmarks.loaded import BLOCK_TOKENS, BLOCKS_PER_ARTIFACT, DATABASES, FINGERPRINT, NAMESPACE, digest, loaded
from benchmarks.scale import load_chunks, match_times, sizes_of
from engine_adapter.ask import DEFAULT_THRESHOLD
from engine_adapter.dense import DenseRouter
from engine_adapter.embeddings import DIMENSIONS, Encoder
from engine_adapter.library import ARTIFACT, KIND, library_artifacts
from engine_adapter.packing import Part, parts_to_annotations
from engine_adapter.passages import PassageIndex
from engine_adapter.routers import LexicalRouter
from repo_service.domain.digest import SHA256, format_digest
from repo_service.domain.repository import Repository
from repo_service.index import Index

ARTIFACT_TOKENS = BLOCKS_PER_ARTIFACT * BLOCK_TOKENS
# Keys and values of one group.
CHUNKS_PER_BLOCK = 2
# Documents of an artifact.
PARTS = 8
LISTINGS = 3
PASSAGES = 128
VECTORS_AT_ONCE = 10_000
COMPARISONS = 5


def run(sizes: Sequence[int], lookups: int, facts: int, vectors: Sequence[int]) -> dict[str, Any]:
    """Everything at each number of tokens, and the comparison of a question with each number of embedded passages."""
    measured: dict[str, Any] = {}
    for tokens in sizes:
        artifacts = round(tokens / ARTIFACT_TOKENS)
        phases: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]] = {
            f"match, {database}": (_match, (database, artifacts, lookups)) for database in DATABASES
        }
        phases["route, lexical"] = (_route, (artifacts, facts))
        measured[f"{tokens:,} tokens"] = {
            "artifacts": artifacts,
            "blocks": artifacts * BLOCKS_PER_ARTIFACT,
            **{name: _apart(f"{tokens:,} tokens, {name}", *phase) for name, phase in phases.items()},
        }
    for count in vectors:
        measured[f"compare, {count:,} vectors"] = _apart(f"compare, {count:,} vectors", _compare, (count,))
    return measured


def _apart(name: str, phase: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    print(name, file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        found = process.submit(_with_memory, phase, Path(directory), *arguments).result()
    print(f"  {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def _with_memory(phase: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    before = {"memory_before_mib": _memory_mib("VmRSS")}
    return before | phase(*arguments) | {"memory_peak_mib": _memory_mib("VmHWM")}


def _memory_mib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


def _match(directory: Path, database: str, artifacts: int, lookups: int) -> dict[str, Any]:
    blocks = artifacts * BLOCKS_PER_ARTIFACT
    with loaded(database, directory, blocks) as rows:
        sizes = sizes_of(rows, blocks)
        load_chunks(rows, CHUNKS_PER_BLOCK, blocks * CHUNKS_PER_BLOCK, CHUNKS_PER_BLOCK)
        rows.load("annotations", ("artifact_id", "name", "value"), _annotations(artifacts))
        size = rows.size()
        # What loading took is none of what is measured: Linux counts the peak anew from here.
        Path("/proc/self/clear_refs").write_text("5")
        memory = {"memory_before_mib": _memory_mib("VmRSS")}
        with Index.open(rows.url) as index:
            found = (
                memory | match_times(index, blocks, lookups) | sizes | {"index_with_chunks_mib": round(size / 2**20)}
            )
            # Of a repository, a listing asks for nothing else.
            repository, made_with = cast("Repository", index), format_digest(SHA256, FINGERPRINT)
            all_s, news_s = [], []
            for _ in range(LISTINGS):
                start = time.perf_counter()
                held = library_artifacts(repository, NAMESPACE, made_with)
                listed = time.perf_counter()
                news = library_artifacts(repository, NAMESPACE, made_with, datetime.now(UTC))
                all_s.append(listed - start)
                news_s.append(time.perf_counter() - listed)
                if (len(held), len(news)) != (artifacts, 0):
                    raise RuntimeError(f"{len(held)} artifacts of {artifacts} are listed, and {len(news)} as new")
            return found | {
                "list_all_s": round(statistics.median(all_s), 2),
                "list_news_ms": round(statistics.median(news_s) * 1e3, 1),
            }


def _annotations(artifacts: int) -> Iterator[tuple[int, str, str]]:
    length = ARTIFACT_TOKENS * CHARACTERS_PER_TOKEN // PARTS
    for artifact in range(artifacts):
        yield artifact + 1, KIND, ARTIFACT
        names = [f"chapter-{artifact * PARTS + part}.md" for part in range(PARTS)]
        parts = [
            Part(
                f"/library/books/{name}",
                name,
                f"sha256:{digest(artifact, part).hex()}",
                length,
                0,
                length,
                part * length,
            )
            for part, name in enumerate(names)
        ]
        for name, value in parts_to_annotations(parts).items():
            yield artifact + 1, name, value


def _route(directory: Path, artifacts: int, facts: int) -> dict[str, Any]:
    babble = Babble(artifacts, ARTIFACT_TOKENS, facts)
    path = directory / "passages.sqlite"
    numbers = {f"sha256:{digest(number, -1).hex()}": number for number in range(artifacts)}
    listed = dict.fromkeys(numbers, (0,))
    index = PassageIndex(path)
    began, written = time.perf_counter(), 0.0

    def text(artifact_id: str) -> str:
        nonlocal written
        start = time.perf_counter()
        made = babble.text(numbers[artifact_id])
        written += time.perf_counter() - start
        if numbers[artifact_id] % 1000 == 999:
            print(f"  {numbers[artifact_id] + 1:,} artifacts of {artifacts:,}", file=sys.stderr, flush=True)
        return made

    index.update(listed, text)
    build_s = time.perf_counter() - began - written
    characters = artifacts * babble.characters
    index.close()
    index = PassageIndex(path)
    router = LexicalRouter(index)
    router.route("open")
    began = time.perf_counter()
    index.update(listed, text)
    update_s = time.perf_counter() - began
    found: dict[str, Any] = {
        "passages": len(index),
        "index_mib": round(sum(file.stat().st_size for file in directory.iterdir()) / 2**20),
        "bytes_per_character": round(path.stat().st_size / characters, 2),
        "build_s": round(build_s, 1),
        "build_characters_per_s": round(characters / build_s),
        "update_ms": round(update_s * 1e3, 1),
    }
    for kind, hidden in (("named", babble.named), ("plain", babble.plain)):
        found[kind] = _asked(router, [fact.question for fact in hidden.values()], [*hidden], numbers)
    found["strange"] = _asked(router, babble.strange, None, numbers)
    index.close()
    return found


def _asked(
    router: LexicalRouter, questions: Iterable[str], homes: Sequence[int] | None, numbers: dict[str, int]
) -> dict[str, Any]:
    wall, cpu, routings = [], [], []
    for question in questions:
        start, spent = time.perf_counter(), time.process_time()
        routings.append(router.route(question))
        wall.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.process_time() - spent) * 1e3)
    found: dict[str, Any] = {"questions": len(routings)}
    if homes is not None:
        ranked = [[numbers[route.artifact_id] for route in routing.routes] for routing in routings]
        found["right_first"] = sum(places[:1] == [home] for places, home in zip(ranked, homes, strict=True))
        found["right_among_five"] = sum(home in places for places, home in zip(ranked, homes, strict=True))
    return found | {
        "grafted": sum(routing.confidence >= DEFAULT_THRESHOLD for routing in routings),
        "p50_ms": round(statistics.median(wall), 1),
        "p99_ms": round(sorted(wall)[int(len(wall) * 0.99)], 1),
        "cpu_p50_ms": round(statistics.median(cpu), 1),
        "cpu_p99_ms": round(sorted(cpu)[int(len(cpu) * 0.99)], 1),
    }


def _compare(directory: Path, count: int) -> dict[str, Any]:
    """A question compared with random vectors of length one, as embeddings are stored."""
    chance = torch.Generator().manual_seed(1)

    def vectors(number: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(number, DIMENSIONS, generator=chance), dim=-1)

    index = PassageIndex(directory / "passages.sqlite")
    # An artifact of as many documents as it has passages, of one word each: only their vectors are looked at.
    documents = range(0, 2 * PASSAGES, 2)
    index.update(dict.fromkeys(map(str, range(count // PASSAGES)), documents), lambda _: "x " * PASSAGES)
    while bare := index.bare(VECTORS_AT_ONCE):
        rows = vectors(len(bare)).half().numpy()
        index.embed([(number, row.tobytes()) for (number, _), row in zip(bare, rows, strict=True)])
    router = DenseRouter(index, cast("Encoder", SimpleNamespace(encode=lambda texts: vectors(len(texts)))))
    wall = []
    for _ in range(COMPARISONS):
        start = time.perf_counter()
        router.route("any")
        wall.append(time.perf_counter() - start)
    index.close()
    size = sum(file.stat().st_size for file in directory.iterdir())
    return {"vectors": count, "index_mib": round(size / 2**20), "p50_ms": round(statistics.median(wall) * 1e3)}
