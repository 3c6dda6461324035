"""The node's cache of chunks: verified, bounded, shared, private, and never in the way."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from beside import beside, forked
from caching import SPEC, chunk, files, get, leftovers, on_disk, use
from pushing import Artifact, push
from serving import served
from synthetic import artifact, fingerprint
from test_api import Service, serving

from repo_service.cli.main import main
from repo_service.client import NodeCache, cached, open_repository
from repo_service.client import cache as module
from repo_service.client.cached import CachedRepository
from repo_service.client.settings import node_cache
from repo_service.client.shared_count import Turn, take_turn
from repo_service.domain.digest import chunk_digest
from repo_service.domain.errors import (
    ArtifactNotFound,
    ChunkCorrupt,
    ChunkNotFound,
    InvalidInput,
    KvgraftError,
    Unavailable,
)
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Repository
from repo_service.services.documents import chunk_key

NS = "default"
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "node" / "chunks"


@pytest.fixture
def cache(directory: Path) -> NodeCache:
    return NodeCache(directory)


@pytest.fixture(autouse=True)
def _nobody_was_warned() -> None:
    module._warned.clear()


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged, but for the services' own lines."""
    return [record for record in caplog.records if record.name.startswith("repo_service.client")]


def read_all(
    repository: Repository, made: Artifact, namespace: str = NS, manifest: Manifest | None = None
) -> dict[str, bytes]:
    """Pull an artifact; what is read must be what was pushed."""
    manifest = manifest or repository.manifest(made[0].id, namespace)
    held = manifest.stored_chunks(repository.records(manifest, namespace))
    found = {digest: read_one(repository, manifest, digest, spec, namespace) for digest, spec in held.items()}
    assert found == made[2]
    return found


def read_one(repository: Repository, manifest: Manifest, digest: str, spec: ChunkSpec, namespace: str = NS) -> bytes:
    out = bytearray(spec.size)
    repository.read_chunk(manifest.id, namespace, digest, spec, memoryview(out))
    return bytes(out)


def a_chunk(made: Artifact) -> tuple[str, ChunkSpec]:
    return next(iter(made[0].stored_chunks(made[1]).items()))


MADE = artifact(random.Random(5).choices(range(1000), k=100), fingerprint())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service") / "repository") as running:
        yield running


@pytest.fixture(autouse=True)
def _made_is_there(request: pytest.FixtureRequest) -> None:
    """`MADE` is at the service, whole, whatever an earlier test did to it."""
    if "service" in request.fixturenames:
        repository = request.getfixturevalue("service").repository
        with suppress(ArtifactNotFound):
            repository.check(MADE[0].id, NS)
        push(repository, MADE)


@pytest.fixture
def remote(service: Service, cache: NodeCache) -> Iterator[Repository]:
    with open_repository(service.url, cache=cache) as repository:
        yield repository


def lose_chunks(service: Service) -> None:
    """Let the service have no chunk any more; a check tells it so, and it takes them again."""
    shutil.rmtree(service.root / "chunks")


# Hits


def test_what_one_process_pulled_the_next_one_reads_with_no_chunk_at_the_service(
    service: Service, directory: Path
) -> None:
    with open_repository(service.url, cache=directory) as first:
        read_all(first, MADE)
    lose_chunks(service)
    size = sum(map(len, MADE[2].values()))
    with open_repository(service.url, cache=directory) as second:
        read_all(second, MADE)
        assert isinstance(second, CachedRepository)
        counts = second.cache.counts
        assert (counts.hits, counts.hit_bytes, counts.misses) == (len(MADE[2]), size, 0)
    with open_repository(service.url, cache="off") as none, pytest.raises(ChunkCorrupt):
        read_all(none, MADE)


def test_a_pull_goes_on_from_the_cache_when_the_service_has_gone(tmp_path: Path, cache: NodeCache) -> None:
    with served(tmp_path / "repository") as url:
        repository = open_repository(url, cache=cache)
        push(repository, MADE)
        read_all(repository, MADE)
        manifest = repository.manifest(MADE[0].id, NS)
        held = manifest.stored_chunks(repository.records(manifest, NS))
    with repository:
        assert {d: read_one(repository, manifest, d, spec) for d, spec in held.items()} == MADE[2]


