"""Artifacts as plain Zarr directories, and back.

An export opens in any Zarr v3 reader. Its folder ``kvgraft``, which readers pass over, holds the
manifest and the block records, so that an import rebuilds the identical artifact. Every file of
an export follows from the artifact: two exports of one artifact are equal, byte for byte.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer

from repo_service.domain.digest import chunk_digest
from repo_service.domain.errors import (
    ChunkCorrupt,
    Conflict,
    DocumentCorrupt,
    InvalidInput,
    RepositoryError,
    StorageFull,
)
from repo_service.domain.manifest import MAX_MANIFEST_BYTES, Manifest, require_digest
from repo_service.domain.names import check_tag
from repo_service.domain.record import MAX_RECORD_BYTES, BlockRecord
from repo_service.domain.repository import Push, Repository, despite_expiry
from repo_service.domain.views import ArtifactInfo
from repo_service.services.zarr_view import ChunkAddress, Hierarchy, ZarrView

Progress = Callable[[int, int], None]
"""Called with the bytes of chunks done and of all chunks, from one thread."""

_DOCUMENTS = "kvgraft"
_MANIFEST = f"{_DOCUMENTS}/manifest.json"

_WORKERS = 4
_OFFERED_RECORDS = 64
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote."""

    artifact_id: str
    chunks: int
    bytes: int


def export_artifact(
    repository: Repository, ref: str, namespace: str, destination: Path, progress: Progress | None = None
) -> ExportReport:
    """Write an artifact as a Zarr v3 directory that opens without kvgraft.

    The directory appears whole or not at all. Memory is bounded by a few chunks.

    Parameters
    ----------
    destination
        The directory to make; its parent must exist.

    Raises
    ------
    Conflict
        If the destination exists.
    ChunkCorrupt
        If a chunk of the artifact is lost or altered.
    ArtifactNotFound, TagNotFound, Ambiguous, MalformedName, InvalidInput, StorageFull
    """
    destination = Path(os.path.abspath(destination))
    _require_absent(destination)
    view = ZarrView(repository, ref, namespace)
    with _directory_of(destination) as root:
        report = _write_chunks(view, root, progress)
        for i, record in enumerate(view.records()):
            _write(root / _record_path(i), record.data)
        _write(root / _MANIFEST, view.manifest.data)
        for key, document in view.hierarchy.documents.items():
            _write(root / key, document)
    return report


def import_artifact(
    repository: Repository, source: Path, namespace: str, tag: str | None = None, progress: Progress | None = None
) -> ArtifactInfo:
    """Push the artifact that an export holds: the same artifact, under the same id.

    Every file is verified, also those the repository needs no copy of.

    Raises
    ------
    InvalidInput
        If ``source`` is no export.
    DocumentCorrupt, MalformedDocument
        If a manifest, block record or Zarr metadata document is missing or altered.
    ChunkCorrupt
        If a chunk's file is missing, cut short or altered; names the file and the chunk.
    Divergence, MalformedName
    """
    if tag is not None:
        check_tag(tag)
    if not (source / _MANIFEST).is_file():
        raise InvalidInput(f"{source} is not an export of kvgraft: it has no file {_MANIFEST}", path=str(source))
    manifest = Manifest.parse(_read_document(source, _MANIFEST, MAX_MANIFEST_BYTES))
    hierarchy = Hierarchy(manifest)
    for key, document in hierarchy.documents.items():
        if _read_document(source, key, len(document)) != document:
            raise DocumentCorrupt(
                f"{source / key} does not belong to the artifact {manifest.id} of {_MANIFEST}: one of the two was altered",
                path=key,
            )
    records = _read_records(source, manifest)

    def publish() -> ArtifactInfo:
        with repository.begin_push(manifest.fingerprint, namespace) as push:
            _push_chunks(push, source, hierarchy, records, progress)
            return push.commit(manifest)

    info = despite_expiry(publish)
    if tag is None:
        return info
    repository.set_tag(namespace, tag, info.id)
    return repository.artifact(info.id, namespace)


def _write_chunks(view: ZarrView, root: Path, progress: Progress | None) -> ExportReport:
    hierarchy, buffers = view.hierarchy, _Buffers()

    def write(item: tuple[str, ChunkAddress]) -> int:
        key, chunk = item
        out = buffers.take(chunk.spec.size)
        view.read(chunk, out)
        _write(root / key, out)
        return chunk.spec.size

    counted = _Counted(progress, _chunk_bytes(hierarchy))
    with ThreadPoolExecutor(_WORKERS) as pool:
        counted.add(pool.map(write, hierarchy.token_chunks()))
        for block in range(len(hierarchy.manifest.blocks)):
            counted.add(pool.map(write, hierarchy.block_chunks(block)))
    return ExportReport(view.manifest.id, counted.chunks, counted.bytes)


