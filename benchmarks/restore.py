"""Restore of an artifact into reused memory, verified, against a raw read of the same bytes into reused memory."""

from __future__ import annotations

import http.client
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.artifacts import NAMESPACE, Synthetic, fingerprint, push, synthetic
from benchmarks.record import rates, ratios, timed_in_turn
from benchmarks.servers import kvgraft_server, sendfile_server
from engine_adapter.cache import take_memory
from engine_adapter.tensors import host_bytes
from repo_service.client import open_repository
from repo_service.domain.layout import Layout
from repo_service.domain.repository import Repository

CONNECTIONS = 4
PIECE = 2**20


def run(blocks: int, rounds: int) -> dict[str, Any]:
    """Restore one artifact of ``blocks`` blocks by every way, page cache warm."""
    with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory, ExitStack() as stack:
        root = Path(directory)
        artifact = synthetic(fingerprint(), blocks)
        url = f"file://{root}/repository"
        local = stack.enter_context(open_repository(url))
        push(local, artifact)
        memory = Destination(artifact)
        files = _same_bytes_in_files(root, artifact)
        served, _ = stack.enter_context(kvgraft_server(root / "repository"))
        remote = stack.enter_context(open_repository(served))
        port = stack.enter_context(sendfile_server(root / "files"))
        hashing_port = stack.enter_context(sendfile_server(root / "files", "--hash"))
        pools = {n: stack.enter_context(ThreadPoolExecutor(n)) for n in (1, 2, CONNECTIONS)}
        ways: dict[str, Callable[[], object]] = {
            "raw read, 1 thread": lambda: memory.raw_read(files, pools[1]),
            "raw read, 2 threads": lambda: memory.raw_read(files, pools[2]),
            "kvgraft embedded, 2 threads": lambda: memory.restore(local, pools[2]),
            "safetensors": lambda: _safetensors(root / "state.safetensors"),
            "torch.load": lambda: torch.load(root / "state.pt", weights_only=True),
            "plain zarr": lambda: _zarr(root / "state.zarr", memory.block),
            "sendfile server": lambda: memory.sendfile(port, files, pools[CONNECTIONS]),
            "sendfile server, client hashes": lambda: memory.sendfile(port, files, pools[CONNECTIONS], blake3),
            "server and client hash": lambda: memory.sendfile(hashing_port, files, pools[CONNECTIONS], blake3),
            "kvgraft over HTTP": lambda: memory.restore(remote, pools[CONNECTIONS]),
        }
        seconds = timed_in_turn(ways, rounds)
        size = artifact.state_bytes
        return {
            "bytes": size,
            "chunk_bytes": memory.chunk_size,
            "rounds": rounds,
            "page_cache": "warm: every way had read its bytes once before",
            "memory": "reused, in huge pages where the system gives them, for every way that reads into given memory",
            "gb_per_s": rates(seconds, size),
            "of_raw_read_1_thread": ratios(seconds, "raw read, 1 thread"),
            "of_raw_read_2_threads": ratios(seconds, "raw read, 2 threads"),
            "of_sendfile_server": ratios(seconds, "sendfile server"),
        }


class Destination:
    """Memory for the whole artifact, as an engine's cache takes it, reused by every way that can read into given memory."""

    def __init__(self, artifact: Synthetic) -> None:
        self._artifact = artifact
        layout = Layout.of(artifact.manifest.fingerprint)
        specs = {name: array.chunk for name, array in layout.arrays.items()}
        self._chunks = [
            (digest, specs[name]) for record in artifact.records for name in specs for digest in record.chunks[name]
        ]
        self.chunk_size = self._chunks[0][1].size
        self._memory = host_bytes(take_memory((artifact.state_bytes,), torch.uint8, torch.device("cpu")))
        self._memory[:] = bytes(len(self._memory))
        self.block = np.empty(layout.arrays["full/k"].shape(1)[1:], dtype=np.uint16)

    def parts(self) -> Iterable[memoryview]:
        return (self._memory[i : i + self.chunk_size] for i in range(0, len(self._memory), self.chunk_size))

    def raw_read(self, files: list[Path], pool: ThreadPoolExecutor) -> None:
        list(pool.map(read_file, files, self.parts()))

    def restore(self, repository: Repository, pool: ThreadPoolExecutor) -> None:
        manifest = repository.manifest(self._artifact.manifest.id, NAMESPACE)
        repository.records(manifest, NAMESPACE)
        list(
            pool.map(
                lambda chunk, out: repository.read_chunk(manifest.id, NAMESPACE, chunk[0], chunk[1], out),
                self._chunks,
                self.parts(),
            )
        )

    def sendfile(
        self, port: int, files: list[Path], pool: ThreadPoolExecutor, hasher: Callable[[], Any] | None = None
    ) -> None:
        parts = list(self.parts())
        list(pool.map(lambda i: _fetch(port, files[i::CONNECTIONS], parts[i::CONNECTIONS], hasher), range(CONNECTIONS)))


def read_file(path: Path, out: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        position = 0
        while position < len(out):
            position += os.readv(fd, [out[position:]])
    finally:
        os.close(fd)


def _fetch(port: int, files: list[Path], parts: list[memoryview], hasher: Callable[[], Any] | None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for file, part in zip(files, parts, strict=True):
        connection.request("GET", f"/{file.name}")
        response = connection.getresponse()
        position, hashed = 0, hasher() if hasher is not None else None
        while position < len(part):
            read = response.readinto(part[position : position + PIECE])
            if hashed is not None:
                hashed.update(part[position : position + read])
            position += read
        response.read()
    connection.close()


def files_of(directory: Path, contents: Iterable[bytes]) -> list[Path]:
    """A new directory with one file a chunk, in order."""
    directory.mkdir()
    files = []
    for i, data in enumerate(contents):
        path = directory / f"{i:06}"
        path.write_bytes(data)
        files.append(path)
    return files


def _same_bytes_in_files(root: Path, artifact: Synthetic) -> list[Path]:
    """One file a chunk for the raw ways, and the same state for safetensors, torch and zarr."""
    files = files_of(root / "files", artifact.contents.values())
    tensors = {
        f"{i:06}": torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
        for i, data in enumerate(artifact.contents.values())
    }
    save_file(tensors, root / "state.safetensors")
    torch.save(tensors, root / "state.pt")
    chunks = list(artifact.contents.values())
    length = len(chunks[0]) // 2
    array = zarr.create_array(
        root / "state.zarr", shape=(len(chunks), length), chunks=(1, length), dtype="uint16", compressors=None
    )
    for i, data in enumerate(chunks):
        array[i] = np.frombuffer(data, dtype=np.uint16)
    return files


def _safetensors(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            file.get_tensor(name).clone()


def _zarr(path: Path, block: np.ndarray[Any, Any]) -> None:
    array = zarr.open_array(path, mode="r")
    target = block.reshape(-1)
    for i in range(array.shape[0]):
        target[:] = array[i]
