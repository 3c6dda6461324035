"""One directory, several processes; and directories that are no repository."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pushing import push
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.domain.access import Scope
from repo_service.domain.errors import KvgraftError, MalformedUrl, NewerFormat, NotARepository, StorageFull
from repo_service.domain.views import ArtifactQuery
from repo_service.index import Index
from repo_service.services.documents import manifest_key
from repo_service.services.opening import open_local

PROCESSES, EACH = 4, 6


def push_some(url: str, seed: int) -> None:
    prefix = random.Random(0).choices(range(1000), k=64)
    with open_repository(url) as repository:
        for i in range(EACH):
            tokens = prefix + random.Random(f"{seed} {i}").choices(range(1000), k=40)
            info, _ = push(repository, artifact(tokens, fingerprint()))
            assert repository.check(info.id, "default").ok


def test_several_processes_open_one_repository_reading_and_writing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/repository"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=push_some, args=(url, seed)) for seed in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    with open_repository(url) as repository:
        assert repository.query(ArtifactQuery()).count == PROCESSES * EACH
        assert repository.stats("default").divergences == 0


def test_a_directory_with_other_things_in_it_is_no_repository(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NotARepository, match=r"notes\.txt"):
        open_repository(f"file://{tmp_path}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


def test_a_file_is_no_repository(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotARepository):
        open_repository(f"file://{tmp_path}/file")


def test_a_missing_directory_is_not_made_for_a_reader(tmp_path: Path) -> None:
    with pytest.raises(NotARepository):
        open_local(f"file://{tmp_path}/typo", create=False)
    assert not (tmp_path / "typo").exists()


def test_a_repository_of_a_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    open_repository(f"file://{root}").close()
    marker = json.loads((root / "kvgraft.json").read_text())
    (root / "kvgraft.json").write_text(json.dumps({**marker, "version": 99}))
    with pytest.raises(NewerFormat, match="99"):
        open_repository(f"file://{root}")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format":"other","version":1}', b'{"version":true}'])
def test_a_damaged_marker_is_named(tmp_path: Path, damage: bytes) -> None:
    root = tmp_path / "repository"
    open_repository(f"file://{root}").close()
    (root / "kvgraft.json").write_bytes(damage)
    with pytest.raises(NotARepository, match=r"kvgraft\.json"):
        open_repository(f"file://{root}")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "ftp://host/x",
        "file://",
        "file:///",
        "file://host/path",
        "http://",
        "http://h/path",
        "s3//x",
        "file:///a\0b",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(MalformedUrl):
        open_repository(url)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_refuses_a_push_and_leaves_the_rest_readable(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(mount)], check=False)
    if done.returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        with open_repository(f"file://{mount}/repository") as repository:
            first, _ = push(repository, artifact(list(range(40)), fingerprint()))
            (mount / "ballast").write_bytes(bytes(100 * 2**10))
            filling = mount / "filling"
            with pytest.raises(OSError, match="No space"):
                fill(filling)
            with pytest.raises(StorageFull):
                push(repository, artifact(list(range(100, 400)), fingerprint()))
            assert repository.check(first.id, "default").ok
            filling.unlink()
            second, _ = push(repository, artifact(list(range(100, 400)), fingerprint()))
            assert repository.check(second.id, "default").ok
            assert not list((mount / "repository" / "tmp").iterdir())
            with pytest.raises(OSError, match="No space"):
                fill(filling)
            assert repository.delete(second.id, "default").chunks > 0, "what frees space works without any"
            assert repository.collect_garbage(grace_s=0).unreadable == []
            assert repository.check(first.id, "default").ok
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_process_killed_in_a_push_leaves_nothing_visible(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/repository"
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from synthetic import artifact, fingerprint; from pushing import offer\n"
        "from repo_service.client import open_repository\n"
        "manifest, records, contents = artifact(list(range(100)), fingerprint())\n"
        "push = open_repository(sys.argv[1]).begin_push(manifest.fingerprint, 'default')\n"
        "for digest in offer(push, manifest, records)[:7]: push.put(digest, contents[digest])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, url, str(Path(__file__).parent)], check=False)
    assert done.returncode == -9
    with open_repository(url) as repository:
        assert repository.query(ArtifactQuery()).count == 0
        made = artifact(list(range(100)), fingerprint())
        info, sent = push(repository, made)
        assert len(sent) == len(made[2]) - 7
        assert repository.check(info.id, "default").ok


def test_errors_say_what_to_do() -> None:
    with pytest.raises(KvgraftError) as error:
        open_repository("nowhere")
    assert "file:///" in str(error.value)


def test_i5_a_lost_index_is_rebuilt_when_the_repository_is_opened(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    with open_repository(f"file://{root}") as repository:
        info, _ = push(repository, artifact(list(range(40)), fingerprint()))
        repository.set_tag("default", "kept", info.id)
    for path in root.glob("index.sqlite*"):
        path.unlink()
    with open_repository(f"file://{root}") as repository:
        assert repository.artifact("kept", "default").id == info.id
        assert repository.check(info.id, "default").ok


@pytest.mark.parametrize("method", ["publish", "unpublish", "set_tag", "delete_tag"])
def test_i5_where_the_index_cannot_commit_the_store_is_as_before(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def documents() -> dict[str, bytes]:
        files = [p for kind in ("entries", "tags") for p in (tmp_path / "repository" / kind).rglob("*.json")]
        return {str(p): p.read_bytes() for p in files}

    with open_repository(f"file://{tmp_path}/repository") as repository:
        stored_info, _ = push(repository, artifact(list(range(40)), fingerprint()))
        other, _ = push(repository, artifact(list(range(50)), fingerprint()))
        repository.set_tag("default", "kept", stored_info.id)
        before = documents()
        index = repository._index  # type: ignore[attr-defined]
        whole = getattr(index, method)

        def full(*arguments: Any) -> None:
            """The write goes through, the commit does not."""
            *rest, write, undo = arguments

            def write_in_vain(value: Any) -> None:
                write(value)
                raise StorageFull("the index can't grow")

            whole(*rest, write_in_vain, undo)

        monkeypatch.setattr(index, method, full)
        uses = {
            "publish": lambda: push(repository, artifact(list(range(60)), fingerprint())),
            "unpublish": lambda: repository.delete(stored_info.id, "default"),
            "set_tag": lambda: repository.set_tag("default", "kept", other.id),
            "delete_tag": lambda: repository.delete_tag("default", "kept"),
        }
        with pytest.raises(StorageFull):
            uses[method]()
        assert documents() == before


def test_whatever_takes_something_away_does_so_in_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a push could not be given up, and kept what it had sent until its lease was over."""
    made = artifact(range(40))
    with open_local((tmp_path / "r").as_uri()) as repository:
        reserve = tmp_path / "r" / "index.sqlite-reserve"
        token = repository.create_access_token(Scope.READ, ["*"]).info

        def full(method: str) -> None:
            whole = getattr(Index, method)

            def call(*arguments: Any) -> Any:
                if reserve.exists():
                    raise StorageFull("the index can't grow")
                return whole(*arguments)

            monkeypatch.setattr(Index, method, call)

        for method in "end_push", "revoke_token", "drop":
            full(method)
        push(repository, made)
        abandoned = repository.begin_push(made[0].fingerprint, "default")
        abandoned.abort()
        assert repository._index.running_pushes() == 0
        assert repository.revoke_access_token(token.id).revoked_at
        (tmp_path / "r" / manifest_key(made[0].id)).unlink()
        repository._index.set_incomplete()
    with open_local((tmp_path / "r").as_uri()) as repository:
        repository.delete(made[0].id, "default")
        assert repository.collect_garbage(grace_s=0).unreadable == []
        assert reserve.exists(), "there was room for it again"
