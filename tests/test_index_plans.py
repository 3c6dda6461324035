"""Lookups stay lookups: no statement that runs often reads a whole table, as the databases' own plans say."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import large_index
import postgres
import pytest
from index_support import EPOCH, begin, empty_index, entry, first_chunk, keys, publish, send
from plan_checks import postgres_scans, sqlite_scans
from sqlalchemy import event

from repo_service.domain.errors import QuotaExceeded
from repo_service.domain.views import ArtifactQuery
from repo_service.index import Index
from repo_service.index.unsettled import ENTRY, TAG, Noted

WHAT = entry(range(100), annotations={"a": "b"}, text="words")
NEW = entry(range(90, 190))
ARTIFACT = WHAT.manifest.id

# What reads all of a namespace by purpose: a call, and words of that one of its statements.
ENTIRE = {
    # All tags are the answer.
    ("tags", "FROM tags JOIN artifacts"),
    # A first page says how much there is besides it, of which nothing is kept but the rows themselves.
    ("page", "sum(artifacts.total_bytes)"),
    ("page", "sum(chunks.size)"),
    # What a namespace holds is added up, in the index alone, where chunks are missing under a quota.
    ("offer under a quota", "sum(chunks.size)"),
    ("offer beyond a quota", "sum(chunks.size)"),
}

SCANS = (
    "SELECT count(*) FROM chunks",
    "SELECT id FROM blocks",
    "SELECT * FROM blocks ORDER BY id",
    "SELECT count(*) FROM artifact_blocks",
)


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
    "delete_tag": lambda index: index.delete_tag("default", "latest"),
    "expire_pushes": lambda index: index.expire_pushes(EPOCH),
    "token": lambda index: index.token("none"),
    "artifacts_after": lambda index: index.artifacts_after(0, 10),
    "mark_damaged": lambda index: index.mark_damaged([first_chunk(WHAT)]),
    "mark_whole": lambda index: index.mark_whole([first_chunk(WHAT)]),
    "unindexed": lambda index: index.unindexed([Noted(ENTRY, "default", ARTIFACT), Noted(TAG, "default", "latest")]),
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
    assert sqlite_scans(steps) == []


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("statement", SCANS)
def test_a_scan_is_told_from_a_lookup(tmp_path: Path, statement: str) -> None:
    with closing(sqlite3.connect(tmp_path / "index.db")) as connection:
        assert sqlite_scans([step for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {statement}")])


@dataclass(frozen=True)
class Planned:
    """A large index in PostgreSQL, which each call leaves as others may find it."""

    index: Index
    costs: dict[str, float]

    def scans(self, statement: str, parameters: Any = (), *, settings: str = "") -> list[str]:
        """Those of the steps of a statement's plan that read much of a table, with the server's own settings if no others are given."""
        with self.index._database._writer.connect() as connection:
            if settings:
                connection.exec_driver_sql(settings)
            plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).scalar_one()
        return postgres_scans(plan[0]["Plan"], self.costs)


@pytest.fixture(scope="module")
def planned() -> Iterator[Planned]:
    with postgres.index() as url:
        large_index.fill(url)
        with Index.open(url) as opened:
            yield Planned(opened, large_index.costs(url))


@pytest.mark.parametrize("name", CALLS)
def test_no_table_is_read_as_a_whole_in_postgres(planned: Planned, name: str) -> None:
    index = planned.index
    publish(index, WHAT)
    index.set_tag("default", "latest", ARTIFACT, EPOCH)
    # Each once, with the last of its parameters.
    statements = {
        statement: parameters
        for statement, parameters in statements_of(index, lambda: CALLS[name](index))
        if not statement.startswith(("SET ", "SELECT pg_"))
    }
    entire = [words for call, words in ENTIRE if call == name]
    assert [words for words in entire if not any(words in statement for statement in statements)] == []
    lookups = [each for each in statements.items() if not any(words in each[0] for words in entire)]
    assert lookups or entire
    assert [step for each in lookups for step in planned.scans(*each)] == []


@pytest.mark.parametrize(
    "statement",
    [
        *SCANS,
        "SELECT * FROM blocks WHERE namespace = 'default'",
        "SELECT count(*) FROM chunks WHERE state IN (2, 3) AND namespace = 'default'",
        "SELECT id FROM artifacts WHERE exactness = 'lossy' ORDER BY id LIMIT 10",
        "SELECT id FROM artifacts WHERE namespace = 'default' AND exactness = 'lossy' ORDER BY created_at, digest LIMIT 10",
        "SELECT * FROM blocks ORDER BY start LIMIT 10",
        "SELECT * FROM blocks WHERE key = sha256('a')",
        "DELETE FROM blocks WHERE start = 7",
    ],
)
def test_a_scan_is_told_from_a_lookup_in_postgres(planned: Planned, statement: str) -> None:
    assert planned.scans(statement)


@pytest.mark.parametrize("statement", SCANS)
def test_to_read_a_whole_index_is_a_scan_too(planned: Planned, statement: str) -> None:
    assert planned.scans(statement, settings="SET LOCAL enable_seqscan = off")


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM blocks WHERE id = 7",
        "SELECT * FROM blocks ORDER BY id LIMIT 10",
        "SELECT * FROM blocks WHERE id > 10000 ORDER BY id LIMIT 10",
        "SELECT min(namespace) FROM artifacts",
        "SELECT * FROM meta",
    ],
)
def test_a_lookup_and_a_page_are_no_scans_in_postgres(planned: Planned, statement: str) -> None:
    assert planned.scans(statement) == []


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