def test_what_was_pushed_from_a_node_is_in_its_cache(service: Service, cache: NodeCache) -> None:
    other = artifact(range(2000, 2100))
    with open_repository(service.url, cache=cache) as repository:
        push(repository, other)
        lose_chunks(service)
        read_all(repository, other)
        assert cache.counts.misses == 0


def test_two_repositories_share_equal_chunks(tmp_path: Path, service: Service, cache: NodeCache) -> None:
    with serving(tmp_path / "second") as second:
        push(second.repository, MADE)
        with open_repository(service.url, cache=cache) as one, open_repository(second.url, cache=cache) as two:
            read_all(one, MADE)
            lose_chunks(second)
            read_all(two, MADE)
            assert len(files(Path(cache.directory))) == len(MADE[2])


def test_threads_of_one_pull_share_a_cache(remote: Repository, service: Service, cache: NodeCache) -> None:
    manifest = remote.manifest(MADE[0].id, NS)
    held = manifest.stored_chunks(remote.records(manifest, NS))

    def read(digest: str) -> bytes:
        return read_one(remote, manifest, digest, held[digest])

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert dict(zip(held, pool.map(read, held), strict=True)) == MADE[2]
        lose_chunks(service)
        assert dict(zip(held, pool.map(read, held), strict=True)) == MADE[2]
    assert (cache.counts.hits, cache.counts.misses) == (3 * len(held), len(held))


# I3


def test_i3_every_flip_and_cut_of_a_cached_file_is_found_and_healed(remote: Repository, cache: NodeCache) -> None:
    read_all(remote, MADE)
    manifest = remote.manifest(MADE[0].id, NS)
    held = manifest.stored_chunks(remote.records(manifest, NS))
    generator = random.Random(3)
    for number in range(400):
        path = generator.choice(files(Path(cache.directory)))
        digest = f"blake3:{path.parent.name}{path.name}"
        whole = path.read_bytes()
        if number % 4:
            damaged = bytearray(whole)
            damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        else:
            damaged = bytearray(whole[: generator.randrange(len(whole))]) if number % 8 else bytearray(whole + b"\0")
        path.write_bytes(damaged)
        assert read_one(remote, manifest, digest, held[digest]) == whole
        assert cache.counts.dropped == number + 1
        assert path.read_bytes() == whole, "it is kept anew"


