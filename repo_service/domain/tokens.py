"""Token ids as bytes, and the chunks of an artifact's ``tokens`` array."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from repo_service.domain.digest import chunk_digest
from repo_service.domain.errors import InvalidTokens
from repo_service.domain.layout import ChunkSpec

MAX_TOKENS = 2**26
TOKEN_DTYPE = "uint32"
TOKEN_CHUNK = 2**20
MAX_TOKEN_ID = 2**31 - 1


def encode_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers.

    Raises
    ------
    InvalidTokens
        If an id is not an integer from 0 to 2**31 - 1.
    """
    values = list(tokens)
    if values and not (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_TOKEN_ID):
        for value in values:
            _check_token(value)
    encoded = array("I", values)
    _little_endian(encoded)
    return encoded.tobytes()


def _check_token(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKEN_ID:
        large = isinstance(value, int) and value.bit_length() > 64
        shown = f"an integer of {value.bit_length()} bits" if isinstance(value, int) and large else str(value)[:40]
        raise InvalidTokens(f"{shown} is not a token id: an integer from 0 to {MAX_TOKEN_ID}")


def decode_tokens(data: bytes) -> list[int]:
    """Inverse of `encode_tokens`."""
    decoded = array("I")
    decoded.frombytes(data)
    _little_endian(decoded)
    return decoded.tolist()


def _little_endian(values: array[int]) -> None:
    if array("H", [1]).tobytes() != b"\x01\x00":
        values.byteswap()


def token_chunks(tokens: Sequence[int]) -> list[tuple[str, bytes]]:
    """The chunks of an artifact's ``tokens`` array, as (digest, bytes); the last is padded with zeros."""
    spec = token_chunk_spec(len(tokens))
    chunks = []
    for start in range(0, len(tokens), spec.shape[0]):
        data = encode_tokens(tokens[start : start + spec.shape[0]]).ljust(spec.size, b"\0")
        chunks.append((chunk_digest(data, spec.dtype, spec.shape), data))
    return chunks


def read_token_chunks(
    digests: Iterable[str], count: int, read: Callable[[str, ChunkSpec, memoryview], object]
) -> list[int]:
    """The token ids of an artifact of ``count`` tokens; ``read`` reads a verified chunk into memory."""
    spec = token_chunk_spec(count)
    buffer = bytearray(spec.size)
    tokens: list[int] = []
    for digest in digests:
        read(digest, spec, memoryview(buffer))
        tokens.extend(decode_tokens(bytes(buffer)))
    return tokens[:count]


def token_chunk_spec(count: int) -> ChunkSpec:
    """Chunks of the ``tokens`` array, shape ``(count,)``, of an artifact of ``count`` tokens."""
    return ChunkSpec(TOKEN_DTYPE, (min(count, TOKEN_CHUNK),))


def token_chunk_count(count: int) -> int:
    return -(-count // TOKEN_CHUNK)
