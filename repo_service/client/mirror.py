"""Mirroring: one repository is given what another holds and it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from pydantic import Field

from repo_service.client.transfer import Progress, check_workers, copy_artifact
from repo_service.domain.errors import (
    AccessDenied,
    ArtifactNotFound,
    Corrupt,
    InvalidInput,
    KvgraftError,
    NotFound,
    QuotaExceeded,
    RepositoryError,
    TagNotFound,
    Unavailable,
)
from repo_service.domain.names import check_namespace
from repo_service.domain.repository import Repository
from repo_service.domain.views import ArtifactInfo, ArtifactQuery, StorageReport, TagInfo, View

# Annotations may take a MiB for each artifact, and a page is one answer.
_PAGE = 50


class MirrorFailure(View):
    """An artifact that is not whole at the destination after a mirror."""

    namespace: str
    artifact_id: str
    code: str
    message: str


class MirrorReport(View):
    """What a mirror did."""

    namespaces: list[str] = Field(description="The namespaces gone through, by name.")
    artifacts_copied: int
    artifacts_present: int = Field(description="Artifacts of the source that the destination had; nothing was sent.")
    artifacts_healed: int = Field(description="Artifacts found damaged at the destination and made whole again.")
    artifacts_failed: list[MirrorFailure]
    artifacts_deleted: int
    extra_artifacts: int = Field(description="Artifacts that only the destination has, left alone.")
    tags_set: int = Field(description="Tags made or moved.")
    tags_deleted: int
    chunks_sent: int
    bytes_sent: int


def mirror(
    source: Repository,
    destination: Repository,
    *,
    namespaces: Sequence[str] | None = None,
    delete: bool = False,
    verify: bool = False,
    workers: int = 4,
    progress: Progress | None = None,
) -> MirrorReport:
    """Copy the artifacts that the destination lacks, and make its tags those of the source.

    An artifact that can't be copied is named in the report, and the others are. After an
    interruption the next mirror goes on with the chunks that are missing then.

    Parameters
    ----------
    namespaces
        By default all that either repository has.
    delete
        Also delete the tags and artifacts that the source does not have, once all else is done.
    verify
        Also read and hash what the destination has, and send again what is damaged.
    workers
        Threads, 1 to 64; each holds one chunk in memory.
    progress
        Called with "artifacts" and with "bytes".

    Raises
    ------
    InvalidInput
        If both are the same repository, or if an empty source would have everything deleted.
    NotFound
        If neither repository has one of the ``namespaces``.
    Unavailable, StorageFull, AccessDenied
    """
    check_workers(workers)
    same = source.info().repository_id
    if destination.info().repository_id == same:
        raise InvalidInput(
            f"{source.url} and {destination.url} are one repository, {same}, or one is a copy of the other's directory: "
            "mirror to a repository of its own",
            repository_id=same,
        )
    chosen = _chosen(source, destination, namespaces, delete)
    meter = _Meter(progress)
    if progress is not None:
        meter.expect(source, chosen)
    run = _Run(source, destination, delete, verify, workers, meter)
    for namespace in chosen:
        run.copy(namespace)
    for namespace in chosen if delete else ():
        run.delete(namespace)
    return MirrorReport(
        namespaces=chosen,
        artifacts_failed=list(run.failures.values()),
        chunks_sent=meter.chunks_sent,
        bytes_sent=meter.bytes_sent,
        **asdict(run.counts),
    )


def _chosen(source: Repository, destination: Repository, wanted: Sequence[str] | None, delete: bool) -> list[str]:
    ours, theirs = source.namespaces(), destination.namespaces()
    if delete and theirs and not ours:
        raise InvalidInput(
            f"{source.url} is empty, so that everything at {destination.url} would be deleted: check the source, "
            "or delete there what is not needed"
        )
    if wanted is None:
        return sorted({*ours, *theirs})
    chosen = sorted({check_namespace(name) for name in wanted})
    for name in chosen:
        if name not in ours and name not in theirs:
            raise NotFound(
                f"neither repository has the namespace {name}; the source has {', '.join(ours[:100]) or 'none'}",
                namespace=name,
            )
    return chosen


class _Meter:
    """How far a mirror is, and what it sent."""

    def __init__(self, progress: Progress | None) -> None:
        self.chunks_sent = 0
        self.bytes_sent = 0
        self._progress = progress
        self._artifacts = self._bytes = 0
        self._artifacts_expected = self._bytes_expected = 0
        self._copied: int | None = None

    def expect(self, source: Repository, namespaces: Sequence[str]) -> None:
        for namespace in namespaces:
            stats = source.stats(namespace)
            self._artifacts_expected += stats.artifacts
            self._bytes_expected += stats.total_bytes
        self._show(0)

    def copying(self, _: str, done: int, __: int) -> None:
        """The progress of one copy, called once after each chunk, and before the first one of each push that it takes."""
        if self._copied is not None and done > self._copied:
            self.chunks_sent += 1
            self.bytes_sent += done - self._copied
        self._copied = done
        self._show(done)

    def ended(self) -> None:
        """A copy is over, whole or not."""
        self._copied = None

    def passed(self, artifact: ArtifactInfo) -> None:
        self._artifacts += 1
        self._bytes += artifact.total_bytes
        self._show(0)

    def _show(self, copied: int) -> None:
        if self._progress is not None:
            done = self._bytes + copied
            self._progress("artifacts", self._artifacts, max(self._artifacts, self._artifacts_expected))
            self._progress("bytes", done, max(done, self._bytes_expected))


@dataclass
class _Counts:
    artifacts_copied: int = 0
    artifacts_present: int = 0
    artifacts_healed: int = 0
    artifacts_deleted: int = 0
    extra_artifacts: int = 0
    tags_set: int = 0
    tags_deleted: int = 0


class _Run:
    """One mirror, namespace by namespace."""

    def __init__(
        self, source: Repository, destination: Repository, delete: bool, verify: bool, workers: int, meter: _Meter
    ) -> None:
        self.counts = _Counts()
        self.failures: dict[tuple[str, str], MirrorFailure] = {}
        self._source = source
        self._destination = destination
        self._delete = delete
        self._verify = verify
        self._workers = workers
        self._meter = meter
        self._extra: dict[str, list[str]] = {}

    def copy(self, namespace: str) -> None:
        """Copy what is missing, then set the tags."""
        for ours, theirs in _side_by_side(
            _artifacts(self._source, namespace), _artifacts(self._destination, namespace)
        ):
            if ours is not None:
                self._bring(ours, present=theirs is not None)
            elif theirs is not None:
                self._pass_over(theirs)
        there = {tag.name: tag.artifact_id for tag in self._destination.tags(namespace)}
        for tag in self._source.tags(namespace):
            if there.get(tag.name) != tag.artifact_id:
                self._set_tag(tag)

    def delete(self, namespace: str) -> None:
        """Delete the tags and artifacts that the source does not have, as it is now."""
        there = self._destination.tags(namespace)
        kept = {tag.name for tag in self._source.tags(namespace)}
        for name in [tag.name for tag in there if tag.name not in kept]:
            with suppress(TagNotFound):
                self._destination.delete_tag(namespace, name)
                self.counts.tags_deleted += 1
        for artifact_id in self._extra.get(namespace, ()):
            if _has(self._source, namespace, artifact_id):
                continue
            with suppress(ArtifactNotFound):
                self._destination.delete(artifact_id, namespace)
                self.counts.artifacts_deleted += 1

    def _bring(self, artifact: ArtifactInfo, *, present: bool) -> None:
        if not present:
            self._copy(artifact.namespace, artifact.id)
        elif self._verify:
            self._check(artifact.namespace, artifact.id)
        else:
            self.counts.artifacts_present += 1
        self._meter.passed(artifact)

    def _pass_over(self, extra: ArtifactInfo) -> None:
        if self._delete:
            self._extra.setdefault(extra.namespace, []).append(extra.id)
            return
        self.counts.extra_artifacts += 1
        if self._verify:
            with suppress(ArtifactNotFound):
                report = self._destination.check(extra.id, extra.namespace)
                if not report.ok:
                    self._fail(extra.namespace, extra.id, _damage(report, "the source does not have it"))

    def _copy(self, namespace: str, artifact_id: str) -> None:
        if self._send(namespace, artifact_id):
            self.counts.artifacts_copied += 1

    def _check(self, namespace: str, artifact_id: str) -> None:
        try:
            report = self._destination.check(artifact_id, namespace)
        except ArtifactNotFound:
            # Deleted since it was listed.
            self._copy(namespace, artifact_id)
            return
        if report.ok:
            self.counts.artifacts_present += 1
        elif self._send(namespace, artifact_id) and self._destination.check(artifact_id, namespace).ok:
            self.counts.artifacts_healed += 1
        else:
            self._fail(namespace, artifact_id, _damage(report, "sending it again did not heal it"))

    def _send(self, namespace: str, artifact_id: str) -> bool:
        """Copy an artifact; False if that failed, or if the source does not have it any more."""
        try:
            copy_artifact(
                self._source,
                self._destination,
                artifact_id,
                namespace,
                namespace,
                workers=self._workers,
                progress=self._meter.copying,
                carry_tag=False,
            )
        except KvgraftError as error:
            if self._concerns_everything(error):
                raise
            if _has(self._source, namespace, artifact_id):
                self._fail(namespace, artifact_id, error)
            return False
        finally:
            self._meter.ended()
        return True

    def _concerns_everything(self, error: KvgraftError) -> bool:
        """Whether the other artifacts would meet the same error."""
        if isinstance(error, Unavailable):
            # A disk that fails in one place refuses one object, and its repository still answers.
            self._source.namespaces()
            self._destination.namespaces()
            return False
        # A quota is one namespace's.
        return isinstance(error, (RepositoryError, AccessDenied)) and not isinstance(error, QuotaExceeded)

    def _fail(self, namespace: str, artifact_id: str, error: KvgraftError) -> None:
        """Note why an artifact is not whole at the destination; the first reason is kept."""
        failure = MirrorFailure(namespace=namespace, artifact_id=artifact_id, code=error.code, message=error.message)
        self.failures.setdefault((namespace, artifact_id), failure)

    def _set_tag(self, tag: TagInfo) -> None:
        place = (tag.namespace, tag.artifact_id)
        if place not in self.failures and not _has(self._destination, *place):
            # Published at the source since its artifacts were listed.
            self._copy(*place)
        with suppress(ArtifactNotFound):
            self._destination.set_tag(tag.namespace, tag.name, tag.artifact_id)
            self.counts.tags_set += 1


def _artifacts(repository: Repository, namespace: str) -> Iterator[ArtifactInfo]:
    """Every artifact, in an order that is the same in every repository."""
    query = ArtifactQuery(namespace=namespace, sort="token_count", descending=False, limit=_PAGE)
    while True:
        page = repository.query(query)
        yield from page.items
        if page.next_cursor is None:
            return
        query = query.model_copy(update={"cursor": page.next_cursor})


def _side_by_side(
    source: Iterator[ArtifactInfo], destination: Iterator[ArtifactInfo]
) -> Iterator[tuple[ArtifactInfo | None, ArtifactInfo | None]]:
    """The artifacts of two repositories in their common order, those that both have as a pair."""
    ours, theirs = next(source, None), next(destination, None)
    while ours is not None or theirs is not None:
        first = min(_rank(artifact) for artifact in (ours, theirs) if artifact is not None)
        here = ours if ours is not None and _rank(ours) == first else None
        there = theirs if theirs is not None and _rank(theirs) == first else None
        yield here, there
        ours = next(source, None) if here is not None else ours
        theirs = next(destination, None) if there is not None else theirs


def _rank(artifact: ArtifactInfo) -> tuple[int, str]:
    return artifact.token_count, artifact.id


def _has(repository: Repository, namespace: str, artifact_id: str) -> bool:
    try:
        repository.artifact(artifact_id, namespace)
    except ArtifactNotFound:
        return False
    return True


def _damage(report: StorageReport, remark: str) -> Corrupt:
    return Corrupt(
        f"{len(report.corrupt)} chunks or documents of {report.artifact_id} are lost or altered at the destination, "
        f"the first is {report.corrupt[0]}; {remark}"
    )
