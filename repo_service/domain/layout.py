"""Layouts: layer groups, their arrays, and how blocks are cut into chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

from repo_service.domain.errors import MalformedDocument
from repo_service.domain.fingerprint import Fingerprint

MAX_CHUNK_BYTES = 8 * 2**20
MAX_DIMENSION = 2**24
MAX_LAYERS = 4096

# A record of more chunks than these would exceed its own limit of 4 MiB.
MAX_BLOCK_CHUNKS = 2**16

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint32": 4,
}

# Names with another meaning beside the groups: the token ids, and an export's own folder.
RESERVED_NAMES = ("tokens", "kvgraft")

GROUP_KINDS = ("full", "sliding", "latent", "recurrent")


@dataclass(frozen=True)
class ChunkSpec:
    """Dtype and shape that a chunk's digest commits to."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class ChunkRef:
    """One chunk of one block: which array, and which part of its layers and heads."""

    array: str
    index: tuple[int, int]


@dataclass(frozen=True)
class ArrayLayout:
    """One array of a layer group, shape ``(blocks, layers, heads, block_tokens, dim)``.

    A chunk holds ``(1, chunk_layers, chunk_heads, block_tokens, dim)``, in C order, little endian;
    tokens beyond the end of a partial block are zeros.
    """

    name: str
    dtype: str
    layers: int
    heads: int
    dim: int
    block_tokens: int
    chunk_layers: int
    chunk_heads: int

    @property
    def chunk(self) -> ChunkSpec:
        return ChunkSpec(self.dtype, (1, self.chunk_layers, self.chunk_heads, self.block_tokens, self.dim))

    @property
    def grid(self) -> tuple[int, int]:
        """Chunks per block along (layers, heads)."""
        return self.layers // self.chunk_layers, self.heads // self.chunk_heads

    def shape(self, blocks: int) -> tuple[int, int, int, int, int]:
        return (blocks, self.layers, self.heads, self.block_tokens, self.dim)


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose state has one kind and shape.

    Parameters
    ----------
    name
        Zarr group name, unique in the layout.
    kind
        One of `GROUP_KINDS`.
    layers
        The model's layer indices, ascending.
    window
        Attention window in tokens for ``sliding``, else None.
    arrays
        The group's arrays, by the name after the slash (``k``, ``v``; ``compressed``, ``rope`` for latent).
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    window: int | None
    arrays: tuple[ArrayLayout, ...]

    def to_json(self) -> dict[str, Any]:
        """The group as it stands in a fingerprint's state section."""
        return {
            "name": self.name,
            "kind": self.kind,
            "layers": list(self.layers),
            "window": self.window,
            "arrays": [
                {
                    "name": a.name,
                    "dtype": a.dtype,
                    "heads": a.heads,
                    "dim": a.dim,
                    "chunk_layers": a.chunk_layers,
                    "chunk_heads": a.chunk_heads,
                }
                for a in self.arrays
            ],
        }