def _push_chunks(
    push: Push, source: Path, hierarchy: Hierarchy, records: list[BlockRecord], progress: Progress | None
) -> None:
    manifest, buffers = hierarchy.manifest, _Buffers()
    missing: set[str] = set()

    def send(item: tuple[str, ChunkAddress]) -> int:
        key, chunk = item
        digest = hierarchy.digest(chunk, records)
        data = buffers.take(chunk.spec.size)
        _read_chunk(source, key, chunk, digest, data)
        if digest in missing:
            push.put(digest, data)
            missing.discard(digest)
        return chunk.spec.size

    counted = _Counted(progress, _chunk_bytes(hierarchy))
    with ThreadPoolExecutor(_WORKERS) as pool:
        if manifest.tokens is not None:
            missing.update(push.offer_tokens(manifest.token_count, manifest.tokens))
            counted.add(pool.map(send, hierarchy.token_chunks()))
        for block in range(len(records)):
            if block % _OFFERED_RECORDS == 0:
                missing.update(push.offer(records[block : block + _OFFERED_RECORDS], manifest.resume_from))
            counted.add(pool.map(send, hierarchy.block_chunks(block)))


class _Counted:
    """Chunks and bytes done. They come a block at a time: a thread pool takes all it is given into memory."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.chunks = 0
        self.bytes = 0
        self._progress = progress
        self._total = total

    def add(self, sizes: Iterable[int]) -> None:
        for size in sizes:
            self.chunks += 1
            self.bytes += size
            if self._progress is not None:
                self._progress(self.bytes, self._total)


def _chunk_bytes(hierarchy: Hierarchy) -> int:
    tokens = sum(chunk.spec.size for _, chunk in hierarchy.token_chunks())
    return hierarchy.manifest.state_bytes + tokens


class _Buffers(threading.local):
    """One reused buffer for each thread."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]


def _read_records(source: Path, manifest: Manifest) -> list[BlockRecord]:
    records = []
    for i, (_, digest) in enumerate(manifest.blocks):
        data = _read_document(source, _record_path(i), MAX_RECORD_BYTES)
        records.append(BlockRecord.parse(require_digest(data, digest, f"block record in {source / _record_path(i)}")))
    manifest.check_records(records)
    return records


def _record_path(block: int) -> str:
    return f"{_DOCUMENTS}/records/{block}.json"


def _read_document(source: Path, name: str, limit: int) -> bytes:
    path = source / name
    with _named_errors(path):
        if not path.is_file():
            raise DocumentCorrupt(f"{path} is missing: the export is not whole", path=name)
        size = path.stat().st_size
        if size > limit:
            raise DocumentCorrupt(f"{path} has {size} bytes; at most {limit} were written", path=name)
        return path.read_bytes()


def _read_chunk(source: Path, key: str, chunk: ChunkAddress, digest: str, out: memoryview) -> None:
    """Read a chunk's file into ``out`` and verify it."""
    path, size = source / key, chunk.spec.size
    details = {"path": key, "digest": digest, "array": chunk.array}
    with _named_errors(path):
        if not path.is_file():
            raise ChunkCorrupt(f"{path}, the chunk {digest}, is missing: the export is not whole", **details)
        found_size = path.stat().st_size
        if found_size != size:
            raise ChunkCorrupt(f"{path}, the chunk {digest}, has {found_size} bytes; it must have {size}", **details)
        with path.open("rb", buffering=0) as file:
            position = 0
            while position < size and (read := file.readinto(out[position:])):
                position += read
    found = chunk_digest(out[:position], chunk.spec.dtype, chunk.spec.shape)
    if found != digest:
        raise ChunkCorrupt(
            f"{path}, the chunk {digest}, reads as {found}: the file was altered", **details, found=found
        )


def _require_absent(destination: Path) -> None:
    if os.path.lexists(destination):
        raise Conflict(f"{destination} exists: choose another destination or remove it", path=str(destination))
    if not destination.parent.is_dir():
        raise InvalidInput(f"{destination.parent} is not a directory: create it first", path=str(destination.parent))


@contextmanager
def _directory_of(destination: Path) -> Iterator[Path]:
    """A directory beside ``destination`` to fill; synced and renamed to it at the end, or removed on an error."""
    temp = destination.with_name(f".kvgraft-export-{uuid.uuid4().hex}")
    with _named_errors(destination):
        temp.mkdir()
    try:
        yield temp
        with _named_errors(destination):
            for directory, _, _ in os.walk(temp, topdown=False):
                _sync_directory(directory)
            _require_absent(destination)
            temp.rename(destination)
            _sync_directory(destination.parent)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def _write(path: Path, data: Buffer) -> None:
    with _named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb", buffering=0) as file:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())


def _sync_directory(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageFull(f"no space is left for {path}: free some or export elsewhere", path=str(path)) from error
        raise RepositoryError(f"the file system refused {path}: {error.strerror}", path=str(path)) from error
