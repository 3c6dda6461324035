"""An artifact as a Zarr v3 hierarchy, derived from its manifest and block records.

Zarr keys to bytes, for any reader: the client's store, the HTTP view and the export share it.
Reading and hashing chunks is the repository's.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from repo_service.domain.errors import ChunkCorrupt, ChunkNotFound, NotStored
from repo_service.domain.layout import DTYPE_BYTES, ArrayLayout, ChunkSpec
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Repository
from repo_service.domain.tokens import token_chunk_spec

TOKENS = "tokens"
METADATA = "zarr.json"

# zarr-specs issue 130: NumPy has no bfloat16 or float8, so their bits travel as unsigned integers.
_ZARR_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "uint32": "uint32",
}

_DIMENSIONS = ("block", "layer", "head", "token", "dim")

_CHUNK_INDEX = re.compile(r"(?:0|[1-9][0-9]{0,8})(?:/(?:0|[1-9][0-9]{0,8}))*", re.ASCII)


@dataclass(frozen=True)
class ChunkAddress:
    """A chunk's place in an artifact.

    Parameters
    ----------
    array
        ``<group>/<array>``, or ``tokens``.
    row
        Chunk index along the array's first axis: the block, or the position among the tokens' chunks.
    position
        Place among the block's chunks of this array, in the order of a block record.
    spec
        Dtype and shape.
    """

    array: str
    row: int
    position: int
    spec: ChunkSpec


class Hierarchy:
    """The Zarr nodes and chunk keys of an artifact; pure, from its manifest alone.

    Iterating gives every key: documents, token chunks, then each block's chunks in the order of its record.

    Attributes
    ----------
    documents
        The metadata documents (``zarr.json`` of each node) by key.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.documents = {
            f"{path}/{METADATA}" if path else METADATA: _encode(node) for path, node in _nodes(manifest).items()
        }
        self._arrays = manifest.layout.arrays
        self._firsts = manifest.layout.first_stored(manifest.resume_from)
        self._blocks = len(manifest.blocks)

    def __iter__(self) -> Iterator[str]:
        yield from self.documents
        yield from (key for key, _ in self.token_chunks())
        for block in range(self._blocks):
            yield from (key for key, _ in self.block_chunks(block))

    def token_chunks(self) -> Iterator[tuple[str, ChunkAddress]]:
        """Key and address of each chunk of the ``tokens`` array; none where the ids are private."""
        if self.manifest.tokens is not None:
            spec = token_chunk_spec(self.manifest.token_count)
            for row in range(len(self.manifest.tokens)):
                yield f"{TOKENS}/c/{row}", ChunkAddress(TOKENS, row, 0, spec)

    def block_chunks(self, block: int) -> Iterator[tuple[str, ChunkAddress]]:
        """Key and address of each chunk that is stored of one block, in the order of its record."""
        for name, array in self._arrays.items():
            if block < self._firsts[name]:
                continue
            layer_chunks, head_chunks = array.grid
            for position in range(layer_chunks * head_chunks):
                i, j = divmod(position, head_chunks)
                yield f"{name}/c/{block}/{i}/{j}/0/0", ChunkAddress(name, block, position, array.chunk)

    def chunk(self, key: str) -> ChunkAddress | None:
        """The chunk that a key names; None for every key outside the hierarchy."""
        name, _, text = key.rpartition("/c/")
        if not _CHUNK_INDEX.fullmatch(text):
            return None
        index = tuple(map(int, text.split("/")))
        if name == TOKENS and self.manifest.tokens is not None:
            grid: tuple[int, ...] = (len(self.manifest.tokens),)
            spec = token_chunk_spec(self.manifest.token_count)
        elif name in self._arrays:
            grid = (self._blocks, *self._arrays[name].grid, 1, 1)
            spec = self._arrays[name].chunk
        else:
            return None
        if len(index) != len(grid) or any(i >= n for i, n in zip(index, grid, strict=True)):
            return None
        position = 0 if name == TOKENS else index[1] * grid[2] + index[2]
        return ChunkAddress(name, index[0], position, spec)

    def digest(self, chunk: ChunkAddress, records: Sequence[BlockRecord]) -> str:
        """The digest that the manifest, or the block's record, gives a chunk.

        Raises
        ------
        NotStored
            If the artifact leaves the chunk out.
        """
        if chunk.array == TOKENS and self.manifest.tokens is not None:
            return self.manifest.tokens[chunk.row]
        first = self._firsts[chunk.array]
        if chunk.row < first:
            raise NotStored(
                f"the artifact {self.manifest.id} stores {chunk.array} from block {first} on, and block {chunk.row} was "
                f"asked for: it keeps of sliding layers what is needed from token {self.manifest.resume_from} on",
                array=chunk.array,
                first_block=first,
                artifact_id=self.manifest.id,
            )
        return records[chunk.row].chunks[chunk.array][chunk.position]


