"""A repository in a bucket: where its index is, whose it is, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faulty import Faults
from pushing import contents_of, offer, push
from servers import READER, S3Server
from serving import reached, served
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.client.transfer import copy_artifact
from repo_service.domain.errors import Conflict, InvalidInput, MalformedUrl, NotARepository, Unavailable
from repo_service.domain.views import ArtifactQuery
from repo_service.services.opening import open_local
from repo_service.services.repository import LocalRepository
from repo_service.storage import S3Store

MADE = artifact(list(range(40)), fingerprint())
OTHER = artifact(list(range(50)), fingerprint())


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"s3://{s3.bucket}/{s3.prefix()}"


@pytest.fixture
def index(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/one.sqlite"


@pytest.fixture
def other(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/other.sqlite"


def opened(url: str, index: str, **options: bool) -> LocalRepository:
    return open_local(url, index_url=index, **options)


def test_a_server_that_ignores_if_none_match_is_refused_at_every_open(
    url: str, index: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker of the refused attempt stayed, and the second attempt found a repository."""
    put = S3Store._put

    async def overwrite(store: S3Store, path: str, body: bytes, mark: str, **_: str) -> None:
        await put(store, path, body, mark)

    with monkeypatch.context() as broken:
        broken.setattr(S3Store, "_put", overwrite)
        for _ in range(2):
            with pytest.raises(NotARepository, match="ignores If-None-Match"):
                opened(url, index)
    left = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=url.removeprefix(f"s3://{s3.bucket}/"))
    assert left["KeyCount"] == 0
    opened(url, index).close()


def test_what_a_crash_in_the_first_open_leaves_does_not_stop_the_second(url: str, index: str, s3: S3Server) -> None:
    prefix = url.removeprefix(f"s3://{s3.bucket}/")
    s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/uploads/kvgraft-probe/{'0' * 32}", Body=b"first")
    with opened(url, index) as repository:
        [gone] = repository.collect_garbage(grace_s=0).removed
        assert gone.name == f"uploads/kvgraft-probe/{'0' * 32}"
    s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}-2/uploads/theirs", Body=b"x")
    with pytest.raises(NotARepository, match="not empty"):
        opened(f"{url}-2", index)


def test_without_an_index_an_s3_repository_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGRAFT_INDEX", raising=False)
    with pytest.raises(InvalidInput, match=r"KVGRAFT_INDEX.*sqlite:///.*PostgreSQL"):
        open_repository(url)


