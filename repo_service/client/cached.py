"""A repository whose chunks are read from the node's cache where they are there (I7).

What may be read is what the repository has just said: manifests and block records always come from it, and name
the chunks that the cache is asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from typing_extensions import Buffer

from repo_service.client.cache import NodeCache
from repo_service.domain.access import DEFAULT_LIFETIME_S, AccessToken, NewAccessToken, Scope
from repo_service.domain.errors import AccessDenied, NotFound
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.manifest import Manifest
from repo_service.domain.policy import Policy
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Push, Repository
from repo_service.domain.views import (
    ArtifactInfo,
    ArtifactPage,
    ArtifactQuery,
    DeleteReport,
    Divergence,
    GarbageReport,
    Match,
    ReindexReport,
    RepositoryInfo,
    ScrubReport,
    Stats,
    StorageReport,
    TagInfo,
)

# Artifacts whose chunks may be read from the cache at once.
_GRANTS_KEPT = 16

# How long the repository's word on an artifact counts before it is asked again.
GRANTED_S = 60.0


@dataclass(frozen=True)
class _Grant:
    chunks: dict[str, ChunkSpec]
    given_at: float


class CachedRepository(Repository):
    """A repository behind a cache of chunks; everything else is the repository's own answer.

    Parameters
    ----------
    repository
        Closed with this one.
    cache
        May be shared by several repositories.
    """

    def __init__(self, repository: Repository, cache: NodeCache) -> None:
        self.url = repository.url
        self.cache = cache
        self._repository = repository
        self._lock = threading.Lock()
        self._grants: dict[tuple[str, str], _Grant] = {}

    # Where rights are given and taken

    def artifact(self, ref: str, namespace: str) -> ArtifactInfo:
        with self._refusals(ref, namespace):
            return self._repository.artifact(ref, namespace)

    def manifest(self, ref: str, namespace: str) -> Manifest:
        with self._refusals(ref, namespace):
            return self._repository.manifest(ref, namespace)

    def records(self, manifest: Manifest, namespace: str) -> list[BlockRecord]:
        with self._refusals(manifest.id, namespace):
            asked_at = time.monotonic()
            records = self._repository.records(manifest, namespace)
        self._grant(manifest.id, namespace, _Grant(manifest.stored_chunks(records), asked_at))
        return records

    def read_chunk(self, artifact_id: str, namespace: str, digest: str, spec: ChunkSpec, out: memoryview) -> None:
        if self._may_read(artifact_id, namespace, digest, spec) and self.cache.read(digest, spec, out):
            return
        with self._refusals(artifact_id, namespace):
            self._repository.read_chunk(artifact_id, namespace, digest, spec, out)
        self.cache.keep(digest, out[: spec.size])

    def delete(self, artifact_id: str, namespace: str) -> DeleteReport:
        self._forget(artifact_id, namespace)
        return self._repository.delete(artifact_id, namespace)

    def _may_read(self, artifact_id: str, namespace: str, digest: str, spec: ChunkSpec) -> bool:
        grant = self._grants.get((namespace, artifact_id))
        if grant is None or grant.chunks.get(digest) != spec:
            return False
        asked_at = time.monotonic()
        if asked_at - grant.given_at > GRANTED_S:
            self.artifact(artifact_id, namespace)
            self._grant(artifact_id, namespace, _Grant(grant.chunks, asked_at))
        return True

    def _grant(self, artifact_id: str, namespace: str, grant: _Grant) -> None:
        with self._lock:
            self._grants.pop((namespace, artifact_id), None)
            self._grants[namespace, artifact_id] = grant
            if len(self._grants) > _GRANTS_KEPT:
                del self._grants[next(iter(self._grants))]

    def _forget(self, ref: str, namespace: str) -> None:
        with self._lock:
            for name in [name for name in self._grants if name[0] == namespace and name[1].startswith(ref)]:
                del self._grants[name]

    @contextmanager
    def _refusals(self, ref: str, namespace: str) -> Iterator[None]:
        """What the repository refuses is not read from the cache either."""
        try:
            yield
        except (AccessDenied, NotFound):
            self._forget(ref, namespace)
            raise

    # What is sent

    def begin_push(self, fingerprint: Fingerprint, namespace: str) -> CachedPush:
        return CachedPush(self._repository.begin_push(fingerprint, namespace), self.cache)

    # What is passed on

    def info(self) -> RepositoryInfo:
        return self._repository.info()

    def match(self, namespace: str, keys: Sequence[str]) -> Match | None:
        return self._repository.match(namespace, keys)

    def query(self, query: ArtifactQuery) -> ArtifactPage:
        return self._repository.query(query)

    def namespaces(self) -> list[str]:
        return self._repository.namespaces()

    def tags(self, namespace: str) -> list[TagInfo]:
        return self._repository.tags(namespace)

    def set_tag(self, namespace: str, name: str, artifact_id: str) -> TagInfo:
        return self._repository.set_tag(namespace, name, artifact_id)

    def delete_tag(self, namespace: str, name: str) -> None:
        self._repository.delete_tag(namespace, name)

    def check(self, ref: str, namespace: str) -> StorageReport:
        return self._repository.check(ref, namespace)

    def stats(self, namespace: str) -> Stats:
        return self._repository.stats(namespace)

    def policy(self, namespace: str) -> Policy:
        return self._repository.policy(namespace)

    def set_policy(self, namespace: str, policy: Policy) -> Policy:
        return self._repository.set_policy(namespace, policy)

    def access_tokens(self) -> list[AccessToken]:
        return self._repository.access_tokens()

    def create_access_token(
        self,
        scope: Scope,
        namespaces: Sequence[str],
        *,
        lifetime_s: int | None = DEFAULT_LIFETIME_S,
        note: str = "",
    ) -> NewAccessToken:
        return self._repository.create_access_token(scope, namespaces, lifetime_s=lifetime_s, note=note)

    def revoke_access_token(self, token_id: str) -> AccessToken:
        return self._repository.revoke_access_token(token_id)

    def divergences(self, namespace: str) -> list[Divergence]:
        return self._repository.divergences(namespace)

    def reindex(self) -> ReindexReport:
        return self._repository.reindex()

    def collect_garbage(self, *, grace_s: float = 3600.0, dry_run: bool = False) -> GarbageReport:
        return self._repository.collect_garbage(grace_s=grace_s, dry_run=dry_run)

    def scrub(self, *, bytes_per_s: float | None = None) -> ScrubReport:
        return self._repository.scrub(bytes_per_s=bytes_per_s)

    def close(self) -> None:
        self._repository.close()
        self.cache.close()


class CachedPush(Push):
    """A push whose chunks are kept on the node once the repository has taken, and so checked, them."""

    def __init__(self, push: Push, cache: NodeCache) -> None:
        self.id = push.id
        self._push = push
        self._cache = cache

    def offer(self, records: Sequence[BlockRecord], resume_from: int = 0) -> list[str]:
        return self._push.offer(records, resume_from)

    def offer_tokens(self, token_count: int, chunks: Sequence[str]) -> list[str]:
        return self._push.offer_tokens(token_count, chunks)

    def put(self, digest: str, data: Buffer) -> None:
        self._push.put(digest, data)
        self._cache.keep(digest, data)

    def commit(self, manifest: Manifest) -> ArtifactInfo:
        return self._push.commit(manifest)

    def abort(self) -> None:
        self._push.abort()
