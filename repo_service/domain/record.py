"""Block keys and block records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from repo_service.domain.canonical import canonical_json, frame, parse_json
from repo_service.domain.digest import BLAKE3, SHA256, format_digest, parse_digest, sha256_digest
from repo_service.domain.errors import MalformedDocument
from repo_service.domain.layout import ChunkSpec, Layout
from repo_service.domain.schedule import Step, split_by_block
from repo_service.domain.tokens import MAX_TOKENS, encode_tokens

MAX_RECORD_BYTES = 4 * 2**20


def block_key(fingerprint_id: str, parent: str | None, tokens: Sequence[int], steps: Sequence[Step]) -> str:
    """Key of one block, chained to the block before it.

    Parameters
    ----------
    fingerprint_id
        Identity of everything that decides the bits.
    parent
        Key of the block before, or None for the first.
    tokens
        The block's own token ids.
    steps
        The schedule steps inside the block, normalized by `split_by_block`; they hold its positions.
    """
    framed = frame(
        ["kvgraft.block.v1", fingerprint_id, parent, encode_tokens(tokens), [step.to_json() for step in steps]]
    )
    return format_digest(SHA256, hashlib.sha256(framed).digest())


def block_keys(fingerprint_id: str, tokens: Sequence[int], steps: Iterable[Step], block_tokens: int) -> list[str]:
    """Keys of all blocks of ``tokens`` under a schedule."""
    keys: list[str] = []
    parent = None
    for i, block_steps in enumerate(split_by_block(steps, block_tokens)):
        start = i * block_tokens
        parent = block_key(fingerprint_id, parent, tokens[start : block_steps[-1].stop], block_steps)
        keys.append(parent)
    return keys


@dataclass(frozen=True)
class BlockRecord:
    """Which chunks hold one block's state.

    Parameters
    ----------
    key, parent
        Block keys; ``parent`` is None for the first block.
    start, stop
        Absolute token span.
    steps
        The schedule inside the block.
    chunks
        Chunk digests by array name, each in the order of `Layout.chunks`.
    """

    key: str
    parent: str | None
    start: int
    stop: int
    steps: tuple[Step, ...]
    chunks: dict[str, tuple[str, ...]]

    @cached_property
    def data(self) -> bytes:
        """The canonical document; its SHA-256 is `digest`."""
        return canonical_json(
            {
                "key": self.key,
                "parent": self.parent,
                "start": self.start,
                "stop": self.stop,
                "steps": [step.to_json() for step in self.steps],
                "chunks": {name: list(digests) for name, digests in self.chunks.items()},
            }
        )

    @cached_property
    def digest(self) -> str:
        return sha256_digest(self.data)

    @classmethod
    def parse(cls, data: bytes) -> BlockRecord:
        """Read a record; `check` ties it to a layout.

        Raises
        ------
        MalformedDocument, MalformedDigest, TooLarge
        """
        record = cls.from_json(parse_json(data, limit=MAX_RECORD_BYTES, what="block record"))
        # What was parsed is canonical, so it need not be encoded again.
        vars(record)["data"] = bytes(data)
        return record

    @classmethod
    def from_json(cls, value: Any) -> BlockRecord:
        match value:
            case {
                "key": str(key),
                "parent": parent,
                "start": int(start),
                "stop": int(stop),
                "steps": list(steps),
                "chunks": dict(chunks),
            } if len(value) == 6 and not isinstance(start, bool) and not isinstance(stop, bool):
                pass
            case _:
                raise MalformedDocument(f"not a block record: {str(value)[:100]}")
        parse_digest(key, SHA256)
        if parent is not None:
            parse_digest_value(parent, SHA256)
        for digests in chunks.values():
            if not isinstance(digests, list):
                raise MalformedDocument(f"the chunks of block {key} are not lists of digests")
            for digest in digests:
                parse_digest_value(digest, BLAKE3)
        return cls(
            key,
            parent,
            start,
            stop,
            tuple(Step.from_json(step) for step in steps),
            {name: tuple(digests) for name, digests in chunks.items()},
        )

    def stored(self, layout: Layout, firsts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Array and digest of each chunk that is stored; ``firsts`` are those of `Layout.first_stored`."""
        for name, digests in self.chunks.items():
            if self.start >= firsts[name] * layout.block_tokens:
                yield from ((name, digest) for digest in digests)

    def check(self, layout: Layout) -> None:
        """Check the span, the steps and the chunks' number against a layout.

        Raises
        ------
        MalformedDocument
        """
        size = layout.block_tokens
        if not 0 <= self.start < self.stop <= MAX_TOKENS or self.start % size or self.stop - self.start > size:
            raise MalformedDocument(
                f"block {self.key} spans {self.start} to {self.stop}, which is no block of {size} tokens"
            )
        if (self.parent is None) != (self.start == 0):
            raise MalformedDocument(f"block {self.key} begins at token {self.start} and its parent is {self.parent}")
        shifted = [Step(step.kind, step.start - self.start, step.stop - self.start) for step in self.steps]
        if not shifted or any(step.start < 0 or step.stop > size for step in shifted):
            raise MalformedDocument(f"the steps of block {self.key} do not lie in its span")
        normal = split_by_block(shifted, size)
        if len(normal) != 1 or normal[0] != shifted or shifted[-1].stop != self.stop - self.start:
            raise MalformedDocument(f"the steps of block {self.key} do not cover its span exactly, in normal form")
        expected = {name: a.grid[0] * a.grid[1] for name, a in layout.arrays.items()}
        found = {name: len(digests) for name, digests in self.chunks.items()}
        if found != expected:
            raise MalformedDocument(
                f"block {self.key} names {_counts(found)} chunks; its layout has {_counts(expected)}",
                block_key=self.key,
            )


def stored_chunks(records: Iterable[BlockRecord], layout: Layout, resume_from: int) -> dict[str, ChunkSpec]:
    """Chunks that an artifact which can be resumed from token ``resume_from`` on stores, with what their digests commit to."""
    firsts = layout.first_stored(resume_from)
    specs = {name: array.chunk for name, array in layout.arrays.items()}
    return {digest: specs[name] for record in records for name, digest in record.stored(layout, firsts)}


def parse_digest_value(value: Any, algorithm: str) -> None:
    """Check a digest that comes out of JSON.

    Raises
    ------
    MalformedDocument, MalformedDigest
    """
    if not isinstance(value, str):
        raise MalformedDocument(f"{str(value)[:100]} is not a digest")
    parse_digest(value, algorithm)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items())[:8]) or "no"
