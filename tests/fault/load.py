"""Many clients, slow clients, and a disk with no room."""

from __future__ import annotations

import math
import os
import random
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import urllib3
from pushing import push
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.domain.digest import chunk_digest
from repo_service.domain.errors import KvgraftError
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord, block_keys
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import canonical_steps, split_by_block
from repo_service.domain.tokens import token_chunks
from tests.fault._served import MIB, Served, service, settled
from tests.fault.suite import Fault

_CLIENTS = 16
_BLOCK = 256


class _Large:
    """An artifact of any number of chunks of 8 MiB, none of which is kept in memory."""

    def __init__(self, chunks: int, seed: int) -> None:
        array = {"name": "k", "dtype": "float32", "heads": 8, "dim": 256, "chunk_layers": 4, "chunk_heads": 8}
        group = {"name": "full", "kind": "full", "layers": [0, 1, 2, 3], "window": None, "arrays": [array]}
        made_with = fingerprint(state={"groups": [group]}, schedule={"block_tokens": _BLOCK})
        self._base = random.Random(seed).randbytes(8 * MIB)
        tokens = [(seed * 7919 + n) % 30_000 for n in range(chunks * _BLOCK)]
        steps = canonical_steps(0, len(tokens), _BLOCK)
        keys = [None, *block_keys(made_with.id, tokens, steps, _BLOCK)]
        self.spec = ChunkSpec("float32", (1, 4, 8, _BLOCK, 256))
        self.digests = {chunk_digest(self.data(n), self.spec.dtype, self.spec.shape): n for n in range(chunks)}
        self.records = [
            BlockRecord(keys[n + 1] or "", keys[n], n * _BLOCK, (n + 1) * _BLOCK, tuple(block), {"full/k": (digest,)})
            for (digest, n), block in zip(self.digests.items(), split_by_block(steps, _BLOCK), strict=True)
        ]
        self.tokens = dict(token_chunks(tokens))
        blocks = tuple((record.key, record.digest) for record in self.records)
        self.manifest = Manifest(made_with, len(tokens), tuple(self.tokens), blocks)

    def data(self, number: int) -> bytes:
        return number.to_bytes(8, "little") + self._base[8:]

    def push(self, repository: Repository, namespace: str) -> None:
        with repository.begin_push(self.manifest.fingerprint, namespace) as running:
            for digest in running.offer(self.records):
                running.put(digest, self.data(self.digests[digest]))
            for digest in running.offer_tokens(self.manifest.token_count, self.manifest.tokens or ()):
                running.put(digest, self.tokens[digest])
            running.commit(self.manifest)

    def pull(self, repository: Repository, namespace: str) -> None:
        """Every chunk, verified by the client as it comes."""
        out = memoryview(bytearray(self.spec.size))
        for digest in self.digests:
            repository.read_chunk(self.manifest.id, namespace, digest, self.spec, out)


def pulls_and_pushes(directory: Path, seed: int, *, chunks: int, aborted: int) -> dict[str, Any]:
    """Each push is one of the same content in a namespace of its own, which must send all of it."""
    rng = random.Random(seed)
    large = _Large(chunks, seed)
    with (
        service(directory / "repository", directory / "log") as served,
        open_repository(served.url) as repository,
        ThreadPoolExecutor(2 * _CLIENTS) as pool,
    ):
        at_start = served.descriptors()
        large.push(repository, "default")
        # Connections of the index are opened as they are needed, and kept.
        list(pool.map(lambda _: large.pull(repository, "default"), range(2)))
        began = time.monotonic()
        work: list[Callable[[], None]] = [lambda: large.pull(repository, "default") for _ in range(_CLIENTS)]
        work += [lambda n=n: large.push(repository, f"client-{n}") for n in range(_CLIENTS)]  # type: ignore[misc]
        for done in [pool.submit(one) for one in work]:
            done.result()
        seconds = time.monotonic() - began
        repository.close()
        after_load = _steady(served)
        with open_repository(served.url) as other:
            running = other.begin_push(large.manifest.fingerprint, "aborted")
            running.offer(large.records)
            list(
                pool.map(lambda n: _cut(served, large, running.id, random.Random(n)), rng.sample(range(10**9), aborted))
            )
            running.abort()
        settled(lambda: served.descriptors() <= after_load)
        left = _steady(served)
        peak = served.memory("VmHWM")
        with open_repository(served.url) as other:
            large.pull(other, "client-3")
            assert other.check(large.manifest.id, "client-5").ok
        assert urllib3.request("GET", f"{served.url}/readyz").status == 200
        assert not served.failures(), served.failures()
    assert peak < 512 * MIB, f"the service took {peak // MIB} MiB"
    assert left <= after_load, f"{left} descriptors after {aborted} aborted transfers, {after_load} before"
    moved = 2 * _CLIENTS * chunks * 8
    return {
        "transfers": 2 * _CLIENTS,
        "mib_each": chunks * 8,
        "mib_per_s": round(moved / seconds),
        "peak_mib": peak // MIB,
        "aborted": aborted,
        "descriptors": [at_start, after_load, left],
    }


