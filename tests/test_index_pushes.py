"""Running pushes: what they must send, what they may rely on, and when they end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from index_support import DAY, begin, empty_index, entry, first_chunk, publish, send

from repo_service.domain.errors import ChunkNotFound, Conflict, MalformedDocument, PushNotFound
from repo_service.domain.layout import ChunkSpec
from repo_service.index import Index

UNKNOWN = "sha256:" + "0" * 64


@pytest.fixture
def index(tmp_path: Path, index_kind: str) -> Iterator[Index]:
    with Index.open(empty_index(tmp_path, index_kind)) as opened:
        yield opened


def test_a_push_knows_its_namespace_and_fingerprint(index: Index) -> None:
    made = entry(range(20)).manifest.fingerprint
    index.begin_push("mine", "team", made, datetime.now(UTC) + DAY)
    assert index.push("mine").namespace == "team"
    assert index.push("mine").fingerprint == made
    with pytest.raises(Conflict):
        index.begin_push("mine", "team", made, datetime.now(UTC) + DAY)


def test_an_offer_names_each_missing_chunk_once_in_the_order_offered(index: Index) -> None:
    push, what = begin(index), entry(range(40))
    specs = dict(reversed(what.specs().items()))
    offered = index.offer(push, what.records, specs)
    assert offered.missing == list(specs)
    assert offered.divergent == []
    assert index.offer(push, what.records, specs) == offered


def test_an_arrived_chunk_is_missing_no_more(index: Index) -> None:
    push, what = begin(index), entry(range(40))
    first, *rest = index.offer(push, what.records, what.specs()).missing
    index.arrived(push, first)
    index.arrived(push, first)
    assert index.offer(push, what.records, what.specs()).missing == rest
    assert index.unarrived(push, [first, *rest]) == rest


def test_the_chunks_of_a_tokens_array_are_offered_without_records(index: Index) -> None:
    push, what = begin(index), entry(range(40))
    specs = {digest: what.specs()[digest] for digest in what.manifest.tokens or ()}
    assert index.offer(push, [], specs).missing == list(specs)
    assert index.offer(push, [], {}).missing == []


def test_only_an_offered_chunk_is_wanted(index: Index) -> None:
    push, other, what = begin(index), begin(index), entry(range(20))
    index.offer(push, what.records, what.specs())
    digest = first_chunk(what)
    assert index.wanted(push, digest) == what.specs()[digest]
    for call in (index.wanted, index.arrived):
        with pytest.raises(ChunkNotFound):
            call(other, digest)


def test_what_another_push_of_the_namespace_sent_need_not_be_sent_again(index: Index) -> None:
    what = entry(range(40))
    first, second = begin(index), begin(index)
    send(index, first, what)
    assert index.offer(second, what.records, what.specs()).missing == []
    index.end_push(first)
    assert index.unarrived(second, list(what.specs())) == []
    index.publish(what)


def test_what_an_expired_push_sent_need_not_be_sent_again(index: Index) -> None:
    what, expired = entry(range(40)), begin(index)
    send(index, expired, what)
    assert index.expire_pushes(datetime.now(UTC) + 2 * DAY) == 1
    assert index.offer(begin(index), what.records, what.specs()).missing == []


def test_a_published_chunk_is_missing_only_in_other_namespaces(index: Index) -> None:
    """I7: deduplication never skips the proof of possession."""
    what = entry(range(40))
    publish(index, what)
    assert index.offer(begin(index), what.records, what.specs()).missing == []
    stranger = begin(index, "stranger")
    assert index.offer(stranger, what.records, what.specs()).missing == list(what.specs())
    assert index.unarrived(stranger, list(what.specs())) == list(what.specs())


def test_a_chunk_sent_in_one_namespace_is_missing_in_another(index: Index) -> None:
    what = entry(range(40))
    send(index, begin(index), what)
    assert index.offer(begin(index, "stranger"), what.records, what.specs()).missing == list(what.specs())


def test_records_come_back_as_offered_in_the_order_asked_for(index: Index) -> None:
    push, what = begin(index), entry(range(70))
    index.offer(push, what.records[:2], {})
    index.offer(push, what.records[2:], {})
    wanted = [what.records[i] for i in (3, 0, 4)]
    assert index.push_records(push, [record.key for record in wanted]) == [record.data for record in wanted]
    with pytest.raises(MalformedDocument, match=UNKNOWN):
        index.push_records(push, [what.records[0].key, UNKNOWN])


def test_a_record_that_diverges_from_a_published_one_is_named_and_nothing_is_remembered(index: Index) -> None:
    """I2: equal keys, equal bytes."""
    stored, other = entry(range(40)), entry(range(40), seed=1)
    publish(index, stored)
    push = begin(index)
    offered = index.offer(push, other.records, other.specs())
    assert offered.missing == []
    assert offered.divergent == [(new, old.digest) for new, old in zip(other.records, stored.records, strict=True)]
    with pytest.raises(MalformedDocument):
        index.push_records(push, [other.records[0].key])
    assert index.offer(begin(index, "stranger"), other.records, other.specs()).divergent == []


def test_a_chunk_that_is_there_is_refused_under_another_shape(index: Index) -> None:
    push, what = begin(index), entry(range(20))
    send(index, push, what)
    digest = first_chunk(what)
    known = what.specs()[digest]
    for spec in (ChunkSpec("float16", known.shape), replace(known, shape=(1, *known.shape))):
        with pytest.raises(MalformedDocument, match=digest):
            index.offer(push, [], {digest: spec})


def test_what_one_push_says_of_a_chunk_binds_no_other(index: Index) -> None:
    """Until its bytes have arrived nobody knows; a false offer must not spoil an honest push."""
    false, honest, what = begin(index), begin(index), entry(range(20))
    digest = first_chunk(what)
    index.offer(false, [], {digest: ChunkSpec("float32", (1,))})
    send(index, honest, what)
    assert index.wanted(honest, digest) == what.specs()[digest]
    assert index.wanted(false, digest) == ChunkSpec("float32", (1,))
    index.publish(what)
    assert index.holds_chunk("default", what.manifest.id, digest) == what.specs()[digest]


def test_an_ended_an_expired_and_an_unknown_push_look_the_same(index: Index) -> None:
    ended, expired = begin(index), begin(index, lease=timedelta(0))
    index.end_push(ended)
    index.end_push(ended)
    messages = set()
    for push in (ended, expired, "unknown"):
        calls = (
            lambda push=push: index.push(push),
            lambda push=push: index.offer(push, [], {}),
            lambda push=push: index.wanted(push, "blake3:" + "0" * 64),
            lambda push=push: index.arrived(push, "blake3:" + "0" * 64),
            lambda push=push: index.push_records(push, []),
            lambda push=push: index.unarrived(push, []),
        )
        for call in calls:
            with pytest.raises(PushNotFound) as raised:
                call()
            messages.add(raised.value.message.replace(push, "…"))
    assert len(messages) == 1


def test_a_push_that_goes_on_sending_keeps_its_lease(index: Index) -> None:
    push, what = begin(index, lease=timedelta(seconds=1)), entry(range(200))
    start = datetime.now(UTC)
    missing = index.offer(push, what.records, what.specs()).missing
    while datetime.now(UTC) < start + timedelta(seconds=1.3):
        index.arrived(push, missing[0])
    assert index.push(push).namespace == "default"
    assert index.expire_pushes(start + timedelta(seconds=1.1)) == 0


def test_pushes_expire_at_their_time(index: Index) -> None:
    begin(index, lease=DAY)
    begin(index, lease=3 * DAY)
    assert index.expire_pushes(datetime.now(UTC)) == 0
    assert index.stats("default").running_pushes == 2
    assert index.expire_pushes(datetime.now(UTC) + 2 * DAY) == 1
    assert index.stats("default").running_pushes == 1
