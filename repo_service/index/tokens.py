"""Token ids as the index keeps them, so that a prefix of any length is found without reading whole sequences.

The first `HEAD_TOKENS` ids stand in the artifact's row and are indexed. All ids stand in parts of
`PART_TOKENS`; each part's ``chain`` is the SHA-256 of the chain before it and its own bytes, so one
comparison settles all full parts of a prefix and another the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from sqlalchemy import ColumnElement, exists, func

from repo_service.domain.tokens import encode_tokens
from repo_service.index.models import Artifact, ArtifactTokens

HEAD_TOKENS = 64
PART_TOKENS = 1024
_TOKEN_BYTES = 4
_HEAD = HEAD_TOKENS * _TOKEN_BYTES
_PART = PART_TOKENS * _TOKEN_BYTES


def head(encoded: bytes) -> bytes:
    return encoded[:_HEAD]


def parts(encoded: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """The parts of encoded token ids, as (part, chain, bytes)."""
    chain = b""
    for part, start in enumerate(range(0, len(encoded), _PART)):
        data = encoded[start : start + _PART]
        chain = hashlib.sha256(chain + data).digest()
        yield part, chain, data


def begins_with(prefix: Sequence[int]) -> list[ColumnElement[bool]]:
    """Conditions on `Artifact` for token ids that begin with ``prefix``; private ids never do.

    Raises
    ------
    InvalidTokens
    """
    encoded = encode_tokens(prefix)
    first = head(encoded)
    conditions = [Artifact.token_head >= first]
    if (beyond := _successor(first)) is not None:
        conditions.append(Artifact.token_head < beyond)
    if len(encoded) <= _HEAD:
        return conditions
    for part, chain, data in list(parts(encoded))[-2:]:
        if len(data) == _PART:
            conditions.append(_part(part, ArtifactTokens.chain == chain))
        else:
            conditions.append(_part(part, func.substr(ArtifactTokens.tokens, 1, len(data)) == data))
    return conditions


def _part(part: int, condition: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists().where(ArtifactTokens.artifact_id == Artifact.id, ArtifactTokens.part == part, condition)


def _successor(prefix: bytes) -> bytes | None:
    """The least byte string above all that begin with ``prefix``; None where there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
