"""Artifacts in zarr-python: a read-only store over any repository, embedded or remote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import NoReturn

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.domain.repository import Repository
from repo_service.services.zarr_view import ZarrView


def open_artifact(repository: Repository, ref: str, namespace: str = DEFAULT_NAMESPACE) -> zarr.Group:
    """Open an artifact as a Zarr group, read-only; chunks are read, and verified, as they are indexed.

    bfloat16 and float8 arrays hold unsigned integers of the same bits; the attribute
    ``kvgraft_dtype`` names the dtype.

    Raises
    ------
    ArtifactNotFound, TagNotFound, Ambiguous, MalformedName
    """
    return zarr.open_group(ArtifactStore(ZarrView(repository, ref, namespace)), mode="r")


class ArtifactStore(Store):
    """A Zarr store of one artifact. Writing raises ValueError; a chunk lost or altered raises `ChunkCorrupt`.

    The repository is called on worker threads, so that the event loop runs on meanwhile.
    """

    supports_writes: bool = False
    supports_deletes: bool = False
    supports_listing: bool = True

    def __init__(self, view: ZarrView) -> None:
        super().__init__(read_only=True)
        self._view = view

    def __eq__(self, value: object) -> bool:
        return (
            isinstance(value, ArtifactStore)
            and self._view.repository is value._view.repository
            and self._view.namespace == value._view.namespace
            and self._view.manifest.id == value._view.manifest.id
        )

    def __hash__(self) -> int:
        return hash((self._view.namespace, self._view.manifest.id))

    def __repr__(self) -> str:
        return f"ArtifactStore({self._view.repository.url}, {self._view.namespace}, {self._view.manifest.id})"

    def with_read_only(self, read_only: bool = False) -> ArtifactStore:
        if not read_only:
            self._refuse()
        return ArtifactStore(self._view)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """A key's bytes, or a range of them; a chunk is read and verified whole even for a range."""
        await self._ensure_open()
        data = await asyncio.to_thread(self._view.get, key)
        if data is None:
            return None
        return prototype.buffer.from_bytes(data if byte_range is None else data[_slice(byte_range, len(data))])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return self._view.size(key) is not None

    async def getsize(self, key: str) -> int:
        size = self._view.size(key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in self._view.hierarchy:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        directory = f"{prefix.rstrip('/')}/".lstrip("/")
        for name in await asyncio.to_thread(self._names, directory):
            yield name

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002
        self._refuse()

    async def delete(self, key: str) -> None:  # noqa: ARG002
        self._refuse()

    def _names(self, directory: str) -> dict[str, None]:
        keys = (key for key in self._view.hierarchy if key.startswith(directory))
        return dict.fromkeys(key[len(directory) :].partition("/")[0] for key in keys)

    def _refuse(self) -> NoReturn:
        raise ValueError(f"artifact {self._view.manifest.id} is immutable; push another one instead")


def _slice(byte_range: ByteRequest, size: int) -> slice:
    match byte_range:
        case RangeByteRequest(start, end):
            return slice(start, end)
        case OffsetByteRequest(offset):
            return slice(offset, size)
        case SuffixByteRequest(suffix):
            return slice(max(0, size - suffix), size)
