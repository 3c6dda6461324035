"""The interface that embedded and remote repositories share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from typing_extensions import Buffer

from repo_service.domain.access import DEFAULT_LIFETIME_S, AccessToken, NewAccessToken, Scope
from repo_service.domain.errors import KvgraftError, PushNotFound
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.manifest import Manifest
from repo_service.domain.policy import Policy
from repo_service.domain.record import BlockRecord
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

T = TypeVar("T")


class Push(ABC):
    """A running push: offer block records, send the chunks that are missing, commit.

    Nothing is visible before `commit` returns, everything after. A push that is neither
    committed nor aborted expires; what it sent need not be sent again by a later one.
    Methods may be called from several threads.
    """

    id: str

    @abstractmethod
    def offer(self, records: Sequence[BlockRecord], resume_from: int = 0) -> list[str]:
        """Announce blocks; returns the digests of chunks to send with `put`.

        Parameters
        ----------
        resume_from
            What the manifest is to say: chunks that the artifact will not store are not asked for.

        Raises
        ------
        Divergence
            If a block key already has other bytes (I2); it is recorded.
        QuotaExceeded
            If the namespace would hold more than it may; the push is over, and what it sent is freed.
        """

    @abstractmethod
    def offer_tokens(self, token_count: int, chunks: Sequence[str]) -> list[str]:
        """Announce the chunks of the ``tokens`` array; returns the digests to send."""

    @abstractmethod
    def put(self, digest: str, data: Buffer) -> None:
        """Send one chunk.

        Raises
        ------
        DigestMismatch, SizeMismatch, ChunkNotFound
            ``ChunkNotFound`` if no offer named the digest.
        """

    @abstractmethod
    def commit(self, manifest: Manifest) -> ArtifactInfo:
        """Publish; durable when this returns. Publishing the same artifact again returns the first one.

        Raises
        ------
        ChunksMissing, MalformedDocument, Divergence
        """

    @abstractmethod
    def abort(self) -> None:
        """Give the push up; harmless after a commit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            # The first error is the one to report; a push that can't be aborted expires.
            with suppress(KvgraftError):
                self.abort()


def despite_expiry(publish: Callable[[], T]) -> T:
    """Call what begins a push and commits it, and once more if the push expired on the way.

    A lease runs out where a machine slept for long or the repository's clock jumped. What was sent is stored,
    unless garbage was collected meanwhile, and is not missing in the new push.
    """
    try:
        return publish()
    except PushNotFound:
        return publish()


class Repository(ABC):
    """A repository of artifacts. ``ref`` is an artifact id, a shortened id, or a tag."""

    url: str

    @abstractmethod
    def info(self) -> RepositoryInfo: ...

    @abstractmethod
    def begin_push(self, fingerprint: Fingerprint, namespace: str) -> Push: ...

    @abstractmethod
    def artifact(self, ref: str, namespace: str) -> ArtifactInfo:
        """Look an artifact up.

        Raises
        ------
        ArtifactNotFound, TagNotFound, Ambiguous, MalformedName
        """

    @abstractmethod
    def manifest(self, ref: str, namespace: str) -> Manifest:
        """The manifest, verified against the artifact's id."""

    @abstractmethod
    def records(self, manifest: Manifest, namespace: str) -> list[BlockRecord]:
        """The block records of an artifact, verified against its manifest."""

    @abstractmethod
    def read_chunk(self, artifact_id: str, namespace: str, digest: str, spec: ChunkSpec, out: memoryview) -> None:
        """Read one chunk that the artifact holds into ``out`` (writable, ``spec.size`` bytes), verified.

        On an error the content of ``out`` is unspecified.

        Raises
        ------
        ChunkCorrupt, ChunkNotFound
        """

    @abstractmethod
    def match(self, namespace: str, keys: Sequence[str]) -> Match | None:
        """The longest stored prefix among the chained block keys of one token sequence."""

    @abstractmethod
    def query(self, query: ArtifactQuery) -> ArtifactPage: ...

    @abstractmethod
    def namespaces(self) -> list[str]:
        """The namespaces that hold an artifact, a tag or a divergence, by name."""

    @abstractmethod
    def tags(self, namespace: str) -> list[TagInfo]: ...

    @abstractmethod
    def set_tag(self, namespace: str, name: str, artifact_id: str) -> TagInfo: ...

    @abstractmethod
    def delete_tag(self, namespace: str, name: str) -> None: ...

    @abstractmethod
    def delete(self, artifact_id: str, namespace: str) -> DeleteReport:
        """Unpublish an artifact with its tags, and free what nothing else needs."""

    @abstractmethod
    def check(self, ref: str, namespace: str) -> StorageReport:
        """Read and hash everything the artifact holds, where the bytes are."""

    @abstractmethod
    def stats(self, namespace: str) -> Stats: ...

    @abstractmethod
    def policy(self, namespace: str) -> Policy:
        """What the namespace keeps and may hold; without a policy, all of it and as much as comes.

        Raises
        ------
        DocumentCorrupt
        """

    @abstractmethod
    def set_policy(self, namespace: str, policy: Policy) -> Policy:
        """Give the namespace a policy, in place of the one it has; garbage collection applies it."""

    @abstractmethod
    def divergences(self, namespace: str) -> list[Divergence]:
        """Recorded divergences, newest first, at most 1,000."""

    @abstractmethod
    def reindex(self) -> ReindexReport:
        """Rebuild the SQL index from the store."""

    @abstractmethod
    def collect_garbage(self, *, grace_s: float = 3600.0, dry_run: bool = False) -> GarbageReport:
        """Recover what crashes left, apply the policies, end abandoned pushes, and remove what nothing needs.

        Parameters
        ----------
        grace_s
            Objects of the store that the index does not know are removed when they are older, in seconds.
        dry_run
            Only say what would be done.
        """

    @abstractmethod
    def scrub(self, *, bytes_per_s: float | None = None) -> ScrubReport:
        """Read and verify everything that published artifacts need, where the bytes are.

        What is damaged is copied aside and named; sealed documents are written again at once, the
        rest is healed by the next push of an artifact that needs it.

        Parameters
        ----------
        bytes_per_s
            Most bytes of chunks to read in a second.
        """

    @abstractmethod
    def access_tokens(self) -> list[AccessToken]:
        """Tokens of the service, newest first, at most 1,000; those that are no longer valid too."""

    @abstractmethod
    def create_access_token(
        self,
        scope: Scope,
        namespaces: Sequence[str],
        *,
        lifetime_s: int | None = DEFAULT_LIFETIME_S,
        note: str = "",
    ) -> NewAccessToken:
        """Make a token for the service over this repository.

        Parameters
        ----------
        namespaces
            Where it is valid; ``["*"]`` for every namespace.
        lifetime_s
            Seconds until it expires; None for never.

        Raises
        ------
        InvalidInput, MalformedName
        """

    @abstractmethod
    def revoke_access_token(self, token_id: str) -> AccessToken:
        """End a token; services take it for at most 5 s more.

        Raises
        ------
        TokenNotFound
        """

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
