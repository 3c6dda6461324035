"""Push of an artifact against a raw write and fsync of the same bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from safetensors.torch import save_file

from benchmarks import artifacts
from benchmarks.artifacts import Synthetic, fingerprint, synthetic
from benchmarks.record import rates, ratios, timed_in_turn
from benchmarks.servers import kvgraft_server
from repo_service.client import open_repository


def run(blocks: int, rounds: int) -> dict[str, Any]:
    """Push an artifact whose bytes the repository never saw, once a round and way; everything synced at the end."""
    with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory, ExitStack() as stack:
        root = Path(directory)
        local = stack.enter_context(open_repository(f"file://{root}/repository"))
        served, _ = stack.enter_context(kvgraft_server(root / "served"))
        remote = stack.enter_context(open_repository(served))
        fresh = [synthetic(fingerprint(), blocks) for _ in range(2 * (rounds + 1))]
        waiting = iter(fresh)
        size = fresh[0].state_bytes
        chunks = list(fresh[0].contents.values())
        tensors = {f"{i}": torch.frombuffer(bytearray(data), dtype=torch.bfloat16) for i, data in enumerate(chunks)}
        ways: dict[str, Callable[[], object]] = {
            "raw write and fsync": lambda: _raw(root / "raw", chunks),
            "kvgraft embedded": lambda: artifacts.push(local, next(waiting)),
            "kvgraft over HTTP": lambda: artifacts.push(remote, next(waiting)),
            "safetensors and fsync": lambda: _synced(root / "s", lambda path: save_file(tensors, path)),
            "torch.save and fsync": lambda: _synced(root / "t", lambda path: torch.save(tensors, path)),
            "plain zarr, not synced": lambda: _zarr(root / "z.zarr", fresh[0]),
        }
        seconds = timed_in_turn(ways, rounds)
        return {
            "bytes": size,
            "rounds": rounds,
            "gb_per_s": rates(seconds, size),
            "of_raw_write": ratios(seconds, "raw write and fsync"),
        }


def _raw(path: Path, chunks: list[bytes]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for data in chunks:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    path.unlink()


def _synced(path: Path, save: Callable[[Path], object]) -> None:
    save(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    path.unlink()


def _zarr(path: Path, artifact: Synthetic) -> None:
    chunks = list(artifact.contents.values())
    length = len(chunks[0]) // 2
    array = zarr.create_array(
        path, shape=(len(chunks), length), chunks=(1, length), dtype="uint16", compressors=None, overwrite=True
    )
    for i, data in enumerate(chunks):
        array[i] = np.frombuffer(data, dtype=np.uint16)
