"""Digests, written with their algorithm: ``blake3:<64 hex>`` for bytes of state, ``sha256:<64 hex>`` for identity."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from blake3 import blake3
from typing_extensions import Buffer

from repo_service.domain.canonical import frame
from repo_service.domain.errors import MalformedDigest

BLAKE3 = "blake3"
SHA256 = "sha256"

_GRAMMAR = re.compile(r"(blake3|sha256):([0-9a-f]{64})", re.ASCII)


def parse_digest(text: str, algorithm: str) -> bytes:
    """Return the 32 bytes of a digest that must be of ``algorithm``.

    Raises
    ------
    MalformedDigest
    """
    match = _GRAMMAR.fullmatch(text)
    if match is None or match[1] != algorithm:
        raise MalformedDigest(f"{text[:100]!r} is not a digest of the form {algorithm}:<64 hexadecimal digits>")
    return bytes.fromhex(match[2])


def format_digest(algorithm: str, digest: bytes) -> str:
    return f"{algorithm}:{digest.hex()}"


def sha256_digest(data: Buffer) -> str:
    return format_digest(SHA256, hashlib.sha256(data).digest())


def blake3_digest(data: Buffer) -> str:
    """Digest of bytes as they are; that of a chunk is `chunk_digest`."""
    return format_digest(BLAKE3, blake3(data).digest())


class ChunkHasher:
    """Digest of one chunk's decoded bytes together with its dtype and shape.

    BLAKE3 over ``frame(["kvgraft.chunk.v1", dtype, shape])`` followed by the bytes, so that
    equal bytes under another dtype or shape are another chunk.
    """

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self._hasher = blake3(frame(["kvgraft.chunk.v1", dtype, list(shape)]))

    def update(self, data: Buffer) -> None:
        self._hasher.update(data)

    def digest(self) -> str:
        return format_digest(BLAKE3, self._hasher.digest())


def chunk_digest(data: Buffer, dtype: str, shape: Sequence[int]) -> str:
    """Digest of a whole chunk held in memory; see `ChunkHasher`."""
    hasher = ChunkHasher(dtype, shape)
    hasher.update(data)
    return hasher.digest()
