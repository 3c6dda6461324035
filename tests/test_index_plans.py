"""Lookups stay lookups: no statement that runs often reads a whole table, as the databases' own plans say."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import postgres
import pytest
from index_support import EPOCH, begin, empty_index, entry, first_chunk, keys, publish, send
from sqlalchemy import event

from repo_service.domain.errors import QuotaExceeded
from repo_service.domain.views import ArtifactQuery
from repo_service.index import Index

WHAT = entry(range(100), annotations={"a": "b"}, text="words")
NEW = entry(range(90, 190))
ARTIFACT = WHAT.manifest.id

# Not tables: lists bound to the statement, a match's own rows, and the full-text index.
BOUND = re.compile(r"SCAN (CONSTANT ROW|\w+_numbers|search|found|anon_1 VIRTUAL TABLE|artifact_search VIRTUAL TABLE)\b")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path)) as opened:
        publish(opened, WHAT)
        opened.set_tag("default", "latest", ARTIFACT, EPOCH)
        yield opened


def statements_of(index: Index, call: Callable[[], object]) -> list[tuple[str, Any]]:
    """Each statement that ``call`` executes, with its parameters, the first of many."""
    statements: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        statements.append((statement, parameters[0] if many else parameters))

    database = index._database
    for engine in (database._reader, database._writer):
        event.listen(engine, "before_cursor_execute", note)
    try:
        call()
    finally:
        for engine in (database._reader, database._writer):
            event.remove(engine, "before_cursor_execute", note)
    assert statements
    return statements


def plans(index: Index, path: Path, call: Callable[[], object]) -> list[str]:
    """Each step of the plan of each statement that ``call`` executes in SQLite."""
    statements = statements_of(index, call)
    with closing(sqlite3.connect(path / "index.db")) as connection:
        return [
            step
            for statement, parameters in statements
            for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]


def refused(index: Index) -> None:
    with pytest.raises(QuotaExceeded):
        index.offer(begin(index), NEW.records, NEW.specs(), 0)


CALLS: dict[str, Callable[[Index], object]] = {
    "match": lambda index: index.match("default", keys(WHAT)),
    "artifact by id": lambda index: index.artifact("default", ARTIFACT),
    "artifact by short id": lambda index: index.artifact("default", ARTIFACT[:20]),
    "artifact by tag": lambda index: index.artifact("default", "latest"),
    "namespaces": lambda index: index.namespaces(),
    "tags": lambda index: index.tags("default"),
    "set_tag": lambda index: index.set_tag("default", "latest", ARTIFACT, EPOCH),
    "holds_chunk": lambda index: index.holds_chunk("default", ARTIFACT, first_chunk(WHAT)),
    "published_record": lambda index: index.published_record("default", keys(WHAT)[0]),
    "offer": lambda index: index.offer(begin(index), NEW.records, NEW.specs()),
    "offer under a quota": lambda index: index.offer(begin(index), NEW.records, NEW.specs(), 10**9),
    "offer beyond a quota": refused,
    "artifact by id, used": lambda index: index.artifact_id("default", ARTIFACT, used=True),
    "send and publish": lambda index: publish(index, NEW),
    "push_records": lambda index: index.push_records(offered(index), keys(NEW)),
    "unarrived": lambda index: index.unarrived(begin(index), list(NEW.specs())),
    "end_push": lambda index: index.end_push(offered(index)),
    "unpublish": lambda index: index.unpublish("default", ARTIFACT),
    "divergences": lambda index: index.divergences("default"),
    "page": lambda index: index.query(ArtifactQuery()),
    "page of a tag": lambda index: index.query(ArtifactQuery(tag="latest")),
    "page of a block": lambda index: index.query(ArtifactQuery(block_key=keys(WHAT)[0])),
    "page of a chunk": lambda index: index.query(ArtifactQuery(chunk=first_chunk(WHAT))),
    "page of an annotation": lambda index: index.query(ArtifactQuery(annotations={"a": "b"})),
    "page of a token prefix": lambda index: index.query(ArtifactQuery(token_prefix=list(range(80)))),
    "page of a text": lambda index: index.query(ArtifactQuery(text="words")),
}


def offered(index: Index) -> str:
    push = begin(index)
    send(index, push, NEW)
    return push


@pytest.mark.parametrize("name", CALLS)
def test_no_table_is_read_as_a_whole(index: Index, tmp_path: Path, name: str) -> None:
    steps = plans(index, tmp_path, lambda: CALLS[name](index))
    assert any(step.startswith("SEARCH") for step in steps)
    assert [step for step in steps if step.startswith("SCAN") and not BOUND.match(step)] == []


@pytest.fixture(scope="module")
def planned() -> Iterator[Index]:
    """An index in PostgreSQL, which each call leaves as others may find it."""
    with Index.open(postgres.empty_index()) as opened:
        yield opened


@pytest.mark.parametrize("name", CALLS)
def test_no_table_is_read_as_a_whole_in_postgres(planned: Index, name: str) -> None:
    """With whole tables forbidden, which small ones are read as otherwise, an index is found for every step."""
    publish(planned, WHAT)
    planned.set_tag("default", "latest", ARTIFACT, EPOCH)
    found: list[str] = []
    for statement, parameters in statements_of(planned, lambda: CALLS[name](planned)):
        if not statement.startswith(("SET ", "SELECT pg_")):
            found += explained(planned, statement, parameters)
    assert found
    assert [step for step in found if "Seq Scan on" in step] == []


def explained(index: Index, statement: str, parameters: Any) -> list[str]:
    with index._database._writer.connect() as connection, connection.begin() as transaction:
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        rows = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars().all()
        transaction.rollback()
    return [str(row) for row in rows]


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("page of")])
def test_a_selective_condition_leads_the_search_for_artifacts(index: Index, tmp_path: Path, name: str) -> None:
    """Not the namespace, which may hold every artifact there is."""
    steps = plans(index, tmp_path, lambda: CALLS[name](index))
    leading = {step for step in steps if step.startswith("SEARCH artifacts ")}
    assert leading <= {
        "SEARCH artifacts USING INTEGER PRIMARY KEY (rowid=?)",
        "SEARCH artifacts USING INDEX ix_artifacts_namespace_token_head (namespace=? AND token_head>? AND token_head<?)",
        "SEARCH artifacts USING COVERING INDEX ix_artifacts_namespace_token_head (namespace=? AND token_head>? AND token_head<?)",
    }


def test_a_chunk_is_looked_up_by_itself_not_through_all_blocks_of_its_artifact(index: Index, tmp_path: Path) -> None:
    steps = plans(index, tmp_path, lambda: CALLS["holds_chunk"](index))
    assert not any("(artifact_id=?)" in step for step in steps)


def test_a_match_runs_one_statement_and_sorts_nothing(index: Index, tmp_path: Path) -> None:
    # The first match of ten minutes is also noted as a use.
    CALLS["match"](index)
    steps = plans(index, tmp_path, lambda: CALLS["match"](index))
    assert sum(step.startswith("SEARCH artifacts") for step in steps) == 1
    assert not any("TEMP B-TREE" in step for step in steps)
