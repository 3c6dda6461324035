"""A verified pull out of S3 against the same objects by plain s3fs and by obstore, which verify nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import s3fs
from blake3 import blake3
from obstore.store import S3Store as Obstore

from benchmarks.artifacts import NAMESPACE, fingerprint, push, synthetic
from benchmarks.record import rates, ratios, timed_in_turn
from benchmarks.restore import Destination
from repo_service.client import open_repository
from repo_service.services.documents import block_record_key, chunk_key, manifest_key

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from servers import s3_server

CONNECTIONS = 8
PREFIX = "benchmark"


def run(blocks: int, rounds: int) -> dict[str, Any]:
    """Pull one artifact of ``blocks`` blocks by every way, through as many connections each."""
    with ExitStack() as stack:
        server = stack.enter_context(s3_server())
        stack.enter_context(mock.patch.dict(os.environ, server.environment | {"KVGRAFT_CODEC": "none"}))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgraft-bench-")))
        artifact = synthetic(fingerprint(), blocks)
        size = artifact.state_bytes
        url, index = f"s3://{server.bucket}/{PREFIX}", f"sqlite:///{directory}/index.sqlite"
        repository = stack.enter_context(open_repository(url, index=index, cache="off"))
        push(repository, artifact)
        memory = Destination(artifact)
        pools = {n: stack.enter_context(ThreadPoolExecutor(n)) for n in (1, CONNECTIONS)}
        # What a pull reads: the manifest and the block records, too.
        documents = [
            manifest_key(artifact.manifest.id),
            *(block_record_key(NAMESPACE, r.key) for r in artifact.records),
        ]
        chunks = [f"{PREFIX}/{chunk_key(digest)}" for digest in artifact.contents]
        keys = [*(f"{PREFIX}/{key}" for key in documents), *chunks]
        names = [f"{server.bucket}/{key}" for key in keys]
        files = s3fs.S3FileSystem(use_listings_cache=False)
        obstore = Obstore(
            server.bucket, endpoint=server.url, region="us-east-1", client_options={"allow_http": True},
            access_key_id=server.environment["AWS_ACCESS_KEY_ID"],
            secret_access_key=server.environment["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip

        def by_obstore(threads: int) -> list[int]:
            return list(pools[threads].map(lambda key: len(obstore.get(key).bytes()), keys))

        def into_place(key: str, out: memoryview) -> None:
            out[:] = memoryview(obstore.get(key).bytes())
            blake3(out).digest()

        async def of_obstore() -> None:
            gate = asyncio.Semaphore(CONNECTIONS)

            async def one(key: str) -> int:
                async with gate:
                    return len(await (await obstore.get_async(key)).bytes_async())

            await asyncio.gather(*map(one, keys))

        ways: dict[str, Callable[[], object]] = {
            "verified pull": lambda: memory.restore(repository, pools[CONNECTIONS]),
            "verified pull, 1 connection": lambda: memory.restore(repository, pools[1]),
            "s3fs, cat of all": lambda: files.cat(names, batch_size=CONNECTIONS),
            "s3fs, 1 connection": lambda: [files.cat_file(name) for name in names],
            "obstore, threads": lambda: by_obstore(CONNECTIONS),
            "obstore, into place and hashed": lambda: list(pools[CONNECTIONS].map(into_place, chunks, memory.parts())),
            "obstore, async": lambda: asyncio.run(of_obstore()),
            "obstore, 1 connection": lambda: by_obstore(1),
        }
        seconds = timed_in_turn(ways, rounds)
        return {
            "bytes": size,
            "chunk_bytes": memory.chunk_size,
            "connections": CONNECTIONS,
            "rounds": rounds,
            "gb_per_s": rates(seconds, size),
            "of_s3fs": ratios(seconds, "s3fs, cat of all"),
            "of_obstore": ratios(seconds, "obstore, threads"),
        }
