"""S3 that fails: a network of errors, stalls and cuts, and writers that race for one key."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest import mock

import postgres
from faulty import Faults, faulty
from pushing import Artifact, contents_of, push
from servers import S3Server, s3_server
from synthetic import BLOCK_TOKENS, artifact

from repo_service.client import open_repository
from repo_service.domain.errors import Unavailable
from repo_service.domain.repository import Repository
from repo_service.storage import S3Store
from tests.fault.suite import Fault

_KEYS = 6
_SIZES = [0, 1, 100, 5_000, 70_000, 1_500_000]
_BIG = 8 * 2**20

# One request in five fails; of those, this part in silence.
_FAILING = 0.2
_QUICK = ["error", "applied-error", "drop", "lost", "reset"]
_SILENT = ["stall", "body-stall", "late"]

# What two busy cores may add to a deadline.
_SLACK_S = 5.0


class _Worker:
    """Operations on keys of its own, against what is known of them: a set of possible contents, None for none."""

    def __init__(self, store: S3Store, name: str, seed: int) -> None:
        self._store = store
        self._name = name
        self._generator = random.Random(f"{seed} {name}")
        self._possible: dict[str, set[bytes | None]] = {f"{name}/{i}": {None} for i in range(_KEYS)}
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0

    def step(self) -> None:
        key = self._generator.choice(list(self._possible))
        operations = [self._get, self._get, self._read, self._read, self._put, self._create, self._create, self._delete]
        operation = self._generator.choice([*operations, self._exists, self._list])
        before = set(self._possible[key])
        began = time.monotonic()
        try:
            self._possible[key] = operation(key, before)
        except Unavailable:
            self.counts["given up"] += 1
        finally:
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.counts["operations"] += 1

    def check(self) -> None:
        """Look at everything at the end, without faults."""
        for key, possible in self._possible.items():
            self._get(key, possible)

    def _data(self) -> bytes:
        size = _BIG if self._generator.random() < 0.05 else self._generator.choice(_SIZES)
        return self._generator.randbytes(size)

    def _known(self, found: bytes | None, possible: set[bytes | None]) -> set[bytes | None]:
        if found not in possible:
            self.counts["corrupt"] += 1
        return {found}

    def _get(self, key: str, possible: set[bytes | None]) -> set[bytes | None]:
        return self._known(self._store.get(key), possible)

    def _read(self, key: str, possible: set[bytes | None]) -> set[bytes | None]:
        out, pieces = bytearray(_BIG), []
        size = self._store.read_into(key, memoryview(out), lambda piece: pieces.append(bytes(piece)))
        found = None if size is None else bytes(out[:size])
        if b"".join(pieces) != (found or b""):
            self.counts["corrupt"] += 1
        return self._known(found, possible)

    def _put(self, key: str, possible: set[bytes | None]) -> set[bytes | None]:
        data = self._data()
        # Given up, it may have been done.
        self._possible[key] = possible | {data}
        self._store.put(key, data)
        return {data}

    def _create(self, key: str, possible: set[bytes | None]) -> set[bytes | None]:
        data = self._data()
        self._possible[key] = possible | ({data} if None in possible else set())
        if self._store.put_if_absent(key, data):
            self.counts["corrupt"] += None not in possible
            return {data}
        there = possible - {None}
        self.counts["corrupt"] += not there
        return there

    def _delete(self, key: str, possible: set[bytes | None]) -> set[bytes | None]:
        self._possible[key] = possible | {None}
        self._store.delete(key)
        return {None}

    def _exists(self, key: str, possible: set[bytes | None]) -> set[bytes | None]:
        right = possible - {None} if self._store.exists(key) else possible & {None}
        self.counts["corrupt"] += not right
        return right

    def _list(self, key: str, possible: set[bytes | None]) -> set[bytes | None]:
        right = possible - {None} if key in self._store.list(self._name) else possible & {None}
        self.counts["corrupt"] += not right
        return right


def s3_faults(
    directory: Path,  # noqa: ARG001
    seed: int,
    *,
    operations: int,
    workers: int,
    seconds: float,
    stall_s: float,
    silent: float,
) -> dict[str, Any]:
    choice, lock = random.Random(seed), threading.Lock()

    def choose(*_: str) -> str | None:
        with lock:
            if choice.random() >= _FAILING:
                return None
            return choice.choice(_SILENT if choice.random() < silent else _QUICK)

    with s3_server() as server, faulty(server.url) as faults, _through(faults, server.environment):
        faults.stall_s = stall_s
        store = S3Store(server.bucket, server.prefix(), seconds=seconds)
        crowd = [_Worker(store, f"worker-{number}", seed) for number in range(workers)]
        faults.choose = choose

        def work(worker: _Worker) -> None:
            for _ in range(operations // workers):
                worker.step()

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, crowd))
        faults.choose = lambda *_: None
        for worker in crowd:
            worker.check()
        store.close()
        requests, met = len(faults.requests), dict(faults.met)
    counts = sum((worker.counts for worker in crowd), Counter[str]())
    slowest = max(worker.slowest for worker in crowd)
    figures = {
        "operations": counts["operations"],
        "corrupt": counts["corrupt"],
        "given_up_at_the_deadline": counts["given up"],
        "deadline_s": seconds,
        "slowest_s": round(slowest, 2),
        "requests": requests,
        "faults": met,
    }
    assert counts["corrupt"] == 0, f"answers that can't be: {figures}"
    assert slowest <= seconds + _SLACK_S, f"an operation ran past its deadline: {figures}"
    assert met, "no fault was met"
    return figures


def race(directory: Path, seed: int, *, rounds: int, writers: int, keys: int) -> dict[str, Any]:  # noqa: ARG001
    """Writers that push one artifact at once, each with a connection of its own; and that create one key at once."""
    with s3_server() as server, mock.patch.dict(os.environ, server.environment), ThreadPoolExecutor(writers) as pool:
        pushes = _race_of_pushes(server, pool, seed, rounds, writers)
        return {"rounds": rounds, "writers": writers, **pushes, **_race_of_contents(server, pool, seed, keys, writers)}


def _race_of_pushes(server: S3Server, pool: ThreadPoolExecutor, seed: int, rounds: int, writers: int) -> dict[str, int]:
    """Every writer's push succeeds; of each chunk there is one object, which is the right one."""
    place = server.prefix()
    url, index = f"s3://{server.bucket}/{place}", postgres.empty_index()
    counts, digests = Counter({"successes": 0, "sent": 0}), set[str]()
    with ExitStack() as stack:
        open_repository(url, index=index).close()
        crowd = [stack.enter_context(open_repository(url, index=index)) for _ in range(writers)]
        for number in range(rounds):
            made = artifact([number] * BLOCK_TOKENS, seed=seed)
            manifest, _, contents = made
            barrier = threading.Barrier(writers)

            def write(repository: Repository, barrier: threading.Barrier = barrier, made: Artifact = made) -> list[str]:
                barrier.wait(60)
                info, sent = push(repository, made)
                assert info.id == made[0].id, f"{info.id} was published in the place of {made[0].id}"
                return sent

            for sent in pool.map(write, crowd):
                counts["successes"] += 1
                counts["sent"] += len(sent)
            digests.update(contents)
            assert crowd[number % writers].check(manifest.id, "default").ok, f"round {number}: something is missing"
            read = contents_of(crowd[(number + 1) % writers], manifest.id)
            assert read == contents, f"round {number}: other bytes were read"
        pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=server.bucket, Prefix=f"{place}/")
        keys = [item["Key"].removeprefix(f"{place}/") for page in pages for item in page.get("Contents", [])]
    objects = Counter(key.partition("/")[0] for key in keys)
    named = [digest for key in keys for digest in digests if key.replace("/", "").endswith(digest.partition(":")[2])]
    figures = {**counts, "digests": len(digests), "objects": objects["chunks"], "manifests": objects["artifacts"]}
    assert counts["successes"] == rounds * writers, figures
    assert sorted(named) == sorted(digests), f"not one object of each digest: {figures}"
    assert objects["chunks"] == len(digests), figures
    assert objects["artifacts"] == objects["blocks"] == rounds, figures
    assert counts["sent"] > len(digests), f"no two writers sent one chunk, so nothing raced: {figures}"
    return figures


