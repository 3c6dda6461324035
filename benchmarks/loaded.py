"""An index of a given number of blocks, on SQLite or on PostgreSQL, in a fraction of the time that pushes take.

Rows go straight into the tables that a match reads, and their unique index is made afterwards.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from repo_service.index import Index

DATABASES = ("sqlite", "postgres")
NAMESPACE = "default"
BLOCKS_PER_ARTIFACT = 128
BLOCK_TOKENS = 256
FINGERPRINT = bytes(32)

_BATCH = 100_000
_TABLES: dict[str, tuple[str, ...]] = {
    "artifacts": (
        "id", "namespace", "digest", "fingerprint_id", "token_count", "block_tokens", "block_count",
        "private_tokens", "exactness", "created_at", "total_bytes", "last_used_at",
    ),
    "blocks": ("id", "namespace", "key", "record", "start", "stop", "part"),
    "artifact_blocks": ("artifact_id", "position", "block_id"),
}  # fmt: skip

Rows = Iterable[tuple[Any, ...]]


@dataclass(frozen=True)
class Loaded:
    """A database with the rows of artifacts and their blocks.

    Attributes
    ----------
    load_s
        Seconds that loading took, with the making of the index.
    load
        Adds rows: a table, its columns, the rows.
    size
        Bytes that the database has on disk now, once it is at rest.
    """

    url: str
    load_s: float
    load: Callable[[str, tuple[str, ...], Rows], None]
    size: Callable[[], int]


@contextmanager
def loaded(database: str, directory: Path, blocks: int) -> Iterator[Loaded]:
    """An index with ``blocks`` blocks, in artifacts of 128, all of one fingerprint."""
    with (_sqlite if database == "sqlite" else _postgres)(directory, blocks) as made:
        yield made


@contextmanager
def _sqlite(directory: Path, blocks: int) -> Iterator[Loaded]:
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
        connection.execute("INSERT INTO fingerprints VALUES (1, ?, ?, '{}')", (FINGERPRINT, FINGERPRINT))

        def load(table: str, columns: tuple[str, ...], rows: Rows) -> None:
            statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
            left = iter(rows)
            while batch := list(islice(left, _BATCH)):
                connection.execute("BEGIN")
                connection.executemany(statement, batch)
                connection.execute("COMMIT")

        def size() -> int:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return path.stat().st_size

        for table, columns in _TABLES.items():
            load(table, columns, _rows(table, blocks))
        connection.execute("CREATE UNIQUE INDEX uq_blocks_namespace_key_part ON blocks (namespace, key, part)")
        size()
        yield Loaded(url, time.perf_counter() - start, load, size)


@contextmanager
def _postgres(directory: Path, blocks: int) -> Iterator[Loaded]:
    import psycopg

    from benchmarks.servers import postgres_server

    with postgres_server(directory) as url:
        Index.open(url).close()
        start = time.perf_counter()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute("SET maintenance_work_mem = '1GB'")
            connection.execute("ALTER TABLE blocks DROP CONSTRAINT uq_blocks_namespace_key_part")
            connection.execute("INSERT INTO fingerprints VALUES (1, %s, %s, '{}')", (FINGERPRINT, FINGERPRINT))

            def load(table: str, columns: tuple[str, ...], rows: Rows) -> None:
                copy = f"COPY {table} ({', '.join(columns)}) FROM STDIN"
                with connection.cursor().copy(copy) as sink:  # type: ignore[arg-type]
                    for row in rows:
                        sink.write_row(row)

            def size() -> int:
                connection.execute("VACUUM ANALYZE")
                found = connection.execute("SELECT pg_database_size(current_database())").fetchone()
                assert found is not None
                return int(found[0])

            for table, columns in _TABLES.items():
                load(table, columns, _rows(table, blocks))
            connection.execute(
                "ALTER TABLE blocks ADD CONSTRAINT uq_blocks_namespace_key_part UNIQUE (namespace, key, part)"
            )
            size()
            yield Loaded(url, time.perf_counter() - start, load, size)


def digest(prompt: int, block: int) -> bytes:
    """The key and the record of a block, as any digest that nothing else has."""
    return hashlib.sha256(b"%d/%d" % (prompt, block)).digest()


def key(prompt: int, block: int) -> str:
    """The same as it is written."""
    return f"sha256:{digest(prompt, block).hex()}"


def _rows(table: str, blocks: int) -> Iterator[tuple[Any, ...]]:
    artifacts = range(blocks // BLOCKS_PER_ARTIFACT)
    now = time.time_ns() // 1000
    if table == "artifacts":
        tokens = BLOCKS_PER_ARTIFACT * BLOCK_TOKENS
        for number in artifacts:
            # Used a moment ago, so that no lookup writes that down.
            yield (
                number + 1,
                NAMESPACE,
                digest(number, -1),
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
    for number in artifacts:
        first = number * BLOCKS_PER_ARTIFACT + 1
        for position in range(BLOCKS_PER_ARTIFACT):
            if table == "artifact_blocks":
                yield number + 1, position, first + position
            else:
                name, start = digest(number, position), position * BLOCK_TOKENS
                yield first + position, NAMESPACE, name, name, start, start + BLOCK_TOKENS, 0
