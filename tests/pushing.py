"""Pushing synthetic artifacts as a client does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from places import Place
from sqlalchemy import Connection

from repo_service.domain.digest import chunk_digest
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Push, Repository
from repo_service.domain.views import ArtifactInfo
from repo_service.services.opening import open_local

Artifact = tuple[Manifest, list[BlockRecord], Mapping[str, bytes]]


def push(repository: Repository, artifact: Artifact, namespace: str = "default") -> tuple[ArtifactInfo, list[str]]:
    """Push an artifact; also the digests of the chunks that had to be sent."""
    manifest, records, contents = artifact
    with repository.begin_push(manifest.fingerprint, namespace) as running:
        sent = offer(running, manifest, records)
        for digest in sent:
            running.put(digest, contents[digest])
        return running.commit(manifest), sent


def contents_of(repository: Repository, ref: str, namespace: str = "default") -> dict[str, bytes]:
    """Every chunk of an artifact, by digest, as it reads."""
    manifest = repository.manifest(ref, namespace)
    found = {}
    for digest, spec in manifest.stored_chunks(repository.records(manifest, namespace)).items():
        out = bytearray(spec.size)
        repository.read_chunk(manifest.id, namespace, digest, spec, memoryview(out))
        assert chunk_digest(out, spec.dtype, spec.shape) == digest
        found[digest] = bytes(out)
    return found


def offer(running: Push, manifest: Manifest, records: Sequence[BlockRecord]) -> list[str]:
    """Announce everything; returns the digests to send."""
    missing = running.offer(records, manifest.resume_from)
    if manifest.tokens is not None:
        missing = missing + running.offer_tokens(manifest.token_count, manifest.tokens)
    return missing


@contextmanager
def writing_to_index(root: Place) -> Iterator[Connection]:
    """A transaction that writes to the index of a repository, as one of another process."""
    with open_local(root.as_uri()) as local, local._index._database.write() as connection:
        yield connection


def expire_pushes(root: Place) -> None:
    """End the running pushes of a repository, as when their leases have run out."""
    with open_local(root.as_uri()) as local:
        local._index.expire_pushes(datetime.now(UTC) + timedelta(days=1))


def expiring_once(root: Place, after: int) -> Callable[[str, int, int], None]:
    """A progress display that ends the running pushes at its call number ``after``."""
    calls: list[int] = []

    def progress(_: str, done: int, __: int) -> None:
        calls.append(done)
        if len(calls) == after:
            expire_pushes(root)

    return progress
