"""Copying an artifact from one repository to another, whichever kinds they are."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor

from pydantic import Field

from repo_service.domain.errors import InvalidInput
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.names import check_namespace, check_tag, is_artifact_reference
from repo_service.domain.repository import Repository, despite_expiry
from repo_service.domain.views import ArtifactInfo, View

Progress = Callable[[str, int, int], None]
"""Called with what is counted ("bytes"), how many are at the destination, and how many there are; one call at a time."""

MAX_WORKERS = 64

# Records offered at once hold the destination's index for a moment only.
_OFFERED_RECORDS = 64


class CopyReport(View):
    """What a copy did."""

    artifact: ArtifactInfo = Field(description="The artifact at the destination.")
    chunks_sent: int
    bytes_sent: int
    bytes_total: int = Field(description="Bytes of the artifact's distinct chunks, sent now or there before.")


def copy_artifact(
    source: Repository,
    destination: Repository,
    ref: str,
    source_namespace: str,
    destination_namespace: str,
    tag: str | None = None,
    workers: int = 4,
    progress: Progress | None = None,
    *,
    carry_tag: bool = True,
) -> CopyReport:
    """Copy an artifact, which keeps its id; only chunks that the destination lacks are read and sent.

    What an interrupted copy sent stays at the destination, so that the next one goes on from there.

    Parameters
    ----------
    ref
        Artifact id, shortened id or tag in the source.
    tag
        Tag to set at the destination; by default the one that ``ref`` is, if it is a tag.
    workers
        Threads, 1 to 64; each holds one chunk in memory.
    carry_tag
        False sets no tag where ``tag`` is None.

    Raises
    ------
    ArtifactNotFound, TagNotFound, Ambiguous, MalformedName
    ChunkCorrupt
        If the source's bytes are not those the artifact names; nothing is published then.
    Divergence
        If the destination holds other bytes under one of the artifact's block keys.
    StorageFull, Unavailable
    """
    check_workers(workers)
    check_namespace(destination_namespace)
    if tag is not None:
        check_tag(tag)
    elif carry_tag and not is_artifact_reference(ref):
        tag = ref
    manifest = source.manifest(source.artifact(ref, source_namespace).id, source_namespace)
    records = source.records(manifest, source_namespace)
    held = manifest.stored_chunks(records)
    tries: list[_Moves] = []

    def publish() -> ArtifactInfo:
        with destination.begin_push(manifest.fingerprint, destination_namespace) as push:
            missing: set[str] = set()
            for start in range(0, len(records), _OFFERED_RECORDS):
                missing.update(push.offer(records[start : start + _OFFERED_RECORDS], manifest.resume_from))
            if manifest.tokens is not None:
                missing.update(push.offer_tokens(manifest.token_count, manifest.tokens))

            def move(digest: str, buffer: memoryview) -> None:
                source.read_chunk(manifest.id, source_namespace, digest, held[digest], buffer)
                push.put(digest, buffer)

            tries.append(_Moves(held, missing, progress))
            tries[-1].run(move, workers)
            return push.commit(manifest)

    info = despite_expiry(publish)
    if tag is not None:
        destination.set_tag(destination_namespace, tag, info.id)
        info = destination.artifact(info.id, destination_namespace)
    return CopyReport(
        artifact=info,
        chunks_sent=sum(moves.chunks for moves in tries),
        bytes_sent=sum(moves.bytes for moves in tries),
        bytes_total=sum(spec.size for spec in held.values()),
    )


def check_workers(workers: int) -> None:
    """Raises `InvalidInput` for a number of threads that no copy takes."""
    if not 1 <= workers <= MAX_WORKERS:
        raise InvalidInput(f"workers is {workers}; it must be from 1 to {MAX_WORKERS}")


class _Moves:
    """Chunks shared out among threads, each of which has one buffer for all of its chunks."""

    def __init__(self, held: Mapping[str, ChunkSpec], missing: Container[str], progress: Progress | None) -> None:
        # In the artifact's order, which is that of the source's disk.
        self._waiting = deque(digest for digest in held if digest in missing)
        sizes = [held[digest].size for digest in self._waiting]
        self.chunks = self.bytes = 0
        self._total = sum(spec.size for spec in held.values())
        self._largest = max(sizes, default=0)
        self._done = self._total - sum(sizes)
        self._held = held
        self._progress = progress
        self._lock = threading.Lock()
        self._report()

    def run(self, move: Callable[[str, memoryview], None], workers: int) -> None:
        """Hand every chunk's digest, with a buffer of its size, to ``move``; the first error ends all threads."""
        with ThreadPoolExecutor(workers, thread_name_prefix="kvgraft-copy") as pool:
            threads = [pool.submit(self._work, move) for _ in range(workers)]
            try:
                for thread in threads:
                    thread.result()
            finally:
                self._stop()

    def _work(self, move: Callable[[str, memoryview], None]) -> None:
        buffer = memoryview(bytearray(self._largest))
        try:
            while (digest := self._take()) is not None:
                size = self._held[digest].size
                move(digest, buffer[:size])
                self._sent(size)
        except BaseException:
            self._stop()
            raise

    def _take(self) -> str | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _stop(self) -> None:
        with self._lock:
            self._waiting.clear()

    def _sent(self, size: int) -> None:
        with self._lock:
            self.chunks += 1
            self.bytes += size
            self._done += size
            self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress("bytes", self._done, self._total)