class ZarrView:
    """Read access to a published artifact by Zarr key. Methods may be called from several threads.

    Constructing reads the manifest; the block records are read with the first chunk.

    Raises
    ------
    ArtifactNotFound, TagNotFound, Ambiguous, MalformedName
    """

    def __init__(self, repository: Repository, ref: str, namespace: str) -> None:
        self.repository = repository
        self.namespace = namespace
        self.hierarchy = Hierarchy(repository.manifest(ref, namespace))
        self._records: list[BlockRecord] | None = None
        self._lock = threading.Lock()

    @property
    def manifest(self) -> Manifest:
        return self.hierarchy.manifest

    def records(self) -> list[BlockRecord]:
        """The artifact's block records, read once and verified."""
        with self._lock:
            if self._records is None:
                self._records = self.repository.records(self.manifest, self.namespace)
            return self._records

    def keys(self) -> list[str]:
        """Every key of the hierarchy."""
        return list(self.hierarchy)

    def size(self, key: str) -> int | None:
        """Bytes of what `get` returns, without reading a chunk; None for a key outside the view."""
        document = self.hierarchy.documents.get(key)
        if document is not None:
            return len(document)
        chunk = self.hierarchy.chunk(key)
        return None if chunk is None else chunk.spec.size

    def get(self, key: str) -> bytes | None:
        """A metadata document or a verified chunk; None only for a key outside the view.

        Zarr readers take an absent chunk for the fill value, so a chunk that is lost, or left out, is an error.

        Raises
        ------
        ChunkCorrupt
            If a chunk of the artifact is lost or altered.
        NotStored
            If the artifact leaves the chunk out.
        """
        document = self.hierarchy.documents.get(key)
        if document is not None:
            return document
        chunk = self.hierarchy.chunk(key)
        if chunk is None:
            return None
        out = bytearray(chunk.spec.size)
        self.read(chunk, memoryview(out))
        return bytes(out)

    def read(self, chunk: ChunkAddress, out: memoryview) -> None:
        """Read one chunk, verified, into ``out`` (writable, ``chunk.spec.size`` bytes).

        Raises
        ------
        ChunkCorrupt, NotStored
        """
        digest = self.hierarchy.digest(chunk, self.records())
        artifact_id = self.manifest.id
        try:
            self.repository.read_chunk(artifact_id, self.namespace, digest, chunk.spec, out)
        except ChunkNotFound as error:
            raise ChunkCorrupt(
                f"chunk {digest} of {chunk.array} of artifact {artifact_id} is lost from the store",
                digest=digest,
                array=chunk.array,
                artifact_id=artifact_id,
            ) from error


def _nodes(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Metadata by node path. The root holds that of all others, for readers that can't list."""
    children: dict[str, dict[str, Any]] = {}
    for group in manifest.layout.groups:
        attributes = {"kind": group.kind, "window": group.window, "layers": list(group.layers)}
        children[group.name] = _group_node(attributes)
        for array in group.arrays:
            children[f"{group.name}/{array.name}"] = _state_node(array, len(manifest.blocks))
    if manifest.tokens is not None:
        spec = token_chunk_spec(manifest.token_count)
        children[TOKENS] = _array_node((manifest.token_count,), spec, ("position",))
    root = _group_node(
        {
            "artifact_id": manifest.id,
            "fingerprint_id": manifest.fingerprint.id,
            "model_id": manifest.fingerprint.model_id,
            "token_count": manifest.token_count,
            "block_tokens": manifest.layout.block_tokens,
            "private_tokens": manifest.tokens is None,
            "exactness": manifest.exactness.to_json(),
            "parent": manifest.parent,
            "annotations": manifest.annotations,
            **({"resume_from": manifest.resume_from} if manifest.resume_from else {}),
        }
    )
    root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": children}
    return {"": root, **children}


def _group_node(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _state_node(array: ArrayLayout, blocks: int) -> dict[str, Any]:
    return _array_node(array.shape(blocks), array.chunk, _DIMENSIONS)


def _array_node(shape: Sequence[int], chunk: ChunkSpec, dimensions: Sequence[str]) -> dict[str, Any]:
    data_type = _ZARR_DTYPES[chunk.dtype]
    codec: dict[str, Any] = {"name": "bytes"}
    if DTYPE_BYTES[chunk.dtype] > 1:
        codec["configuration"] = {"endian": "little"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk.shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        # A chunk that an export has lost must not read as a plausible value.
        "fill_value": "NaN" if data_type.startswith("float") else 2 ** (8 * DTYPE_BYTES[chunk.dtype]) - 1,
        "codecs": [codec],
        "dimension_names": list(dimensions),
        "attributes": {"kvgraft_dtype": chunk.dtype},
    }


def _encode(node: dict[str, Any]) -> bytes:
    return json.dumps(node, separators=(",", ":"), ensure_ascii=False).encode()
