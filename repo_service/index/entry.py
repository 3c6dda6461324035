"""What is published: a manifest with everything the index derives its rows from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from repo_service.domain.digest import BLAKE3, parse_digest
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord


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
        """The digests of the chunks stored of each block, 32 bytes each."""
        layout = self.manifest.layout
        firsts = layout.first_stored(self.manifest.resume_from)
        return [
            [parse_digest(digest, BLAKE3) for _, digest in record.stored(layout, firsts)] for record in self.records
        ]

    def parts(self) -> list[int]:
        """How much of each block is stored, as the column ``blocks.part`` says it."""
        firsts = self.manifest.layout.first_stored(self.manifest.resume_from)
        size = self.manifest.layout.block_tokens
        return [
            0
            if record.stop >= self.manifest.resume_from
            else 1 + sum(record.start < first * size for first in firsts.values())
            for record in self.records
        ]

    def token_chunks(self) -> list[bytes]:
        """The chunk digests of the ``tokens`` array, 32 bytes each."""
        return [parse_digest(digest, BLAKE3) for digest in self.manifest.tokens or ()]

    def specs(self) -> dict[str, ChunkSpec]:
        """Every chunk the artifact stores, with what its digest commits to."""
        return self.manifest.stored_chunks(self.records)
