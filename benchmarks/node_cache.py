"""A pull through the service with a cold and with a warm cache of the node, against a raw read of the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.artifacts import fingerprint, push, synthetic
from benchmarks.record import rates, ratios, timed_in_turn
from benchmarks.restore import CONNECTIONS, Destination, files_of
from benchmarks.servers import kvgraft_server
from repo_service.client import NodeCache, open_repository


def run(blocks: int, rounds: int) -> dict[str, Any]:
    """Pull one artifact of ``blocks`` blocks by every way, page cache warm."""
    with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory, ExitStack() as stack:
        root = Path(directory)
        artifact = synthetic(fingerprint(), blocks)
        size = artifact.state_bytes
        with open_repository(f"file://{root}/repository") as local:
            push(local, artifact)
        memory = Destination(artifact)
        files = files_of(root / "files", artifact.contents.values())
        served, _ = stack.enter_context(kvgraft_server(root / "repository"))
        cold, warm, full = (NodeCache(root / name, 2 * size) for name in ("cold", "warm", "full"))
        # Half of the artifact fits, so that every pull evicts.
        tight = NodeCache(root / "tight", size // 2)
        none = stack.enter_context(open_repository(served, cache="off"))
        filling, hitting, evicting = (
            stack.enter_context(open_repository(served, cache=cache)) for cache in (cold, warm, tight)
        )
        pools = {n: stack.enter_context(ThreadPoolExecutor(n)) for n in (1, 2, CONNECTIONS)}
        contents = list(artifact.contents.items())

        def fill() -> None:
            full.clear()
            for digest, data in contents:
                full.keep(digest, data)

        def pull_cold() -> None:
            cold.clear()
            memory.restore(filling, pools[CONNECTIONS])

        ways: dict[str, Callable[[], object]] = {
            "raw read, 1 thread": lambda: memory.raw_read(files, pools[1]),
            "raw read, 2 threads": lambda: memory.raw_read(files, pools[2]),
            "service, no cache": lambda: memory.restore(none, pools[CONNECTIONS]),
            "service, cold cache": pull_cold,
            "service, cache too small": lambda: memory.restore(evicting, pools[CONNECTIONS]),
            "service, warm cache, 1 thread": lambda: memory.restore(hitting, pools[1]),
            "service, warm cache, 2 threads": lambda: memory.restore(hitting, pools[2]),
            "clear, and keep all chunks": fill,
        }
        seconds = timed_in_turn(ways, rounds)
        return {
            "bytes": size,
            "chunk_bytes": memory.chunk_size,
            "rounds": rounds,
            "page_cache": "warm: every way had read its bytes once before",
            "kept_of_chunks": f"{full.info().chunks} of {len(contents)}",
            "hits_warm": warm.counts.hits,
            "gb_per_s": rates(seconds, size),
            "of_raw_read_1_thread": ratios(seconds, "raw read, 1 thread"),
            "of_raw_read_2_threads": ratios(seconds, "raw read, 2 threads"),
            "of_no_cache": ratios(seconds, "service, no cache"),
        }
