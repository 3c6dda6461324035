"""Frames: chunks as they lie in a repository that encodes them; they decode into given memory, verified.

A frame is `MAGIC`, the length of its header (4 bytes, little endian), the header, and the payload. The header is
canonical JSON with the fields ``codec``, ``size`` (decoded bytes), ``stored_size`` and ``stored_digest`` (of the
payload). Nothing in it is believed: all of it follows from the payload and from what the reader knows already.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from typing_extensions import Buffer

from repo_service.domain.canonical import canonical_json, parse_json
from repo_service.domain.digest import blake3_digest, chunk_digest
from repo_service.domain.errors import UNREADABLE, ChunkCorrupt, InvalidInput
from repo_service.domain.layout import DTYPE_BYTES, ChunkSpec

MAGIC = b"kvgchunk"
MAX_HEADER_BYTES = 512

NONE = "none"
BLOSC = "blosc-lz4-bitshuffle"
CODECS = (NONE, BLOSC)

_START = len(MAGIC) + 4

_LEVEL = 5
_ELEMENTS: dict[int, Literal["B", "H", "I"]] = {1: "B", 2: "H", 4: "I"}

# Of the 16 bytes that a Blosc payload begins with: the format's version, and what LZ4 is named by.
_BLOSC_HEADER = 16
_BLOSC_VERSION = 2
_BLOSC_LZ4 = 1


def check_codec(name: str) -> str:
    """Return the name of a codec unchanged.

    Raises
    ------
    InvalidInput
    """
    if name not in CODECS:
        raise InvalidInput(f"the codec {name[:40]!r} is not known; there are {', '.join(CODECS)}", codecs=list(CODECS))
    return name


def longest_frame(spec: ChunkSpec) -> int:
    """The most bytes that a chunk's frame may have: what does not become smaller is not encoded."""
    return _START + MAX_HEADER_BYTES + spec.size


def encode_chunk(data: Buffer, spec: ChunkSpec, codec: str) -> bytes:
    """The frame of a chunk; ``data`` has ``spec.size`` bytes.

    Raises
    ------
    InvalidInput
        For an unknown codec.
    """
    raw = memoryview(data).cast("B")
    used, payload = NONE, raw
    if check_codec(codec) == BLOSC:
        from numcodecs import blosc

        # Bits of equal weight are put together, element by element: the width of an element decides how small it gets.
        elements = raw.cast(_ELEMENTS[DTYPE_BYTES[spec.dtype]])
        encoded = memoryview(blosc.compress(elements, b"lz4", _LEVEL, blosc.BITSHUFFLE))
        if len(encoded) < len(raw):
            used, payload = BLOSC, encoded
    header = canonical_json(_header(used, spec, payload))
    return b"".join((MAGIC, len(header).to_bytes(4, "little"), header, payload))


def decode_chunk(frame: memoryview, digest: str, spec: ChunkSpec, out: memoryview) -> None:
    """Decode a frame into ``out`` (writable, ``spec.size`` bytes) and verify the chunk (I3).

    What the frame says of sizes is compared, never used, and no decoder sees a payload that is not whole.

    Raises
    ------
    ChunkCorrupt
    """
    codec, payload = _opened(frame, digest, spec)
    if codec == NONE:
        if len(payload) != spec.size:
            _refuse(digest, f"holds {len(payload)} bytes; it must have {spec.size}")
        out[:] = payload
    else:
        _decode_blosc(payload, digest, spec, out)
    found = chunk_digest(out, spec.dtype, spec.shape)
    if found != digest:
        _refuse(digest, f"decodes to {found}", found=found)


def _header(codec: str, spec: ChunkSpec, payload: memoryview) -> dict[str, Any]:
    return {
        "codec": codec,
        "size": spec.size,
        "stored_digest": blake3_digest(payload),
        "stored_size": len(payload),
    }


def _opened(frame: memoryview, digest: str, spec: ChunkSpec) -> tuple[str, memoryview]:
    """Codec and payload of a frame whose header is the one that they must have."""
    if frame[: len(MAGIC)] != MAGIC:
        _refuse(digest, f"is stored in {len(frame)} bytes that are no frame")
    length = int.from_bytes(frame[len(MAGIC) : _START], "little")
    text, payload = bytes(frame[_START : _START + min(length, MAX_HEADER_BYTES)]), frame[_START + length :]
    if len(text) != length:
        _refuse(digest, f"has a frame of {len(frame)} bytes with a header of {length}")
    try:
        header = parse_json(text, limit=MAX_HEADER_BYTES, what="header of its frame")
    except UNREADABLE as error:
        _refuse(digest, f"can't be read, for {error.message}")
    codec = header.get("codec") if isinstance(header, dict) else None
    if codec not in CODECS:
        _refuse(digest, f"is stored with the codec {str(codec)[:40]!r}, and this kvgraft reads {', '.join(CODECS)}")
    expected = _header(codec, spec, payload)
    if text != canonical_json(expected):
        wrong = [
            f"{name} {str(header.get(name))[:80]} instead of {value}"
            for name, value in expected.items()
            if header.get(name) != value
        ]
        _refuse(digest, f"has a frame whose header says {', '.join(wrong) or 'more than it may'}")
    return codec, payload


def _decode_blosc(payload: memoryview, digest: str, spec: ChunkSpec, out: memoryview) -> None:
    from numcodecs import blosc

    head = payload[:_BLOSC_HEADER]
    size, stored = int.from_bytes(head[4:8], "little"), int.from_bytes(head[12:16], "little")
    # The decoder itself reads as far as the payload's own header says.
    if len(head) < _BLOSC_HEADER or head[0] != _BLOSC_VERSION or head[2] >> 5 != _BLOSC_LZ4:
        _refuse(digest, f"has a payload of {len(payload)} bytes that is not of {BLOSC}")
    if (size, stored) != (spec.size, len(payload)):
        _refuse(digest, f"has a payload that says {size} bytes in {stored}; it must be {spec.size} in {len(payload)}")
    try:
        blosc.decompress(payload, out)
    except (RuntimeError, ValueError) as error:
        _refuse(digest, f"has a payload that can't be decoded ({error})")


def _refuse(digest: str, why: str, **details: Any) -> NoReturn:
    raise ChunkCorrupt(f"the chunk {digest} {why}: its stored bytes were altered", digest=digest, **details)
