"""A team's repository in S3 and PostgreSQL: replicas that are killed, and machines whose links are cut."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from beside import beside
from families import build
from fleet import Replica, balancer, team
from pushing import Artifact, push
from servers import s3_server
from synthetic import artifact

from engine_adapter.demo_models import resolve
from repo_service.client import open_repository
from repo_service.domain.errors import KvgraftError
from repo_service.domain.repository import Repository
from tests.fault.suite import Fault


def replicas(directory: Path, seed: int, *, clients: int, count: int, seconds: int, every_ms: int) -> dict[str, Any]:
    """Each client pushes, tags, matches and reads through a balancer, while every ``every_ms`` one replica is killed."""
    with ExitStack() as stack:
        s3 = stack.enter_context(s3_server())
        stack.enter_context(mock.patch.dict(os.environ, s3.environment))
        served = stack.enter_context(team(directory, s3, count, gc_seconds=3, gc_grace_seconds=5))
        url = stack.enter_context(balancer([("127.0.0.1", replica.port) for replica in served.replicas]))
        end = time.monotonic() + seconds
        with _killing(served.replicas, every_ms / 1000, end) as kills, ThreadPoolExecutor(clients) as threads:
            done = list(threads.map(lambda number: _Client(url, number, seed).work(end), range(clients)))
        tracebacks = [line for replica in served.replicas for line in replica.failures()]
        environment = served.environment
        with open_repository(environment["KVGRAFT_REPO"], index=environment["KVGRAFT_INDEX"]) as repository:
            acknowledged = [one for client in done for one in client.acknowledged]
            lost = [one for one in acknowledged if not _is_whole(repository, one)]
    wrong = [line for client in done for line in client.wrong]
    figures = {
        "clients": clients,
        "replicas": count,
        "seconds": seconds,
        "kills": len(kills),
        "longest_between_kills_s": round(max((b - a for a, b in pairwise(kills)), default=seconds), 1),
        "operations": sum(client.operations for client in done),
        "longest_s": round(max(client.longest for client in done), 1),
        "failed": len(wrong),
        "acknowledged": len(acknowledged),
        "lost": len(lost),
    }
    assert not wrong, f"{figures}: {wrong[:5]}"
    assert not lost, f"{figures}: {lost[:5]}"
    assert not tracebacks, tracebacks
    assert len(kills) >= 0.9 * seconds * 1000 / every_ms, f"too few kills to say anything: {figures}"
    assert acknowledged, figures
    return figures


class _Client:
    def __init__(self, url: str, number: int, seed: int) -> None:
        self._url = url
        self._tag = f"client-{number}"
        self._rng = random.Random(seed + number)
        self.acknowledged: list[str] = []
        self.wrong: list[str] = []
        self.operations = 0
        self.longest = 0.0

    def work(self, end: float) -> _Client:
        with open_repository(self._url) as repository:
            while time.monotonic() < end:
                made = artifact(self._rng.choices(range(1000), k=self._rng.randrange(1, 60)))
                for step in (self._push, self._set_tag, self._match, self._read):
                    began = time.monotonic()
                    try:
                        step(repository, made)
                    except (KvgraftError, AssertionError) as error:
                        self.wrong.append(f"{step.__name__}: {type(error).__name__} {error}")
                        break
                    self.operations += 1
                    self.longest = max(self.longest, time.monotonic() - began)
        return self

    def _push(self, repository: Repository, made: Artifact) -> None:
        self.acknowledged.append(push(repository, made)[0].id)

    def _set_tag(self, repository: Repository, made: Artifact) -> None:
        assert repository.set_tag("default", self._tag, made[0].id).artifact_id == made[0].id

    def _match(self, repository: Repository, made: Artifact) -> None:
        found = repository.match("default", [record.key for record in made[1]])
        assert found is not None
        assert found.blocks == len(made[1])

    def _read(self, repository: Repository, _: Artifact) -> None:
        report = repository.check(self._rng.choice(self.acknowledged), "default")
        assert report.ok, report


@contextmanager
def _killing(replicas: list[Replica], every_s: float, end: float) -> Iterator[list[float]]:
    """Kill one every ``every_s`` from now to the end, and start it again at once; gives the times of the kills so far.

    One is left up: where the others are still starting, the kill comes as soon as one of them is up, and
    those after it when they were due.
    """
    kills: list[float] = []
    with ThreadPoolExecutor(len(replicas)) as starting:

        def kill(stop: threading.Event) -> None:
            due, up = time.monotonic(), deque(replicas)
            started: list[Future[Replica]] = []
            while due < end and not stop.wait(max(0.0, due - time.monotonic())):
                for one in [one for one in started if one.done()]:
                    started.remove(one)
                    up.append(one.result())
                if len(up) < 2:
                    stop.wait(0.05)
                    continue
                victim = up.popleft()
                victim.kill()
                kills.append(time.monotonic())
                started.append(starting.submit(_started, victim))
                due += every_s
            for last in started:
                last.result()

        # What a replica that does not start says is raised at the end.
        with beside(kill):
            yield kills


def _started(replica: Replica) -> Replica:
    replica.start()
    return replica


def _is_whole(repository: Repository, artifact_id: str) -> bool:
    try:
        return repository.check(artifact_id, "default").ok
    except KvgraftError:
        return False


def three_machines(directory: Path, seed: int, *, tokens: int, cuts: int, kbit: int, real: int) -> dict[str, Any]:
    """A deposits, B grafts, C queries; all pull the artifact, through two replicas, while links are cut."""
    if why := _no_network():
        pytest.skip(f"three-machines: a network of its own can't be made here: {why}")
    if real:
        model = str(resolve("smollm2"))
    else:
        model = str(directory / "model")
        build("llama", torch.float32, "sdpa").save_pretrained(model)
    script = Path(__file__).parent.parent / "three_machines.py"
    arguments = [str(value) for value in (directory, model, tokens, cuts, kbit, seed)]
    done = subprocess.run(
        ["unshare", "--net", sys.executable, script, *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["queried"] == [seen["artifact"]], seen
    assert seen["logits"][0] == seen["logits"][1], seen
    assert seen["grafted"] > 0, seen
    assert sorted(seen["trees"]) == ["A", "B", "C"], seen
    assert len({digest for digests in seen["trees"].values() for digest in digests}) == 1, seen
    assert seen["cuts"] >= cuts, seen
    assert seen["in_transfer"] >= cuts // 4, seen
    assert seen["lost"], f"no request had to be sent again: {seen}"
    assert not seen["tracebacks"], seen
    pulls = sum(len(digests) for digests in seen["trees"].values())
    return {
        "cuts": seen["cuts"],
        "in_transfer": seen["in_transfer"],
        "connections_broken": seen["connections"],
        "requests_sent_again": len(seen["lost"]),
        "pulls": pulls,
        "mib": seen["mib"],
        "grafted_tokens": seen["grafted"],
        "logits_equal": 1,
    }


def _no_network() -> str | None:
    """Why no network can be made here; None if one can."""
    for command in ("ip", "tc", "unshare"):
        if shutil.which(command) is None:
            return f"{command} is missing (Debian: iproute2, util-linux)"
    made = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "try", "type", "bridge"], check=False, capture_output=True, text=True
    )
    return (made.stderr.strip() or "not permitted") if made.returncode else None


FAULTS = [
    Fault(
        "replicas",
        "one of the replicas on S3 and PostgreSQL killed every 2 s under 8 clients: all succeed by retry, nothing is lost",
        replicas,
        # Starting a replica takes two cores seconds; with fewer of them no other would be up when one is due.
        short={"clients": 3, "count": 4, "seconds": 10, "every_ms": 2000},
        full={"clients": 8, "count": 6, "seconds": 120, "every_ms": 2000},
    ),
    Fault(
        "three-machines",
        "A deposits, B grafts, C queries over links that are cut 20 times: equal bytes on all three, equal logits",
        three_machines,
        short={"tokens": 300, "cuts": 5, "kbit": 2000, "real": 0},
        full={"tokens": 600, "cuts": 20, "kbit": 40_000, "real": 1},
    ),
]
