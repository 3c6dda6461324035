"""The repository on this machine: every service behind the one interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial

from repo_service.domain.access import DEFAULT_LIFETIME_S, AccessToken, NewAccessToken, Scope, check_token_id
from repo_service.domain.canonical import check_canonical
from repo_service.domain.digest import BLAKE3
from repo_service.domain.errors import ArtifactNotFound, ChunkCorrupt, InvalidInput, KvgraftError, NotARepository
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.frame import NONE
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.manifest import Manifest
from repo_service.domain.names import check_namespace, check_tag
from repo_service.domain.policy import Policy
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Repository
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
from repo_service.index import Index
from repo_service.services.access import Recognition, create_token
from repo_service.services.documents import chunk_key, seal, tag_key
from repo_service.services.garbage import GRACE_S, collect_garbage, remove_unneeded
from repo_service.services.marker import Marker, read_marker
from repo_service.services.observer import Observer
from repo_service.services.ownership import Ownership
from repo_service.services.push import LocalPush, begin_push
from repo_service.services.read import (
    Holdings,
    check_artifact,
    read_ahead,
    read_chunk,
    read_manifest,
    read_record,
    read_records,
)
from repo_service.services.reindex import reindex
from repo_service.services.reserve import Reserve
from repo_service.services.retention import Clock, read_policy, write_policy
from repo_service.services.scrub import scrub
from repo_service.services.settle import drop_unread
from repo_service.services.undo import follow_rows
from repo_service.services.withdraw import withdraw
from repo_service.storage import Store
from repo_service.version import __version__

_CHECK_WORKERS = 2

# Chunks whose URLs are given in one answer.
CHUNK_URLS = 64


class LocalRepository(Repository):
    """A store and its index.

    Several processes may open one repository at once, reading and writing.

    Attributes
    ----------
    recognition
        Tells who the access tokens of requests belong to.
    observer
        Told what the repository does in this process.
    """

    def __init__(
        self, url: str, marker: Marker, store: Store, index: Index, reserve: Reserve, owner: Ownership | None = None
    ) -> None:
        self.url = url
        self._marker = marker
        self._store = store
        self._index = index
        self._reserve = reserve
        self._owner = owner
        self._holdings = Holdings(store, index)
        self._clock = Clock()
        self.recognition = Recognition(index)
        self.observer = Observer()

    def info(self) -> RepositoryInfo:
        return RepositoryInfo(
            repository_id=self._marker.repository_id,
            format_version=self._marker.version,
            codec=self._marker.codec,
            server_version=__version__,
        )

    def begin_push(self, fingerprint: Fingerprint, namespace: str) -> LocalPush:
        # New bytes don't take the room that deletions need.
        self._reserve.keep()
        self._check_owner()
        push_id = begin_push(self._store, self._index, fingerprint, namespace)
        self.observer.begun()
        return self.resume_push(push_id, namespace)

    def resume_push(self, push_id: str, namespace: str) -> LocalPush:
        """Take up a push that another process or request began in the namespace.

        Raises
        ------
        MalformedName
        """
        check_namespace(namespace)
        return LocalPush(self._store, self._index, push_id, namespace, self.observer, self._reserve, self._check_owner)

    def _check_owner(self) -> None:
        """Raise `Conflict` if the store has become another index's since it was opened."""
        if self._owner is not None:
            self._owner.check()

    def artifact(self, ref: str, namespace: str) -> ArtifactInfo:
        return self._index.artifact(check_namespace(namespace), ref)

    def _require(self, ref: str, namespace: str, *, used: bool = True) -> str:
        return self._index.artifact_id(check_namespace(namespace), ref, used=used)

    def manifest(self, ref: str, namespace: str) -> Manifest:
        return read_manifest(self._store, self._require(ref, namespace))

    def records(self, manifest: Manifest, namespace: str) -> list[BlockRecord]:
        self._require(manifest.id, namespace)
        records = read_records(self._store, manifest, namespace)
        self._holdings.keep(namespace, manifest, records)
        return records

    def record_page(self, manifest: Manifest, namespace: str, start: int, count: int) -> Iterator[BlockRecord]:
        """Some of an artifact's block records, each verified against the manifest, and read when it is its turn.

        Raises
        ------
        ArtifactNotFound, DocumentCorrupt
        """
        self._require(manifest.id, namespace)

        def read(block: tuple[str, str]) -> BlockRecord:
            return read_record(self._store, namespace, *block)

        return (record() for _, record in read_ahead(self._store, read, manifest.blocks[start : start + count]))

    def probe_store(self) -> None:
        """Read one object of the store.

        Raises
        ------
        RepositoryError, Unavailable
        """
        found = read_marker(self._store, self.url)
        if found != self._marker:
            raise NotARepository(
                f"{self.url} is the repository {found.repository_id} now; it was {self._marker.repository_id}",
                found=found.repository_id,
            )

    def probe_index(self) -> int:
        """Ask the index for the number of running pushes.

        Raises
        ------
        RepositoryError, Unavailable
        """
        return self._index.running_pushes()

    def chunk_spec(self, artifact_id: str, namespace: str, digest: str) -> ChunkSpec:
        """Dtype and shape of a chunk that the artifact holds.

        Raises
        ------
        ArtifactNotFound, ChunkNotFound
        """
        return self._holdings.require(check_namespace(namespace), artifact_id, digest)

    def read_chunk(self, artifact_id: str, namespace: str, digest: str, spec: ChunkSpec, out: memoryview) -> None:
        self.chunk_spec(artifact_id, namespace, digest)
        try:
            read_chunk(self._store, digest, spec, out)
        except ChunkCorrupt:
            self._await_again([digest])
            raise
        self.observer.read(spec.size)

    @property
    def is_framed(self) -> bool:
        """Whether the store holds frames, which `chunk_urls` then lead to."""
        return self._store.codec != NONE

    def chunk_urls(self, artifact_id: str, namespace: str, digest: str, seconds: int) -> dict[str, str]:
        """Where the store itself gives a chunk of the artifact, and those that follow it, to anyone for ``seconds``.

        Empty where the store has no such URLs. What comes from them is unverified.

        Raises
        ------
        ArtifactNotFound, ChunkNotFound, Unavailable
        """
        digests = self._holdings.from_on(check_namespace(namespace), artifact_id, digest, CHUNK_URLS)
        found = {digest: self._store.url_of(chunk_key(digest), seconds) for digest in digests}
        urls = {digest: url for digest, url in found.items() if url is not None}
        self.observer.located(len(urls))
        return urls

    def _await_again(self, digests: Sequence[str]) -> None:
        """Let the next push of damaged chunks send them; the damage is reported whether or not this can be noted."""
        with suppress(KvgraftError):
            self._index.mark_damaged(digests)

    def match(self, namespace: str, keys: Sequence[str]) -> Match | None:
        match = self._index.match(check_namespace(namespace), keys)
        self.observer.matched(len(keys), match.blocks if match else 0)
        return match

    def query(self, query: ArtifactQuery) -> ArtifactPage:
        check_namespace(query.namespace)
        if query.tag is not None:
            check_tag(query.tag)
        # Refuses what no database takes: lone surrogates.
        check_canonical([query.text, query.annotations])
        return self._index.query(query)

    def namespaces(self) -> list[str]:
        return self._index.namespaces()

    def tags(self, namespace: str) -> list[TagInfo]:
        return self._index.tags(check_namespace(namespace))

    def set_tag(self, namespace: str, name: str, artifact_id: str) -> TagInfo:
        check_tag(name)
        artifact = self.artifact(artifact_id, namespace)
        key = tag_key(namespace, name)
        return self._index.set_tag(
            namespace,
            name,
            artifact.id,
            datetime.now(UTC),
            lambda tag: self._store.put(key, seal(tag)),
            partial(follow_rows, self._store),
        )

    def delete_tag(self, namespace: str, name: str) -> None:
        key = tag_key(namespace, name)

        undo = partial(follow_rows, self._store)
        self._reserve.spent_on(lambda: self._index.delete_tag(namespace, name, lambda _: self._store.delete(key), undo))

    def delete(self, artifact_id: str, namespace: str) -> DeleteReport:
        self._check_owner()
        try:
            artifact = self._index.artifact(check_namespace(namespace), artifact_id)
        except ArtifactNotFound:
            if not self._reserve.spent_on(lambda: drop_unread(self._store, self._index, artifact_id, namespace)):
                raise
            return DeleteReport(artifact_id=artifact_id, tags=[], chunks=0, bytes=0)
        tags = self._reserve.spent_on(lambda: withdraw(self._store, self._index, artifact))
        self._holdings.forget(namespace, artifact.id)
        chunks, freed = self._reserve.spent_on(
            lambda: remove_unneeded(self._store, self._index, artifact.id, namespace)
        )
        return DeleteReport(artifact_id=artifact.id, tags=tags, chunks=chunks, bytes=freed)

    def check(self, ref: str, namespace: str) -> StorageReport:
        report = check_artifact(self._store, self._require(ref, namespace, used=False), namespace, _CHECK_WORKERS)
        self._await_again([name for name in report.corrupt if name.startswith(BLAKE3)])
        self.observer.damaged("check", len(report.corrupt))
        return report

    def stats(self, namespace: str) -> Stats:
        return self._index.stats(check_namespace(namespace))

    def divergences(self, namespace: str) -> list[Divergence]:
        return self._index.divergences(check_namespace(namespace))

    def reindex(self) -> ReindexReport:
        self._check_owner()
        return reindex(self._store, self._index)

    def collect_garbage(self, *, grace_s: float = GRACE_S, dry_run: bool = False, sweep: bool = True) -> GarbageReport:
        """As the interface says; without ``sweep`` only what rows let go of is removed."""
        if not grace_s >= 0:
            raise InvalidInput(f"the grace is {grace_s} s; it must be 0 or more")
        self._check_owner()
        began = time.monotonic()
        with self._watched("gc"):
            report = self._reserve.spent_on(
                lambda: collect_garbage(
                    self._store,
                    self._index,
                    grace_s=grace_s,
                    dry_run=dry_run,
                    sweep=sweep,
                    now=self._clock.now(),
                    withdrawn=self._holdings.forget,
                )
            )
        self.observer.collected(report, time.monotonic() - began)
        return report

    def policy(self, namespace: str) -> Policy:
        return read_policy(self._store, namespace)

    def set_policy(self, namespace: str, policy: Policy) -> Policy:
        return write_policy(self._store, namespace, policy)

    def scrub(self, *, bytes_per_s: float | None = None, ended: Callable[[float], bool] | None = None) -> ScrubReport:
        """As the interface says; ``ended`` waits for some seconds and returns True to stop the scrub there."""
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise InvalidInput(f"the rate is {bytes_per_s} bytes a second; it must be above 0")
        began = time.monotonic()
        with self._watched("scrub"):
            report = scrub(self._store, self._index, bytes_per_s=bytes_per_s, ended=ended)
        self.observer.damaged("scrub", report.damaged)
        self.observer.scrubbed(report, time.monotonic() - began)
        return report

    @contextmanager
    def _watched(self, job: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.observer.failed(job)
            raise

    def alone(self, job: str) -> AbstractContextManager[bool]:
        """True inside the block if no other process that serves this repository is inside one for the same job."""
        return self._index.alone(job)

    def access_tokens(self) -> list[AccessToken]:
        return self._index.tokens()

    def create_access_token(
        self,
        scope: Scope,
        namespaces: Sequence[str],
        *,
        lifetime_s: int | None = DEFAULT_LIFETIME_S,
        note: str = "",
    ) -> NewAccessToken:
        return create_token(self._index, scope, namespaces, lifetime_s=lifetime_s, note=note)

    def revoke_access_token(self, token_id: str) -> AccessToken:
        return self._reserve.spent_on(lambda: self._index.revoke_token(check_token_id(token_id), datetime.now(UTC)))

    def close(self) -> None:
        self._index.close()
        self._store.close()