def test_the_index_may_come_from_the_environment(url: str, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRAFT_INDEX", index)
    with open_repository(url) as repository:
        info, _ = push(repository, MADE)
    with open_repository(url, index=index) as repository:
        assert repository.check(info.id, "default").ok


@pytest.mark.usefixtures("s3")
def test_a_directory_may_have_its_index_elsewhere_and_then_has_no_second(tmp_path: Path, index: str) -> None:
    url = f"file://{tmp_path}/repository"
    with open_repository(url, index=index) as repository:
        info, _ = push(repository, MADE)
    assert not (tmp_path / "repository" / "index.sqlite").exists()
    with pytest.raises(Conflict, match="reindex --take-over"):
        open_repository(url)
    with open_repository(url, index=index) as repository:
        assert repository.check(info.id, "default").ok


def test_every_command_finds_the_index_of_a_directory_that_has_it_elsewhere(
    tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `serve` knew it; `gc`, `scrub`, `reindex --take-over` and the rest opened one inside, and were refused."""
    directory = tmp_path / "repository"
    with open_repository(directory.as_uri(), index=index) as repository:
        push(repository, MADE)
    monkeypatch.setenv("KVGRAFT_INDEX", index)
    for arguments in ("scrub",), ("gc",), ("reindex", "--take-over"):
        command = [sys.executable, "-m", "repo_service.cli", *arguments, "--repo", directory.as_uri(), "--json"]
        subprocess.run(command, capture_output=True, check=True, env=os.environ.copy())
    with open_repository(directory.as_uri()) as repository:
        assert repository.stats("default").artifacts == 1
    assert not (directory / "index.sqlite").exists()


def test_a_directory_with_its_index_inside_keeps_it_whatever_the_environment_says(
    tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "repository").as_uri()
    monkeypatch.setenv("KVGRAFT_INDEX", index)
    for _ in range(2):
        open_repository(url).close()
    assert (tmp_path / "repository" / "index.sqlite").exists()
    assert not (tmp_path / "one.sqlite").exists()


def test_an_index_is_named_where_the_repository_is_opened() -> None:
    for options in ({"index": "sqlite:///x"}, {"take_over": True}):
        with pytest.raises(InvalidInput, match="has its own index"):
            open_repository("http://127.0.0.1:1", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="in memory"):
        open_repository("memory:", index="sqlite:///x")


def test_nothing_is_taken_over_where_the_index_lies_inside(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing to take over"):
        open_local(f"file://{tmp_path}/repository", take_over=True)


def test_a_prefix_in_use_or_a_missing_repository_is_refused(s3: S3Server, url: str, index: str) -> None:
    with pytest.raises(NotARepository, match="no repository at s3://"):
        opened(url, index, create=False)
    s3.client().put_object(Bucket=s3.bucket, Key=f"{url.rpartition('/')[2]}/notes.txt", Body=b"mine")
    with pytest.raises(NotARepository, match="not empty"):
        opened(url, index)
    with pytest.raises(Unavailable, match="Make the bucket"):
        opened("s3://no-such-bucket/a", index)
    with pytest.raises(MalformedUrl):
        opened(f"{url}?x", index)


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf"])
def test_a_deadline_that_is_none_is_refused(url: str, index: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRAFT_S3_SECONDS", value)
    with pytest.raises(InvalidInput, match="KVGRAFT_S3_SECONDS"):
        opened(url, index)


def test_a_reader_without_the_right_to_write_is_told(url: str, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url, index) as repository:
        info, _ = push(repository, MADE)
        for name, value in READER.items():
            monkeypatch.setenv(name, value)
        with opened(url, index) as reader:
            assert reader.check(info.id, "default").ok
            with pytest.raises(Unavailable, match="AccessDenied"):
                push(reader, OTHER)
        assert repository.check(info.id, "default").ok


def test_a_second_index_is_refused_until_it_takes_over(url: str, index: str, other: str) -> None:
    with opened(url, index) as repository:
        first, _ = push(repository, MADE)
        running = repository.begin_push(OTHER[0].fingerprint, "default")
        for digest in offer(running, OTHER[0], OTHER[1]):
            running.put(digest, OTHER[2][digest])
        with pytest.raises(Conflict, match=r"belongs to the index [0-9a-f]{32}.*kvgraft reindex --take-over"):
            opened(url, other)
        with opened(url, other, take_over=True) as taken:
            assert taken.reindex().artifacts == 1
            assert taken.check(first.id, "default").ok
        for refused in (
            lambda: running.commit(OTHER[0]),
            lambda: repository.begin_push(MADE[0].fingerprint, "default"),
            lambda: repository.delete(first.id, "default"),
            lambda: repository.collect_garbage(grace_s=0),
            repository.reindex,
        ):
            with pytest.raises(Conflict, match="take-over"):
                refused()
        assert repository.check(first.id, "default").ok, "reading harms nobody"
    with opened(url, other) as taken:
        assert taken.collect_garbage(grace_s=0).chunks > 0, "what was pushed and never published"
        assert taken.check(first.id, "default").ok
    with pytest.raises(Conflict):
        opened(url, index)


def test_a_take_over_that_was_cut_short_is_finished_by_whoever_opens_next(url: str, index: str, other: str) -> None:
    with opened(url, index) as repository:
        info, _ = push(repository, MADE)
    with opened(url, other, take_over=True) as repository:
        assert repository.stats("default").artifacts == 0
    with opened(url, other) as repository:
        assert repository.check(info.id, "default").ok


def test_i5_a_lost_index_is_rebuilt_by_taking_over(
    url: str, index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(url, index) as repository:
        info, _ = push(repository, MADE)
        repository.set_tag("default", "kept", info.id)
        before = repository._index.dump()
    for path in tmp_path.glob("one.sqlite*"):
        path.unlink()
    monkeypatch.setenv("KVGRAFT_INDEX", index)
    command = [sys.executable, "-m", "repo_service.cli", "reindex", "--repo", url, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ.copy())
    assert run.returncode != 0
    assert "--take-over" in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    run = subprocess.run([*command, "--take-over"], capture_output=True, text=True, check=True, env=os.environ.copy())
    assert json.loads(run.stdout)["artifacts"] == 1
    with opened(url, index) as repository:
        assert repository._index.dump() == before


@pytest.mark.parametrize("damage", [b"", b"{", b"{}"])
def test_a_damaged_ownership_is_no_ownership_of_anyone(s3: S3Server, url: str, index: str, damage: bytes) -> None:
    opened(url, index).close()
    place = {"Bucket": s3.bucket, "Key": f"{url.rpartition('/')[2]}/index.json"}
    s3.client().put_object(Body=damage, **place)
    with pytest.raises(Conflict, match="take-over"):
        opened(url, index)
    with opened(url, index, take_over=True) as repository:
        repository.reindex()
    opened(url, index).close()


def test_a_service_serves_a_bucket(url: str, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRAFT_INDEX", index)
    with served(url) as address, open_repository(address) as repository, opened(url, index) as beside:
        info, sent = push(repository, MADE)
        assert sent
        assert repository.check(info.id, "default").ok
        assert beside.check(info.id, "default").ok
        again, sent = push(beside, MADE)
        assert (again, sent) == (info, [])
        repository.delete(info.id, "default")
        assert [key for kind in ("chunks", "entries", "artifacts") for key in beside._store.list(kind)] == []


@pytest.mark.parametrize("how", ["embedded", "service"])
def test_no_read_lists_the_bucket(
    how: str, url: str, index: str, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing costs what the bucket holds, whatever is read."""
    monkeypatch.setenv("KVGRAFT_INDEX", index)
    with reached(how, url) as repository, open_repository(f"file://{tmp_path}/pulled") as pulled:
        info, _ = push(repository, MADE)
        repository.set_tag("default", "kept", info.id)
        faults.requests.clear()
        assert repository.artifact("kept", "default").id == info.id
        assert contents_of(repository, info.id) == MADE[2]
        found = repository.match("default", [record.key for record in MADE[1]])
        assert found is not None
        assert found.blocks == len(MADE[1])
        assert [item.id for item in repository.query(ArtifactQuery(tag="kept")).items] == [info.id]
        assert [tag.name for tag in repository.tags("default")] == ["kept"]
        assert repository.stats("default").artifacts == 1
        copy_artifact(repository, pulled, info.id, "default", "default")
        assert contents_of(pulled, info.id) == MADE[2]
        assert repository.check(info.id, "default").ok
    asked = list(faults.requests)
    assert sum(path.count("/chunks/") for _, path, _ in asked) >= 2 * len(MADE[2]), "it was read through here"
    # Objects have a key below the bucket; what has none is asked of the bucket, as listings are.
    listings = [ask for ask in asked if "list-type" in ask[1] or "/" not in ask[1].partition("?")[0].strip("/")]
    assert listings == []
    with open_repository(url) as again:
        faults.requests.clear()
        again.collect_garbage(grace_s=0)
    assert any("list-type=2" in path for _, path, _ in faults.requests), "listings would have been seen"
