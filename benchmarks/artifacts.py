"""Synthetic artifacts of a chosen size: real documents and digests, random state, no model."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from repo_service.domain.digest import chunk_digest
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import ArrayLayout, LayerGroup, Layout, chunk_split
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord, block_keys
from repo_service.domain.repository import Push, Repository
from repo_service.domain.schedule import Step, canonical_steps, split_by_block
from repo_service.domain.tokens import token_chunks
from repo_service.domain.views import ArtifactInfo

BLOCK_TOKENS = 256
NAMESPACE = "default"


def fingerprint(layers: int = 30, heads: int = 3, dim: int = 64, dtype: str = "bfloat16") -> Fingerprint:
    """A fingerprint with the layout of SmolLM2-135M unless told otherwise."""
    split = chunk_split(layers, heads, BLOCK_TOKENS, dim, dtype)
    arrays = tuple(ArrayLayout(name, dtype, layers, heads, dim, BLOCK_TOKENS, *split) for name in ("k", "v"))
    group = LayerGroup("full", "full", tuple(range(layers)), None, arrays)
    return Fingerprint(
        {
            "model": {"architecture": "Synthetic", "weights": os.urandom(8).hex()},
            "positions": {},
            "state": {"groups": [group.to_json()]},
            "schedule": {"block_tokens": BLOCK_TOKENS},
            "numerics": {},
            "canary": {},
        }
    )


@dataclass
class Synthetic:
    """One artifact with its chunks' bytes at hand."""

    manifest: Manifest
    records: list[BlockRecord]
    contents: dict[str, bytes]
    token_contents: dict[str, bytes]

    @property
    def state_bytes(self) -> int:
        return sum(map(len, self.contents.values()))


def random_block(
    layout: Layout, key: str, parent: str | None, steps: list[Step]
) -> tuple[BlockRecord, dict[str, bytes]]:
    """A block of random state: its record, and its chunks' bytes by digest."""
    contents: dict[str, bytes] = {}
    chunks: dict[str, list[str]] = {name: [] for name in layout.arrays}
    for ref in layout.chunks():
        spec = layout.arrays[ref.array].chunk
        data = os.urandom(spec.size)
        digest = chunk_digest(data, spec.dtype, spec.shape)
        contents[digest] = data
        chunks[ref.array].append(digest)
    named = {name: tuple(digests) for name, digests in chunks.items()}
    return BlockRecord(key, parent, steps[0].start, steps[-1].stop, tuple(steps), named), contents


def synthetic(made_with: Fingerprint, blocks: int) -> Synthetic:
    """An artifact of random token ids and random state."""
    layout = Layout.of(made_with)
    count = blocks * BLOCK_TOKENS
    tokens = random.Random(os.urandom(8)).choices(range(32000), k=count)
    steps = canonical_steps(0, count, BLOCK_TOKENS)
    keys = block_keys(made_with.id, tokens, steps, BLOCK_TOKENS)
    contents: dict[str, bytes] = {}
    records: list[BlockRecord] = []
    for i, block_steps in enumerate(split_by_block(steps, BLOCK_TOKENS)):
        record, chunks = random_block(layout, keys[i], keys[i - 1] if i else None, block_steps)
        records.append(record)
        contents |= chunks
    token_contents = dict(token_chunks(tokens))
    manifest = Manifest(made_with, count, tuple(token_contents), tuple((r.key, r.digest) for r in records))
    return Synthetic(manifest, records, contents, token_contents)


def push(repository: Repository, artifact: Synthetic, workers: int = 4) -> ArtifactInfo:
    """Push an artifact as a client does: offer, send what is missing in parallel, commit."""
    with repository.begin_push(artifact.manifest.fingerprint, NAMESPACE) as running:
        missing = running.offer(artifact.records)
        missing += running.offer_tokens(artifact.manifest.token_count, artifact.manifest.tokens or ())
        _send(running, {**artifact.contents, **artifact.token_contents}, missing, workers)
        return running.commit(artifact.manifest)


def _send(running: Push, contents: dict[str, bytes], missing: list[str], workers: int) -> None:
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda digest: running.put(digest, contents[digest]), missing))
