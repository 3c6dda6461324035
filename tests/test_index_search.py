"""Queries: every condition, alone and together, and pages that stay right while rows come and go."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_support import DAY, EPOCH, empty_index, entry, first_chunk, keys, publish
from synthetic import fingerprint

from repo_service.domain.errors import InvalidTokens, MalformedDigest, MalformedRequest
from repo_service.domain.manifest import Exactness
from repo_service.domain.views import MAX_QUERY_CHARACTERS, MAX_QUERY_WORDS, ArtifactPage, ArtifactQuery
from repo_service.index import Entry, Index, search

OTHER_MODEL = fingerprint(model={"weights": "sha256:" + "ab" * 32})
OTHER_MACHINE = fingerprint(numerics={"torch": "2.10"})

BASE = entry(range(20), annotations={"task": "aime", "year": "2025"}, text="The quick brown fox")
LONGER = entry(range(40), created_at=EPOCH + DAY, text='Über "straße" C++ 日本語')
MODEL = entry(range(7, 27), OTHER_MODEL, created_at=EPOCH + 2 * DAY, annotations={"task": "aime"})
MACHINE = entry(range(9, 29), OTHER_MACHINE, created_at=EPOCH + 3 * DAY, exactness=Exactness("lossy", "int8", "0.1"))
PRIVATE = entry(range(70), created_at=EPOCH + 4 * DAY, private=True, annotations={"task": "x" * 4096})
FOREIGN = entry(range(20), namespace="foreign", annotations={"task": "aime"}, text="quick")
ENTRIES = {"base": BASE, "longer": LONGER, "model": MODEL, "machine": MACHINE, "private": PRIVATE, "foreign": FOREIGN}
NAMES = {(what.namespace, what.manifest.id): name for name, what in ENTRIES.items()}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, index_kind: str) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path_factory.mktemp("search"), index_kind)) as opened:
        opened.rebuild(ENTRIES.values(), [], [])
        opened.set_tag("default", "best", MODEL.manifest.id, EPOCH)
        opened.set_tag("foreign", "theirs", FOREIGN.manifest.id, EPOCH)
        yield opened


@pytest.fixture
def index(tmp_path: Path, index_kind: str) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path, index_kind)) as opened:
        yield opened


def names(page: ArtifactPage) -> list[str]:
    return [NAMES[item.namespace, item.id] for item in page.items]


ALL = {"base", "longer", "model", "machine", "private"}
CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, ALL),
    ({"namespace": "foreign"}, {"foreign"}),
    ({"namespace": "empty"}, set()),
    ({"fingerprint_id": OTHER_MACHINE.id}, {"machine"}),
    ({"model_id": BASE.manifest.fingerprint.model_id}, {"base", "longer", "machine", "private"}),
    ({"model_id": "sha256:" + "0" * 64}, set()),
    ({"min_tokens": 40}, {"longer", "private"}),
    ({"max_tokens": 20}, {"base", "model", "machine"}),
    ({"min_tokens": 21, "max_tokens": 69}, {"longer"}),
    ({"min_tokens": 2**80}, set()),
    ({"max_tokens": 2**80}, ALL),
    ({"covers": (30, 40)}, {"longer", "private"}),
    ({"covers": (0, 2**80)}, set()),
    ({"block_key": keys(BASE)[0]}, {"base", "longer", "private"}),
    ({"block_key": keys(LONGER)[2]}, {"longer"}),
    ({"block_key": keys(FOREIGN)[1]}, {"base"}),
    ({"chunk": first_chunk(BASE)}, {"base", "longer", "private"}),
    ({"chunk": (LONGER.manifest.tokens or ("",))[0]}, {"longer"}),
    ({"chunk": "blake3:" + "0" * 64}, set()),
    ({"token_prefix": list(range(20))}, {"base", "longer"}),
    ({"token_prefix": list(range(21))}, {"longer"}),
    ({"token_prefix": list(range(70))}, set()),
    ({"token_prefix": []}, {"base", "longer", "model", "machine"}),
    ({"tag": "best"}, {"model"}),
    ({"tag": "theirs"}, set()),
    ({"annotations": {"task": "aime"}}, {"base", "model"}),
    ({"annotations": {"task": "aime", "year": "2025"}}, {"base"}),
    ({"annotations": {"task": "x" * 4096}}, {"private"}),
    ({"annotations": {"task": "x" * 4095}}, set()),
    ({"annotations": {"task": "nul\0"}}, set()),
    ({"exactness": "lossy"}, {"machine"}),
    ({"exactness": "exact"}, ALL - {"machine"}),
    ({"created_after": EPOCH + DAY}, ALL - {"base"}),
    ({"created_before": EPOCH + DAY}, {"base"}),
    ({"created_after": EPOCH + DAY, "created_before": EPOCH + 2 * DAY}, {"longer"}),
    ({"created_before": (EPOCH + DAY).astimezone(timezone(timedelta(hours=9)))}, {"base"}),
    ({"text": "QUICK fox"}, {"base"}),
    ({"text": "quick cat"}, set()),
    ({"text": "qui"}, set()),
    ({"text": "straße"}, {"longer"}),
    ({"text": "c++"}, {"longer"}),
    ({"text": "日本語"}, {"longer"}),
    ({"text": " \t"}, ALL),
    ({"text": "quick", "annotations": {"year": "2025"}, "covers": (0, 20), "exactness": "exact"}, {"base"}),
    ({"block_key": keys(BASE)[0], "tag": "best"}, set()),
]


@pytest.mark.parametrize(("conditions", "expected"), CASES, ids=[str(case[0])[:60] for case in CASES])
def test_a_query_selects_what_meets_every_condition(
    filled: Index, conditions: dict[str, Any], expected: set[str]
) -> None:
    page = filled.query(ArtifactQuery(**conditions))
    assert set(names(page)) == expected
    selected = [ENTRIES[name] for name in expected]
    assert page.count == len(expected)
    assert page.total_bytes == sum(spec.size for what in selected for spec in what.specs().values())
    distinct = {digest: spec.size for what in selected for digest, spec in what.specs().items()}
    assert page.unique_bytes == sum(distinct.values())
    assert page.next_cursor is None


@pytest.mark.parametrize(
    "text",
    ['"', '""', "'", "*", "a*", "AND", "NOT quick", "text:quick", "(quick", "^quick", "-", "{a b}:", "qu\0ick", ":"],
)
def test_no_words_are_read_as_query_syntax(filled: Index, text: str) -> None:
    assert filled.query(ArtifactQuery(text=text)).count in (0, 1)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_is_a_query(filled: Index, text: str) -> None:
    filled.query(ArtifactQuery(text=text))


def test_as_many_words_as_a_query_may_have_are_one(filled: Index) -> None:
    assert filled.query(ArtifactQuery(text="quick " * MAX_QUERY_WORDS)).count == 1
    assert filled.query(ArtifactQuery(text=" ".join(f"word{i}" for i in range(MAX_QUERY_WORDS)))).count == 0
    assert filled.query(ArtifactQuery(text="quick".ljust(MAX_QUERY_CHARACTERS))).count == 1
    assert filled.query(ArtifactQuery(text="a." * (MAX_QUERY_CHARACTERS // 2))).count == 0


def test_a_token_prefix_of_any_length_is_compared_exactly(index: Index) -> None:
    lengths = (63, 64, 65, 1023, 1024, 1025, 2048, 2500)
    common = [255, 2**31 - 1, 0] * 900
    whole = entry(common[:2600], block_tokens=1024)
    publish(index, whole)
    for length in lengths:
        publish(index, entry([*common[: length - 1], 7], block_tokens=1024))
    for length in lengths:
        found = index.query(ArtifactQuery(token_prefix=common[:length]))
        assert whole.manifest.id in [item.id for item in found.items]
        assert found.count == 1 + sum(other > length for other in lengths)
        assert index.query(ArtifactQuery(token_prefix=[*common[: length - 1], 7])).count == 1
        assert index.query(ArtifactQuery(token_prefix=[*common[: length - 1], 8])).count == 0


@pytest.mark.parametrize(
    ("conditions", "error"),
    [
        ({"covers": (3, 3)}, MalformedRequest),
        ({"covers": (-1, 3)}, MalformedRequest),
        ({"created_after": EPOCH.replace(tzinfo=None)}, MalformedRequest),
        ({"token_prefix": [-1]}, InvalidTokens),
        ({"fingerprint_id": "sha256:12"}, MalformedDigest),
        ({"chunk": "sha256:" + "0" * 64}, MalformedDigest),
        ({"cursor": ""}, MalformedRequest),
        ({"cursor": "%%%"}, MalformedRequest),
        ({"cursor": "bnVsbA=="}, MalformedRequest),
        ({"cursor": "W" * 10_000}, MalformedRequest),
        ({"cursor": "é"}, MalformedRequest),
    ],
    ids=str,
)
def test_a_malformed_condition_is_refused(filled: Index, conditions: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        filled.query(ArtifactQuery(**conditions))


@pytest.mark.parametrize(
    "other",
    [{"sort": "token_count"}, {"descending": False}, {"namespace": "foreign"}, {"min_tokens": 1}, {"text": "a"}],
    ids=str,
)
def test_a_cursor_of_another_query_is_refused(filled: Index, other: dict[str, Any]) -> None:
    cursor = filled.query(ArtifactQuery(limit=2)).next_cursor
    with pytest.raises(MalformedRequest, match="another query"):
        filled.query(ArtifactQuery(cursor=cursor, **other))
    assert len(filled.query(ArtifactQuery(cursor=cursor, limit=1)).items) == 1


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("sort", ["created_at", "token_count", "total_bytes"])
def test_pages_hold_every_artifact_once_in_order(index: Index, sort: Any, descending: bool) -> None:
    """Half of the artifacts share their sort value, so that pages end between equals."""
    entries = [entry([i] * (1 + 5 * (i % 2) * i), created_at=EPOCH + (i % 2) * i * DAY) for i in range(12)]
    index.rebuild(entries, [], [])
    query = ArtifactQuery(sort=sort, descending=descending)
    everything = index.query(query)
    values = [(getattr(item, sort), item.id) for item in everything.items]
    assert values == sorted(values, reverse=descending)
    paged = list(pages(index, query.model_copy(update={"limit": 5})))
    assert [item for page in paged for item in page.items] == everything.items
    assert {(page.count, page.total_bytes, page.unique_bytes) for page in paged} == {
        (12, everything.total_bytes, everything.unique_bytes)
    }


def test_pages_stay_right_while_artifacts_come_and_go(index: Index) -> None:
    before = [entry([i], created_at=EPOCH + i * DAY) for i in range(0, 40, 2)]
    index.rebuild(before, [], [])
    removed = before[3].manifest.id
    seen: list[str] = []
    for number, page in enumerate(pages(index, ArtifactQuery(limit=3))):
        seen += [item.id for item in page.items]
        publish(index, entry([39 - 2 * number], created_at=EPOCH + (39 - 2 * number) * DAY))
        publish(index, entry([100 + number], created_at=EPOCH + (100 + number) * DAY))
        if removed not in seen and number == 2:
            index.unpublish("default", removed)
    assert len(seen) == len(set(seen))
    assert {what.manifest.id for what in before} - {removed} <= set(seen)


def test_i8_a_page_ends_where_its_annotations_would_take_too_much(
    filled: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "PAGE_CHARACTERS", 100)
    found = [names(page) for page in pages(filled, ArtifactQuery(descending=False, limit=1000))]
    assert found == [["base", "longer", "model", "machine"], ["private"]]
    monkeypatch.setattr(search, "PAGE_CHARACTERS", 0)
    assert all(len(page.items) <= 2 for page in pages(filled, ArtifactQuery(limit=1000)))


def pages(index: Index, query: ArtifactQuery) -> Iterator[ArtifactPage]:
    while True:
        page = index.query(query)
        yield page
        if page.next_cursor is None:
            return
        query = query.model_copy(update={"cursor": page.next_cursor})


def test_removed_text_is_found_no_more(index: Index) -> None:
    what: Entry = entry(range(20), text="findable")
    publish(index, what)
    assert index.query(ArtifactQuery(text="findable")).count == 1
    index.unpublish("default", what.manifest.id)
    assert index.query(ArtifactQuery(text="findable")).count == 0
    publish(index, entry(range(30), text="other"))
    assert index.query(ArtifactQuery(text="findable")).count == 0
