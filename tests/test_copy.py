"""`copy_artifact`: between every two kinds of repository, interrupted, resumed, and with faults at the source."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from places import Place
from pushing import contents_of, expire_pushes, expiring_once
from synthetic import artifact, fingerprint
from test_api import serving

from repo_service.client import open_repository
from repo_service.client.transfer import copy_artifact
from repo_service.domain.errors import (
    ArtifactNotFound,
    ChunkCorrupt,
    Divergence,
    InvalidInput,
    MalformedName,
    PushNotFound,
)
from repo_service.domain.repository import Repository
from repo_service.domain.views import ArtifactQuery
from repo_service.services.documents import chunk_key

pytestmark = pytest.mark.everywhere

NS = "default"


def publish(repository: Repository, tokens: Sequence[int], tag: str | None = None, **options: Any) -> str:
    """Push a synthetic artifact; returns its id."""
    manifest, records, chunks = artifact(tokens, **options)
    with repository.begin_push(manifest.fingerprint, NS) as push:
        missing = push.offer(records)
        if manifest.tokens is not None:
            missing += push.offer_tokens(manifest.token_count, manifest.tokens)
        for digest in missing:
            push.put(digest, chunks[digest])
        push.commit(manifest)
    if tag is not None:
        repository.set_tag(NS, tag, manifest.id)
    return manifest.id


def alter(root: Place, digest: str) -> None:
    """Flip one bit of a stored chunk."""
    path = root / chunk_key(digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("way", ["file to file", "file to http", "http to file", "http to http"])
def test_zarr_3682_a_parallel_copy_has_every_chunk_and_the_same_id(tmp_path: Path, root: Place, way: str) -> None:
    kinds = way.split(" to ")
    with serving(tmp_path / "0") as first, serving(root) as second:
        urls = [s.url if kind == "http" else s.repository.url for s, kind in zip((first, second), kinds, strict=True)]
        with open_repository(urls[0]) as source, open_repository(urls[1]) as destination:
            artifact_id = publish(source, range(200), "handbook")
            report = copy_artifact(source, destination, "handbook", NS, NS, workers=8)
            assert report.artifact.id == artifact_id
            assert report.artifact.tags == ["handbook"]
            assert report.bytes_sent == report.bytes_total == report.artifact.total_bytes
            assert contents_of(destination, artifact_id) == contents_of(source, artifact_id)
            again = copy_artifact(source, destination, artifact_id[:20], NS, NS)
            assert (again.chunks_sent, again.bytes_sent, again.bytes_total) == (0, 0, report.bytes_total)
            assert again.artifact.model_copy(update={"last_used_at": None}) == report.artifact


def test_a_shared_prefix_is_not_sent_again(source: Repository, destination: Repository) -> None:
    short = publish(source, range(64))
    long = publish(source, range(100))
    copy_artifact(source, destination, short, NS, NS)
    report = copy_artifact(source, destination, long, NS, NS)
    shared = contents_of(source, short).keys() & contents_of(source, long).keys()
    assert report.chunks_sent == len(contents_of(source, long)) - len(shared)
    assert len(shared) == 4 * 6
    assert destination.check(long, NS).ok


def test_private_tokens_stay_private(source: Repository, destination: Repository) -> None:
    artifact_id = publish(source, range(40), private=True)
    assert copy_artifact(source, destination, artifact_id, NS, NS).artifact.private_tokens


@pytest.mark.parametrize(
    ("ref", "options", "tags"),
    [
        ("handbook", {}, ["handbook"]),
        ("handbook", {"tag": "other"}, ["other"]),
        ("handbook", {"carry_tag": False}, []),
        ("handbook", {"carry_tag": False, "tag": "other"}, ["other"]),
        (None, {}, []),
        (None, {"tag": "other"}, ["other"]),
    ],
)
def test_a_tag_is_carried_over_unless_told_otherwise(
    source: Repository, destination: Repository, ref: str | None, options: dict[str, Any], tags: list[str]
) -> None:
    artifact_id = publish(source, range(40), "handbook")
    report = copy_artifact(source, destination, ref or artifact_id, NS, "team", **options)
    assert report.artifact.tags == tags
    assert report.artifact.namespace == "team"


def test_progress_goes_from_what_is_there_to_everything(source: Repository, destination: Repository) -> None:
    copy_artifact(source, destination, publish(source, range(64)), NS, NS)
    artifact_id = publish(source, range(100))
    seen: list[tuple[str, int, int]] = []
    report = copy_artifact(source, destination, artifact_id, NS, NS, progress=lambda *call: seen.append(call))
    assert {(kind, total) for kind, _, total in seen} == {("bytes", report.bytes_total)}
    done = [done for _, done, _ in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (report.bytes_total - report.bytes_sent, report.bytes_total)
    assert len(done) == report.chunks_sent + 1


@pytest.mark.parametrize("after", [1, 2, 10, 36, 37])
def test_a_push_that_expires_begins_again_by_itself_and_sends_nothing_twice(
    source: Repository, repository: Repository, root: Place, after: int
) -> None:
    artifact_id = publish(source, range(90))
    ending = expiring_once(root, after)
    report = copy_artifact(source, repository, artifact_id, NS, NS, workers=1, progress=ending)
    assert report.chunks_sent == len(contents_of(source, artifact_id)) == 37
    assert report.bytes_sent == report.bytes_total
    assert repository.check(artifact_id, NS).ok


def test_a_push_that_expires_again_and_again_is_given_up(
    source: Repository, destination: Repository, root: Place
) -> None:
    artifact_id = publish(source, range(90))
    with pytest.raises(PushNotFound):
        copy_artifact(source, destination, artifact_id, NS, NS, progress=lambda *_: expire_pushes(root))
    assert destination.query(ArtifactQuery()).count == 0


KILLED = """
import os, signal, sys
from repo_service.client import open_repository
from repo_service.client.transfer import copy_artifact