def _race_of_contents(server: S3Server, pool: ThreadPoolExecutor, seed: int, rounds: int, writers: int) -> Any:
    """Of writers that create one key with contents of their own, one is told that it did, and all read what it wrote."""
    prefix, counts = server.prefix(), Counter({"created": 0, "told_it_is_there": 0})
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(S3Store(server.bucket, prefix))) for _ in range(writers)]
        for number in range(rounds):
            contents = [random.Random(f"{seed} {number} {name}").randbytes(10_000) for name in range(writers)]
            barrier = threading.Barrier(writers)

            def write(
                name: int, number: int = number, barrier: threading.Barrier = barrier, contents: Any = contents
            ) -> tuple[bool, bytes | None]:
                barrier.wait(60)
                won = stores[name].put_if_absent(f"race/{number}", contents[name])
                return won, stores[name].get(f"race/{number}")

            answers = list(pool.map(write, range(writers)))
            winners = [name for name, (won, _) in enumerate(answers) if won]
            counts["created"] += len(winners)
            counts["told_it_is_there"] += len(answers) - len(winners)
            assert len(winners) == 1, f"round {number}: {len(winners)} of {writers} created one object"
            assert {data for _, data in answers} == {contents[winners[0]]}, f"round {number}: other bytes were read"
        assert len(list(stores[0].list("race"))) == rounds
    assert counts == {"created": rounds, "told_it_is_there": rounds * (writers - 1)}, counts
    return dict(counts)


def _through(faults: Faults, environment: dict[str, str]) -> Any:
    return mock.patch.dict(os.environ, environment | {"AWS_ENDPOINT_URL": faults.url})


FAULTS = [
    Fault(
        "s3-faults",
        "operations on S3 with 20% errors, long stalls and mid-body resets: 0 corrupt, none past its deadline",
        s3_faults,
        short={"operations": 96, "workers": 8, "seconds": 30, "stall_s": 30, "silent": 0},
        full={"operations": 1000, "workers": 8, "seconds": 60, "stall_s": 60, "silent": 0.1},
    ),
    Fault(
        "s3-race",
        "8 writers push one artifact at once: one object of each digest, 8 successes; of 8 contents of a key one stays",
        race,
        short={"rounds": 2, "writers": 8, "keys": 1},
        full={"rounds": 100, "writers": 8, "keys": 25},
    ),
]
