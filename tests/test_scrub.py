"""Scrub: whatever is damaged is found, named with the artifacts it belongs to, and healed where it can be."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pushing import Artifact, push
from serving import served
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.client.repair import repair
from repo_service.domain.errors import ChunkCorrupt, DocumentCorrupt, InvalidInput
from repo_service.domain.repository import Repository
from repo_service.services.repository import open_local

MADE_WITH = fingerprint()
KINDS = {
    "chunks": "chunk",
    "blocks": "block record",
    "artifacts": "manifest",
    "entries": "entry",
    "tags": "tag",
    "divergences": "divergence",
}


def made(seed: int, count: int = 40, state: int = 0) -> Artifact:
    return artifact(random.Random(seed).choices(range(1000), k=count), MADE_WITH, seed=state)


def filled(repository: Repository) -> str:
    """One artifact with a tag and a divergence."""
    info, _ = push(repository, made(1))
    repository.set_tag("default", "name", info.id)
    with pytest.raises(Exception, match="other bytes"):
        push(repository, made(1, state=1))
    return info.id


def files(root: Path, kind: str) -> list[Path]:
    return sorted(path for path in (root / kind).rglob("*") if path.is_file())


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "altered":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif how == "truncated":
        path.write_bytes(data[:-1])
    else:
        path.unlink()


def test_a_whole_repository_has_no_damage(repository: Repository) -> None:
    filled(repository)
    report = repository.scrub()
    assert report.damage == []
    assert (report.artifacts, report.block_records) == (1, 3)
    assert report.chunks == repository.stats("default").chunks
    assert report.bytes == repository.stats("default").unique_bytes


@pytest.mark.parametrize("how", ["altered", "truncated", "lost"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_named_and_healed(root: Path, kind: str, how: str, tmp_path: Path) -> None:
    with open_repository(f"file://{root}") as repository, open_repository(f"file://{tmp_path}/whole") as whole:
        push(whole, made(1))
        find_and_heal(repository, filled(repository), whole, root, kind, how)


def test_a_service_finds_and_heals_damage_too(root: Path, tmp_path: Path) -> None:
    with served(root) as url, open_repository(url) as repository, open_repository(f"file://{tmp_path}/whole") as whole:
        push(whole, made(1))
        artifact_id = filled(repository)
        for kind in KINDS:
            find_and_heal(repository, artifact_id, whole, root, kind, "altered")


def find_and_heal(repository: Repository, artifact_id: str, whole: Repository, root: Path, kind: str, how: str) -> None:
    path = files(root, kind)[0]
    before = path.read_bytes()
    damage(path, how)
    (found,) = repository.scrub().damage
    assert found.kind == KINDS[kind]
    aside = root / "quarantine" / path.relative_to(root)
    assert (found.quarantined is None) == (how == "lost")
    assert aside.exists() == (how != "lost")
    if kind in ("entries", "tags", "divergences"):
        assert found.healed
    else:
        assert found.artifacts == [("default", artifact_id)]
        with pytest.raises((ChunkCorrupt, DocumentCorrupt)):
            read(repository, artifact_id)
        (healed,) = repair(whole, repository, [("default", artifact_id)])
        assert healed.healed, healed.reason
        if kind == "chunks":
            assert healed.bytes_sent == len(before), "only what is damaged is sent"
    assert path.read_bytes() == before
    assert repository.scrub().damage == []
    read(repository, artifact_id)
    assert repository.reindex().corrupt == []


def read(repository: Repository, artifact_id: str) -> None:
    report = repository.check(artifact_id, "default")
    if report.corrupt:
        raise ChunkCorrupt(report.corrupt[0])


def test_a_damaged_chunk_that_a_reader_met_is_sent_again_by_the_next_push(repository: Repository, root: Path) -> None:
    one = made(1)
    info, _ = push(repository, one)
    path = files(root, "chunks")[3]
    damage(path, "altered")
    digest = f"blake3:{path.parent.name}{path.name}"
    with pytest.raises(ChunkCorrupt):
        read(repository, info.id)
    again, sent = push(repository, one)
    assert again == info
    assert sent == [digest]
    read(repository, info.id)
    _, sent = push(repository, one)
    assert sent == []


def test_a_damaged_chunk_survives_the_end_of_a_push_and_goes_with_its_artifact(root: Path) -> None:
    with open_local(f"file://{root}") as repository:
        info, _ = push(repository, made(1))
        path = files(root, "chunks")[0]
        damage(path, "altered")
        repository.scrub()
        running = repository.begin_push(MADE_WITH, "default")
        assert len(running.offer(made(1)[1])) == 1
        running.abort()
        repository.collect_garbage(grace_s=0)
        assert path.exists(), "its artifact still refers to it"
        assert repository.reindex().corrupt == []
        repository.delete(info.id, "default")
        assert not path.exists()


def test_damage_without_a_source_is_left_and_said(repository: Repository, root: Path, tmp_path: Path) -> None:
    info, _ = push(repository, made(1))
    damage(files(root, "chunks")[0], "altered")
    with open_repository(f"file://{tmp_path}/empty") as empty:
        (left,) = repair(empty, repository, [("default", info.id)])
        assert not left.healed
        assert "artifact_not_found" in str(left.reason)


def test_the_command_heals_and_says_by_its_exit_code_whether_damage_is_left(root: Path, tmp_path: Path) -> None:
    for place in (root, tmp_path / "whole"):
        with open_repository(f"file://{place}") as repository:
            push(repository, made(1))
    damage(files(root, "chunks")[0], "lost")
    command = [sys.executable, "-m", "repo_service.cli", "scrub", "--repo", f"file://{root}", "--json"]
    left = subprocess.run(command, check=False, capture_output=True, text=True)
    assert left.returncode == 1, left.stderr
    assert len(json.loads(left.stdout)["damage"]) == 1
    command += ["--repair-from", f"file://{tmp_path}/whole"]
    healed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert healed.returncode == 0, healed.stderr
    assert [one["healed"] for one in json.loads(healed.stdout)["repairs"]] == [True]


def test_a_rate_is_kept_and_a_scrub_can_be_ended(root: Path) -> None:
    with open_local(f"file://{root}") as repository:
        push(repository, made(1))
        size = repository.stats("default").unique_bytes
        began = time.monotonic()
        assert repository.scrub(bytes_per_s=size / 0.5).bytes == size
        assert time.monotonic() - began > 0.4
        assert repository.scrub(ended=lambda _: True).chunks == 1
        with pytest.raises(InvalidInput):
            repository.scrub(bytes_per_s=0)