def _steady(served: Served) -> int:
    """Descriptors once their number stays, as when the connections that were closed are gone."""
    found = [served.descriptors()]
    while len(found) < 4 or len(set(found[-4:])) > 1:
        time.sleep(0.25)
        found.append(served.descriptors())
    return found[-1]


def _cut(served: Served, large: _Large, push_id: str, rng: random.Random) -> None:
    """A transfer, either way, that its client ends in the middle: with a goodbye or without."""
    digest = rng.choice(list(large.digests))
    with served.connect() as connection:
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with suppress(OSError):
            if rng.random() < 0.5:
                connection.sendall(_head(served, f"GET /v1/artifacts/{large.manifest.id}/chunks/{digest}"))
                connection.recv(rng.choice([1, 1000, 100_000, MIB]))
            else:
                length = f"Content-Length: {large.spec.size}"
                connection.sendall(_head(served, f"PUT /v1/pushes/{push_id}/chunks/{digest}", length))
                connection.sendall(bytes(rng.choice([0, 1, 1000, 100_000, 4 * MIB])))


def _head(served: Served, first: str, *lines: str) -> bytes:
    return "\r\n".join([f"{first} HTTP/1.1", f"Host: {served.netloc}", *lines, "", ""]).encode()


def slow_clients(
    directory: Path,
    _seed: int,
    *,
    clients: int,
    before_s: int,
    every_ms: int,
    idle_s: int,
    stall_s: int,
    body_s: int,
    closed_s: int,
    slack_ms: int,
) -> dict[str, Any]:
    """A third of the clients each sends its header, or its body, a byte at a time, or reads nothing of a large answer.

    Others are measured while the connections are held; making the large answers is work, and told apart.
    """
    made = artifact(range(20), text="word " * 60_000)
    limits = {"idle_seconds": idle_s, "stall_seconds": stall_s, "body_seconds": body_s}
    with (
        service(directory / "repository", directory / "log", **limits) as served,
        open_repository(served.url) as repository,
        ExitStack() as stack,
    ):
        push(repository, made)
        path = f"/v1/artifacts/{made[0].id}"
        probes = [path, f"{path}/chunks/{made[1][0].chunks['full/k'][0]}"]
        with _probed(served, probes) as before:
            time.sleep(before_s)
        json_head = _head(served, "POST /v1/match", "Content-Type: application/json", "Content-Length: 1000")
        asked = _head(served, f"GET {path}/manifest")
        openings = [b"GET /healthz HTTP/1.1\r\nX: ", json_head, asked * 3]
        waiting: dict[socket.socket, tuple[int, float]] = {}
        closed: dict[int, float] = {}
        with _probed(served, probes) as opening:
            for n in range(clients):
                connection = stack.enter_context(served.connect())
                if n % 3 == 2:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.sendall(openings[n % 3])
                waiting[connection] = n % 3, time.monotonic()
            time.sleep(stall_s / 5)
        with _probed(served, probes) as during:
            began = sent = time.monotonic()
            while waiting and time.monotonic() - began < 3 * closed_s:
                time.sleep(0.2)
                held, now = _held(served), time.monotonic()
                is_due = now - sent >= every_ms / 1000
                sent = now if is_due else sent
                for connection, (kind, since) in list(waiting.items()):
                    if connection.getsockname()[1] not in held:
                        del waiting[connection]
                        closed[kind] = max(closed.get(kind, 0.0), now - since)
                    elif kind < 2 and is_due:
                        with suppress(OSError):
                            connection.sendall(b"a")
        peak = served.memory("VmHWM")
        after = urllib3.request("GET", f"{served.url}/readyz").status
        failures = served.failures()
    kinds = "header", "body", "reader"
    p99s = [(1000 * _percentile(before[probe]), 1000 * _percentile(during[probe])) for probe in probes]
    figures = {
        "clients": clients,
        "closed_s": {kinds[kind]: round(seconds, 1) for kind, seconds in closed.items()},
        "open": {kinds[kind]: count for kind, count in Counter(kind for kind, _ in waiting.values()).items()},
        "p99_ms": [round(value, 2) for value in p99s[0]],
        "opening_p99_ms": [round(1000 * _percentile(opening[probe]), 2) for probe in probes],
        "chunk_p99_ms": [round(value, 2) for value in p99s[1]],
        "peak_mib": peak // MIB,
    }
    assert not waiting, f"not closed: {figures}"
    assert max(closed.values()) <= closed_s, f"closed too late: {figures}"
    assert all(late <= 2 * early + slack_ms for early, late in p99s), f"others wait: {figures}"
    assert after == 200
    assert not failures, failures
    return figures


