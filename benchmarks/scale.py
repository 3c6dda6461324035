"""Longest-prefix match as the index grows, on SQLite and on PostgreSQL.

Loading a hundred million blocks by pushes would measure pushes: rows are loaded as they are.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.artifacts import fingerprint
from benchmarks.loaded import BLOCKS_PER_ARTIFACT, NAMESPACE, Loaded, digest, key, loaded
from repo_service.domain.layout import Layout
from repo_service.index import Index

PROMPT_BLOCKS = 32
ARRIVALS = 2_000
CHUNKS = 1_000_000
CHUNKS_PER_BLOCK = 4


def run(sizes: Sequence[int], databases: Sequence[str], lookups: int) -> dict[str, Any]:
    """Match prompts of 32 blocks, half of which are stored in part, against each number of indexed blocks."""
    measured: dict[str, Any] = {}
    for database in databases:
        for blocks in sizes:
            print(f"{database}, {blocks:,} blocks", file=sys.stderr, flush=True)
            with (
                tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory,
                loaded(database, Path(directory), blocks) as rows,
            ):
                found = sizes_of(rows, blocks)
                with Index.open(rows.url) as index:
                    found = match_times(index, blocks, lookups) | _writing(index) | found
                found["bytes_per_chunk"] = _bytes_per_chunk(rows)
            measured[f"{database}, {blocks:,} blocks"] = found
    return measured


def sizes_of(rows: Loaded, blocks: int) -> dict[str, Any]:
    """What the rows of artifacts and blocks take."""
    size = rows.size()
    return {"index_mib": round(size / 2**20), "bytes_per_block": round(size / blocks), "load_s": round(rows.load_s)}


def load_chunks(rows: Loaded, first: int, count: int, per_block: int) -> None:
    """Chunks numbered from ``first``, each of a block that is no other's."""
    numbers = range(first, first + count)
    columns = ("id", "namespace", "digest", "dtype", "shape", "size", "state")
    rows.load(
        "chunks", columns, ((n, NAMESPACE, digest(-1, n), "bfloat16", "[1, 30, 3, 256, 64]", 2**23, 2) for n in numbers)
    )
    rows.load("block_chunks", ("block_id", "chunk_id"), ((n // per_block, n) for n in numbers))


def _bytes_per_chunk(rows: Loaded) -> int:
    before = rows.size()
    # Behind what arrived while that was measured.
    load_chunks(rows, 10_000_000, CHUNKS, CHUNKS_PER_BLOCK)
    return round((rows.size() - before) / CHUNKS)


def match_times(index: Index, blocks: int, lookups: int) -> dict[str, Any]:
    """Match prompts, half of which are stored in part, and check what is found."""
    chooser = random.Random(1)
    artifacts = blocks // BLOCKS_PER_ARTIFACT
    # Connections are opened before anything is timed.
    index.match(NAMESPACE, [key(0, 0)])
    seconds: list[float] = []
    for _ in range(lookups):
        prompt, shared = chooser.randrange(2 * artifacts), chooser.randrange(PROMPT_BLOCKS)
        keys = [key(prompt, i) if i < shared else key(-1 - prompt, i) for i in range(PROMPT_BLOCKS)]
        begin = time.perf_counter()
        match = index.match(NAMESPACE, keys)
        seconds.append(time.perf_counter() - begin)
        if (match.blocks if match else 0) != (shared if prompt < artifacts else 0):
            raise RuntimeError(f"prompt {prompt} matched {match}; {shared} of its blocks are stored")
    seconds.sort()
    return {
        "lookups": lookups,
        "keys_per_lookup": PROMPT_BLOCKS,
        "p50_ms": round(statistics.median(seconds) * 1e3, 3),
        "p99_ms": round(seconds[int(len(seconds) * 0.99)] * 1e3, 3),
    }


def _writing(index: Index) -> dict[str, Any]:
    """Arrivals of chunks, which are what a push writes most, by one thread and by four at once."""
    made_with = fingerprint()
    spec = next(iter(Layout.of(made_with).arrays.values())).chunk
    rates = {}
    for threads in (1, 4):
        digests = [[f"blake3:{os.urandom(32).hex()}" for _ in range(ARRIVALS // threads)] for _ in range(threads)]
        names = [f"push-{threads}-{n}" for n in range(threads)]
        for name, offered in zip(names, digests, strict=True):
            index.begin_push(name, NAMESPACE, made_with, datetime.now(UTC) + timedelta(hours=1))
            index.offer(name, [], dict.fromkeys(offered, spec))
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(lambda name, some: [index.arrived(name, digest) for digest in some], names, digests))
            rates[threads] = round(ARRIVALS / (time.perf_counter() - began))
    return {"arrivals_per_s": rates[1], "arrivals_per_s_4_threads": rates[4]}
