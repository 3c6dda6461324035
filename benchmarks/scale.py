"""Longest-prefix match as the index grows, on SQLite and on PostgreSQL.

Rows go straight into the tables that a match reads, and their unique index is made afterwards: loading
a hundred million blocks by pushes would measure pushes.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.artifacts import fingerprint
from repo_service.domain.layout import Layout
from repo_service.index import Index

NAMESPACE = "default"
BLOCKS_PER_ARTIFACT = 128
BLOCK_TOKENS = 256
PROMPT_BLOCKS = 32
BATCH = 100_000
ARRIVALS = 2_000

_TABLES: dict[str, tuple[str, ...]] = {
    "artifacts": (
        "id", "namespace", "digest", "fingerprint_id", "token_count", "block_tokens", "block_count",
        "private_tokens", "exactness", "created_at", "total_bytes", "last_used_at",
    ),
    "blocks": ("id", "namespace", "key", "record", "start", "stop", "part"),
    "artifact_blocks": ("artifact_id", "position", "block_id"),
}  # fmt: skip
# Loaded by themselves, to see their size.
_CHUNK_TABLES: dict[str, tuple[str, ...]] = {
    "chunks": ("id", "namespace", "digest", "dtype", "shape", "size", "state"),
    "block_chunks": ("block_id", "chunk_id"),
}
CHUNKS = 1_000_000
CHUNKS_PER_BLOCK = 4

Rows = Iterable[tuple[Any, ...]]


def run(sizes: list[int], databases: list[str], lookups: int) -> dict[str, Any]:
    """Match prompts of 32 blocks, half of which are stored in part, against each number of indexed blocks."""
    measured: dict[str, Any] = {}
    for database in databases:
        measure = _sqlite if database == "sqlite" else _postgres
        for blocks in sizes:
            with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory:
                print(f"{database}, {blocks:,} blocks", file=sys.stderr, flush=True)
                measured[f"{database}, {blocks:,} blocks"] = measure(Path(directory), blocks, lookups)
    return measured


def _sqlite(directory: Path, blocks: int, lookups: int) -> dict[str, Any]:
    path = directory / "index.sqlite"
    url = f"sqlite:///{path}"
    Index.open(url).close()
    start = time.perf_counter()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("foreign_keys=OFF", "synchronous=OFF", "cache_size=-1048576", "temp_store=FILE"):
            connection.execute(f"PRAGMA {pragma}")
        made = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'blocks'").fetchone()[0]
        unconstrained = re.sub(
            r",\s*CONSTRAINT uq_blocks_namespace_key_part UNIQUE \(namespace, \"?key\"?, part\)", "", made
        )
        if unconstrained == made:
            raise RuntimeError("the table of blocks is not made as it was")
        connection.execute("DROP TABLE blocks")
        connection.execute(unconstrained)
        connection.execute(f"INSERT INTO fingerprints VALUES {_fingerprint()}")

        def load(tables: Mapping[str, tuple[str, ...]], count: int) -> None:
            for table, columns in tables.items():
                statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
                rows = _rows(table, count)
                while batch := list(islice(rows, BATCH)):
                    connection.execute("BEGIN")
                    connection.executemany(statement, batch)
                    connection.execute("COMMIT")

        load(_TABLES, blocks)
        connection.execute("CREATE UNIQUE INDEX uq_blocks_namespace_key_part ON blocks (namespace, key, part)")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        loaded = time.perf_counter() - start
        size = path.stat().st_size
        with Index.open(url) as index:
            measured = _measured(index, blocks, lookups) | _writing(index) | _sizes(blocks, size, loaded)
        size = path.stat().st_size
        load(_CHUNK_TABLES, CHUNKS)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return measured | {"bytes_per_chunk": round((path.stat().st_size - size) / CHUNKS)}


def _postgres(directory: Path, blocks: int, lookups: int) -> dict[str, Any]:
    import psycopg

    from benchmarks.servers import postgres_server

    with postgres_server(directory) as url:
        Index.open(url).close()
        start = time.perf_counter()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute("SET maintenance_work_mem = '1GB'")
            connection.execute("ALTER TABLE blocks DROP CONSTRAINT uq_blocks_namespace_key_part")
            connection.execute(f"INSERT INTO fingerprints VALUES {_fingerprint('{}::bytea')}")  # type: ignore[arg-type]

            def load(tables: Mapping[str, tuple[str, ...]], count: int) -> None:
                for table, columns in tables.items():
                    copy = f"COPY {table} ({', '.join(columns)}) FROM STDIN"
                    with connection.cursor().copy(copy) as sink:  # type: ignore[arg-type]
                        for row in _rows(table, count):
                            sink.write_row(row)

            def size() -> int:
                found = connection.execute("SELECT pg_database_size(current_database())").fetchone()
                assert found is not None
                return int(found[0])

            load(_TABLES, blocks)
            connection.execute(
                "ALTER TABLE blocks ADD CONSTRAINT uq_blocks_namespace_key_part UNIQUE (namespace, key, part)"
            )
            connection.execute("VACUUM ANALYZE")
            loaded = time.perf_counter() - start
            with Index.open(url) as index:
                sizes = _sizes(blocks, size(), loaded)
                measured = _measured(index, blocks, lookups) | _writing(index) | sizes
            before = size()
            load(_CHUNK_TABLES, CHUNKS)
            return measured | {"bytes_per_chunk": round((size() - before) / CHUNKS)}


def _sizes(blocks: int, size: int, loaded_s: float) -> dict[str, Any]:
    return {"index_mib": round(size / 2**20), "bytes_per_block": round(size / blocks), "load_s": round(loaded_s)}


def _measured(index: Index, blocks: int, lookups: int) -> dict[str, Any]:
    chooser = random.Random(1)
    artifacts = blocks // BLOCKS_PER_ARTIFACT
    # Connections are opened before anything is timed.
    index.match(NAMESPACE, [_key(0, 0)])
    seconds: list[float] = []
    for _ in range(lookups):
        prompt, shared = chooser.randrange(2 * artifacts), chooser.randrange(PROMPT_BLOCKS)
        keys = [_key(prompt, i) if i < shared else _key(-1 - prompt, i) for i in range(PROMPT_BLOCKS)]
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


def _digest(prompt: int, block: int) -> bytes:
    return hashlib.sha256(b"%d/%d" % (prompt, block)).digest()


def _key(prompt: int, block: int) -> str:
    return f"sha256:{_digest(prompt, block).hex()}"


def _fingerprint(blob: str = "X{}") -> str:
    digest = f"'{'00' * 32}'"
    if "bytea" in blob:
        digest = f"'\\x{'00' * 32}'"
    return f"(1, {blob.format(digest)}, {blob.format(digest)}, '{{}}')"


def _rows(table: str, blocks: int) -> Iterator[tuple[Any, ...]]:
    artifacts = range(blocks // BLOCKS_PER_ARTIFACT)
    now = time.time_ns() // 1000
    if table == "artifacts":
        tokens = BLOCKS_PER_ARTIFACT * BLOCK_TOKENS
        for number in artifacts:
            digest = hashlib.sha256(b"%d" % number).digest()
            # Used a moment ago, so that no lookup writes that down.
            yield (
                number + 1,
                NAMESPACE,
                digest,
                1,
                tokens,
                BLOCK_TOKENS,
                BLOCKS_PER_ARTIFACT,
                True,
                "exact",
                now,
                2**30,
                now + 10**9,
            )
        return
    if table in _CHUNK_TABLES:
        # Behind what arrived while that was measured, and each of a block that is no other's.
        for number in range(10_000_000, 10_000_000 + blocks):
            if table == "block_chunks":
                yield number // CHUNKS_PER_BLOCK, number
            else:
                yield number, NAMESPACE, _digest(-1, number), "bfloat16", "[1, 30, 3, 256, 64]", 2**23, 2
        return
    for number in artifacts:
        first = number * BLOCKS_PER_ARTIFACT + 1
        for position in range(BLOCKS_PER_ARTIFACT):
            if table == "artifact_blocks":
                yield number + 1, position, first + position
            else:
                key, start = _digest(number, position), position * BLOCK_TOKENS
                yield first + position, NAMESPACE, key, key, start, start + BLOCK_TOKENS, 0
