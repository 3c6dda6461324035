"""The states of chunks against what refers to them, through any sequence of operations."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_support import DAY, begin, empty_index, entry
from sqlalchemy import text

from repo_service.domain.errors import ArtifactNotFound, ChunksMissing
from repo_service.index import Index
from repo_service.index.models import HELD, ChunkState

ENTRIES = [entry(tokens, namespace=namespace) for namespace in ("one", "two") for tokens in ([0] * 16, [0] * 20)]

entries = st.integers(0, len(ENTRIES) - 1)
operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["offer", "publish", "unpublish", "damage", "rebuild"]), entries),
        st.tuples(st.sampled_from(["send"]), entries, st.integers(0, 20)),
        st.tuples(st.sampled_from(["end", "reclaim", "interrupt", "expire"]), entries),
    ),
    min_size=12,
    max_size=30,
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, index_kind: str) -> Iterator[Index]:
    """An index that each example begins by emptying."""
    with Index.open(empty_index(tmp_path_factory.mktemp("states"), index_kind)) as opened:
        yield opened


class Model:
    """Runs operations on an index and on a set of bytes that stands for the store."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.stored: set[str] = set()
        self.pushes: dict[int, str] = {}
        self.published: set[int] = set()
        self.damaged: set[str] = set()
        index.rebuild([], [], [])
        index.expire_pushes(datetime.now(UTC) + 9 * DAY)
        index.reclaim(self.remove)

    def run(self, name: str, number: int, count: int = 0) -> None:
        what = ENTRIES[number]
        push = self.pushes.get(number)
        if name in ("offer", "send"):
            push = self.pushes.setdefault(number, push or begin(self.index, what.namespace))
            for digest in self.index.offer(push, what.records, what.specs()).missing[:count]:
                self.stored.add(digest)
                self.damaged.discard(digest)
                self.index.arrived(push, digest)
        elif name == "publish":
            try:
                self.index.publish(what)
                self.published.add(number)
            except ChunksMissing:
                assert number not in self.published
        elif name == "unpublish":
            try:
                self.index.unpublish(what.namespace, what.manifest.id)
                self.published.remove(number)
            except ArtifactNotFound:
                assert number not in self.published
        elif name == "end" and push is not None:
            self.index.end_push(self.pushes.pop(number))
        elif name == "expire":
            self.index.expire_pushes(datetime.now(UTC) + 2 * DAY)
            self.pushes.clear()
        elif name == "damage":
            self.damage(min(self.stored & set(what.specs()), default=None))
        elif name == "rebuild":
            self.index.rebuild([ENTRIES[n] for n in sorted(self.published)], [], [])
        elif name == "reclaim":
            self.index.reclaim(self.remove)
        elif name == "interrupt":
            self.interrupt()

    def damage(self, digest: str | None) -> None:
        if digest is not None:
            self.stored.remove(digest)
            self.damaged.add(digest)
            self.index.mark_damaged([digest])

    def remove(self, _records: object, chunks: list[str]) -> None:
        self.stored -= set(chunks)

    def interrupt(self) -> None:
        def part(_records: object, chunks: list[str]) -> None:
            self.stored -= set(chunks[::2])
            raise InterruptedError

        try:
            self.index.reclaim(part)
        except InterruptedError:
            return

    def check(self) -> None:
        with self.index._database.read() as connection:
            rows = connection.execute(text(STATES)).all()
        for row in rows:
            assert bool(row.published) == (row.state in HELD)
            if not row.published:
                assert bool(row.pushed) == (row.state in (ChunkState.AWAITED, ChunkState.STORED))
            if row.state in (ChunkState.STORED, ChunkState.PUBLISHED, ChunkState.LOOSE):
                assert f"blake3:{row.digest.hex()}" in self.stored, "what is promised is there"
        needed = {digest for number in self.published for digest in ENTRIES[number].specs()}
        assert needed <= self.stored | self.damaged


STATES = """
    SELECT digest, state,
        EXISTS (SELECT 1 FROM block_chunks WHERE chunk_id = chunks.id)
            OR EXISTS (SELECT 1 FROM artifact_token_chunks WHERE chunk_id = chunks.id) AS published,
        EXISTS (SELECT 1 FROM push_chunks WHERE chunk_id = chunks.id) AS pushed
    FROM chunks
"""


@settings(max_examples=30, deadline=None)
@given(operations)
def test_a_chunk_is_promised_only_while_its_bytes_are_there(index: Index, steps: list[tuple[str, int]]) -> None:
    model = Model(index)
    for step in steps:
        model.run(*step)
        model.check()
    for number in list(model.pushes):
        model.run("end", number)
    for number in list(model.published):
        model.run("unpublish", number)
    model.run("reclaim", 0)
    assert model.stored == set(), "what nothing needs is freed"
