"""I5: the index can be rebuilt from the store, equal row for row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from index_support import DAY, EPOCH, begin, empty_index, entry, first_chunk, keys, publish, send
from synthetic import fingerprint

from repo_service.domain.errors import ArtifactNotFound, ChunksMissing, Divergence
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.views import ArtifactQuery, TagInfo
from repo_service.domain.views import Divergence as DivergenceView
from repo_service.index import Entry, Index, Rebuilt

ENTRIES = [
    entry(range(40), annotations={"a": "b", "c": "d"}, text="first words"),
    entry(range(70), created_at=EPOCH + DAY, text="second words"),
    entry(range(40), namespace="other"),
    entry(range(3000, 5000), private=True),
    entry(range(3000), fingerprint(numerics={"torch": "2.10"}, block_tokens=512)),
]
DIVERGENCE = DivergenceView(
    id="d",
    namespace="default",
    block_key=keys(ENTRIES[0])[0],
    stored_record=ENTRIES[0].records[0].digest,
    offered_record=entry(range(40), seed=1).records[0].digest,
    chunks=["full/k", "full/v"],
    created_at=EPOCH,
)


@pytest.fixture
def index(tmp_path: Path, index_kind: str) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path, index_kind)) as opened:
        yield opened


@pytest.fixture
def lived(index: Index) -> Index:
    """An index with a history: artifacts and tags that came and went, pushes that failed."""
    gone = entry(range(500, 600), fingerprint(model={"weights": "sha256:" + "0" * 64}))
    publish(index, gone)
    for what in ENTRIES:
        publish(index, what)
    index.set_tag("default", "moved", gone.manifest.id, EPOCH)
    index.set_tag("default", "moved", ENTRIES[1].manifest.id, EPOCH + DAY)
    index.set_tag("other", "theirs", ENTRIES[2].manifest.id, EPOCH)
    index.unpublish("default", gone.manifest.id)
    index.record_divergence(DIVERGENCE)
    failed = begin(index)
    send(index, failed, entry(range(900, 950)))
    index.end_push(failed)
    return index


def tags(index: Index) -> list[TagInfo]:
    return [*index.tags("default"), *index.tags("other")]


def page(index: Index, query: ArtifactQuery) -> dict[str, Any]:
    """Without last uses, which are not in the store."""
    return index.query(query).model_dump(exclude={"items": {"__all__": {"last_used_at"}}})


def derived(index: Index) -> dict[str, Any]:
    """What users see, besides the rows."""
    return {
        "query": page(index, ArtifactQuery()),
        "text": page(index, ArtifactQuery(text="words")),
        "match": index.match("default", keys(ENTRIES[1])),
        "stats": [index.stats(namespace).model_dump(exclude={"running_pushes"}) for namespace in ("default", "other")],
    }


def test_a_rebuilt_index_equals_the_one_before_row_for_row(lived: Index, tmp_path: Path) -> None:
    before, seen, kept = lived.dump(), derived(lived), tags(lived)
    assert all(before.values()), "every table has rows to compare"
    counts = lived.rebuild(iter(ENTRIES[::-1]), iter(kept[::-1]), iter([DIVERGENCE]))
    assert lived.dump() == before
    assert derived(lived) == seen
    assert counts == Rebuilt(5, len(before["blocks"]), len(before["chunks"]), 2, 1)
    (tmp_path / "new").mkdir()
    with Index.open(empty_index(tmp_path / "new")) as new:
        new.rebuild(ENTRIES, kept, [DIVERGENCE])
        assert new.dump() == before
        assert derived(new) == seen


def test_readers_see_the_old_rows_until_all_the_new_are_there(lived: Index) -> None:
    def entries() -> Iterator[Entry]:
        for what in ENTRIES[1:]:
            yield what
            assert lived.artifact("default", ENTRIES[0].manifest.id).id == ENTRIES[0].manifest.id
            assert lived.dump() == before

    before = lived.dump()
    lived.rebuild(entries(), [], [])
    with pytest.raises(ArtifactNotFound):
        lived.artifact("default", ENTRIES[0].manifest.id)


def test_a_rebuild_that_fails_changes_nothing(lived: Index) -> None:
    before = lived.dump()
    with pytest.raises(Divergence):
        lived.rebuild([ENTRIES[0], entry(range(40), seed=1)], [], [])
    assert lived.dump() == before


def test_tags_of_artifacts_that_are_not_there_are_left_out(lived: Index) -> None:
    assert lived.rebuild(ENTRIES[2:], tags(lived), []).tags == 1
    assert [tag.name for tag in tags(lived)] == ["theirs"]


def test_running_pushes_go_on_through_a_rebuild(lived: Index) -> None:
    what, push = entry(range(100, 140)), begin(lived)
    *arrived, last = lived.offer(push, what.records, what.specs()).missing
    for digest in arrived:
        lived.arrived(push, digest)
    lived.rebuild(ENTRIES, [], [])
    assert lived.unarrived(push, list(what.specs())) == [last]
    lived.arrived(push, last)
    lived.publish(what)


def test_a_running_push_sends_again_what_the_store_no_longer_has(lived: Index) -> None:
    """I4: what an artifact promised that the rebuild did not find is promised no more."""
    what, push = ENTRIES[0], begin(lived)
    assert lived.offer(push, what.records, what.specs()).missing == []
    lived.rebuild(ENTRIES[2:], [], [])
    with pytest.raises(ChunksMissing):
        lived.publish(what)
    assert lived.unarrived(push, list(what.specs())) == list(what.specs())


def test_a_false_offer_does_not_spoil_a_rebuild(index: Index) -> None:
    what = entry(range(40))
    digest = first_chunk(what)
    index.offer(begin(index), [], {digest: ChunkSpec("float32", (1,))})
    index.rebuild([what], [], [])
    assert index.holds_chunk("default", what.manifest.id, digest) == what.specs()[digest]
    assert index.stats("default").unique_bytes == sum(spec.size for spec in what.specs().values())


def test_bytes_of_an_artifact_that_a_rebuild_did_not_find_are_not_reclaimed(lived: Index) -> None:
    """A manifest that can't be read today may be readable tomorrow."""
    lived.reclaim(lambda *_: None)
    lived.rebuild(ENTRIES[1:], [], [])
    removed: list[object] = []
    assert lived.reclaim(lambda records, chunks: removed.extend([*records, *chunks])) == (0, 0)
    assert removed == []


def test_what_was_to_be_reclaimed_before_a_rebuild_still_is(index: Index) -> None:
    gone, kept = entry(range(100, 140)), entry(range(40))
    publish(index, gone)
    publish(index, kept)
    index.unpublish("default", gone.manifest.id)
    index.rebuild([kept], [], [])
    removed: set[str] = set()
    index.reclaim(lambda _, chunks: removed.update(chunks))
    assert removed == set(gone.specs())