@pytest.mark.parametrize("what", ["directory", "pipe", "link", "socket name", "unreadable"])
def test_what_is_no_file_in_a_chunks_place_is_a_miss(
    remote: Repository, cache: NodeCache, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    read_all(remote, MADE)
    for path in files(Path(cache.directory)):
        path.unlink()
        if what == "directory":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "link":
            path.symlink_to("/etc/passwd")
        elif what == "socket name":
            path.symlink_to(path)
        else:
            path.touch(0o000)
    read_all(remote, MADE)
    read_all(remote, MADE)
    assert told(caplog) == []


@pytest.mark.parametrize("flip", [*range(0, 96, 7), None])
def test_a_damaged_count_is_counted_anew(directory: Path, flip: int | None) -> None:
    cache = NodeCache(directory, 10 * SPEC.size)
    for number in range(6):
        cache.keep(*chunk(number))
    path = directory / "bytes"
    data = bytearray(path.read_bytes())
    if flip is None:
        data = data[:5]
    else:
        data[flip // 8] ^= 1 << flip % 8
    path.write_bytes(data)
    for number in range(6, 40):
        cache.keep(*chunk(number))
        cache.close()
        assert on_disk(directory) <= 10 * SPEC.size
    assert len(files(directory)) >= 8


# I7


def test_i7_a_deleted_artifact_is_not_read_from_the_cache(remote: Repository, service: Service) -> None:
    read_all(remote, MADE)
    digest, spec = a_chunk(MADE)
    service.repository.delete(MADE[0].id, NS)
    with pytest.raises(ArtifactNotFound):
        remote.manifest(MADE[0].id, NS)
    with pytest.raises(ArtifactNotFound):
        read_one(remote, MADE[0], digest, spec)
    with pytest.raises(ArtifactNotFound):
        remote.records(MADE[0], NS)


def test_i7_the_word_of_the_repository_is_asked_for_again(
    remote: Repository, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_all(remote, MADE)
    digest, spec = a_chunk(MADE)
    monkeypatch.setattr(cached, "GRANTED_S", 0.0)
    assert read_one(remote, MADE[0], digest, spec) == MADE[2][digest]
    service.repository.delete(MADE[0].id, NS)
    with pytest.raises(ArtifactNotFound):
        read_one(remote, MADE[0], digest, spec)
    monkeypatch.setattr(cached, "GRANTED_S", 60.0)
    with pytest.raises(ArtifactNotFound):
        read_one(remote, MADE[0], digest, spec)


def test_i7_deleting_through_a_client_ends_its_own_reading(remote: Repository) -> None:
    read_all(remote, MADE)
    remote.delete(MADE[0].id, NS)
    with pytest.raises(ArtifactNotFound):
        read_one(remote, MADE[0], *a_chunk(MADE))


def test_i7_cached_bytes_open_no_other_namespace_and_no_other_artifact(
    remote: Repository, service: Service, cache: NodeCache
) -> None:
    other = artifact(range(3000, 3040))
    push(service.repository, other)
    read_all(remote, MADE)
    read_all(remote, other)
    for namespace, about in (("elsewhere", MADE), ("elsewhere", other)):
        with pytest.raises(ArtifactNotFound):
            remote.manifest(about[0].id, namespace)
        with pytest.raises(ArtifactNotFound):
            remote.records(about[0], namespace)
        with pytest.raises(ArtifactNotFound):
            read_one(remote, about[0], *a_chunk(about), namespace=namespace)
    digest, spec = a_chunk(MADE)
    with pytest.raises(ChunkNotFound):
        read_one(remote, other[0], digest, spec)
    with pytest.raises(KvgraftError):
        remote.read_chunk("sha256:" + "0" * 64, NS, digest, spec, memoryview(bytearray(spec.size)))
    before = cache.counts.hits
    assert read_one(remote, MADE[0], digest, spec) == MADE[2][digest]
    assert cache.counts.hits == before + 1, "refusals elsewhere took no right away"


def test_i7_a_repository_that_never_named_a_chunk_is_asked_for_it(service: Service, cache: NodeCache) -> None:
    with open_repository(service.url, cache=cache) as first:
        read_all(first, MADE)
    digest, spec = a_chunk(MADE)
    with open_repository(service.url, cache=cache) as second:
        hits = cache.counts.hits
        assert read_one(second, MADE[0], digest, spec) == MADE[2][digest]
        service.repository.delete(MADE[0].id, NS)
        with pytest.raises(ArtifactNotFound):
            read_one(second, MADE[0], digest, spec)
        assert cache.counts.hits == hits


def test_another_shape_for_a_cached_digest_takes_no_good_file_away(remote: Repository, cache: NodeCache) -> None:
    read_all(remote, MADE)
    digest, spec = a_chunk(MADE)
    with pytest.raises(KvgraftError):
        read_one(remote, MADE[0], digest, ChunkSpec(spec.dtype, tuple(reversed(spec.shape))))
    assert cache.counts.dropped == 0
    assert read_one(remote, MADE[0], digest, spec) == MADE[2][digest]


def test_no_digest_leaves_the_directory(cache: NodeCache) -> None:
    for name in ("blake3:../../x", "../x", "sha256:" + "0" * 64, "blake3:" + "A" * 64, ""):
        with pytest.raises(InvalidInput):
            cache.read(name, SPEC, memoryview(bytearray(SPEC.size)))
        with pytest.raises(InvalidInput):
            cache.keep(name, b"")


def test_the_directory_is_the_users_alone(directory: Path, cache: NodeCache) -> None:
    before = os.umask(0)
    try:
        cache.keep(*chunk(1))
    finally:
        os.umask(before)
    assert get(cache, 1) is not None
    for path in [directory, *directory.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_directory_that_others_may_enter_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    cache = NodeCache(directory)
    cache.keep(*chunk(1))
    assert list(directory.iterdir()) == []
    assert "not this user's alone" in caplog.text
    directory.chmod(0o700)
    NodeCache(directory).keep(*chunk(1))
    assert len(files(directory)) == 1


def test_nothing_is_removed_from_a_directory_that_others_may_enter(directory: Path, cache: NodeCache) -> None:
    """A repository's own chunks, for one, have the same names."""
    cache.keep(*chunk(1))
    directory.chmod(0o755)
    [kept] = files(directory)
    kept.write_bytes(b"of another kind")
    assert get(cache, 1) is None
    with pytest.raises(Unavailable, match="not this user's alone"):
        cache.clear()
    assert kept.read_bytes() == b"of another kind"


# The bound


def test_the_least_recently_used_go_first_down_to_nine_tenths(directory: Path) -> None:
    cache = NodeCache(directory, 20 * SPEC.size)
    for number in range(18):
        cache.keep(*chunk(number))
    assert len(files(directory)) == 18
    for number in range(18):
        path = Path(cache._path(chunk(number)[0]))
        os.utime(path, (time.time() - 10_000 + number,) * 2)
    assert get(cache, 0), "this one is used again"
    for number in range(18, 21):
        cache.keep(*chunk(number))
        cache.close()
    assert on_disk(directory) <= 20 * SPEC.size
    there = {number for number in range(21) if Path(cache._path(chunk(number)[0])).exists()}
    assert {0, 18, 19, 20} <= there
    gone = set(range(21)) - there
    assert gone == set(range(1, 1 + len(gone)))
    assert gone


def test_a_chunk_beyond_the_bound_is_not_kept_and_takes_nothing_away(directory: Path) -> None:
    cache = NodeCache(directory, SPEC.size)
    cache.keep(*chunk(1))
    big = ChunkSpec("uint32", (512,))
    data = bytes(big.size)
    cache.keep(chunk_digest(data, big.dtype, big.shape), data)
    cache.close()
    assert get(cache, 1)
    assert len(files(directory)) == 1
    cache.keep(*chunk(2))
    cache.close()
    cache.keep(*chunk(2))
    assert get(cache, 2), "a bound of one chunk still lets the newest in"


def test_the_bound_holds_with_four_processes_writing(directory: Path) -> None:
    limit = 40 * SPEC.size
    processes = [SPAWN.Process(target=use, args=(directory, limit, seed, 400, 300)) for seed in range(4)]
    for process in processes:
        process.start()
    most = 0
    while any(process.is_alive() for process in processes):
        most = max(most, on_disk(directory))
        time.sleep(0.001)
    assert [process.exitcode for process in processes] == [0] * 4
    # A file that is renamed between two looks of `on_disk` is seen twice: one for each writer.
    assert 20 * SPEC.size < most <= limit + 4 * SPEC.size
    assert on_disk(directory) <= limit
    assert leftovers(directory) == []


def test_a_reader_whose_file_is_evicted_reads_it_whole(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NodeCache(directory, 100 * SPEC.size)
    cache.keep(*chunk(1))
    hashed = module._hashed

    def evicted_meanwhile(fd: int, spec: ChunkSpec, out: memoryview) -> str | None:
        assert NodeCache(directory).clear().chunks == 1
        return hashed(fd, spec, out)

    monkeypatch.setattr(module, "_hashed", evicted_meanwhile)
    assert get(cache, 1) == chunk(1)[1]
    monkeypatch.setattr(module, "_hashed", hashed)
    assert get(cache, 1) is None


def test_the_default_bound_is_at_most_a_tenth_of_the_free_disk(directory: Path, cache: NodeCache) -> None:
    cache.keep(*chunk(1))
    disk = os.statvfs(directory)
    assert 0 < cache.info().limit_bytes <= min(10 * 2**30, disk.f_blocks * disk.f_frsize // 10)


def test_a_writer_that_holds_the_count_for_long_keeps_nobody_waiting(
    directory: Path, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.keep(*chunk(0))
    turns: list[str] = []

    def counted(path: str, wait_s: float) -> AbstractContextManager[Turn | None]:
        turns.append(path)
        return take_turn(path, wait_s)

    monkeypatch.setattr(module, "take_turn", counted)
    code = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, directory / "bytes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for number in range(1, 50):
            cache.keep(*chunk(number))
            assert get(cache, 0)
        assert 1 <= len(turns) < 10, "one that waited in vain speaks for the next ones"
        assert len(files(directory)) == 1
        holder.communicate()


# Disks that fail; tests/fault/node_cache.py kills writers


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    directory.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(directory)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small file system needs privileges that this user does not have")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_full_disk_is_done_without_and_told_once(
    tmp_path: Path, service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "small", "size=256k"):
        cache = NodeCache(tmp_path / "small" / "chunks", 2**30)
        with open_repository(service.url, cache=cache) as repository:
            digest, _ = chunk(1)
            cache.keep(digest, chunk(1)[1])
            (tmp_path / "small" / "ballast").write_bytes(bytes(220 * 1024))
            read_all(repository, MADE)
            read_all(repository, MADE)
            assert [r.levelno for r in told(caplog)] == [logging.WARNING]
            assert "No space left" in caplog.text
            assert get(cache, 1), "what is there is still read"
            assert leftovers(Path(cache.directory)) == []
            (tmp_path / "small" / "ballast").unlink()
            read_all(repository, MADE)
            misses = cache.counts.misses
            monkeypatch.setattr(cache, "_paused_until", 0.0)
            read_all(repository, MADE)
            assert cache.counts.misses > misses
            misses = cache.counts.misses
            read_all(repository, MADE)
            assert cache.counts.misses == misses, "it is used again when there is room"
            assert len(told(caplog)) == 1


def test_a_directory_that_cannot_be_written_is_read_and_told_once(
    tmp_path: Path, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "disk" / "chunks"
    with mounted(tmp_path / "disk", "size=2m"):
        half = dict(list(MADE[2].items())[::2])
        for digest, data in half.items():
            NodeCache(directory).keep(digest, data)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        for _ in range(2):
            with open_repository(service.url, cache=directory) as repository:
                read_all(repository, MADE)
                assert isinstance(repository, CachedRepository)
                assert (repository.cache.counts.hits, repository.cache.counts.misses) == (
                    len(half),
                    len(MADE[2]) - len(half),
                )
        assert len(told(caplog)) == 1
        with pytest.raises(Unavailable):
            NodeCache(directory).clear()


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/x/y", "/etc/passwd"])
def test_a_place_where_no_directory_can_be_is_done_without(
    service: Service, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_repository(service.url, cache=place) as repository:
        read_all(repository, MADE)
        read_all(repository, MADE)
    assert len(told(caplog)) <= 1
    assert NodeCache(place).info().chunks == 0


def test_a_directory_that_is_removed_meanwhile_is_made_again(
    remote: Repository, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_all(remote, MADE)
    shutil.rmtree(directory)
    read_all(remote, MADE)
    read_all(remote, MADE)
    assert len(files(directory)) >= len(MADE[2]) - 1
    assert told(caplog) == []


# Fork


def test_a_child_after_a_fork_reads_writes_and_counts_for_itself(cache: NodeCache) -> None:
    for number in range(10):
        cache.keep(*chunk(number))
        get(cache, number)

    def busy(stop: threading.Event) -> None:
        number = 100
        while not stop.is_set():
            cache.keep(*chunk(number))
            get(cache, number)
            number += 1

    with beside(busy):
        codes = [forked(partial(_child, cache, child), 20) for child in range(10)]
    assert codes == [0] * 10
    assert all(get(cache, 10_000 + child) for child in range(10))


def _child(cache: NodeCache, child: int) -> None:
    cache.keep(*chunk(10_000 + child))
    read = [get(cache, number) for number in (0, 1, 10_000 + child, 99_999)]
    assert None not in read[:3]
    assert (cache.counts.hits, cache.counts.misses) == (3, 1)


# Settings and commands


def test_the_directory_and_the_bound_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRAFT_CACHE_DIR", "off")
    assert node_cache() is None
    monkeypatch.delenv("KVGRAFT_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    made = node_cache()
    assert made is not None
    assert made.directory == f"{tmp_path}/.cache/kvgraft/chunks"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("KVGRAFT_CACHE_MIB", "3")
    made = node_cache()
    assert made is not None
    assert (made.directory, made.info().limit_bytes) == (f"{tmp_path}/xdg/kvgraft/chunks", 3 * 2**20)
    monkeypatch.setenv("KVGRAFT_CACHE_DIR", "~/mine")
    made = node_cache()
    assert made is not None
    assert made.directory == f"{tmp_path}/mine"


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "ten", "9" * 13, "²"])
def test_a_bound_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    monkeypatch.setenv("KVGRAFT_CACHE_MIB", value)
    with pytest.raises(InvalidInput, match="KVGRAFT_CACHE_MIB"):
        open_repository("http://127.0.0.1:1", cache=tmp_path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> object:
    capsys.readouterr()
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_commands_say_what_the_cache_did_and_holds(
    tmp_path: Path,
    service: Service,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVGRAFT_CACHE_DIR", str(directory))
    monkeypatch.setenv("KVGRAFT_CACHE_MIB", "7")
    size, count = sum(map(len, MADE[2].values())), len(MADE[2])

    def pull(name: str) -> Mapping[str, int]:
        answer = run(capsys, "pull", MADE[0].id, "--from", service.url, "--to", (tmp_path / name).as_uri())
        assert isinstance(answer, dict)
        return dict(answer["cache"])

    assert pull("a") == {"hits": 0, "misses": count, "hit_bytes": 0, "missed_bytes": size, "dropped": 0}
    assert pull("b") == {"hits": count, "misses": 0, "hit_bytes": size, "missed_bytes": 0, "dropped": 0}
    here = {"directory": str(directory), "limit_bytes": 7 * 2**20, "chunks": count, "bytes": size}
    assert run(capsys, "cache", "info") == here
    assert run(capsys, "cache", "clear") == here
    assert run(capsys, "cache", "info") == here | {"chunks": 0, "bytes": 0}
    assert run(capsys, "cache", "clear") == here | {"chunks": 0, "bytes": 0}
    assert main(["cache", "info"]) == 0
    assert f"{directory}: 0 chunks, 0 bytes of at most 7.0 MiB" in capsys.readouterr().out
    monkeypatch.setenv("KVGRAFT_CACHE_DIR", "off")
    assert run(capsys, "cache", "info") is None
    answer = run(capsys, "pull", MADE[0].id, "--from", service.url, "--to", (tmp_path / "c").as_uri())
    assert isinstance(answer, dict)
    assert answer["cache"] is None


def test_clearing_takes_nothing_that_is_not_the_caches(directory: Path, cache: NodeCache) -> None:
    cache.keep(*chunk(1))
    for name in ("notes", "ab/other", "abc", "tmp/file", f"zz/{'0' * 62}"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("mine")
    assert cache.clear().chunks == 1
    for name in ("notes", "ab/other", "abc", "tmp/file", f"zz/{'0' * 62}"):
        assert (directory / name).read_text() == "mine"


def test_commands_that_look_after_a_repository_read_past_the_cache(
    service: Service, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGRAFT_CACHE_DIR", str(directory))
    push(service.repository, MADE, "mirrored")
    assert main(["mirror", service.url, (tmp_path / "copy").as_uri(), "--namespace", "mirrored", "--json"]) == 0
    assert not directory.exists()


def test_an_artifact_damaged_at_the_service_is_still_read_from_a_whole_cache_and_never_wrongly(
    remote: Repository, service: Service
) -> None:
    read_all(remote, MADE)
    digest, spec = a_chunk(MADE)
    path = service.root / chunk_key(digest)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    assert read_one(remote, MADE[0], digest, spec) == MADE[2][digest]
    assert isinstance(remote, CachedRepository)
    remote.cache.clear()
    with pytest.raises(ChunkCorrupt):
        read_one(remote, MADE[0], digest, spec)
    assert files(Path(remote.cache.directory)) == []


def test_an_embedded_repository_has_no_cache(tmp_path: Path, directory: Path) -> None:
    with open_repository((tmp_path / "repository").as_uri(), cache=directory) as repository:
        push(repository, MADE)
        read_all(repository, MADE)
        assert not isinstance(repository, CachedRepository)
    assert not directory.exists()


def test_records_altered_by_the_caller_grant_nothing(remote: Repository) -> None:
    """A manifest that the repository does not have names nothing that may be read."""
    read_all(remote, MADE)
    stranger: tuple[Manifest, list[BlockRecord], Mapping[str, bytes]] = artifact(range(500, 600))
    manifest = stranger[0]
    with pytest.raises(ArtifactNotFound):
        remote.records(manifest, NS)
    with pytest.raises(ArtifactNotFound):
        read_one(remote, manifest, *a_chunk(MADE))
