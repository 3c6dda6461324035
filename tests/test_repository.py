"""One suite for the repository's interface, embedded and through the service."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from places import Place
from pushing import Artifact, offer, push
from serving import reached
from synthetic import artifact, fingerprint

from repo_service.domain.digest import chunk_digest
from repo_service.domain.errors import (
    Ambiguous,
    ArtifactNotFound,
    ChunkNotFound,
    ChunksMissing,
    DigestMismatch,
    Divergence,
    InvalidInput,
    MalformedDigest,
    MalformedDocument,
    MalformedName,
    MalformedRequest,
    NotFound,
    PushNotFound,
    SizeMismatch,
    TagNotFound,
)
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord, block_keys
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import canonical_steps
from repo_service.domain.views import MAX_QUERY_CHARACTERS, MAX_QUERY_WORDS, ArtifactQuery

pytestmark = pytest.mark.everywhere

MADE_WITH = fingerprint()
SIZE = 16


@pytest.fixture(scope="module", params=["embedded", "service"])
def repository(request: pytest.FixtureRequest, module_root: Place) -> Iterator[Repository]:
    with reached(request.param, module_root.as_uri()) as opened:
        yield opened


@pytest.fixture
def namespace() -> str:
    return f"n{uuid.uuid4().hex[:12]}"


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def read_all(repository: Repository, manifest: Manifest, namespace: str) -> dict[str, bytes]:
    contents = {}
    for digest, spec in manifest.stored_chunks(repository.records(manifest, namespace)).items():
        out = memoryview(bytearray(spec.size))
        repository.read_chunk(manifest.id, namespace, digest, spec, out)
        contents[digest] = bytes(out)
    return contents


@pytest.mark.everywhere(always=True)
def test_what_was_pushed_is_pulled_byte_for_byte(repository: Repository, namespace: str) -> None:
    made = artifact(tokens_of(1, 100), MADE_WITH, annotations={"origin": "test"}, text="a text to find")
    info, sent = push(repository, made, namespace)
    manifest = repository.manifest(info.id, namespace)
    assert manifest == made[0]
    assert read_all(repository, manifest, namespace) == made[2]
    assert set(sent) == set(made[2])
    assert info.total_bytes == sum(map(len, made[2].values()))
    assert repository.artifact(info.id, namespace).model_copy(update={"last_used_at": None}) == info


def test_pushing_again_sends_nothing_and_gives_the_first_artifact(repository: Repository, namespace: str) -> None:
    made = artifact(tokens_of(2, 50), MADE_WITH)
    first, _ = push(repository, made, namespace)
    second, sent = push(repository, made, namespace)
    assert sent == []
    assert second == first


def test_a_shared_prefix_of_2048_tokens_is_stored_once_and_not_sent_again(
    repository: Repository, namespace: str
) -> None:
    prefix = tokens_of(3, 2048)
    one = artifact(prefix + tokens_of(4, 64), MADE_WITH)
    two = artifact(prefix + tokens_of(5, 64), MADE_WITH)
    first, _ = push(repository, one, namespace)
    shared = {d for record in one[1][: 2048 // SIZE] for digests in record.chunks.values() for d in digests}
    second, sent = push(repository, two, namespace)
    assert not shared & set(sent)
    stats = repository.stats(namespace)
    assert stats.total_bytes == first.total_bytes + second.total_bytes
    assert stats.unique_bytes == sum(len(data) for data in {**one[2], **two[2]}.values())
    assert stats.blocks == 2048 // SIZE + 8


def test_i2_other_bytes_under_a_stored_key_are_refused_recorded_and_visible(
    repository: Repository, namespace: str
) -> None:
    tokens = tokens_of(6, 40)
    stored = artifact(tokens, MADE_WITH, seed=1)
    altered = artifact(tokens, MADE_WITH, seed=2)
    info, _ = push(repository, stored, namespace)
    with pytest.raises(Divergence) as refused:
        push(repository, altered, namespace)
    key = stored[1][0].key
    assert refused.value.details["block_key"] == key
    assert repository.stats(namespace).divergences == 1
    (divergence,) = repository.divergences(namespace)
    assert (divergence.block_key, divergence.stored_record, divergence.offered_record) == (
        key,
        stored[1][0].digest,
        altered[1][0].digest,
    )
    with pytest.raises(ArtifactNotFound):
        repository.artifact(altered[0].id, namespace)
    assert read_all(repository, repository.manifest(info.id, namespace), namespace) == stored[2]


def test_i2_two_pushes_at_once_of_other_bytes_publish_one(repository: Repository, namespace: str) -> None:
    tokens = tokens_of(7, 40)
    made = [artifact(tokens, MADE_WITH, seed=seed) for seed in range(4)]

    def attempt(one: Artifact) -> bool:
        try:
            push(repository, one, namespace)
        except Divergence:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(attempt, made)) == 1
    assert repository.stats(namespace).artifacts == 1
    refused = {divergence.offered_record for divergence in repository.divergences(namespace)}
    assert len(refused) == 3, "each of the others is on record"


def test_zarr_python_3682_parallel_pushes_lose_nothing(repository: Repository, namespace: str) -> None:
    prefix = tokens_of(8, 64)
    made = [artifact(prefix + tokens_of(100 + i, 48), MADE_WITH) for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: push(repository, one, namespace), made))
    for one in made:
        assert read_all(repository, repository.manifest(one[0].id, namespace), namespace) == one[2]


def test_nothing_is_visible_before_a_commit(repository: Repository, namespace: str) -> None:
    manifest, records, contents = artifact(tokens_of(9, 40), MADE_WITH)
    keys = [record.key for record in records]
    running = repository.begin_push(MADE_WITH, namespace)
    missing = offer(running, manifest, records)
    for digest in missing[:-1]:
        running.put(digest, contents[digest])
    with pytest.raises(ChunksMissing):
        running.commit(manifest)
    assert repository.match(namespace, keys) is None
    assert repository.query(ArtifactQuery(namespace=namespace)).count == 0
    with pytest.raises(NotFound):
        repository.manifest(manifest.id, namespace)
    running.put(missing[-1], contents[missing[-1]])
    running.commit(manifest)
    found = repository.match(namespace, keys)
    assert found is not None
    assert found.tokens == 40


def test_lmcache_4991_an_unfinished_push_misses(repository: Repository, namespace: str) -> None:
    manifest, records, contents = artifact(tokens_of(10, 40), MADE_WITH)
    running = repository.begin_push(MADE_WITH, namespace)
    digest = offer(running, manifest, records)[0]
    running.put(digest, contents[digest])
    assert repository.match(namespace, [record.key for record in records]) is None


def test_lmcache_4991_a_failed_push_misses_after_its_chunks_arrived(repository: Repository, namespace: str) -> None:
    manifest, records, contents = artifact(tokens_of(10, 40), MADE_WITH)
    running = repository.begin_push(MADE_WITH, namespace)
    for digest in offer(running, manifest, records):
        running.put(digest, contents[digest])
    running.abort()
    assert repository.match(namespace, [record.key for record in records]) is None
    with pytest.raises(PushNotFound):
        running.commit(manifest)


def test_a_push_that_was_cut_goes_on_with_what_is_missing(repository: Repository, namespace: str) -> None:
    manifest, records, contents = artifact(tokens_of(11, 100), MADE_WITH)
    cut = repository.begin_push(MADE_WITH, namespace)
    wanted = offer(cut, manifest, records)
    for digest in wanted[:5]:
        cut.put(digest, contents[digest])
    _, sent = push(repository, (manifest, records, contents), namespace)
    assert set(sent) == set(wanted[5:])


def test_match_finds_the_longest_prefix_of_a_token_sequence(repository: Repository, namespace: str) -> None:
    tokens = tokens_of(12, 100)
    push(repository, artifact(tokens, MADE_WITH), namespace)

    def matched(prompt: list[int]) -> int:
        whole = prompt[: len(prompt) // SIZE * SIZE]
        keys = block_keys(MADE_WITH.id, whole, canonical_steps(0, len(whole), SIZE), SIZE)
        found = repository.match(namespace, keys)
        return found.tokens if found else 0

    for shared in (0, 1, 15, 16, 17, 47, 48, 95, 96):
        assert matched(tokens[:shared] + tokens_of(13, 40)) == shared // SIZE * SIZE
    other = fingerprint(numerics={"torch": "other"})
    keys = block_keys(other.id, tokens[:96], canonical_steps(0, 96, SIZE), SIZE)
    assert repository.match(namespace, keys) is None
    assert repository.match("elsewhere", [record.key for record in artifact(tokens, MADE_WITH)[1]]) is None


def test_tags_move_and_artifacts_do_not(repository: Repository, namespace: str) -> None:
    one, _ = push(repository, artifact(tokens_of(14, 20), MADE_WITH), namespace)
    two, _ = push(repository, artifact(tokens_of(15, 20), MADE_WITH), namespace)
    repository.set_tag(namespace, "latest", one.id)
    assert repository.artifact("latest", namespace).id == one.id
    repository.set_tag(namespace, "latest", two.id)
    assert repository.artifact("latest", namespace).tags == ["latest"]
    assert repository.artifact(one.id, namespace).tags == []
    assert [tag.name for tag in repository.tags(namespace)] == ["latest"]
    repository.delete_tag(namespace, "latest")
    with pytest.raises(TagNotFound):
        repository.artifact("latest", namespace)
    with pytest.raises(TagNotFound):
        repository.delete_tag(namespace, "latest")


def test_a_shortened_id_is_enough_and_an_unknown_one_is_not_found(repository: Repository, namespace: str) -> None:
    info, _ = push(repository, artifact(tokens_of(16, 20), MADE_WITH), namespace)
    assert repository.artifact(info.id[:20], namespace).id == info.id
    with pytest.raises(ArtifactNotFound):
        repository.artifact("sha256:" + "0" * 64, namespace)
    assert issubclass(Ambiguous, Exception)


def test_queries_go_through(repository: Repository, namespace: str) -> None:
    before = datetime.now(UTC) - timedelta(minutes=1)
    made = [
        artifact(tokens_of(20 + i, 20 + 10 * i), MADE_WITH, annotations={"n": str(i)}, text=f"word{i} common")
        for i in range(5)
    ]
    for one in made:
        push(repository, one, namespace)
    repository.set_tag(namespace, "third", made[3][0].id)

    def ids(**conditions: object) -> set[int]:
        page = repository.query(ArtifactQuery(namespace=namespace, **conditions))  # type: ignore[arg-type]
        assert page.count == len(page.items)
        return {i for i, one in enumerate(made) for item in page.items if item.id == one[0].id}

    everything = {0, 1, 2, 3, 4}
    assert ids() == ids(fingerprint_id=MADE_WITH.id) == ids(model_id=MADE_WITH.model_id) == everything
    assert ids(min_tokens=40) == {2, 3, 4}
    assert ids(max_tokens=30) == {0, 1}
    assert ids(covers=(30, 45)) == {3, 4}
    assert ids(block_key=made[1][1][0].key) == {1}
    assert ids(chunk=made[2][1][0].chunks["full/k"][0]) == {2}
    assert ids(token_prefix=tokens_of(24, 60)[:7]) == {4}
    assert ids(tag="third") == {3}
    assert ids(annotations={"n": "2"}) == {2}
    assert ids(exactness="exact") == everything
    assert ids(exactness="lossy") == set()
    assert ids(created_after=before) == everything
    assert ids(created_before=before) == set()
    assert ids(text="word4") == {4}
    assert ids(text="common") == everything
    assert ids(text='"unbalanced AND (') == set()
    pages: list[str] = []
    cursor = None
    while True:
        page = repository.query(ArtifactQuery(namespace=namespace, sort="token_count", limit=2, cursor=cursor))
        pages += [item.id for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert pages == [one[0].id for one in reversed(made)]
    assert page.unique_bytes <= page.total_bytes == sum(repository.artifact(i, namespace).total_bytes for i in pages)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("word " * (MAX_QUERY_WORDS + 1), MAX_QUERY_WORDS),
        ("a\0" * (MAX_QUERY_WORDS + 1), MAX_QUERY_WORDS),
        ("x" * (MAX_QUERY_CHARACTERS + 1), MAX_QUERY_CHARACTERS),
        (" " * (MAX_QUERY_CHARACTERS + 1), MAX_QUERY_CHARACTERS),
    ],
    ids=["words", "words apart by NUL", "characters", "spaces"],
)
def test_i8_a_query_of_too_much_text_is_refused_by_its_limit(
    repository: Repository, namespace: str, text: str, limit: int
) -> None:
    with pytest.raises(MalformedRequest, match=f"the limit is {limit}") as early:
        ArtifactQuery(namespace=namespace, text=text)
    unchecked = ArtifactQuery(namespace=namespace).model_copy(update={"text": text})
    with pytest.raises(MalformedRequest) as late:
        repository.query(unchecked)
    assert late.value.to_json() == early.value.to_json()


def test_deleting_frees_what_nothing_else_needs_and_only_that(repository: Repository, namespace: str) -> None:
    prefix = tokens_of(30, 64)
    one = artifact(prefix + tokens_of(31, 32), MADE_WITH)
    two = artifact(prefix + tokens_of(32, 32), MADE_WITH)
    push(repository, one, namespace)
    push(repository, two, namespace)
    repository.set_tag(namespace, "doomed", one[0].id)
    report = repository.delete(one[0].id, namespace)
    assert report.tags == ["doomed"]
    assert report.chunks >= len(set(one[2]) - set(two[2]))
    with pytest.raises(ArtifactNotFound):
        repository.manifest(one[0].id, namespace)
    with pytest.raises(NotFound):
        repository.delete(one[0].id, namespace)
    assert read_all(repository, repository.manifest(two[0].id, namespace), namespace) == two[2]
    assert repository.check(two[0].id, namespace).ok
    info, sent = push(repository, one, namespace)
    assert set(sent) == set(one[2]) - set(two[2])
    assert repository.check(info.id, namespace).ok


def test_i5_the_index_is_rebuilt_from_the_store(repository: Repository, namespace: str) -> None:
    made = [artifact(tokens_of(40 + i, 40), MADE_WITH, text="kept") for i in range(3)]
    infos = [push(repository, one, namespace)[0] for one in made]
    repository.set_tag(namespace, "kept", infos[1].id)
    with pytest.raises(Divergence):
        push(repository, artifact(tokens_of(40, 40), MADE_WITH, seed=9), namespace)
    before = (
        repository.query(ArtifactQuery(namespace=namespace)),
        repository.tags(namespace),
        repository.divergences(namespace),
        repository.stats(namespace).model_copy(update={"running_pushes": 0}),
    )
    report = repository.reindex()
    assert report.corrupt == []
    after = (
        repository.query(ArtifactQuery(namespace=namespace)),
        repository.tags(namespace),
        repository.divergences(namespace),
        repository.stats(namespace).model_copy(update={"running_pushes": 0}),
    )
    assert after == before


def test_i7_another_namespace_s_chunks_are_neither_readable_nor_skipped(repository: Repository, namespace: str) -> None:
    made = artifact(tokens_of(50, 40), MADE_WITH)
    mine, other = namespace, namespace + "-other"
    push(repository, made, mine)
    digest, spec = next(iter(made[0].stored_chunks(made[1]).items()))
    with pytest.raises(ArtifactNotFound):
        repository.read_chunk(made[0].id, other, digest, spec, memoryview(bytearray(spec.size)))
    with pytest.raises(ArtifactNotFound):
        repository.manifest(made[0].id, other)
    _, sent = push(repository, made, other)
    assert set(sent) == set(made[2])


def test_namespaces_are_those_that_hold_something(repository: Repository, namespace: str) -> None:
    one, other, tagged = namespace, namespace + "-other", namespace + "-tagged"
    for name in other, tagged, one:
        info, _ = push(repository, artifact(tokens_of(52, 20), MADE_WITH), name)
    repository.set_tag(tagged, "latest", info.id)
    with pytest.raises(Divergence):
        push(repository, artifact(tokens_of(52, 20), MADE_WITH, seed=1), other)
    repository.begin_push(MADE_WITH, namespace + "-begun")
    found = repository.namespaces()
    assert found == sorted(set(found))
    assert [name for name in found if name.startswith(namespace)] == [one, other, tagged]
    for name in one, other, tagged:
        repository.delete(info.id, name)
    assert [name for name in repository.namespaces() if name.startswith(namespace)] == [other]


def test_a_chunk_that_the_artifact_does_not_hold_is_not_served(repository: Repository, namespace: str) -> None:
    one, two = (artifact(tokens_of(60 + i, 20), MADE_WITH) for i in range(2))
    push(repository, one, namespace)
    push(repository, two, namespace)
    digest, spec = next(iter(two[0].stored_chunks(two[1]).items()))
    with pytest.raises(ChunkNotFound):
        repository.read_chunk(one[0].id, namespace, digest, spec, memoryview(bytearray(spec.size)))


def test_uploads_that_are_not_what_they_say_are_refused(repository: Repository, namespace: str) -> None:
    manifest, records, contents = artifact(tokens_of(70, 20), MADE_WITH)
    running = repository.begin_push(MADE_WITH, namespace)
    digest = offer(running, manifest, records)[0]
    data = contents[digest]
    with pytest.raises(DigestMismatch):
        running.put(digest, bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(SizeMismatch):
        running.put(digest, data[:-1])
    with pytest.raises(SizeMismatch):
        running.put(digest, data + b"\0")
    stranger = chunk_digest(b"x", "uint32", (1,))
    with pytest.raises(ChunkNotFound):
        running.put(stranger, b"x")
    with pytest.raises(MalformedDigest):
        running.put("blake3:zz", data)
    running.put(digest, data)
    running.abort()


def broken(kind: str, made: Artifact) -> tuple[Manifest, list[BlockRecord]]:
    manifest, records, _ = made
    if kind == "a block left out":
        del records[1]
    elif kind == "overlapping spans":
        records[1] = replace(records[1], start=records[0].start, stop=records[0].stop, parent=None)
    elif kind == "another parent":
        records[1] = replace(records[1], parent=records[1].key)
    elif kind == "a chunk left out":
        chunks = {name: digests[:-1] for name, digests in records[0].chunks.items()}
        records[0] = replace(records[0], chunks=chunks)
    elif kind == "steps with a gap":
        records[0] = replace(records[0], steps=(replace(records[0].steps[0], stop=10),))
    elif kind == "tokens of another key":
        records[0] = replace(records[0], key="sha256:" + "1" * 64)
        records[1] = replace(records[1], parent="sha256:" + "1" * 64)
    return replace(manifest, blocks=tuple((r.key, r.digest) for r in records)), records


@pytest.mark.parametrize(
    "kind",
    [
        "a block left out",
        "overlapping spans",
        "another parent",
        "a chunk left out",
        "steps with a gap",
        "tokens of another key",
    ],
)
def test_a_manifest_that_does_not_hold_together_is_refused_and_nothing_is_published(
    repository: Repository, namespace: str, kind: str
) -> None:
    made = artifact(tokens_of(80, 48), MADE_WITH)
    manifest, records = broken(kind, made)
    with pytest.raises((MalformedDocument, ChunksMissing)):
        push(repository, (manifest, records, made[2]), namespace)
    assert repository.query(ArtifactQuery(namespace=namespace)).count == 0


def test_a_manifest_whose_tokens_are_not_those_of_its_keys_is_refused(repository: Repository, namespace: str) -> None:
    made = artifact(tokens_of(81, 48), MADE_WITH)
    other = artifact(tokens_of(82, 48), MADE_WITH)
    lying = replace(made[0], tokens=other[0].tokens)
    with pytest.raises(MalformedDocument, match="key"):
        push(repository, (lying, made[1], {**made[2], **other[2]}), namespace)


def test_private_tokens_are_not_published(repository: Repository, namespace: str) -> None:
    made = artifact(tokens_of(83, 48), MADE_WITH, private=True)
    info, _ = push(repository, made, namespace)
    assert info.private_tokens
    assert repository.manifest(info.id, namespace).tokens is None
    page = repository.query(ArtifactQuery(namespace=namespace, token_prefix=tokens_of(83, 48)[:4]))
    assert page.count == 0


@pytest.mark.parametrize("bad", ["", "UPPER", "../up", "a/b", "a" * 64, "-x", "ü"])
def test_bad_namespaces_and_tags_are_refused(repository: Repository, bad: str) -> None:
    for use in (
        lambda: repository.begin_push(MADE_WITH, bad),
        lambda: repository.artifact("sha256:" + "0" * 64, bad),
        lambda: repository.stats(bad),
    ):
        with pytest.raises((MalformedName, NotFound, InvalidInput)):
            use()


@pytest.mark.parametrize("ref", ["sha256:12", "sha256:" + "g" * 64, "blake3:" + "0" * 64, "a b", "/", "x" * 200])
def test_bad_references_are_refused(repository: Repository, namespace: str, ref: str) -> None:
    with pytest.raises((MalformedName, MalformedDigest, NotFound)):
        repository.artifact(ref, namespace)
