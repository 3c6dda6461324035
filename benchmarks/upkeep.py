"""What keeping a repository in order costs for each object: a collection with a sweep, and a rebuild of the index."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.artifacts import fingerprint, push, synthetic
from benchmarks.servers import postgres_server
from repo_service.services.opening import open_local
from repo_service.services.repository import LocalRepository

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from servers import s3_server

PUSHERS = 8


def run(artifacts: int, rounds: int) -> dict[str, Any]:
    """Keep ``artifacts`` artifacts of one small block in order, on a disk with SQLite and on S3 with PostgreSQL."""
    measured: dict[str, Any] = {"artifacts": artifacts, "rounds": rounds}
    for name, place in (("disk, SQLite", _on_disk), ("S3, PostgreSQL", _on_s3)):
        with place() as repository:
            measured[name] = _measured(repository, artifacts, rounds)
    return measured


def _measured(repository: LocalRepository, artifacts: int, rounds: int) -> dict[str, Any]:
    made_with = fingerprint(layers=2, heads=1, dim=8)
    with ThreadPoolExecutor(PUSHERS) as pool:
        began = time.perf_counter()
        list(pool.map(lambda _: push(repository, synthetic(made_with, 1), workers=1), range(artifacts)))
        pushing = time.perf_counter() - began
    objects = sum(1 for prefix in ("chunks", "blocks", "artifacts", "entries") for _ in repository._store.list(prefix))
    sweep = _median_s(repository.collect_garbage, rounds)
    light = _median_s(lambda: repository.collect_garbage(sweep=False), rounds)
    reindex = _median_s(repository.reindex, rounds)
    return {
        "objects": objects,
        "pushes_per_s": round(artifacts / pushing),
        "swept_objects_per_s": round(objects / sweep),
        "collection_without_sweep_s": round(light, 4),
        "reindexed_artifacts_per_s": round(artifacts / reindex),
    }


def _median_s(work: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


@contextmanager
def _on_disk() -> Iterator[LocalRepository]:
    with (
        tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory,
        open_local(f"file://{directory}/r") as opened,
    ):
        yield opened


@contextmanager
def _on_s3() -> Iterator[LocalRepository]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgraft-bench-")))
        server = stack.enter_context(s3_server())
        stack.enter_context(mock.patch.dict(os.environ, server.environment))
        index = stack.enter_context(postgres_server(directory))
        yield stack.enter_context(open_local(f"s3://{server.bucket}/upkeep", index_url=index))