def progress(kind, done, total):
    if done >= total // 2:
        print(done, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

with open_repository(sys.argv[1]) as source, open_repository(sys.argv[2]) as destination:
    copy_artifact(source, destination, sys.argv[3], "default", "default", workers=1, progress=progress)
"""


@pytest.mark.parametrize("kind", ["file", "http"])
def test_after_kill_9_only_what_is_missing_is_sent(source: Repository, root: Place, kind: str) -> None:
    artifact_id = publish(source, range(200))
    with serving(root) as service:
        url = service.url if kind == "http" else service.repository.url
        command = [sys.executable, "-c", KILLED, source.url, url, artifact_id]
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL
        sent = int(killed.stdout)
        with open_repository(url) as destination:
            with pytest.raises(ArtifactNotFound):
                destination.artifact(artifact_id, NS)
            report = copy_artifact(source, destination, artifact_id, NS, NS)
            assert report.bytes_sent == report.bytes_total - sent
            assert 0 < report.bytes_sent < report.bytes_total
            assert contents_of(destination, artifact_id) == contents_of(source, artifact_id)


def test_an_interrupted_copy_ends_its_threads_and_goes_on_later(source: Repository, destination: Repository) -> None:
    artifact_id = publish(source, range(200))

    def interrupt(_: str, done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        copy_artifact(source, destination, artifact_id, NS, NS, progress=interrupt)
    assert threading.active_count() == before
    assert destination.stats(NS).artifacts == 0
    report = copy_artifact(source, destination, artifact_id, NS, NS)
    assert report.bytes_sent < report.bytes_total * 2 // 3
    assert destination.check(artifact_id, NS).ok


def test_huggingface_hub_3643_altered_bytes_of_the_right_length_are_named_and_nothing_is_published(
    source: Repository, destination: Repository, tmp_path: Path
) -> None:
    artifact_id = publish(source, range(100))
    altered = sorted(contents_of(source, artifact_id))[7]
    alter(tmp_path / "source", altered)
    with pytest.raises(ChunkCorrupt, match=altered):
        copy_artifact(source, destination, artifact_id, NS, NS)
    with pytest.raises(ArtifactNotFound):
        destination.artifact(artifact_id, NS)


def test_other_bytes_under_a_key_of_the_destination_are_a_divergence(
    source: Repository, destination: Repository
) -> None:
    artifact_id = publish(source, range(100))
    publish(destination, range(100), seed=1)
    with pytest.raises(Divergence):
        copy_artifact(source, destination, artifact_id, NS, NS)
    assert len(destination.divergences(NS)) == 1


def test_bad_arguments_change_nothing(source: Repository, destination: Repository) -> None:
    artifact_id = publish(source, range(40))
    for error, arguments in (
        (InvalidInput, {"workers": 0}),
        (InvalidInput, {"workers": 1000}),
        (MalformedName, {"tag": "no tag"}),
        (MalformedName, {"destination_namespace": "NOT"}),
        (ArtifactNotFound, {"ref": "sha256:" + "0" * 64}),
    ):
        wanted: dict[str, Any] = {"ref": artifact_id, "source_namespace": NS, "destination_namespace": NS, **arguments}
        with pytest.raises(error):
            copy_artifact(source, destination, **wanted)
    stats = destination.stats(NS)
    assert (stats.artifacts, stats.chunks) == (0, 0)


def test_memory_is_a_buffer_for_each_thread_whatever_the_size(source: Repository, destination: Repository) -> None:
    array = {"dtype": "float32", "heads": 8, "dim": 64, "chunk_layers": 1, "chunk_heads": 8}
    arrays = [{"name": name, **array} for name in ("k", "v")]
    groups = [{"name": "full", "kind": "full", "layers": [0], "window": None, "arrays": arrays}]
    made_with = fingerprint(block_tokens=256, state={"groups": groups})
    chunk = 256 * 8 * 64 * 4
    artifact_id = publish(source, range(256 * 32), fingerprint=made_with)
    tracemalloc.start()
    try:
        report = copy_artifact(source, destination, artifact_id, NS, NS, workers=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.bytes_sent > 64 * chunk
    assert peak < 2 * chunk + 4 * 2**20