def _held(served: Served) -> set[int]:
    """Ports of the clients whose connections the service still holds.

    A client that does not read learns of the end only when it does.
    """
    port = int(served.netloc.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Local address, remote address, ..., inode, which is 0 once the process has let go.
    return {int(row[2][-4:], 16) for row in rows if int(row[1][-4:], 16) == port and row[9] != "0"}


@contextmanager
def _probed(served: Served, paths: list[str]) -> Iterator[dict[str, list[float]]]:
    """Ask for the paths, one after the other, until the block ends; how long each answer took, in seconds."""
    times: dict[str, list[float]] = {path: [] for path in paths}
    stop = threading.Event()

    def ask() -> None:
        pool = urllib3.PoolManager()
        while not stop.is_set():
            for path in paths:
                began = time.perf_counter()
                status = pool.request("GET", served.url + path, retries=False).status
                times[path].append(time.perf_counter() - began)
                assert status == 200
                time.sleep(0.002)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield times
    finally:
        stop.set()
        asking.join()


def _percentile(times: list[float]) -> float:
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]


def disk_full(directory: Path, seed: int, *, points: int, mib: int) -> dict[str, Any]:
    """Another file leaves room for a part of a push: 100 different parts, from none to nearly all."""
    if os.geteuid() != 0:
        pytest.skip("disk-full: mounting a file system needs root")
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with _mounted(directory / "disk", mib) as disk, service(disk / "repository", directory / "log") as served:
        with open_repository(served.url) as repository:
            kept = _Large(1, seed)
            kept.push(repository, "default")
            ballast = disk / "ballast"
            for point in range(points):
                made = _Large(3, seed + 1 + point)
                # From the bytes that the push needs, down to none; the last ones around the commit.
                room = 26 * MIB * point // points if point % 2 else rng.randrange(0, 200_000)
                if point % 4 == 1:
                    room = 24 * MIB + rng.randrange(0, 400_000)
                _fill(disk, ballast, room)
                try:
                    made.push(repository, "default")
                    counts["published"] += 1
                except KvgraftError as error:
                    counts[error.code] += 1
                    if error.code != "storage_full":
                        wrong.append(f"{room} bytes of room: {error.code}: {error.message}")
                try:
                    _fill(disk, ballast, 0)
                    kept.pull(repository, "default")
                    repository.artifact(kept.manifest.id, "default")
                    counts["read"] += 1
                except KvgraftError as error:
                    wrong.append(f"a read on a full disk: {error.code}: {error.message}")
                ballast.unlink()
                # With room again, and without a restart.
                made.push(repository, "default")
                _fill(disk, ballast, 0)
                # What frees space works without any.
                repository.delete(made.manifest.id, "default")
                counts["deleted_on_full_disk"] += 1
                ballast.unlink(missing_ok=True)
            if corrupt := repository.reindex().corrupt:
                wrong.append(f"a rebuild finds {corrupt[:3]} corrupt")
            statuses = served.log.read_text().count("storage_full")
        wrong += served.failures()
    assert not wrong, f"{len(wrong)} of {points}, {dict(counts)}: " + "; ".join(wrong[:8])
    return {"points": points, **counts, "answers_507": statuses}


@contextmanager
def _mounted(place: Path, mib: int) -> Iterator[Path]:
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"disk-full: mounting a file system is not permitted: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(disk: Path, ballast: Path, room: int) -> None:
    """Let another file take all but ``room`` bytes."""
    with ballast.open("ab") as file:
        status = os.statvfs(disk)
        free = status.f_bavail * status.f_frsize
        with suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, file.tell() + free - room))


FAULTS = [
    Fault(
        "pulls-and-pushes",
        "16 pulls and 16 pushes of 1 GiB at once, 1,000 aborted transfers: under 512 MiB, no descriptor left open",
        pulls_and_pushes,
        short={"chunks": 1, "aborted": 50},
        full={"chunks": 128, "aborted": 1000},
    ),
    Fault(
        "slow-clients",
        "500 clients of 1 byte in 10 s: closed within 30 s, p99 of others at most doubled",
        slow_clients,
        short={
            "clients": 60,
            "before_s": 1,
            "every_ms": 300,
            "idle_s": 2,
            "stall_s": 1,
            "body_s": 2,
            "closed_s": 4,
            "slack_ms": 500,
        },
        full={
            "clients": 500,
            "before_s": 20,
            "every_ms": 10_000,
            "idle_s": 25,
            "stall_s": 25,
            "body_s": 600,
            "closed_s": 30,
            "slack_ms": 0,
        },
    ),
    Fault(
        "disk-full",
        "100 pushes on a disk that fills up: 507 storage_full, reads and deletes go on, room is enough to recover",
        disk_full,
        short={"points": 4, "mib": 64},
        full={"points": 100, "mib": 64},
    ),
]
