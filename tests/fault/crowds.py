"""Many at once: pushers, collectors, writers, clients that vanish, and clocks that jump."""

from __future__ import annotations

import http.client
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pushing import Artifact, offer, push
from serving import served
from sqlalchemy import text

from repo_service.client import open_repository
from repo_service.domain.errors import ChunksMissing, PushNotFound, Unavailable
from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.domain.repository import Push
from repo_service.index.sqlite import SqliteDatabase
from tests.fault.damage import Opened, made, read_whole
from tests.fault.suite import Fault

R = TypeVar("R")

DAY_S = 24 * 3600


def processes(number: int) -> ProcessPoolExecutor:
    """Fresh processes: this one may have threads, and torch."""
    return ProcessPoolExecutor(number, mp_context=multiprocessing.get_context("spawn"))


def together(threads: int, work: Callable[[int], R]) -> list[R]:
    """Results of ``work(i)`` from threads that start at one moment."""
    barrier = threading.Barrier(threads)

    def start(i: int) -> R:
        barrier.wait(60)
        return work(i)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(start, range(threads)))


def shares(total: int, parts: int) -> list[range]:
    """The numbers below ``total`` cut in parts."""
    return [range(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


def push_same(root: Path, url: str, number: int, threads: int) -> list[tuple[str, datetime]]:
    """Push one artifact from several threads, every other one through the service."""
    with open_repository(f"file://{root}") as embedded, open_repository(url) as remote:

        def one(i: int) -> tuple[str, datetime]:
            info, _ = push(remote if i % 2 else embedded, made(number, 40, 16))
            return info.id, info.created_at

        return together(threads, one)


def same_artifact(directory: Path, seed: int, *, clients: int, rounds: int) -> dict[str, Any]:
    root, workers = directory / "repository", 2 if clients < 64 else 4
    pushes = 0
    with Opened(root) as opened, served(root) as url, processes(workers) as pool:
        known: dict[str, Artifact] = {}
        for number in range(seed, seed + rounds):
            what = made(number, 40, 16)
            known[what[0].id] = what
            running = [pool.submit(push_same, root, url, number, clients // workers) for _ in range(workers)]
            answers = [answer for future in running for answer in future.result()]
            pushes += len(answers)
            assert {artifact_id for artifact_id, _ in answers} == {what[0].id}, "not all got the artifact they pushed"
            assert len(set(answers)) == 1, f"published more than once: {sorted({str(t) for _, t in answers})}"
            opened.check(known, must=set(known))
            opened.check_files()
        opened.check_index()
    return {"clients": clients, "rounds": rounds, "pushes": pushes, "failed": 0, "copies": 1}


@dataclass
class Pushed:
    """What a crowd of pushers did."""

    there: list[int] = field(default_factory=list)
    deleted: int = 0
    abandoned: int = 0
    begun_again: int = 0


def relative(number: int) -> Artifact:
    """Four in a row share a block, which is let go of and needed again while others are at it."""
    return made(number, 24, 16, family=number // 4 % 1000)


def push_many(root: Path, numbers: Sequence[int], seed: int, threads: int, lease_s: float) -> Pushed:
    """Push artifacts that share blocks; delete some again, leave some in the middle."""
    done = Pushed()
    lock = threading.Lock()
    with Opened(root) as opened:

        def one(i: int) -> None:
            generator = random.Random(f"{seed} {i}")
            for number in numbers[i::threads]:
                what = relative(number)
                if generator.random() < 0.1:
                    leave(opened, what, lease_s, generator)
                    done.abandoned += 1
                    continue
                done.begun_again += push_until_done(opened, what, generator.choice([0, 0, 0.1]))
                if generator.random() < 0.3:
                    read_whole(opened.repository, what[0].id, what[2])
                if generator.random() < 0.3:
                    opened.repository.delete(what[0].id, DEFAULT_NAMESPACE)
                    done.deleted += 1
                else:
                    with lock:
                        done.there.append(number)

        together(threads, one)
    return done


def push_until_done(opened: Opened, what: Artifact, pause_s: float) -> int:
    """Push, anew if the push's lease ran out, also in the middle of its commit; returns how often it did."""
    manifest, records, contents = what
    # A clock that jumps ahead ends all pushes, and a slow machine is long at one.
    for attempt in range(500):
        running = opened.repository.begin_push(manifest.fingerprint, DEFAULT_NAMESPACE)
        with suppress(PushNotFound, ChunksMissing):
            missing = offer(running, manifest, records)
            time.sleep(pause_s)
            for digest in missing:
                running.put(digest, contents[digest])
            running.commit(manifest)
            return attempt
    raise AssertionError("500 pushes in a row expired")


def begin(opened: Opened, what: Artifact, lease_s: float, generator: random.Random) -> Push:
    """A push with a short lease."""
    name = f"short{generator.randrange(10**12)}"
    expires = datetime.now(UTC) + timedelta(seconds=lease_s)
    opened.index.begin_push(name, DEFAULT_NAMESPACE, what[0].fingerprint, expires)
    return opened.repository.resume_push(name, DEFAULT_NAMESPACE)


def leave(opened: Opened, what: Artifact, lease_s: float, generator: random.Random, url: str | None = None) -> None:
    """Begin a push, send some of it, and vanish; with the URL of a service, in the middle of sending it a chunk."""
    manifest, records, contents = what
    running = begin(opened, what, lease_s, generator)
    # It may be over sooner than this process gets to it.
    with suppress(PushNotFound):
        missing = offer(running, manifest, records)
        sent = generator.randint(0, len(missing))
        for digest in missing[:sent]:
            running.put(digest, contents[digest])
        if url is not None and sent < len(missing):
            data = contents[missing[sent]]
            send_partly(url, running.id, missing[sent], data, generator.randint(0, len(data)))


def gc_under_load(directory: Path, seed: int, *, artifacts: int, workers: int, every_ms: int) -> dict[str, Any]:
    root, threads = directory / "repository", 5
    grace_s = 5 * every_ms / 1000
    freed = sweeps = 0
    begun: list[float] = []
    over = threading.Event()
    with Opened(root) as opened, processes(workers) as pool, ThreadPoolExecutor(1) as beside:

        def reclaim() -> int:
            """As a service does between its sweeps: what rows let go of."""
            freed = 0
            while not over.is_set():
                begun.append(time.monotonic())
                freed += opened.repository.collect_garbage(grace_s=grace_s, sweep=False).chunks
                over.wait(max(0.0, begun[-1] + every_ms / 1000 - time.monotonic()))
            return freed

        numbers = [range(seed + part.start, seed + part.stop) for part in shares(artifacts, workers)]
        running = [pool.submit(push_many, root, part, seed + i, threads, grace_s) for i, part in enumerate(numbers)]
        reclaiming = beside.submit(reclaim)
        try:
            while not all(future.done() for future in running):
                freed += opened.repository.collect_garbage(grace_s=grace_s).chunks
                sweeps += 1
                time.sleep(every_ms / 1000)
        finally:
            over.set()
        freed += reclaiming.result()
        results = [future.result() for future in running]
        assert not any(done.begun_again for done in results), "a push lost what it had sent before its lease was over"
        time.sleep(2 * grace_s)
        freed += opened.repository.collect_garbage(grace_s=grace_s).chunks
        known = _known(results)
        opened.check(known, must=set(known))
        opened.check_files()
        opened.check_index()
    return {
        "artifacts": artifacts,
        "pushers": workers * threads,
        "there": len(known),
        "deleted": sum(done.deleted for done in results),
        "abandoned": sum(done.abandoned for done in results),
        "collections": len(begun),
        "s_between_collections": round((begun[-1] - begun[0]) / max(1, len(begun) - 1), 2),
        "sweeps_of_the_whole_store_beside_them": sweeps,
        "chunks_collected": freed,
        "missing_chunks": 0,
        "garbage_after_twice_the_grace": 0,
    }


def _known(results: Iterable[Pushed]) -> dict[str, Artifact]:
    return {what[0].id: what for done in results for what in map(relative, done.there)}


def vanish(directory: Path, seed: int, *, clients: int, lease_ms: int) -> dict[str, Any]:
    generator, lease_s = random.Random(seed), lease_ms / 1000
    with Opened(directory / "repository") as opened, served(directory / "repository") as url:
        first, _ = push(opened.repository, made(seed, 24, 16))
        before = opened.files()
        for number in range(seed + 1, seed + 1 + clients):
            by = url if number % 2 else None
            leave(opened, made(number, 24, 16 * (number // 2 % 2)), lease_s, generator, by)
        left = len(opened.files() - before)
        time.sleep(2 * lease_s)
        report = opened.repository.collect_garbage(grace_s=lease_s)
        assert opened.files() == before, f"{len(opened.files() - before)} files of clients that vanished are left"
        opened.check({first.id: made(seed, 24, 16)}, must={first.id})
    return {
        "clients": clients,
        "in_a_request": clients // 2,
        "files_they_left": left,
        "expired": report.expired_pushes,
        "files_after": 0,
    }


def resume(directory: Path, seed: int, *, cuts: int) -> dict[str, Any]:
    generator = random.Random(seed)
    most = 0
    with served(directory / "repository") as url, open_repository(url) as remote:
        for number in range(seed, seed + cuts):
            manifest, records, contents = made(number, 60)
            running = remote.begin_push(manifest.fingerprint, DEFAULT_NAMESPACE)
            digests = offer(running, manifest, records)
            cut = generator.randrange(sum(len(contents[digest]) for digest in digests))
            sent: set[str] = set()
            for digest in digests:
                size = len(contents[digest])
                sent.add(digest)
                if cut < size:
                    # At the very end too: all is sent, and no answer comes.
                    send_partly(url, running.id, digest, contents[digest], size if cut == size - 1 else cut)
                    break
                running.put(digest, contents[digest])
                cut -= size
            again = running if number % 2 else remote.begin_push(manifest.fingerprint, DEFAULT_NAMESPACE)
            missing = offer(again, manifest, records)
            repeated = len(sent & set(missing))
            most = max(most, repeated)
            assert repeated <= 1, f"{repeated} chunks had to be sent again, of {len(sent)}"
            for digest in missing:
                again.put(digest, contents[digest])
            read_whole(remote, again.commit(manifest).id, contents)
    return {"cuts": cuts, "most_chunks_sent_again": most}


def send_partly(url: str, push_id: str, digest: str, data: bytes, size: int) -> None:
    """Send a chunk's first bytes and hang up."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.putrequest("PUT", f"/v1/pushes/{push_id}/chunks/{digest}")
    connection.putheader("Content-Type", "application/octet-stream")
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders()
    connection.send(data[:size])
    connection.close()


def write_much(root: Path, writers: Sequence[int], transactions: int, artifact_id: str) -> int:
    """Add one, again and again, to a number that all share; returns how often the index was not to be had."""
    refused = [0] * len(writers)
    database = SqliteDatabase(f"sqlite:///{root}/index.sqlite")
    with Opened(root) as opened:

        def one(i: int) -> None:
            for _ in range(transactions):
                try:
                    with database.write() as connection:
                        found = connection.execute(text("SELECT value FROM meta WHERE name = 'shared'")).scalar_one()
                        number = {"value": str(int(found) + 1)}
                        connection.execute(text("UPDATE meta SET value = :value WHERE name = 'shared'"), number)
                except Unavailable:
                    refused[i] += 1
            opened.repository.set_tag(DEFAULT_NAMESPACE, f"writer-{writers[i]}", artifact_id)

        together(len(writers), one)
    database.close()
    return sum(refused)


def many_writers(directory: Path, seed: int, *, writers: int, transactions: int, workers: int) -> dict[str, Any]:
    root = directory / "repository"
    with Opened(root) as opened, processes(workers) as pool:
        info, _ = push(opened.repository, made(seed, 24))
        database = SqliteDatabase(f"sqlite:///{root}/index.sqlite")
        with database.write() as connection:
            connection.execute(text("INSERT INTO meta (name, value) VALUES ('shared', '0')"))
        running = [pool.submit(write_much, root, part, transactions, info.id) for part in shares(writers, workers)]
        refused = sum(future.result() for future in running)
        with database.read() as connection:
            total = int(connection.execute(text("SELECT value FROM meta WHERE name = 'shared'")).scalar_one())
        database.close()
        lost = writers * transactions - refused - total
        assert refused == 0, f"{refused} transactions found the database locked"
        assert lost == 0, f"{lost} of {writers * transactions} updates were lost"
        tags = {tag.name for tag in opened.repository.tags(DEFAULT_NAMESPACE)}
        assert tags == {f"writer-{i}" for i in range(writers)}, "tags were lost"
    return {"writers": writers, "transactions": writers * transactions, "locked": refused, "lost_updates": lost}


class Clock:
    """This process's clock, which can be moved."""

    ahead_s = 0.0

    @classmethod
    def install(cls) -> None:
        now_s, now_ns = time.time, time.time_ns
        time.time = lambda: now_s() + cls.ahead_s
        time.time_ns = lambda: now_ns() + int(cls.ahead_s * 1e9)
        for name, module in list(sys.modules.items()):
            if name.startswith("repo_service") and getattr(module, "datetime", None) is datetime:
                module.datetime = _MovedDatetime  # type: ignore[attr-defined]


class _MovedDatetime(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime.now(tz) + timedelta(seconds=Clock.ahead_s)


def jump(root: Path, numbers: Sequence[int], seed: int, stop: Path) -> tuple[Pushed, int]:
    """Push and collect in a process whose clock jumps, until a file is there."""
    Clock.install()
    generator = random.Random(seed)
    collections = 0
    with Opened(root) as opened, ThreadPoolExecutor(1) as pool:
        running = pool.submit(push_many, root, numbers, seed, 3, 3600.0)
        while not (running.done() and stop.exists()):
            Clock.ahead_s = generator.choice([0, DAY_S, -DAY_S])
            opened.repository.collect_garbage()
            collections += 1
            time.sleep(0.02)
        return running.result(), collections


def clock_jumps(directory: Path, seed: int, *, artifacts: int) -> dict[str, Any]:
    root, stop = directory / "repository", directory / "stop"
    with Opened(root) as opened, processes(2) as pool:
        push(opened.repository, made(seed, 24))
        moved, still = shares(artifacts, 2)
        jumping = pool.submit(jump, root, [seed + 1 + i for i in moved], seed, stop)
        calm = pool.submit(push_many, root, [seed + 1 + i for i in still], seed + 1, 3, 3600.0)
        calm.exception()
        stop.touch()
        result, collections = jumping.result()
        known = _known([result, calm.result()]) | {made(seed, 24)[0].id: made(seed, 24)}
        opened.check(known, must=set(known))
        opened.check_index()
        opened.collect()
        opened.check_files()
        opened.check(known, must=set(known))
        again = result.begun_again + calm.result().begun_again
    return {"artifacts": artifacts, "collections": collections, "pushes_begun_again": again, "live_chunks_collected": 0}


FAULTS = [
    Fault(
        "same-artifact",
        "clients that push one artifact at once all succeed, and one copy is stored",
        same_artifact,
        short={"clients": 16, "rounds": 2},
        full={"clients": 64, "rounds": 100},
    ),
    Fault(
        "gc-under-load",
        "no chunk is missing after an acknowledged commit; all garbage is gone by twice the grace",
        gc_under_load,
        short={"artifacts": 80, "workers": 2, "every_ms": 200},
        full={"artifacts": 10_000, "workers": 2, "every_ms": 1000},
    ),
    Fault(
        "vanish",
        "all space of clients that vanish in the middle is back by twice the lease",
        vanish,
        short={"clients": 40, "lease_ms": 500},
        full={"clients": 1000, "lease_ms": 5000},
    ),
    Fault(
        "resume",
        "a push cut anywhere is resumed with at most one chunk sent again",
        resume,
        short={"cuts": 8},
        full={"cuts": 200},
    ),
    Fault(
        "writers",
        "many writers never find the database locked and lose no update",
        many_writers,
        short={"writers": 10, "transactions": 30, "workers": 2},
        full={"writers": 50, "transactions": 100, "workers": 5},
    ),
    Fault(
        "clock",
        "a clock that jumps a day either way takes no chunk of an artifact or of a push that succeeds",
        clock_jumps,
        short={"artifacts": 30},
        full={"artifacts": 2000},
    ),
]
