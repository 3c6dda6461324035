"""`mirror`: between every two kinds of repository, again and again, interrupted, and with faults on both sides."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from places import FULL, Place
from pushing import contents_of, expiring_once, push
from synthetic import artifact
from test_api import serving
from test_copy import alter

from repo_service.cli import output
from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.client.mirror import MirrorReport, mirror
from repo_service.domain.errors import (
    Divergence,
    InvalidInput,
    MalformedName,
    NotFound,
    QuotaExceeded,
    StorageFull,
    Unavailable,
)
from repo_service.domain.repository import Repository
from repo_service.domain.views import ArtifactQuery
from repo_service.services.documents import block_record_key, manifest_key
from repo_service.services.repository import LocalRepository

pytestmark = pytest.mark.everywhere

NS = "default"
WORKERS = 2


@pytest.fixture
def memory() -> Iterator[tuple[Repository, Repository]]:
    with open_repository("memory:") as source, open_repository("memory:") as destination:
        yield source, destination


def give(
    repository: Repository, tokens: Sequence[int], tag: str | None = None, namespace: str = NS, **options: Any
) -> str:
    """Publish a synthetic artifact; returns its id."""
    info, _ = push(repository, artifact(tokens, **options), namespace)
    if tag is not None:
        repository.set_tag(namespace, tag, info.id)
    return info.id


def ids(repository: Repository, namespace: str = NS) -> set[str]:
    return {info.id for info in repository.query(ArtifactQuery(namespace=namespace, limit=1000)).items}


def tags(repository: Repository, namespace: str = NS) -> dict[str, str]:
    return {tag.name: tag.artifact_id for tag in repository.tags(namespace)}


def held(repository: Repository, namespace: str = NS) -> dict[str, int]:
    """Sizes of the chunks of all artifacts, by digest."""
    sizes: dict[str, int] = {}
    for artifact_id in ids(repository, namespace):
        manifest = repository.manifest(artifact_id, namespace)
        sizes |= {d: s.size for d, s in manifest.stored_chunks(repository.records(manifest, namespace)).items()}
    return sizes


def failures(report: MirrorReport) -> dict[str, str]:
    return {failure.artifact_id: failure.code for failure in report.artifacts_failed}


KINDS = ("memory", "file", "http", "s3")
WAYS = [f"{a} to {b}" for a in KINDS for b in KINDS]


@pytest.mark.parametrize("way", [way for way in WAYS if FULL or "s3" not in way or way == "file to s3"])
def test_a_mirror_holds_what_its_source_holds_and_the_next_one_sends_nothing(
    tmp_path: Path, way: str, request: pytest.FixtureRequest
) -> None:
    with ExitStack() as stack:

        def opened(kind: str, name: str) -> Repository:
            if kind == "memory":
                return stack.enter_context(open_repository("memory:"))
            if kind == "s3":
                server = request.getfixturevalue("s3")
                url, index = f"s3://{server.bucket}/{server.prefix()}", f"sqlite:///{tmp_path}/{name}.sqlite"
                return stack.enter_context(open_repository(url, index=index))
            service = stack.enter_context(serving(tmp_path / name))
            url = service.url if kind == "http" else service.repository.url
            return stack.enter_context(open_repository(url))

        first, _, second = way.partition(" to ")
        source, destination = opened(first, "source"), opened(second, "destination")
        short, long = give(source, range(32), "short"), give(source, range(40), "long")
        private = give(source, range(50, 60), "mine", "team-a", private=True)
        report = mirror(source, destination)
        assert (report.namespaces, report.artifacts_copied, report.tags_set) == ([NS, "team-a"], 3, 3)
        assert (report.artifacts_present, report.extra_artifacts, report.artifacts_failed) == (0, 0, [])
        sizes = [*held(source).values(), *held(source, "team-a").values()]
        assert (report.chunks_sent, report.bytes_sent) == (len(sizes), sum(sizes))
        assert tags(destination) == tags(source) == {"short": short, "long": long}
        assert tags(destination, "team-a") == {"mine": private}
        assert contents_of(destination, long) == contents_of(source, long)
        assert destination.check(private, "team-a").ok
        again = mirror(source, destination)
        assert again == MirrorReport(
            namespaces=[NS, "team-a"],
            artifacts_copied=0,
            artifacts_present=3,
            artifacts_healed=0,
            artifacts_failed=[],
            artifacts_deleted=0,
            extra_artifacts=0,
            tags_set=0,
            tags_deleted=0,
            chunks_sent=0,
            bytes_sent=0,
        )


def test_150_artifacts_are_found_over_pages_whatever_the_destination_has(
    memory: tuple[Repository, Repository],
) -> None:
    source, destination = memory
    # Of equal lengths and of different ones, so that both parts of the order count.
    made = [range(i, i + 1 + i % 7) for i in range(150)]
    wanted = [give(source, tokens) for tokens in made]
    assert [give(destination, tokens) for tokens in made[::3]] == wanted[::3]
    extra = [give(destination, range(5000 + i, 5003 + i)) for i in range(60)]
    report = mirror(source, destination)
    assert (report.artifacts_copied, report.artifacts_present, report.extra_artifacts) == (100, 50, 60)
    assert ids(destination) == {*wanted, *extra}
    assert mirror(source, destination, delete=True).artifacts_deleted == 60
    assert ids(destination) == ids(source) == set(wanted)


def test_a_push_that_expires_in_a_mirror_begins_again_and_is_counted_once(
    source: Repository, destination: Repository, root: Place
) -> None:
    push(source, artifact(range(90)))
    ending = expiring_once(root, 20)
    report = mirror(source, destination, workers=1, progress=ending)
    assert (report.artifacts_copied, report.artifacts_failed, report.chunks_sent) == (1, [], 37)


def test_an_empty_source_gives_nothing_and_deletes_nothing(memory: tuple[Repository, Repository]) -> None:
    source, destination = memory
    report = mirror(source, destination, delete=True)
    assert (report.namespaces, report.artifacts_copied) == ([], 0)
    kept = give(destination, range(20), "kept")
    report = mirror(source, destination)
    assert (report.namespaces, report.extra_artifacts, report.artifacts_copied) == ([NS], 1, 0)
    with pytest.raises(InvalidInput, match="is empty"):
        mirror(source, destination, delete=True)
    assert tags(destination) == {"kept": kept}


def test_tags_follow_and_those_of_the_destination_stay(memory: tuple[Repository, Repository]) -> None:
    source, destination = memory
    one, two = give(source, range(20), "latest"), give(source, range(30), "other")
    mirror(source, destination)
    source.set_tag(NS, "latest", two)
    source.delete_tag(NS, "other")
    destination.set_tag(NS, "own", one)
    report = mirror(source, destination)
    assert (report.tags_set, report.tags_deleted) == (1, 0)
    assert tags(destination) == {"latest": two, "other": two, "own": one}


def test_delete_removes_what_the_source_does_not_have(source: Repository, destination: Repository) -> None:
    one, two = give(source, range(64), "latest"), give(source, range(80))
    mirror(source, destination)
    elsewhere = give(destination, range(10), "mine", "other")
    source.set_tag(NS, "latest", two)
    source.delete(one, NS)
    destination.set_tag(NS, "old", two)
    left = mirror(source, destination)
    assert (left.extra_artifacts, left.artifacts_deleted, left.tags_deleted) == (2, 0, 0)
    chosen = mirror(source, destination, namespaces=[NS], delete=True)
    assert (chosen.artifacts_deleted, chosen.tags_deleted, chosen.extra_artifacts) == (1, 1, 0)
    assert (ids(destination), tags(destination)) == ({two}, {"latest": two})
    assert destination.check(two, NS).ok
    assert ids(destination, "other") == {elsewhere}
    rest = mirror(source, destination, delete=True)
    assert (rest.artifacts_deleted, rest.tags_deleted) == (1, 1)
    assert destination.namespaces() == [NS]


def test_only_the_namespaces_asked_for_are_mirrored(memory: tuple[Repository, Repository]) -> None:
    source, destination = memory
    for name in "a", "b", "c":
        give(source, range(20), namespace=name)
    report = mirror(source, destination, namespaces=["c", "a", "c"])
    assert report.namespaces == destination.namespaces() == ["a", "c"]


def test_bad_arguments_change_nothing(memory: tuple[Repository, Repository]) -> None:
    source, destination = memory
    give(source, range(20))
    for error, arguments in (
        (InvalidInput, {"workers": 0}),
        (MalformedName, {"namespaces": ["NOT"]}),
        (NotFound, {"namespaces": [NS, "mistyped"]}),
    ):
        wanted: dict[str, Any] = arguments
        with pytest.raises(error):
            mirror(source, destination, **wanted)
    assert destination.namespaces() == []


def test_a_repository_is_not_mirrored_onto_itself(tmp_path: Path) -> None:
    with serving(tmp_path / "one") as service, open_repository(service.repository.url) as here:
        give(here, range(20))
        shutil.copytree(tmp_path / "one", tmp_path / "copy")
        for url in here.url, service.url, (tmp_path / "copy").as_uri():
            with open_repository(url) as there, pytest.raises(InvalidInput, match=here.info().repository_id):
                mirror(here, there, delete=True)


# Faults


def test_a_corrupt_artifact_is_named_and_the_others_are_copied(
    source: Repository, destination: Repository, tmp_path: Path
) -> None:
    made = [give(source, range(100 * i, 100 * i + 40), f"tag-{i}") for i in range(4)]
    chunk, manifest = made[1], made[2]
    alter(tmp_path / "source", next(iter(contents_of(source, chunk))))
    path = tmp_path / "source" / manifest_key(manifest)
    path.write_bytes(path.read_bytes().replace(b"40", b"41", 1))
    report = mirror(source, destination)
    assert failures(report) == {chunk: "chunk_corrupt", manifest: "document_corrupt"}
    assert report.artifacts_copied == report.tags_set == 2
    assert tags(destination) == {"tag-0": made[0], "tag-3": made[3]}
    assert all(destination.check(artifact_id, NS).ok for artifact_id in ids(destination))
    assert 0 < report.chunks_sent < len(held(destination)) + len(artifact(range(100, 140))[2])


def test_a_divergence_is_named_recorded_and_ends_nothing(memory: tuple[Repository, Repository]) -> None:
    source, destination = memory
    made = [give(source, range(100 * i, 100 * i + 40)) for i in range(3)]
    other = give(destination, range(100, 140), seed=1)
    report = mirror(source, destination)
    assert failures(report) == {made[1]: Divergence.code}
    assert "already stored with other bytes" in report.artifacts_failed[0].message
    assert (report.artifacts_copied, report.extra_artifacts) == (2, 1)
    assert len(destination.divergences(NS)) == 1
    assert failures(mirror(source, destination, delete=True)) == {made[1]: Divergence.code}
    assert ids(destination) == {made[0], made[2]}
    assert other not in ids(destination)
    assert mirror(source, destination).artifacts_copied == 1


@pytest.mark.parametrize("by", ["this process", "another one"])
def test_an_artifact_deleted_at_the_source_meanwhile_is_no_error(
    source: Repository, destination: Repository, by: str
) -> None:
    made = [give(source, range(100 * i, 100 * i + 40 + i)) for i in range(4)]
    with open_repository(source.url) as another:
        deleting = source if by == "this process" else another

        def delete(kind: str, done: int, _: int) -> None:
            if kind == "bytes" and done and made[1] in ids(deleting):
                # One is being copied, the other was listed.
                deleting.delete(made[0], NS)
                deleting.delete(made[1], NS)

        report = mirror(source, destination, progress=delete)
    assert (report.artifacts_copied, report.artifacts_failed) == (2, [])
    assert ids(destination) == ids(source) == set(made[2:])


def test_a_tag_moved_meanwhile_takes_its_artifact_along(memory: tuple[Repository, Repository]) -> None:
    source, destination = memory
    give(source, range(40), "latest")
    give(source, range(50))
    late: list[str] = []

    def move(kind: str, done: int, _: int) -> None:
        if kind == "artifacts" and done == 1 and not late:
            # Before the place in the order that the mirror has reached.
            late.append(give(source, range(20), "latest"))

    report = mirror(source, destination, progress=move)
    assert tags(destination) == {"latest": late[0]}
    assert (report.artifacts_copied, report.artifacts_failed) == (3, [])


def test_what_the_source_got_meanwhile_is_not_deleted(memory: tuple[Repository, Repository]) -> None:
    source, destination = memory
    give(source, range(40))
    both = give(destination, range(50), "both")

    def publish(kind: str, done: int, _: int) -> None:
        if kind == "artifacts" and done == 1:
            give(source, range(50), "both")

    report = mirror(source, destination, delete=True, progress=publish)
    assert (report.artifacts_deleted, report.tags_deleted) == (0, 0)
    assert tags(destination) == {"both": both}


def test_a_disk_that_refuses_one_object_costs_one_artifact(
    source: Repository, destination: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [give(source, range(100 * i, 100 * i + 40)) for i in range(3)]
    refuse(monkeypatch, "read_chunk", Unavailable("the file system refused it"), when=lambda args: args[1] == made[1])
    report = mirror(source, destination)
    assert failures(report) == {made[1]: Unavailable.code}
    assert report.artifacts_copied == 2


def test_a_full_namespace_leaves_the_others_room(
    memory: tuple[Repository, Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = memory
    one, two = give(source, range(40), namespace="a"), give(source, range(40), namespace="b")
    refuse(monkeypatch, "begin_push", QuotaExceeded("full"), when=lambda args: args[2] == "a")
    assert failures(mirror(source, destination)) == {one: QuotaExceeded.code}
    assert ids(destination, "b") == {two}


@pytest.mark.parametrize("error", [Unavailable("gone"), StorageFull("full")])
def test_a_repository_that_can_do_no_more_ends_the_mirror_before_anything_is_deleted(
    memory: tuple[Repository, Repository], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    source, destination = memory
    give(source, range(40))
    extra = give(destination, range(100, 120), "extra")
    with monkeypatch.context() as patched:
        refuse(patched, "begin_push", error)
        if isinstance(error, Unavailable):
            # The first question is that for the namespaces.
            asked: list[object] = []
            refuse(patched, "namespaces", error, when=lambda _: asked.append(None) or len(asked) > 2)
        with pytest.raises(type(error)):
            mirror(source, destination, delete=True)
    assert tags(destination) == {"extra": extra}
    assert mirror(source, destination).artifacts_copied == 1


def refuse(
    patch: pytest.MonkeyPatch, name: str, error: Exception, when: Callable[[Sequence[Any]], bool] = lambda _: True
) -> None:
    """Have a method of embedded repositories raise."""
    method = getattr(LocalRepository, name)

    def refusing(*args: Any) -> Any:
        if when(args):
            raise error
        return method(*args)

    patch.setattr(LocalRepository, name, refusing)


# Verify


def test_verify_of_what_is_whole_sends_nothing(source: Repository, destination: Repository) -> None:
    give(source, range(40))
    give(source, range(50))
    mirror(source, destination)
    report = mirror(source, destination, verify=True)
    assert (report.artifacts_present, report.artifacts_healed, report.chunks_sent) == (2, 0, 0)


def test_verify_heals_documents(source: Repository, destination: Repository, root: Place) -> None:
    made = give(source, range(40))
    mirror(source, destination)
    manifest = source.manifest(made, NS)
    (root / manifest_key(made)).unlink()
    record = root / block_record_key(NS, manifest.blocks[1][0])
    record.write_bytes(record.read_bytes()[:-1])
    assert mirror(source, destination).artifacts_present == 1
    report = mirror(source, destination, verify=True)
    assert (report.artifacts_present, report.artifacts_healed, report.artifacts_failed) == (0, 1, [])
    assert destination.check(made, NS).ok


@pytest.mark.parametrize("array", ["state", "tokens"])
def test_verify_heals_chunks(source: Repository, destination: Repository, root: Place, array: str) -> None:
    made = give(source, range(40))
    mirror(source, destination)
    manifest = source.manifest(made, NS)
    digests = manifest.tokens if array == "tokens" else source.records(manifest, NS)[0].chunks["full/k"]
    assert digests
    alter(root, digests[0])
    report = mirror(source, destination, verify=True)
    assert (report.artifacts_healed, report.artifacts_failed, report.chunks_sent) == (1, [], 1)
    assert destination.check(made, NS).ok
    assert mirror(source, destination, verify=True).artifacts_present == 1


def test_verify_names_what_it_can_not_heal(
    source: Repository, destination: Repository, tmp_path: Path, root: Place
) -> None:
    both = give(source, range(40))
    mirror(source, destination)
    extra = give(destination, range(100, 120))
    for place, artifact_id in ((tmp_path / "source", both), (root, both), (root, extra)):
        alter(place, next(iter(held_of(artifact_id, source, destination))))
    assert mirror(source, destination).artifacts_failed == []
    report = mirror(source, destination, verify=True)
    assert set(failures(report)) == {both, extra}
    assert (report.artifacts_present, report.artifacts_healed, report.extra_artifacts) == (0, 0, 1)


def held_of(artifact_id: str, *repositories: Repository) -> dict[str, Any]:
    repository = next(r for r in repositories if artifact_id in ids(r))
    manifest = repository.manifest(artifact_id, NS)
    return dict(manifest.stored_chunks(repository.records(manifest, NS)))


# Interruptions


def test_an_interrupted_mirror_goes_on_where_it_stopped(source: Repository, destination: Repository) -> None:
    for i in range(4):
        give(source, range(100 * i, 100 * i + 40), f"tag-{i}")
    total = sum(held(source).values())
    seen = 0

    def interrupt(kind: str, done: int, _: int) -> None:
        nonlocal seen
        if kind == "bytes" and done > total // 2:
            raise KeyboardInterrupt
        seen = done if kind == "bytes" else seen

    with pytest.raises(KeyboardInterrupt):
        mirror(source, destination, workers=1, progress=interrupt)
    report = mirror(source, destination)
    assert 0 < report.bytes_sent <= total - seen
    assert (ids(destination), tags(destination)) == (ids(source), tags(source))


@pytest.mark.parametrize("kind", ["file", "http"])
def test_after_kill_9_of_the_command_only_what_is_missing_is_sent(
    source: Repository, root: Place, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for i in range(10):
        give(source, range(100 * i, 100 * i + 64), f"tag-{i}")
    total = len(held(source))
    with serving(root) as service:
        url = service.url if kind == "http" else service.repository.url
        command = ["mirror", source.url, url, "--workers", str(WORKERS), "--json"]
        with subprocess.Popen([sys.executable, "-m", "repo_service.cli", *command]) as child:
            while stored(root) < total // 2 and child.poll() is None:
                time.sleep(0.005)
            child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        before = settled(root)
        assert 0 < before < total
        capsys.readouterr()
        assert main(command) == 0
        report = json.loads(capsys.readouterr().out)
        # What was stored and not yet recorded is sent once more.
        assert total - before <= report["chunks_sent"] <= total - before + WORKERS
        assert report["artifacts_copied"] + report["artifacts_present"] == 10
        with open_repository(url) as destination:
            assert tags(destination) == tags(source)
            assert all(destination.check(artifact_id, NS).ok for artifact_id in ids(destination))


def settled(root: Place) -> int:
    """Chunks stored, once the service has finished the requests of a client that was killed."""
    count = -1
    while count != (count := stored(root)):
        time.sleep(0.5)
    return count


def stored(root: Place) -> int:
    return sum(len(path.name) == 62 for path in (root / "chunks").rglob("*"))


def test_progress_counts_artifacts_and_bytes_to_the_end(source: Repository, destination: Repository) -> None:
    give(source, range(40))
    mirror(source, destination)
    give(source, range(50))
    give(source, range(20), namespace="team-a")
    seen: dict[str, list[tuple[int, int]]] = {"artifacts": [], "bytes": []}
    mirror(source, destination, progress=lambda kind, done, total: seen[kind].append((done, total)))
    size = sum(source.stats(name).total_bytes for name in (NS, "team-a"))
    for kind, total in (("artifacts", 3), ("bytes", size)):
        done = [done for done, _ in seen[kind]]
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, total)
        assert {total for _, total in seen[kind]} == {total}


# The command


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["mirror", *args])
    return code, *capsys.readouterr()


def test_the_command_makes_the_destination_and_says_what_it_did(
    source: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give(source, range(40), "latest")
    extra = give(source, range(50), namespace="team-a")
    there = (tmp_path / "new").as_uri()
    code, out, err = run(capsys, source.url, there)
    assert (code, err) == (0, "")
    assert out.startswith(f"mirrored 2 namespaces to {there}: 2 artifacts copied, 1 tag set, ")
    source.delete(extra, "team-a")
    assert (
        "1 artifact there before, 1 artifact there only, 0 chunks, 0 bytes sent in "
        in run(capsys, source.url, there)[1]
    )
    code, out, _ = run(capsys, source.url, there, "--delete", "--namespace", "team-a", "--json")
    report = json.loads(out)
    assert (code, report["namespaces"], report["artifacts_deleted"]) == (0, ["team-a"], 1)
    with open_repository(there) as destination:
        assert destination.namespaces() == [NS]


def test_the_command_names_what_failed_and_exits_with_1(
    source: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = give(source, range(40))
    digest = next(iter(contents_of(source, bad)))
    alter(tmp_path / "source", digest)
    args = [source.url, (tmp_path / "new").as_uri()]
    code, out, _ = run(capsys, *args)
    assert code == 1
    assert f"failed: {NS} {bad}: the chunk {digest} reads as" in out
    code, out, _ = run(capsys, *args, "--json")
    assert (code, json.loads(out)["artifacts_failed"][0]["code"]) == (1, "chunk_corrupt")


def test_the_command_shows_artifacts_and_bytes_on_a_terminal(
    source: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = source.artifact(give(source, range(40)), NS).total_bytes
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run(capsys, source.url, (tmp_path / "new").as_uri())
    assert code == 0
    assert "1 artifacts of 1 artifacts" in err
    assert f"{output.size(size)} of {output.size(size)}" in err


def test_a_mistyped_source_is_an_error_and_is_not_created(
    source: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, (tmp_path / "none").as_uri(), (tmp_path / "new").as_uri(), "--json")
    assert (code, json.loads(err)["error"]["code"]) == (5, "not_a_repository")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    code, _, err = run(capsys, source.url, source.url)
    assert (code, "are one repository" in err) == (2, True)
