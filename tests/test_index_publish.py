"""Published artifacts: whole or not at all, immutable, found by id and by name."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from index_support import DAY, EPOCH, begin, empty_index, entry, first_chunk, keys, publish, send
from sqlalchemy import text

from repo_service.domain.errors import (
    Ambiguous,
    ArtifactNotFound,
    ChunkNotFound,
    ChunksMissing,
    Divergence,
    MalformedDocument,
    MalformedName,
    MalformedRequest,
    NotARepository,
    TagNotFound,
)
from repo_service.domain.views import Divergence as DivergenceView
from repo_service.index import Index

UNKNOWN = "sha256:" + "0" * 64


@pytest.fixture
def index(tmp_path: Path, index_kind: str) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path, index_kind)) as opened:
        yield opened


def test_everything_about_an_artifact_is_told(index: Index) -> None:
    what = entry(range(40), annotations={"task": "aime", "a": "ü"}, text="words", parent=UNKNOWN)
    info = publish(index, what)
    assert info.id == what.manifest.id
    assert info.fingerprint_id == what.manifest.fingerprint.id
    assert info.model_id == what.manifest.fingerprint.model_id
    assert (info.token_count, info.block_tokens, info.block_count) == (40, 16, 3)
    assert (info.private_tokens, info.exactness, info.parent) == (False, "exact", UNKNOWN)
    assert info.created_at == EPOCH
    assert info.total_bytes == sum(spec.size for spec in what.specs().values())
    assert info.annotations == {"a": "ü", "task": "aime"}
    assert info.tags == []
    assert index.artifact("default", info.id) == info


def test_publishing_again_returns_the_first_unchanged(index: Index) -> None:
    first = publish(index, entry(range(40)))
    before = index.dump()
    assert index.publish(entry(range(40), created_at=EPOCH + DAY)) == first
    assert index.dump() == before


def test_an_artifact_is_published_only_when_every_chunk_has_arrived(index: Index) -> None:
    push, what = begin(index), entry(range(40))
    *arrived, last = index.offer(push, what.records, what.specs()).missing
    for digest in arrived:
        index.arrived(push, digest)
    with pytest.raises(ChunksMissing, match=last):
        index.publish(what)
    with pytest.raises(ArtifactNotFound):
        index.artifact("default", what.manifest.id)
    assert not any(rows for rows in index.dump().values())
    index.arrived(push, last)
    index.publish(what)


def test_a_push_that_expired_in_the_middle_of_its_commit_publishes_nothing(index: Index) -> None:
    """I4: even where other blocks hold all its chunks, its block records may be gone."""
    what, push = entry(range(40), private=True), begin(index)
    send(index, push, what)
    keeper = begin(index)
    index.offer(keeper, [], what.specs())
    index.end_push(push)
    assert index.unarrived(keeper, list(what.specs())) == []
    with pytest.raises(ChunksMissing, match="expired"):
        index.publish(what)
    index.offer(keeper, what.records, {})
    index.publish(what)


def test_a_chunk_sent_in_another_namespace_does_not_count(index: Index) -> None:
    """I7: knowing a hash grants nothing."""
    send(index, begin(index, "other"), entry(range(40), namespace="other"))
    with pytest.raises(ChunksMissing):
        index.publish(entry(range(40)))


def test_a_divergent_artifact_is_refused_at_the_commit_too(index: Index) -> None:
    """I2: two pushes that began before either was published."""
    first, second = entry(range(40)), entry(range(40), seed=1)
    for what in (first, second):
        send(index, begin(index), what)
    index.publish(first)
    before = index.dump()
    with pytest.raises(Divergence) as raised:
        index.publish(second)
    assert raised.value.details["block_key"] in keys(first)
    assert raised.value.details["stored_record"] in {record.digest for record in first.records}
    assert raised.value.details["offered_record"] in {record.digest for record in second.records}
    assert index.dump() == before


def test_artifacts_with_a_common_prefix_share_its_blocks(index: Index) -> None:
    publish(index, entry(range(64)))
    longer = entry([*range(32), *range(100, 132)])
    missing = send(index, begin(index), longer)
    shared = {digest for record in longer.records[:2] for pair in record.chunks.values() for digest in pair}
    assert shared.isdisjoint(missing)
    index.publish(longer)
    stats = index.stats("default")
    assert (stats.artifacts, stats.blocks, stats.tokens, stats.fingerprints) == (2, 6, 128, 1)
    assert stats.unique_bytes < stats.total_bytes


def test_an_entry_whose_chunk_has_another_shape_than_was_pushed_is_refused(index: Index) -> None:
    push, what = begin(index), entry(range(40))
    send(index, push, what)
    digest = first_chunk(what)
    with index._database.write() as connection:
        connection.execute(text("UPDATE chunks SET dtype = 'float16' WHERE dtype = 'bfloat16'"))
    with pytest.raises(MalformedDocument, match=digest):
        index.publish(what)


def test_an_artifact_is_found_by_id_short_id_and_tag(index: Index) -> None:
    info = publish(index, entry(range(20)))
    index.set_tag("default", "latest", info.id, EPOCH)
    digits = info.id.removeprefix("sha256:")
    for length in (8, 9, 31, 63, 64):
        assert index.artifact("default", f"sha256:{digits[:length]}").id == info.id
    assert index.artifact("default", "latest").tags == ["latest"]


def test_what_is_not_there_and_what_is_not_yours_look_the_same(index: Index) -> None:
    """I7."""
    info = publish(index, entry(range(20)))
    with pytest.raises(ArtifactNotFound, match="namespace stranger") as there:
        index.artifact("stranger", info.id)
    with pytest.raises(ArtifactNotFound) as absent:
        index.artifact("stranger", UNKNOWN)
    assert there.value.message.replace(info.id, "") == absent.value.message.replace(UNKNOWN, "")
    with pytest.raises(TagNotFound, match="namespace default"):
        index.artifact("default", "latest")
    with pytest.raises(MalformedName):
        index.artifact("default", "sha256:12")


def test_a_short_id_of_several_artifacts_is_ambiguous_and_lists_them(tmp_path: Path) -> None:
    with Index.open(empty_index(tmp_path)) as index:
        one, two = publish(index, entry(range(20))).id, publish(index, entry(range(30))).id
        twin = one[:-1] + ("0" if one[-1] != "0" else "1")
        with closing(sqlite3.connect(tmp_path / "index.db")) as connection, connection:
            raw = [bytes.fromhex(digest.removeprefix("sha256:")) for digest in (twin, two)]
            connection.execute("UPDATE artifacts SET digest = ? WHERE digest = ?", raw)
        with pytest.raises(Ambiguous) as raised:
            index.artifact("default", one[:15])
        assert sorted(raised.value.details["ids"]) == sorted([one, twin])
        assert index.artifact("default", one).id == one


def test_only_chunks_of_the_artifact_itself_are_held(index: Index) -> None:
    mine, other = entry(range(40)), entry(range(50, 90))
    publish(index, mine)
    publish(index, other)
    for digest, spec in mine.specs().items():
        assert index.holds_chunk("default", mine.manifest.id, digest) == spec
    for namespace, artifact_id, digest in (
        ("default", other.manifest.id, first_chunk(mine)),
        ("default", other.manifest.id, (mine.manifest.tokens or ("",))[0]),
        ("default", UNKNOWN, first_chunk(mine)),
        ("stranger", mine.manifest.id, first_chunk(mine)),
        ("default", mine.manifest.id, "blake3:" + "0" * 64),
    ):
        with pytest.raises(ChunkNotFound):
            index.holds_chunk(namespace, artifact_id, digest)


def test_a_shared_block_is_held_by_each_artifact_that_has_it(index: Index) -> None:
    mine, other = entry(range(40)), entry(range(60))
    publish(index, mine)
    publish(index, other)
    assert index.holds_chunk("default", other.manifest.id, first_chunk(mine)) == mine.specs()[first_chunk(mine)]


def test_published_records_are_told_by_namespace(index: Index) -> None:
    what = entry(range(40))
    publish(index, what)
    assert index.published_record("default", what.records[1].key) == what.records[1].digest
    assert index.published_record("stranger", what.records[1].key) is None
    assert index.published_record("default", UNKNOWN) is None


def test_unpublishing_removes_the_artifact_its_tags_and_what_no_other_needs(index: Index) -> None:
    short, long = entry(range(32)), entry(range(64), annotations={"a": "b"}, text="words")
    publish(index, short)
    alone = index.dump()
    publish(index, long)
    for name in ("b", "a"):
        index.set_tag("default", name, long.manifest.id, EPOCH)
    assert index.unpublish("default", long.manifest.id) == ["a", "b"]
    assert index.dump() == alone
    with pytest.raises(ArtifactNotFound):
        index.unpublish("default", long.manifest.id)
    with pytest.raises(ArtifactNotFound):
        index.unpublish("stranger", short.manifest.id)
    index.unpublish("default", short.manifest.id)
    assert not any(rows for rows in index.dump().values())


def test_tags_move_and_go(index: Index) -> None:
    one, two = publish(index, entry(range(20))), publish(index, entry(range(30)))
    index.set_tag("default", "latest", one.id, EPOCH)
    moved = index.set_tag("default", "latest", two.id, EPOCH + timedelta(microseconds=1))
    index.set_tag("default", "best", one.id, EPOCH)
    assert [tag.name for tag in index.tags("default")] == ["best", "latest"]
    assert index.tags("default")[1] == moved
    assert moved.updated_at == EPOCH + timedelta(microseconds=1)
    assert index.artifact("default", "latest").id == two.id
    assert index.tags("stranger") == []
    index.delete_tag("default", "latest")
    for namespace, name in (("default", "latest"), ("stranger", "best")):
        with pytest.raises(TagNotFound):
            index.delete_tag(namespace, name)
    with pytest.raises(ArtifactNotFound):
        index.set_tag("stranger", "latest", one.id, EPOCH)


def test_divergences_are_kept_once_and_told_newest_first(index: Index) -> None:
    kept = [
        DivergenceView(
            id=str(i),
            namespace="default",
            block_key=UNKNOWN,
            stored_record=UNKNOWN,
            offered_record=UNKNOWN,
            chunks=["full/k"],
            created_at=EPOCH + i * DAY,
        )
        for i in range(3)
    ]
    for divergence in (*kept, kept[0].model_copy(update={"chunks": []})):
        index.record_divergence(divergence)
    assert index.divergences("default") == kept[::-1]
    assert index.divergences("stranger") == []
    assert index.stats("default").divergences == 3


def test_the_time_of_publication_needs_a_time_zone(index: Index) -> None:
    with pytest.raises(MalformedRequest, match="time zone"):
        publish(index, entry(range(20), created_at=EPOCH.replace(tzinfo=None)))


def test_an_index_belongs_to_one_repository(index: Index) -> None:
    index.claim("one")
    index.claim("one")
    with pytest.raises(NotARepository, match=r"one.*two"):
        index.claim("two")
