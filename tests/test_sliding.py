"""Artifacts that store of sliding layers only what a resume needs, in the repository; no model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from places import Place
from pushing import Artifact, push
from synthetic import artifact, fingerprint
from test_api import serving

from repo_service.client import open_repository
from repo_service.client.mirror import mirror
from repo_service.client.repair import repair
from repo_service.client.transfer import copy_artifact
from repo_service.client.zarr_store import open_artifact
from repo_service.domain.canonical import canonical_json
from repo_service.domain.errors import ChunkNotFound, ChunksMissing, MalformedDocument, NotStored, QuotaExceeded
from repo_service.domain.layout import Layout
from repo_service.domain.manifest import Manifest
from repo_service.domain.policy import Policy
from repo_service.domain.record import stored_chunks
from repo_service.domain.repository import Repository
from repo_service.domain.views import Match
from repo_service.services.export import export_artifact, import_artifact
from repo_service.services.opening import open_local

pytestmark = pytest.mark.everywhere

NS = "default"
SIZE = 16
WINDOW = 32
TOKENS = random.Random(3).choices(range(1000), k=150)
LAST = 144
"""Where the last block of `TOKENS` begins: an artifact of them that stores the least is resumed from here."""

WHOLE = artifact(TOKENS)
PART = artifact(TOKENS, resume_from=LAST)


@pytest.fixture(params=["embedded", "service"])
def repository(request: pytest.FixtureRequest, root: Place) -> Iterator[Repository]:
    with ExitStack() as stack:
        url = root.as_uri() if request.param == "embedded" else stack.enter_context(serving(root)).url
        yield stack.enter_context(open_repository(url))


def shorter(count: int, resume_from: int = 0) -> Artifact:
    return artifact(TOKENS[:count], resume_from=resume_from)


def match(repository: Repository, blocks: int) -> Match | None:
    return repository.match(NS, [record.key for record in WHOLE[1][:blocks]])


def matched(repository: Repository) -> list[int]:
    """How many blocks are matched where so many are asked for, from the first to the last one."""
    found = (match(repository, blocks) for blocks in range(1, len(WHOLE[1]) + 1))
    return [one.blocks if one else 0 for one in found]


def assert_holds(repository: Repository, made: Artifact) -> None:
    """What an artifact stores is there, byte for byte, and nothing else is its."""
    manifest, records, chunks = made
    assert repository.manifest(manifest.id, NS).data == manifest.data
    assert [record.data for record in repository.records(manifest, NS)] == [record.data for record in records]
    for digest, spec in manifest.stored_chunks(records).items():
        out = bytearray(spec.size)
        repository.read_chunk(manifest.id, NS, digest, spec, memoryview(out))
        assert out == chunks[digest]
    report = repository.check(manifest.id, NS)
    assert report.ok
    assert (report.chunks, report.bytes) == (len(chunks), sum(map(len, chunks.values())))
    assert repository.artifact(manifest.id, NS).total_bytes == report.bytes


def left_out() -> set[str]:
    """The chunks that the whole artifact stores and the other leaves out."""
    return set(WHOLE[2]) - set(PART[2])


def assert_reindexed_equal(root: Place) -> None:
    """I5: the index that the store gives is the one that was there, row for row."""
    with open_local(root.as_uri()) as local:
        before = local._index.dump()
        assert local.reindex().corrupt == []
        assert local._index.dump() == before


# The documents


def test_what_is_left_out_is_the_sliding_layers_beyond_the_window() -> None:
    layout = PART[0].layout
    first = (LAST - (WINDOW - 1)) // SIZE
    assert layout.last_resume(len(TOKENS)) == LAST
    assert layout.first_stored(LAST) == {"full/k": 0, "full/v": 0, "sliding/k": first, "sliding/v": first}
    sliding = {
        digest for record in WHOLE[1][:first] for name in ("sliding/k", "sliding/v") for digest in record.chunks[name]
    }
    assert left_out() == sliding
    assert [record.data for record in PART[1]] == [record.data for record in WHOLE[1]]
    tokens = sum(len(WHOLE[2][digest]) for digest in WHOLE[0].tokens or ())
    assert PART[0].state_bytes == sum(map(len, PART[2].values())) - tokens
    assert WHOLE[0].state_bytes == sum(map(len, WHOLE[2].values())) - tokens


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 32, 33, 200])
@pytest.mark.parametrize("count", [1, 16, 17, 48, 150, 160])
def test_every_token_of_the_window_before_the_resume_is_stored(window: int, count: int) -> None:
    groups = fingerprint().sections["state"]["groups"]
    layout = Layout.of(fingerprint(state={"groups": [groups[0], groups[1] | {"window": window}]}))
    start = layout.last_resume(count)
    for name, first in layout.first_stored(start).items():
        assert first * SIZE <= max(0, start - (window - 1)), "the first token that a resume needs is stored"
        assert first == 0 or ("sliding" in name and (first + 1) * SIZE > start - max(1, window - 1)), (
            "and no block more"
        )
        assert first * SIZE < max(1, start), "so is the block before the resume"


def test_a_manifest_that_stores_everything_is_as_it_was() -> None:
    assert b"resume_from" not in WHOLE[0].data
    assert json.loads(WHOLE[0].data)["version"] == 1
    assert Manifest.parse(WHOLE[0].data).resume_from == 0
    assert Manifest.parse(PART[0].data) == PART[0]
    assert json.loads(PART[0].data)["version"] == 2


@pytest.mark.parametrize(
    "resume_from",
    [0, -16, 1, 17, 150, 160, 2**40, True, False, None, "144", [144], {"float": "0x1.2p+7"}, 16, 32],
    ids=repr,
)
def test_a_hostile_resume_is_refused(resume_from: Any) -> None:
    """Out of range, inside a block, of another type; with 16 and 32 nothing is left out."""
    value = json.loads(PART[0].data) | {"resume_from": resume_from}
    with pytest.raises(MalformedDocument):
        Manifest.parse(canonical_json(value))
    with pytest.raises(MalformedDocument):
        Manifest.parse(PART[0].data.replace(b'"resume_from":144', b'"resume_from":144.0'))


def test_a_resume_is_refused_without_its_version_and_without_sliding_layers() -> None:
    for fields in ({"version": 1}, {"version": 3}):
        with pytest.raises(MalformedDocument, match="version"):
            Manifest.parse(canonical_json(json.loads(PART[0].data) | fields))
    with pytest.raises(MalformedDocument, match="version 2"):
        Manifest.parse(canonical_json(json.loads(WHOLE[0].data) | {"version": 2}))
    full = fingerprint(state={"groups": fingerprint().sections["state"]["groups"][:1]})
    with pytest.raises(MalformedDocument, match="leaves nothing out"):
        artifact(TOKENS, full, resume_from=LAST)
    assert Layout.of(full).last_resume(len(TOKENS)) == 0


# Push, read, match


def test_only_what_is_stored_is_asked_for_sent_and_read(repository: Repository) -> None:
    info, sent = push(repository, PART)
    assert sorted(sent) == sorted(PART[2])
    assert_holds(repository, PART)
    assert info.total_bytes < sum(map(len, WHOLE[2].values()))
    digest = min(left_out())
    with pytest.raises(ChunkNotFound):
        repository.read_chunk(
            info.id, NS, digest, WHOLE[0].stored_chunks(WHOLE[1])[digest], memoryview(bytearray(2**12))
        )


def test_a_commit_that_promises_more_than_was_sent_is_refused(repository: Repository) -> None:
    manifest, records, chunks = WHOLE
    with repository.begin_push(manifest.fingerprint, NS) as running:
        for digest in running.offer(records, LAST) + running.offer_tokens(len(TOKENS), manifest.tokens or ()):
            running.put(digest, chunks[digest])
        with pytest.raises(ChunksMissing):
            running.commit(manifest)
        with pytest.raises(ChunkNotFound):
            running.put(min(left_out()), chunks[min(left_out())])
        assert running.commit(PART[0]).id == PART[0].id


def test_a_quota_counts_what_is_stored(repository: Repository) -> None:
    size = sum(map(len, PART[2].values()))
    repository.set_policy(NS, Policy(quota_bytes=size))
    push(repository, PART)
    with pytest.raises(QuotaExceeded):
        push(repository, WHOLE)
    assert_holds(repository, PART)


def test_a_match_ends_where_it_can_be_resumed(repository: Repository, root: Place) -> None:
    push(repository, PART)
    assert matched(repository) == [0] * 8 + [9, 10]
    assert match(repository, 10) == Match(artifact_id=PART[0].id, blocks=10, tokens=150)
    push(repository, shorter(40))
    assert matched(repository) == [1, 2, 2, 2, 2, 2, 2, 2, 9, 10]
    push(repository, shorter(112, resume_from=96))
    assert matched(repository) == [1, 2, 2, 2, 2, 6, 7, 7, 9, 10]
    assert match(repository, 8) == Match(artifact_id=shorter(112, resume_from=96)[0].id, blocks=7, tokens=112)
    push(repository, WHOLE)
    assert matched(repository) == list(range(1, 11))
    assert_reindexed_equal(root)
    assert matched(repository) == list(range(1, 11))
    repository.delete(WHOLE[0].id, NS)
    assert matched(repository) == [1, 2, 2, 2, 2, 6, 7, 7, 9, 10]
    repository.delete(PART[0].id, NS)
    assert matched(repository) == [1, 2, 2, 2, 2, 6, 7, 7, 7, 7]


@pytest.mark.parametrize("order", [(PART, WHOLE), (WHOLE, PART)], ids=["part first", "whole first"])
def test_either_may_go_and_the_other_stays_whole(
    repository: Repository, root: Place, order: tuple[Artifact, Artifact]
) -> None:
    first, second = order
    _, sent = push(repository, first)
    assert sorted(sent) == sorted(first[2])
    _, sent = push(repository, second)
    assert set(sent) == set(second[2]) - set(first[2]), "what both store is sent once"
    assert repository.stats(NS).blocks == len(WHOLE[1])
    assert repository.stats(NS).chunks == len(WHOLE[2])
    assert_holds(repository, first)
    assert_holds(repository, second)
    assert_reindexed_equal(root)
    dry = repository.collect_garbage(dry_run=True, grace_s=0)
    assert (dry.chunks, dry.block_records) == (0, 0)
    repository.delete(first[0].id, NS)
    assert_holds(repository, second)
    assert repository.stats(NS).chunks == len(second[2])
    assert repository.collect_garbage(grace_s=0).removed == []
    with open_local(root.as_uri()) as local:
        stored = {f"blake3:{key.removeprefix('chunks/').replace('/', '')}" for key in local._store.list("chunks")}
    assert stored == set(second[2])
    assert_reindexed_equal(root)
    repository.delete(second[0].id, NS)
    with open_local(root.as_uri()) as local:
        assert [*local._store.list("chunks"), *local._store.list("blocks")] == []


def test_a_policy_that_lets_the_whole_one_go_keeps_what_the_other_stores(repository: Repository, root: Place) -> None:
    push(repository, WHOLE)
    push(repository, PART)
    repository.set_tag(NS, "kept", PART[0].id)
    repository.set_policy(NS, Policy(keep_tags=["*"], max_bytes=1))
    dry = repository.collect_garbage(dry_run=True, grace_s=0)
    report = repository.collect_garbage(grace_s=0)
    assert {item.name for item in dry.removed} == {item.name for item in report.removed} == {WHOLE[0].id} | left_out()
    assert (dry.chunks, dry.block_records) == (report.chunks, report.block_records) == (len(left_out()), 0)
    assert_holds(repository, PART)
    assert_reindexed_equal(root)


def test_a_scrub_reads_each_record_once_and_names_all_who_need_it(repository: Repository, root: Place) -> None:
    push(repository, WHOLE)
    push(repository, PART)
    report = repository.scrub()
    assert (report.block_records, report.chunks, report.damage) == (len(WHOLE[1]), len(WHOLE[2]), [])
    digest = min(left_out())
    (root / "chunks" / digest[7:9] / digest[9:]).unlink()
    key = WHOLE[1][1].key.removeprefix("sha256:")
    (root / "blocks" / NS / key[:2] / f"{key[2:]}.json").write_bytes(b"{}")
    named = {item.kind: item.artifacts for item in repository.scrub().damage}
    assert named == {
        "chunk": [(NS, WHOLE[0].id)],
        "block record": sorted([(NS, WHOLE[0].id), (NS, PART[0].id)]),
    }


# Copies, views


def test_a_copy_a_mirror_and_a_repair_carry_what_is_stored(
    source: Repository, destination: Repository, root: Place
) -> None:
    push(source, PART)
    report = copy_artifact(source, destination, PART[0].id, NS, NS)
    assert (report.chunks_sent, report.bytes_total) == (len(PART[2]), sum(map(len, PART[2].values())))
    assert_holds(destination, PART)
    push(source, WHOLE)
    mirrored = mirror(source, destination, verify=True)
    assert (mirrored.artifacts_copied, mirrored.artifacts_present) == (1, 1)
    assert mirrored.chunks_sent == len(left_out())
    assert_holds(destination, WHOLE)
    source.delete(WHOLE[0].id, NS)
    assert mirror(source, destination, delete=True).artifacts_deleted == 1
    assert_holds(destination, PART)
    digest = min(PART[2])
    (root / "chunks" / digest[7:9] / digest[9:]).unlink()
    touched = destination.scrub().touched
    assert [one.healed for one in repair(source, destination, touched)] == [True]
    assert_holds(destination, PART)


def test_an_export_holds_what_is_stored_and_comes_back(repository: Repository, tmp_path: Path) -> None:
    push(repository, PART)
    report = export_artifact(repository, PART[0].id, NS, tmp_path / "export")
    assert (report.chunks, report.bytes) == (len(PART[2]), sum(map(len, PART[2].values())))
    with open_local("memory:") as other:
        assert import_artifact(other, tmp_path / "export", NS).id == PART[0].id
        assert_holds(other, PART)
    group = zarr.open_group(str(tmp_path / "export"), mode="r")
    assert group.attrs["resume_from"] == LAST
    first = PART[0].layout.first_stored(LAST)["sliding/k"]
    sliding = np.asarray(group["sliding/k"])
    assert (sliding[:first] == 0xFFFF).all(), "what is not stored reads as NaN, never as a plausible value"
    assert not (sliding[first:-1] == 0xFFFF).all(axis=(1, 2, 3, 4)).any()


def test_the_zarr_view_refuses_what_is_not_stored_by_name(repository: Repository) -> None:
    push(repository, PART)
    group = open_artifact(repository, PART[0].id, NS)
    first = PART[0].layout.first_stored(LAST)["sliding/k"]
    assert np.asarray(group["sliding/k"][first:]).shape[0] == len(PART[1]) - first
    assert np.asarray(group["full/k"]).shape[0] == len(PART[1])
    with pytest.raises(NotStored, match=f"sliding/k from block {first} on, and block {first - 1}"):
        group["sliding/k"][first - 1]


def test_a_zarr_reader_over_http_meets_no_fill_value(root: Place) -> None:
    with serving(root) as service:
        push(service.repository, PART)
        base = f"/v1/artifacts/{PART[0].id}/zarr/sliding/k/c"
        first = PART[0].layout.first_stored(LAST)["sliding/k"]
        assert service.request("GET", f"{base}/{first}/0/0/0/0").status == 200
        assert service.error("GET", f"{base}/{first - 1}/0/0/0/0") == (410, "not_stored")


def test_a_hostile_offer_is_refused(root: Place) -> None:
    with serving(root) as service:
        push_id = service.repository.begin_push(PART[0].fingerprint, NS).id
        for resume_from in ("-1", "144.0", "1.5", '"144"', "true", "null", str(2**40)):
            body = f'{{"records":[],"resume_from":{resume_from}}}'.encode()
            answer = service.error("POST", f"/v1/namespaces/{NS}/pushes/{push_id}/blocks", body)
            assert answer in {(422, "malformed_request"), (400, "malformed_document")}, resume_from


def test_an_offer_of_any_resume_asks_for_what_it_stores(repository: Repository) -> None:
    manifest, records, _ = WHOLE
    for resume_from in (0, 1, 143, LAST, 2**26):
        with repository.begin_push(manifest.fingerprint, NS) as running:
            assert running.offer(records, resume_from) == list(stored_chunks(records, manifest.layout, resume_from))
            running.abort()
