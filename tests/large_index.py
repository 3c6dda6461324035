"""An index in PostgreSQL that its planner takes for a large one, because it is: filled by SQL, in a second or two."""

from __future__ import annotations

import psycopg

from repo_service.index.models import Base

ARTIFACTS = 8000
BLOCKS = 5 * ARTIFACTS
PUSHES = 1000

SMALL = ("meta", "unsettled")
"""Tables that don't grow with what is kept: a few values, and what is being written now."""

# Nearly all is in one namespace, as in most repositories: that it is given makes no statement a lookup. There are
# many others: an index is not cheaply skipped through where no namespace is given, as PostgreSQL does from version 18.
_NAMESPACE = "CASE WHEN i % 20 = 0 THEN 'team-' || i % 2000 ELSE 'default' END"

# Chunks of blocks come first, one for each, then those of artifacts' tokens, those that only pushes refer to, and
# some that nothing does.
_PUBLISHED = BLOCKS + ARTIFACTS
_PUSHED = _PUBLISHED + 4 * PUSHES
_CHUNKS = _PUSHED + 500


def _rows(table: str, columns: str, values: str, count: int, more: str = "") -> str:
    return f"INSERT INTO {table} ({columns}) SELECT {values} FROM generate_series(1, {count}) AS i {more}"


def _digest(what: str, of: str = "i") -> str:
    return f"sha256(('{what}' || {of})::bytea)"


_FILL = [
    _rows("fingerprints", "digest, model_digest, sections", f"{_digest('f')}, {_digest('m')}, '{{}}'", 2000),
    _rows(
        "chunks",
        "namespace, digest, dtype, shape, size, state",
        f"{_NAMESPACE}, {_digest('c')}, 'float16', '[8, 64]', 1024 + i % 512, "
        f"CASE WHEN i > {_PUSHED} THEN 4 WHEN i > {_PUBLISHED} THEN i % 2 ELSE 2 END",
        _CHUNKS,
    ),
    _rows(
        "blocks",
        "namespace, key, record, start, stop, part",
        f"{_NAMESPACE}, {_digest('b')}, {_digest('r')}, 16 * (i % 4), 16 * (i % 4) + 16, 0",
        BLOCKS,
    ),
    _rows("block_chunks", "block_id, chunk_id", "i, i", BLOCKS),
    _rows(
        "artifacts",
        "namespace, digest, fingerprint_id, token_count, block_tokens, block_count, private_tokens, exactness, "
        "created_at, total_bytes, token_head",
        f"{_NAMESPACE}, {_digest('a')}, 1 + i % 2000, 96 + i % 977, 16, 6, false, 'exact', "
        f"1700000000000000 + 1000000 * i::bigint, 100000 + i % 5000, {_digest('t')}",
        ARTIFACTS,
    ),
    _rows(
        "artifact_blocks",
        "artifact_id, position, block_id",
        f"i, p, 1 + (5 * i + p) % {BLOCKS}",
        ARTIFACTS,
        "CROSS JOIN generate_series(0, 5) AS p",
    ),
    _rows("artifact_token_chunks", "artifact_id, chunk_id", f"i, {BLOCKS} + i", ARTIFACTS),
    _rows("artifact_tokens", "artifact_id, part, chain, tokens", f"i, 0, {_digest('n')}, {_digest('t')}", ARTIFACTS),
    _rows(
        "annotations",
        "artifact_id, name, value",
        "i, chr(97 + k), 'value-' || i",
        ARTIFACTS,
        "CROSS JOIN generate_series(0, 1) AS k",
    ),
    _rows("artifact_texts", "artifact_id, text", "i, 'document ' || i", ARTIFACTS),
    _rows("artifact_words", "artifact_id, words", "i, ARRAY['document', i::text]", ARTIFACTS),
    _rows("tags", "namespace, name, artifact_id, updated_at", f"{_NAMESPACE}, 'tag-' || i, i, i", ARTIFACTS),
    _rows(
        "divergences",
        "namespace, id, block_key, stored_record, offered_record, chunks, created_at",
        f"{_NAMESPACE}, 'd-' || i, {_digest('b')}, {_digest('r')}, {_digest('o')}, '[]', i",
        ARTIFACTS,
    ),
    # Far from expiring.
    _rows(
        "pushes",
        "name, namespace, fingerprint, lease, expires_at",
        f"'running-' || i, {_NAMESPACE}, '{{}}', 1000000, 4000000000000000 + i",
        PUSHES,
    ),
    _rows(
        "push_blocks",
        "push_id, key, record, document",
        f"i, {_digest('p', '(50 * i + k)')}, {_digest('q')}, {_digest('s')}",
        PUSHES,
        "CROSS JOIN generate_series(1, 20) AS k",
    ),
    _rows(
        "push_chunks",
        "push_id, chunk_id, dtype, shape",
        f"i, CASE WHEN k > 4 THEN 1 + (7 * i + k) % {_PUBLISHED} ELSE {_PUBLISHED} + 4 * i - k + 1 END, 'float16', '[8, 64]'",
        PUSHES,
        "CROSS JOIN generate_series(1, 40) AS k",
    ),
    _rows("loose_records", "namespace, key", f"{_NAMESPACE}, {_digest('l')}", 5000),
    _rows(
        "tokens",
        "name, secret_digest, scope, namespaces, note, created_at",
        f"'token-' || i, {_digest('x')}, 'read', '[]', '', i",
        5000,
    ),
]


_REFERENCES = """
    SELECT conrelid::regclass::text, quote_ident(conname), pg_get_constraintdef(oid) FROM pg_constraint
    WHERE contype = 'f' AND connamespace = 'public'::regnamespace
"""


def fill(url: str) -> None:
    """Fill an empty index in PostgreSQL, and let the database know how large its tables are."""
    with psycopg.connect(url, autocommit=True) as connection:
        with connection.transaction():
            # Checked for all rows at once, which takes a tenth of the time.
            references = connection.execute(_REFERENCES).fetchall()
            changes = [f"ALTER TABLE {table} DROP CONSTRAINT {name}" for table, name, _ in references]
            changes += _FILL
            changes += [f"ALTER TABLE {table} ADD CONSTRAINT {name} {what}" for table, name, what in references]
            for change in changes:
                connection.execute(change)
        # Which also tells where an index alone can answer, as it does in a database that is a day old.
        connection.execute("VACUUM (ANALYZE)")


def costs(url: str) -> dict[str, float]:
    """The tables that grow, and what it costs by the planner's measure to read all of each."""
    tables = sorted({*Base.metadata.tables, "artifact_words"} - {*SMALL})
    with psycopg.connect(url) as connection:
        sizes = connection.execute(
            "SELECT relname, relpages, reltuples FROM pg_class WHERE relname = ANY(%s)", [tables]
        )
        found = {name: (pages, rows) for name, pages, rows in sizes}
    # A table that a migration adds is to be filled, too.
    assert [name for name in tables if found[name][1] < 1000] == []
    return {name: pages + rows / 100 for name, (pages, rows) in found.items()}
