"""Match: the longest published prefix, against a model that compares lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_support import empty_index, entry, keys, publish
from synthetic import fingerprint

from repo_service.domain.errors import MalformedDigest
from repo_service.domain.layout import Layout
from repo_service.domain.views import Match
from repo_service.index import Entry, Index

UNKNOWN = "sha256:" + "0" * 64

# Few token values and short blocks, so that sequences often share a prefix.
FULL, SLIDING = fingerprint().sections["state"]["groups"]
MADE_WITH = fingerprint(block_tokens=4, state={"groups": [FULL, SLIDING | {"window": 5}]})
LAYOUT = Layout.of(MADE_WITH)
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(lambda bits: [bit for bit in bits for _ in "ab"])


@pytest.fixture
def index(tmp_path: Path, index_kind: str) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path, index_kind)) as opened:
        yield opened


def small(tokens: list[int], *, in_part: bool = False) -> Entry:
    resume_from = LAYOUT.last_resume(len(tokens)) if in_part else 0
    return entry(tokens, MADE_WITH, resume_from=resume_from)


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory, index_kind: str) -> Iterator[Index]:
    """An index that each example fills anew."""
    with Index.open(empty_index(tmp_path_factory.mktemp("match"), index_kind)) as opened:
        yield opened


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(sequences, st.booleans()), max_size=6), st.lists(sequences, min_size=1, max_size=8), st.data()
)
def test_match_agrees_with_comparing_lists(
    rebuilt: Index, published: list[tuple[list[int], bool]], asked: list[list[int]], data: st.DataObject
) -> None:
    made = [small(tokens, in_part=in_part) for tokens, in_part in published]
    entries = {what.manifest.id: what for what in made}
    rebuilt.rebuild(entries.values(), [], [])
    for removed in data.draw(st.lists(st.sampled_from(sorted(entries)), unique=True)) if entries else []:
        rebuilt.unpublish("default", removed)
        del entries[removed]
    for tokens in asked:
        wanted = keys(small(tokens))
        found = rebuilt.match("default", wanted)
        lengths = {name: resumable(what, common(wanted, keys(what))) for name, what in entries.items()}
        longest = max(lengths.values(), default=0)
        if found is None:
            assert longest == 0
            continue
        assert found.blocks == lengths[found.artifact_id] == longest
        assert found.tokens == entries[found.artifact_id].records[longest - 1].stop


def resumable(what: Entry, blocks: int) -> int:
    """So many blocks if the state after them can be resumed, else none: what is stored in part can only at its end."""
    return blocks if blocks and what.records[blocks - 1].stop >= what.manifest.resume_from else 0


def common(a: list[str], b: list[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_longer_sequence_matches_all_that_is_published(index: Index) -> None:
    what = entry(range(40))
    publish(index, what)
    longer = keys(entry(range(200)))
    assert index.match("default", longer) == Match(artifact_id=what.manifest.id, blocks=2, tokens=32)
    assert index.match("default", keys(what)) == Match(artifact_id=what.manifest.id, blocks=3, tokens=40)


def test_nothing_matches_in_another_namespace_or_without_keys(index: Index) -> None:
    """I7."""
    what = entry(range(40))
    publish(index, what)
    assert index.match("stranger", keys(what)) is None
    assert index.match("default", []) is None
    assert index.match("default", [UNKNOWN, *keys(what)]) is None
    with pytest.raises(MalformedDigest):
        index.match("default", ["sha256:12"])


def test_an_artifact_with_private_tokens_is_matched_by_whoever_knows_them(index: Index) -> None:
    what = entry(range(40), private=True)
    publish(index, what)
    assert index.match("default", keys(what)) == Match(artifact_id=what.manifest.id, blocks=3, tokens=40)


def test_a_failed_push_is_never_matched_lmcache_4991(index: Index) -> None:
    what = entry(range(40))
    index.begin_push("failed", "default", what.manifest.fingerprint, what.created_at.replace(year=9999))
    for digest in index.offer("failed", what.records, what.specs()).missing[:-1]:
        index.arrived("failed", digest)
    assert index.match("default", keys(what)) is None
    index.end_push("failed")
    assert index.match("default", keys(what)) is None


@pytest.mark.parametrize("stored", [0, 1, 299, 300])
def test_a_match_takes_more_keys_than_sqlite_takes_variables(index: Index, stored: int) -> None:
    tokens = range(4 * 300)
    if stored:
        index.rebuild([entry(tokens[: 4 * stored], block_tokens=4)], [], [])
    wanted = keys(entry(tokens, block_tokens=4)) + [UNKNOWN] * 40_000
    found = index.match("default", wanted)
    assert (found.blocks if found else 0) == stored
