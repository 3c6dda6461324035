"""Blocks between a repository and the engine: verified reads into place, hashed writes out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine_adapter.cache import StateCache
from engine_adapter.engine import Progress
from engine_adapter.state import BlockState, Restored, empty_block
from engine_adapter.tensors import host_bytes
from repo_service.domain.digest import chunk_digest
from repo_service.domain.layout import MAX_CHUNK_BYTES, ChunkSpec, Layout
from repo_service.domain.record import BlockRecord, block_key
from repo_service.domain.repository import Push, Repository

if TYPE_CHECKING:
    from torch import Tensor

# Blocks that may wait to be hashed and sent while the model computes on.
_BLOCKS_IN_FLIGHT = 4


class _Wanted(NamedTuple):
    digest: str
    spec: ChunkSpec
    place: Callable[[Tensor], None]


class ChunkReader:
    """Reads chunks with several threads, each through one reused buffer, pinned where there is a GPU.

    Parameters
    ----------
    repository, namespace
        Where from.
    workers
        Threads; memory is ``workers`` times 8 MiB.
    device
        The engine's device.
    """

    def __init__(self, repository: Repository, namespace: str, workers: int, device: torch.device) -> None:
        self._repository = repository
        self._namespace = namespace
        self._device = device
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvgraft-read")
        self.bytes_read = 0

    def restore(
        self,
        artifact_id: str,
        layout: Layout,
        records: Sequence[BlockRecord],
        position: int,
        cache: StateCache,
        progress: Progress | None = None,
    ) -> None:
        """Fill an empty cache with the state of the first ``position`` tokens.

        Raises
        ------
        ChunkCorrupt, ChunkNotFound, Unavailable
            The cache is then unchanged.
        """
        restored = Restored(layout, position, cache, self._device)
        wanted = []
        for record in records:
            for name, digests in record.chunks.items():
                if not restored.needs(name, record.start, record.stop):
                    continue
                array = layout.arrays[name]
                for number, digest in enumerate(digests):
                    layer, head = divmod(number, array.grid[1])

                    def place(
                        chunk: Tensor,
                        name: str = name,
                        record: BlockRecord = record,
                        layer: int = layer * array.chunk_layers,
                        head: int = head * array.chunk_heads,
                    ) -> None:
                        restored.place(name, record.start, record.stop, layer, head, chunk)

                    wanted.append(_Wanted(digest, array.chunk, place))
        self._read(artifact_id, wanted, progress)
        restored.install(layout, cache)

    def read_block(self, artifact_id: str, layout: Layout, record: BlockRecord) -> BlockState:
        """One block's whole state on the host."""
        block = empty_block(layout, record.start)
        block.stop = record.stop
        block.steps = list(record.steps)
        wanted = []
        for name, digests in record.chunks.items():
            array = layout.arrays[name]
            for number, digest in enumerate(digests):
                target = _chunk_view(block, layout, name, number)
                wanted.append(_Wanted(digest, array.chunk, lambda chunk, target=target: target.copy_(chunk)))  # type: ignore[misc]
        self._read(artifact_id, wanted, None)
        return block

    def _read(self, artifact_id: str, wanted: Sequence[_Wanted], progress: Progress | None) -> None:
        total = sum(item.spec.size for item in wanted)
        done = 0
        futures = [self._pool.submit(self._read_one, artifact_id, item) for item in wanted]
        try:
            for future, item in zip(futures, wanted, strict=True):
                future.result()
                done += item.spec.size
                if progress is not None:
                    progress("bytes", done, total)
        finally:
            for future in futures:
                future.cancel()
        self.bytes_read += total

    def _read_one(self, artifact_id: str, item: _Wanted) -> None:
        buffer = self._buffer()[: item.spec.size]
        self._repository.read_chunk(artifact_id, self._namespace, item.digest, item.spec, host_bytes(buffer))
        item.place(buffer.view(getattr(torch, item.spec.dtype)).view(item.spec.shape[1:]))
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()

    def _buffer(self) -> Tensor:
        if not hasattr(self._local, "buffer"):
            pinned = self._device.type == "cuda"
            self._local.buffer = torch.empty(MAX_CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        buffer: Tensor = self._local.buffer
        return buffer

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class BlockWriter:
    """Hashes blocks and sends what the repository lacks, on a thread of its own while the model computes.

    Used as the ``emit`` of a `BlockRecorder`; at most four blocks wait. ``resume_from`` is what the manifest is to say.
    """

    def __init__(
        self, push: Push, layout: Layout, fingerprint_id: str, tokens: Sequence[int], resume_from: int = 0
    ) -> None:
        self._push = push
        self._layout = layout
        self._fingerprint_id = fingerprint_id
        self._tokens = tokens
        self._resume_from = resume_from
        self._records: list[BlockRecord] = []
        self._pending: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvgraft-write")
        self.bytes_sent = 0

    def known(self, records: Sequence[BlockRecord]) -> bool:
        """Begin with blocks that are already stored; False, and nothing begun, where what is wanted of them is not."""
        if records and self._push.offer(records, self._resume_from):
            return False
        self._records.extend(records)
        return True

    def __call__(self, block: BlockState) -> None:
        while len(self._pending) >= _BLOCKS_IN_FLIGHT:
            self._pending.pop(0).result()
        self._pending.append(self._pool.submit(self._write, block))

    def finish(self) -> list[BlockRecord]:
        """Wait for every block; returns all records in order.

        Raises
        ------
        Divergence, StorageFull, Unavailable
            Whatever the repository refused a block with.
        """
        try:
            for future in self._pending:
                future.result()
        finally:
            self.close()
        return self._records

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _write(self, block: BlockState) -> None:
        parent = self._records[-1].key if self._records else None
        record, chunks = record_block(block, self._layout, self._fingerprint_id, parent, self._tokens)
        for digest in self._push.offer([record], self._resume_from):
            self._push.put(digest, chunks[digest])
            self.bytes_sent += chunks[digest].nbytes
        self._records.append(record)


def record_block(
    block: BlockState, layout: Layout, fingerprint_id: str, parent: str | None, tokens: Sequence[int]
) -> tuple[BlockRecord, dict[str, memoryview]]:
    """Hash a block; returns its record and its chunks' bytes by digest.

    Parameters
    ----------
    tokens
        All token ids from position 0, at least up to the block's end.
    """
    contents: dict[str, memoryview] = {}
    chunks: dict[str, list[str]] = {name: [] for name in layout.arrays}
    numbers = dict.fromkeys(layout.arrays, 0)
    for ref in layout.chunks():
        spec = layout.arrays[ref.array].chunk
        view = _chunk_view(block, layout, ref.array, numbers[ref.array])
        data = host_bytes(view)
        digest = chunk_digest(data, spec.dtype, spec.shape)
        contents[digest] = data
        chunks[ref.array].append(digest)
        numbers[ref.array] += 1
    key = block_key(fingerprint_id, parent, tokens[block.start : block.stop], block.steps)
    record = BlockRecord(
        key, parent, block.start, block.stop, tuple(block.steps), {name: tuple(d) for name, d in chunks.items()}
    )
    return record, contents


def _chunk_view(block: BlockState, layout: Layout, name: str, number: int) -> Tensor:
    array = layout.arrays[name]
    layer, head = divmod(number, array.grid[1])
    return block.arrays[name][
        layer * array.chunk_layers : (layer + 1) * array.chunk_layers,
        head * array.chunk_heads : (head + 1) * array.chunk_heads,
    ]
