"""What is published: a manifest with everything the index derives its rows from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from repo_service.domain.digest import BLAKE3, parse_digest
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.tokens import token_chunk_spec


@dataclass(frozen=True)
class Entry:
    """One artifact as it goes into the index.

    Parameters
    ----------
    namespace
        Where it is published.
    manifest, records
        The documents, checked against each other by the caller.
    tokens
        All token ids, or None where they are private.
    created_at
        When it was first published, with a time zone.
    """

    namespace: str
    manifest: Manifest
    records: Sequence[BlockRecord]
    tokens: Sequence[int] | None
    created_at: datetime

    def block_chunks(self) -> list[list[bytes]]:
        """The chunk digests of each block, 32 bytes each."""
        return [
            [parse_digest(digest, BLAKE3) for digests in record.chunks.values() for digest in digests]
            for record in self.records
        ]

    def token_chunks(self) -> list[bytes]:
        """The chunk digests of the ``tokens`` array, 32 bytes each."""
        return [parse_digest(digest, BLAKE3) for digest in self.manifest.tokens or ()]

    def specs(self) -> dict[str, ChunkSpec]:
        """Every chunk the artifact refers to, with what its digest commits to."""
        chunks = {name: array.chunk for name, array in self.manifest.layout.arrays.items()}
        specs = {
            digest: chunks[name]
            for record in self.records
            for name, digests in record.chunks.items()
            for digest in digests
        }
        specs.update(dict.fromkeys(self.manifest.tokens or (), token_chunk_spec(self.manifest.token_count)))
        return specs
