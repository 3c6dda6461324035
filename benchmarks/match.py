"""Longest-prefix match among many indexed blocks."""

from __future__ import annotations

import hashlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.artifacts import BLOCK_TOKENS, NAMESPACE, fingerprint
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import Layout
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.schedule import PREFILL, Step
from repo_service.index import Entry, Index

BLOCKS_PER_ARTIFACT = 128
PROMPT_BLOCKS = 32


def run(blocks: int, lookups: int) -> dict[str, Any]:
    """Match prompts of 32 blocks, half of which are stored in part, against ``blocks`` indexed blocks."""
    made_with = fingerprint()
    with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory:
        path = Path(directory) / "index.sqlite"
        index = Index.open(f"sqlite:///{path}")
        start = time.perf_counter()
        index.rebuild(_entries(made_with, blocks), iter(()), iter(()))
        loaded = time.perf_counter() - start
        chooser = random.Random(1)
        seconds: list[float] = []
        for _ in range(lookups):
            prompt = chooser.randrange(2 * blocks // BLOCKS_PER_ARTIFACT)
            shared = chooser.randrange(PROMPT_BLOCKS)
            stored = prompt < blocks // BLOCKS_PER_ARTIFACT
            keys = [_key(prompt, i) if i < shared else _key(-1 - prompt, i) for i in range(PROMPT_BLOCKS)]
            begin = time.perf_counter()
            match = index.match(NAMESPACE, keys)
            seconds.append(time.perf_counter() - begin)
            if (match.blocks if match else 0) != (shared if stored else 0):
                raise RuntimeError(f"prompt {prompt} matched {match}, {shared} blocks are stored")
        index.close()
        seconds.sort()
        return {
            "blocks": blocks,
            "lookups": lookups,
            "keys_per_lookup": PROMPT_BLOCKS,
            "p50_ms": round(statistics.median(seconds) * 1e3, 3),
            "p99_ms": round(seconds[int(len(seconds) * 0.99)] * 1e3, 3),
            "index_mib": round(path.stat().st_size / 2**20),
            "load_s": round(loaded, 1),
        }


def _key(prompt: int, block: int) -> str:
    return f"sha256:{hashlib.sha256(b'%d/%d' % (prompt, block)).hexdigest()}"


def _entries(made_with: Fingerprint, blocks: int) -> Iterator[Entry]:
    layout = Layout.of(made_with)
    now = datetime.now(UTC)
    for artifact in range(blocks // BLOCKS_PER_ARTIFACT):
        keys = [_key(artifact, i) for i in range(BLOCKS_PER_ARTIFACT)]
        records = [
            BlockRecord(
                key,
                keys[i - 1] if i else None,
                i * BLOCK_TOKENS,
                (i + 1) * BLOCK_TOKENS,
                (Step(PREFILL, i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS),),
                {name: (f"blake3:{hashlib.sha256(f'{key}{name}'.encode()).hexdigest()}",) for name in layout.arrays},
            )
            for i, key in enumerate(keys)
        ]
        manifest = Manifest(
            made_with, BLOCKS_PER_ARTIFACT * BLOCK_TOKENS, None, tuple((r.key, r.digest) for r in records)
        )
        yield Entry(NAMESPACE, manifest, records, None, now)
