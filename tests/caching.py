"""A node's cache filled with small chunks, without a repository."""

from __future__ import annotations

import random
from pathlib import Path

from repo_service.client import NodeCache
from repo_service.domain.digest import chunk_digest
from repo_service.domain.layout import ChunkSpec

SPEC = ChunkSpec("uint32", (256,))


def chunk(number: int) -> tuple[str, bytes]:
    """A chunk of `SPEC`, by number."""
    data = random.Random(number).randbytes(SPEC.size)
    return chunk_digest(data, SPEC.dtype, SPEC.shape), data


def get(cache: NodeCache, number: int) -> bytes | None:
    digest, data = chunk(number)
    out = bytearray(SPEC.size)
    if not cache.read(digest, SPEC, memoryview(out)):
        return None
    assert out == data, "the cache gave other bytes"
    return data


def files(directory: Path) -> list[Path]:
    """The chunks that lie in a cache."""
    return sorted(path for path in directory.rglob("*") if len(path.name) == 62)


def leftovers(directory: Path) -> list[Path]:
    return list((directory / "tmp").iterdir())


def on_disk(directory: Path) -> int:
    """Bytes of everything that counts, as far as it stays still."""
    sizes = 0
    for path in [*directory.glob("tmp/*"), *files(directory)]:
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:
            continue
    return sizes


def use(directory: Path, limit: int, seed: int, reads: int, numbers: int, clears: float = 0.0) -> None:
    """Read chunks, and keep those that are not there, as pulls do; now and then clear all."""
    cache = NodeCache(directory, limit)
    generator = random.Random(seed)
    for _ in range(reads):
        number = generator.randrange(numbers)
        if get(cache, number) is None:
            cache.keep(*chunk(number))
        if generator.random() < clears:
            cache.clear()
    cache.close()
