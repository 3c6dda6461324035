"""Pushes and pulls of a team: 1, 2 and 4 clients on 1 and 2 replicas over PostgreSQL and S3."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.artifacts import fingerprint, push, synthetic
from benchmarks.restore import CONNECTIONS, Destination
from repo_service.client import open_repository

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fleet import team
from servers import s3_server

SPAWN = multiprocessing.get_context("spawn")


def run(clients: list[int], replicas: list[int], blocks: int, rounds: int) -> dict[str, Any]:
    """Each client, a process of its own, pushes artifacts of ``blocks`` blocks and pulls them back."""
    measured: dict[str, Any] = {}
    with ExitStack() as stack:
        server = stack.enter_context(s3_server())
        stack.enter_context(mock.patch.dict(os.environ, server.environment))
        for count in replicas:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgraft-bench-")))
            with team(directory, server, count) as served:
                urls = [replica.url for replica in served.replicas]
                for many in clients:
                    with SPAWN.Pool(many) as pool:
                        work = [(urls[n % count], blocks, rounds) for n in range(many)]
                        done = pool.starmap(_client, work, chunksize=1)
                    measured[f"{many} clients, {count} replicas"] = {
                        "push_mib_per_s": round(sum(one["push"] for one in done)),
                        "pull_mib_per_s": round(sum(one["pull"] for one in done)),
                    }
    return {"blocks": blocks, "rounds": rounds, **measured}


def _client(url: str, blocks: int, rounds: int) -> dict[str, float]:
    made_with = fingerprint()
    made = [synthetic(made_with, blocks) for _ in range(rounds)]
    size = sum(one.state_bytes for one in made) / 2**20
    memories = [Destination(one) for one in made]
    with open_repository(url, cache="off") as repository:
        began = time.perf_counter()
        for one in made:
            push(repository, one)
        pushed = time.perf_counter()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for memory in memories:
                memory.restore(repository, pool)
        pulled = time.perf_counter()
    return {"push": size / (pushed - began), "pull": size / (pulled - pushed)}
