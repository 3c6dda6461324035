"""The node's cache: writers killed at any call, and bits that flip in what lies there."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from caching import SPEC, chunk, files, get, leftovers, on_disk, use
from pushing import push
from serving import served

from repo_service.client import NodeCache, cache, open_repository, shared_count
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.domain.repository import Repository
from tests.fault.damage import flipped, made
from tests.fault.kills import Calling, Calls, Point, choose
from tests.fault.suite import Fault

_CALLS = ("open", "write", "ftruncate", "rename", "unlink", "mkdir", "pread", "pwrite", "utime", "scandir", "close")
_NUMBERS = 120
_LIMIT = 40 * SPEC.size


class Outcome(NamedTuple):
    """How the writer that was to be killed, and the one beside it, fared."""

    killed: bool
    calls: list[str]
    seconds: float


def nursery(directory: Path, orders: Connection) -> None:
    """Fork two writers for each order (seed, call to die at, moment to die at); the second one lives."""
    for module in (cache, shared_count):
        module.os = Calling(Calls.ticking, _CALLS)  # type: ignore[attr-defined]
    while (order := orders.recv()) is not None:
        seed, at_point, at_moment = order
        reader, writer = os.pipe()
        victim = _forked(directory, seed, at_point, writer)
        other = _forked(directory, seed + 1, None, None)
        os.close(writer)
        if at_moment is not None:
            time.sleep(at_moment)
            os.kill(victim, signal.SIGKILL)
        with os.fdopen(reader) as lines:
            seconds, *calls = lines.read().split("\n")
        status, beside = os.waitpid(victim, 0)[1], os.waitpid(other, 0)[1]
        killed = os.WIFSIGNALED(status)
        failed = [code for code in (0 if killed else status, beside) if code]
        orders.send(
            f"a writer ended with the status {failed}" if failed else Outcome(killed, calls, float(seconds or 0))
        )


def _forked(directory: Path, seed: int, at_point: Point | None, writer: int | None) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            Calls.start(at_point)
            began = time.monotonic()
            use(directory, _LIMIT, seed, 40, _NUMBERS, clears=0.01)
            if writer is not None:
                with os.fdopen(writer, "w") as lines:
                    lines.write("\n".join([str(time.monotonic() - began), *Calls.seen]))
            status = 0
        finally:
            os._exit(status)
    return pid


@contextmanager
def writers(directory: Path) -> Iterator[Connection]:
    """Forks come from a fresh process: this one may have threads, and torch."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=nursery, args=(directory, there))
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.send(None)
        process.join(30)
        here.close()


def kill(directory: Path, generator: random.Random, points: int) -> int:
    """Kill writers at ``points`` points, judging after each; returns how many ended before theirs."""
    killed = unharmed = 0
    calls: list[str] = []
    seconds = 0.0
    with writers(directory) as orders:
        while killed < points:
            assert unharmed < 2 * points + 20, "writers end before their point"
            at_point = at_moment = None
            if calls:
                if generator.random() < 0.8:
                    at_point = choose(calls, generator)
                else:
                    at_moment = generator.uniform(0, seconds)
            orders.send((generator.randrange(2**31), at_point, at_moment))
            outcome = orders.recv()
            where = f"killed at {at_point or at_moment}"
            assert isinstance(outcome, Outcome), f"{where}: {outcome}"
            if outcome.calls:
                calls, seconds = outcome.calls, outcome.seconds
            killed += outcome.killed
            unharmed += not outcome.killed
            judge(directory, where)
    return unharmed


def judge(directory: Path, where: str) -> None:
    """What is there is whole and within the bound, and the cache takes more and forgets what the dead left."""
    node = NodeCache(directory, _LIMIT)
    there = sum(get(node, number) is not None for number in range(_NUMBERS))
    assert there == len(files(directory)), f"{where}: {len(files(directory))} files, {there} of them chunks"
    assert node.counts.dropped == 0, f"{where}: {node.counts.dropped} files were torn"
    for number in (_NUMBERS, _NUMBERS + 1):
        node.keep(*chunk(number))
        node.close()
        if get(node, number) is None:
            node.keep(*chunk(number))
        assert get(node, number), f"{where}: nothing more is kept"
        Path(node._path(chunk(number)[0])).unlink()
    assert not leftovers(directory), f"{where}: {leftovers(directory)} are left"
    assert on_disk(directory) <= _LIMIT, f"{where}: {on_disk(directory)} bytes"


def flip(directory: Path, generator: random.Random, repository: Repository, damages: int) -> dict[str, int]:
    """Damage a file of the cache, and read it through a repository, again and again."""
    manifest = made(1)[0]
    held = manifest.stored_chunks(repository.records(manifest, DEFAULT_NAMESPACE))
    contents = made(1)[2]
    for digest in held:
        _read(repository, manifest.id, digest, held, contents)
    healed = counts = 0
    for _ in range(damages):
        if generator.random() < 0.05:
            _damage(directory / "bytes", generator)
            counts += 1
            continue
        path = generator.choice(files(directory))
        whole = path.read_bytes()
        _damage(path, generator)
        digest = f"blake3:{path.parent.name}{path.name}"
        _read(repository, manifest.id, digest, held, contents)
        assert path.read_bytes() == whole, f"{path} was not healed"
        healed += 1
    return {"damaged_files": healed, "damaged_counts": counts, "wrong_bytes": 0}


def _read(
    repository: Repository,
    artifact_id: str,
    digest: str,
    held: Mapping[str, ChunkSpec],
    contents: Mapping[str, bytes],
) -> None:
    out = bytearray(held[digest].size)
    repository.read_chunk(artifact_id, DEFAULT_NAMESPACE, digest, held[digest], memoryview(out))
    assert out == contents[digest], f"{digest} was read with other bytes"


def _damage(path: Path, generator: random.Random) -> None:
    """Flip a bit; one time in ten, let the file end early."""
    data = path.read_bytes()
    if data and generator.random() < 0.9:
        path.write_bytes(flipped(data, generator.randrange(8 * len(data))))
    else:
        path.write_bytes(data[: generator.randrange(len(data) or 1)])


def node_cache(directory: Path, seed: int, *, points: int, damages: int) -> dict[str, Any]:
    generator = random.Random(seed)
    unharmed = kill(directory / "killed", generator, points)
    with served(directory / "repository") as url:
        with open_repository(url, cache="off") as plain:
            push(plain, made(1))
        node = NodeCache(directory / "flipped")
        with open_repository(url, cache=node) as repository:
            found = flip(directory / "flipped", generator, repository, damages)
    assert node.counts.dropped == found["damaged_files"], "a damaged file was taken for whole"
    return {"points": points, "ended_unharmed": unharmed, "torn_files": 0, "temp_files_left": 0, **found}


FAULTS = [
    Fault(
        "node-cache",
        "kill -9 of writers, and damage, in a node's cache: no wrong byte, no torn file, nothing left, the bound kept",
        node_cache,
        short={"points": 12, "damages": 100},
        full={"points": 200, "damages": 10_000},
    )
]
