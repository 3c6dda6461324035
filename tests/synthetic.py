"""Artifacts without a model: plausible fingerprints, real documents, chunk bytes from a seeded generator.

Import as ``from synthetic import artifact, fingerprint``. Equal block keys and seeds give equal
bytes, so prefixes share blocks as real ones do; another seed makes a divergence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from repo_service.domain.digest import chunk_digest
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import DTYPE_BYTES, ArrayLayout, Layout
from repo_service.domain.manifest import Exactness, Manifest
from repo_service.domain.record import BlockRecord, block_keys
from repo_service.domain.schedule import Step, canonical_steps, split_by_block
from repo_service.domain.tokens import token_chunks

BLOCK_TOKENS = 16

_HEX = "0123456789abcdef"


def fingerprint(*, block_tokens: int = BLOCK_TOKENS, **overrides: dict[str, Any]) -> Fingerprint:
    """A fingerprint of a three-layer model; ``numerics={"torch": "2.10"}`` replaces fields of a section."""
    arrays = [
        {"name": name, "dtype": "bfloat16", "heads": 2, "dim": 4, "chunk_layers": 1, "chunk_heads": 2}
        for name in ("k", "v")
    ]
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "architecture": "SyntheticForCausalLM",
            "config": {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 32000},
            "weights": "sha256:" + _HEX * 4,
            "quantization": None,
            "adapters": [],
            "tokenizer": "sha256:" + _HEX[::-1] * 4,
            "chat_template": None,
        },
        "positions": {"rope_type": "default", "theta": {"float": "0x1.3880000000000p+13"}, "window": 4096},
        "state": {
            "groups": [
                {"name": "full", "kind": "full", "layers": [0, 2], "window": None, "arrays": arrays},
                {"name": "sliding", "kind": "sliding", "layers": [1], "window": 32, "arrays": arrays},
            ]
        },
        "schedule": {"block_tokens": block_tokens, "batch": 1, "prefill": "block", "decode": "single"},
        "numerics": {"engine": "transformers", "attention": "eager", "torch": "2.9.0", "device": "cpu", "isa": "AVX2"},
        "canary": {"logits": "sha256:" + "c0" * 32},
    }
    for name, fields in overrides.items():
        sections[name] = {**sections[name], **fields}
    return Fingerprint(sections)


def artifact(
    tokens: Sequence[int],
    fingerprint: Fingerprint | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    seed: int = 0,
    private: bool = False,
    steps: Sequence[Step] | None = None,
    exactness: Exactness | None = None,
    parent: str | None = None,
    annotations: dict[str, str] | None = None,
    text: str | None = None,
    resume_from: int = 0,
) -> tuple[Manifest, list[BlockRecord], dict[str, bytes]]:
    """One whole artifact: its manifest, its block records, and the bytes of every chunk by digest.

    ``block_tokens`` counts only where no fingerprint is given. The chunks of the tokens array are
    among the chunks unless the token ids are ``private``; with ``resume_from`` only those that are stored.
    """
    made_with = fingerprint or _default_fingerprint(block_tokens)
    layout = Layout.of(made_with)
    schedule = list(steps) if steps is not None else canonical_steps(0, len(tokens), layout.block_tokens)
    keys = block_keys(made_with.id, tokens, schedule, layout.block_tokens)
    records: list[BlockRecord] = []
    chunks: dict[str, bytes] = {}
    for i, block_steps in enumerate(split_by_block(schedule, layout.block_tokens)):
        start, stop = i * layout.block_tokens, block_steps[-1].stop
        state = block_chunks(layout, keys[i], stop - start, seed)
        for pairs in state.values():
            chunks.update(pairs)
        records.append(
            BlockRecord(
                keys[i],
                keys[i - 1] if i else None,
                start,
                stop,
                tuple(Step(step.kind, step.start, step.stop) for step in block_steps),
                {name: tuple(digest for digest, _ in pairs) for name, pairs in state.items()},
            )
        )
    token_pairs = [] if private else token_chunks(tokens)
    chunks.update(token_pairs)
    manifest = Manifest(
        made_with,
        len(tokens),
        None if private else tuple(digest for digest, _ in token_pairs),
        tuple((record.key, record.digest) for record in records),
        exactness or Exactness(),
        parent,
        annotations or {},
        text,
        resume_from,
    )
    if resume_from:
        chunks = {digest: chunks[digest] for digest in manifest.stored_chunks(records)}
    return manifest, records, chunks


def block_chunks(layout: Layout, key: str, tokens: int, seed: int = 0) -> dict[str, list[tuple[str, bytes]]]:
    """The chunks of one block of ``tokens`` tokens, as (digest, bytes) by array, padding zeroed."""
    state: dict[str, list[tuple[str, bytes]]] = {}
    for ref in layout.chunks():
        array = layout.arrays[ref.array]
        data = _chunk_bytes(array, f"{seed} {key} {ref.array} {ref.index}", tokens)
        state.setdefault(ref.array, []).append((chunk_digest(data, array.chunk.dtype, array.chunk.shape), data))
    return state


def _chunk_bytes(array: ArrayLayout, name: str, tokens: int) -> bytes:
    row = array.dim * DTYPE_BYTES[array.dtype]
    plane = array.block_tokens * row
    data = bytearray(hashlib.shake_128(name.encode()).digest(array.chunk.size))
    for start in range(0, len(data), plane):
        data[start + tokens * row : start + plane] = bytes(plane - tokens * row)
    return bytes(data)


def _default_fingerprint(block_tokens: int) -> Fingerprint:
    return fingerprint(block_tokens=block_tokens)