@dataclass(frozen=True)
class Layout:
    """The layer groups of an architecture and the block size; order is that of chunks in a block record."""

    block_tokens: int
    groups: tuple[LayerGroup, ...]

    @classmethod
    def of(cls, fingerprint: Fingerprint) -> Layout:
        """Read the layout out of a fingerprint's state and schedule sections.

        Raises
        ------
        MalformedDocument
            If a dimension is missing or out of range, a chunk would exceed 8 MiB, or a block
            would have more chunks than a record can list.
        """
        block_tokens = _integer(fingerprint.sections["schedule"], "block_tokens", 2**20)
        groups = fingerprint.sections["state"].get("groups")
        if not isinstance(groups, list) or not 1 <= len(groups) <= 64:
            raise MalformedDocument("the fingerprint's state has no list of 1 to 64 layer groups")
        layout = cls(block_tokens, tuple(_read_group(group, block_tokens) for group in groups))
        names = [group.name for group in layout.groups]
        if len(set(names)) != len(names):
            raise MalformedDocument(f"two layer groups share a name: {names}")
        if layout.block_chunks > MAX_BLOCK_CHUNKS:
            raise MalformedDocument(
                f"a block of this layout has {layout.block_chunks} chunks; the limit is {MAX_BLOCK_CHUNKS}"
            )
        return layout

    @cached_property
    def arrays(self) -> dict[str, ArrayLayout]:
        """Arrays by full name, ``<group>/<array>``."""
        return {f"{group.name}/{a.name}": a for group in self.groups for a in group.arrays}

    def first_stored(self, resume_from: int) -> dict[str, int]:
        """The first block whose chunks an artifact stores, by array.

        Parameters
        ----------
        resume_from
            The token from which on the artifact can be resumed: of sliding groups it stores the window before that
            and what follows, of all others everything. With 0 it stores everything.
        """
        firsts: dict[str, int] = {}
        for group in self.groups:
            # A window of one token keeps nothing; its last block is stored all the same, so that what can be resumed is whole.
            needed = 0 if group.window is None else max(0, resume_from - max(1, group.window - 1))
            firsts.update((f"{group.name}/{array.name}", needed // self.block_tokens) for array in group.arrays)
        return firsts

    def last_resume(self, token_count: int) -> int:
        """The ``resume_from`` with which an artifact of so many tokens stores the least; 0 where that is everything.

        It is where the last block begins, so that the last forward call can be computed again.
        """
        start = (token_count - 1) // self.block_tokens * self.block_tokens
        return start if any(self.first_stored(start).values()) else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's state."""
        return sum(_block_bytes(a) for a in self.arrays.values())

    def stored_bytes(self, blocks: int, resume_from: int) -> int:
        """Bytes of the state that an artifact of so many blocks stores, partial ones padded."""
        return sum(
            (blocks - first) * _block_bytes(self.arrays[name]) for name, first in self.first_stored(resume_from).items()
        )

    @property
    def block_chunks(self) -> int:
        """Number of chunks of one block."""
        return sum(math.prod(a.grid) for a in self.arrays.values())

    def chunks(self) -> Iterator[ChunkRef]:
        """The chunks of one block, in the order of a block record."""
        for name, array in self.arrays.items():
            layer_chunks, head_chunks = array.grid
            for i in range(layer_chunks):
                for j in range(head_chunks):
                    yield ChunkRef(name, (i, j))


def _block_bytes(array: ArrayLayout) -> int:
    return math.prod(array.shape(1)) * DTYPE_BYTES[array.dtype]


def chunk_split(layers: int, heads: int, block_tokens: int, dim: int, dtype: str) -> tuple[int, int]:
    """Choose (chunk_layers, chunk_heads): the most layers, then heads, that divide evenly into 8 MiB.

    Raises
    ------
    MalformedDocument
        If one head of one layer of one block is larger than a chunk may be.
    """
    head_bytes = block_tokens * dim * DTYPE_BYTES[dtype]
    for chunk_layers in _divisors(layers):
        if chunk_layers * heads * head_bytes <= MAX_CHUNK_BYTES:
            return chunk_layers, heads
    for chunk_heads in _divisors(heads):
        if chunk_heads * head_bytes <= MAX_CHUNK_BYTES:
            return 1, chunk_heads
    raise MalformedDocument(
        f"one head of {block_tokens} tokens of {dim} {dtype} has {head_bytes} bytes; a chunk may have {MAX_CHUNK_BYTES}: use smaller blocks"
    )


def _divisors(n: int) -> Sequence[int]:
    return [d for d in range(n, 0, -1) if n % d == 0]


def _read_group(value: Any, block_tokens: int) -> LayerGroup:
    match value:
        case {"name": str(name), "kind": str(kind), "layers": list(layers), "window": window, "arrays": list(arrays)}:
            pass
        case _:
            raise MalformedDocument(f"not a layer group: {str(value)[:100]}")
    if kind not in GROUP_KINDS:
        raise MalformedDocument(f"the layer group {name!r} has the unknown kind {kind!r}")
    if name in RESERVED_NAMES:
        raise MalformedDocument(f"a layer group can't be named {name!r}")
    if not _is_array_name(name):
        raise MalformedDocument(f"{name[:100]!r} is not a layer group's name: 1 to 32 of a-z 0-9 -")
    if window is not None and not (_is_index(window) and 0 < window <= MAX_DIMENSION):
        raise MalformedDocument(f"the layer group {name!r} has the window {str(window)[:40]}")
    if (window is not None) != (kind == "sliding"):
        raise MalformedDocument(f"the layer group {name!r} is {kind} and its window is {window}")
    if not (0 < len(layers) <= MAX_LAYERS and all(map(_is_index, layers)) and layers == sorted(set(layers))):
        raise MalformedDocument(f"the layers of group {name!r} are not ascending indices")
    read = tuple(_read_array(array, len(layers), block_tokens) for array in arrays)
    if not 1 <= len(read) <= 8 or len({a.name for a in read}) != len(read):
        raise MalformedDocument(f"the layer group {name!r} has no arrays, too many, or two of one name")
    return LayerGroup(name, kind, tuple(layers), window, read)


def _read_array(value: Any, layers: int, block_tokens: int) -> ArrayLayout:
    match value:
        case {"name": str(name), "dtype": str(dtype)} if _is_array_name(name):
            pass
        case _:
            raise MalformedDocument(f"not an array of a layer group: {str(value)[:100]}")
    if dtype not in DTYPE_BYTES:
        raise MalformedDocument(f"the array {name!r} has the unknown dtype {dtype[:40]!r}")
    heads = _integer(value, "heads", MAX_DIMENSION)
    array = ArrayLayout(
        name,
        dtype,
        layers,
        heads,
        _integer(value, "dim", MAX_DIMENSION),
        block_tokens,
        _integer(value, "chunk_layers", layers),
        _integer(value, "chunk_heads", heads),
    )
    if layers % array.chunk_layers or heads % array.chunk_heads:
        raise MalformedDocument(f"the chunks of array {name!r} do not divide its layers and heads evenly")
    if array.chunk.size > MAX_CHUNK_BYTES:
        raise MalformedDocument(
            f"a chunk of array {name!r} has {array.chunk.size} bytes; the limit is {MAX_CHUNK_BYTES}"
        )
    return array


def _integer(fields: dict[str, Any], name: str, maximum: int) -> int:
    value = fields.get(name)
    if not _is_index(value) or not 0 < value <= maximum:
        raise MalformedDocument(f"{name} is {str(value)[:40]}; it must be an integer from 1 to {maximum}", field=name)
    return value


def _is_index(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_array_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= 32
        and all(c in "abcdefghijklmnopqrstuvwxyz0123456789-" for c in name)
    )
