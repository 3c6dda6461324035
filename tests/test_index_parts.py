"""The index where artifacts store blocks in part: a row for each of the ways in which they do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from index_support import DAY, EPOCH, empty_index, entry, keys, publish

from repo_service.index import Index

COUNT = 150
WHOLE = entry(range(COUNT))
PART = entry(range(COUNT), resume_from=144)
OTHER = entry(range(96), resume_from=80)
"""Stores what `PART` leaves out, and leaves out what it stores."""


@pytest.fixture
def index(tmp_path: Path, index_kind: str) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path, index_kind)) as opened:
        yield opened


def left_out() -> set[str]:
    return set(WHOLE.specs()) - set(PART.specs())


def ids(index: Index) -> dict[str, int]:
    """Row numbers by artifact id."""
    return {artifact.id: artifact.row for artifact in index.artifacts_after(0, 10)}


def test_a_block_says_how_much_of_it_is_stored() -> None:
    assert WHOLE.parts() == [0] * 10
    # Two arrays are left out of the first seven blocks; the state at the end of the eighth can't be resumed.
    assert PART.parts() == [3] * 7 + [1, 0, 0]


def test_equal_blocks_are_counted_and_read_once(index: Index) -> None:
    for what in (WHOLE, PART, OTHER):
        publish(index, what)
    assert index.stats("default").blocks == len(WHOLE.records)
    assert index.stats("default").chunks == len({digest for what in (WHOLE, PART, OTHER) for digest in what.specs()})
    first, rest = index.records_after(0, 4), []
    while page := index.records_after(([*first, *rest])[-1].row, 4):
        rest += page
    assert sorted(record.key for record in [*first, *rest]) == sorted(keys(WHOLE))
    holders = {record.key: index.holders_of_block(record.row) for record in [*first, *rest]}
    named = sorted(("default", what.manifest.id) for what in (WHOLE, PART, OTHER))
    assert holders[keys(WHOLE)[0]] == named
    assert index.holders_of_chunk(min(left_out() - set(OTHER.specs()))) == [("default", WHOLE.manifest.id)]


def test_what_would_be_freed_is_what_no_other_artifact_stores(index: Index) -> None:
    for what in (WHOLE, PART):
        publish(index, what)
    rows = ids(index)
    assert index.freed([]) == ([], [], [])
    freed = index.freed([rows[WHOLE.manifest.id]])
    assert {digest for digest, _ in freed.chunks} == left_out()
    assert freed.records == []
    assert index.freed([rows[PART.manifest.id]]) == ([], [], [PART.manifest.id])
    both = index.freed(list(rows.values()))
    assert {digest for digest, _ in both.chunks} == set(WHOLE.specs())
    assert sorted(both.records) == sorted(("default", key) for key in keys(WHOLE))


def test_an_artifact_that_goes_takes_what_only_it_stores(index: Index) -> None:
    for what in (WHOLE, PART, OTHER):
        publish(index, what)
    removed: list[str] = []
    records: list[tuple[str, str]] = []

    def remove(gone: list[tuple[str, str]], chunks: list[str]) -> None:
        records.extend(gone)
        removed.extend(chunks)

    index.unpublish("default", WHOLE.manifest.id)
    index.reclaim(remove)
    assert set(removed) == left_out() - set(OTHER.specs())
    index.unpublish("default", PART.manifest.id)
    index.reclaim(remove)
    assert set(removed) == set(WHOLE.specs()) - set(OTHER.specs())
    assert sorted(records) == sorted(("default", key) for key in keys(WHOLE)[6:])
    assert index.match("default", keys(WHOLE)) == index.match("default", keys(OTHER))


def test_a_rebuilt_index_says_the_same_row_for_row(index: Index) -> None:
    """I5."""
    entries = [WHOLE, PART, OTHER, entry(range(COUNT), resume_from=144, created_at=EPOCH + DAY, namespace="other")]
    for what in entries:
        publish(index, what)
    before = index.dump()
    assert {row[2] for row in before["blocks"]} == {0, 1, 3}
    report = index.rebuild(entries, [], [])
    assert index.dump() == before
    assert report.blocks == 2 * len(WHOLE.records)
    for what in entries[1:3]:
        index.unpublish("default", what.manifest.id)
    index.reclaim(lambda *_: None)
    after = index.dump()
    index.rebuild([WHOLE, entries[3]], [], [])
    assert index.dump() == after
