"""Memory of server and client while an artifact of several GiB is pulled and placed in an engine's cache."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.artifacts import BLOCK_TOKENS, NAMESPACE, fingerprint, random_block
from benchmarks.servers import kvgraft_server
from engine_adapter.cache import StateCache
from engine_adapter.transfer import ChunkReader
from repo_service.client import open_repository
from repo_service.domain.layout import Layout
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord, block_keys
from repo_service.domain.schedule import canonical_steps, split_by_block
from repo_service.domain.tokens import token_chunks

LAYERS, HEADS, DIM = 32, 8, 128
WORKERS = 4
TAG = "large"


def run(gib: float) -> dict[str, Any]:
    """Push, then pull over HTTP into a fresh cache, an artifact of ``gib`` GiB with the layout of an 8B model."""
    with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory, ExitStack() as stack:
        root = Path(directory) / "repository"
        # In a process of its own: what it allocates and frees must not hide what a pull takes.
        pushing = multiprocessing.get_context("spawn").Process(target=_push, args=(root, gib))
        pushing.start()
        pushing.join()
        url, pid = stack.enter_context(kvgraft_server(root))
        remote = stack.enter_context(open_repository(url))
        server_before = _resident(pid)
        manifest = remote.manifest(TAG, NAMESPACE)
        records = remote.records(manifest, NAMESPACE)
        layout = manifest.layout
        config = LlamaConfig(num_hidden_layers=LAYERS)
        reader = ChunkReader(remote, NAMESPACE, WORKERS, torch.device("cpu"))
        stack.callback(reader.close)
        client_before = _resident(os.getpid())
        with _Peak(pid) as server, _Peak(os.getpid()) as client:
            cache = StateCache(config)
            reader.restore(manifest.id, layout, records, manifest.token_count, cache)
        layers: list[Any] = cache.layers
        cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        return {
            "artifact_mib": round(manifest.state_bytes / 2**20),
            "cache_mib": round(cache_bytes / 2**20),
            "configured_buffers_mib": WORKERS * 8,
            "server_growth_mib": round((server.peak - server_before) / 2**20, 1),
            "client_growth_mib": round((client.peak - client_before) / 2**20, 1),
            "client_growth_beyond_cache_mib": round((client.peak - client_before - cache_bytes) / 2**20, 1),
        }


def _push(root: Path, gib: float) -> None:
    """Push block by block."""
    made_with = fingerprint(LAYERS, HEADS, DIM)
    layout = Layout.of(made_with)
    blocks = round(gib * 2**30 / layout.block_bytes)
    tokens = random.Random(1).choices(range(32000), k=blocks * BLOCK_TOKENS)
    steps = canonical_steps(0, len(tokens), BLOCK_TOKENS)
    keys = block_keys(made_with.id, tokens, steps, BLOCK_TOKENS)
    records: list[BlockRecord] = []
    with open_repository(f"file://{root}") as repository, repository.begin_push(made_with, NAMESPACE) as push:
        for i, block_steps in enumerate(split_by_block(steps, BLOCK_TOKENS)):
            record, contents = random_block(layout, keys[i], keys[i - 1] if i else None, block_steps)
            for digest in push.offer([record]):
                push.put(digest, contents[digest])
            records.append(record)
        token_contents = dict(token_chunks(tokens))
        for digest in push.offer_tokens(len(tokens), list(token_contents)):
            push.put(digest, token_contents[digest])
        manifest = Manifest(made_with, len(tokens), tuple(token_contents), tuple((r.key, r.digest) for r in records))
        info = push.commit(manifest)
        repository.set_tag(NAMESPACE, TAG, info.id)


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Peak:
    """The largest resident size of a process while this is open, sampled every 5 ms."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.peak = 0

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, _resident(self._pid))

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
