"""What a repository answers: plain values, the same from an embedded repository and over HTTP."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from repo_service.domain.errors import MalformedRequest
from repo_service.domain.names import DEFAULT_NAMESPACE

# A full-text query takes time for each word, and for each part of a word that has signs in it.
MAX_QUERY_WORDS = 64
MAX_QUERY_CHARACTERS = 1024

SortField = Literal["created_at", "token_count", "total_bytes"]


class View(BaseModel):
    """Base of all views: immutable; fields of a newer server are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RepositoryInfo(View):
    """What is at a repository's address."""

    repository_id: str
    format_version: int
    codec: str = Field("none", description="What chunks are stored with; none is their bytes as they are.")
    server_version: str


class ChunkUrls(View):
    """Where to fetch chunks without the service in between."""

    seconds: int = Field(ge=0, le=86400, description="How long the URLs are good.")
    urls: dict[str, str] = Field(description="URLs by digest; none where all bytes go through the service.")
    framed: bool = Field(
        default=False, description="Whether what is fetched there are frames, which hold the chunks encoded."
    )


class ArtifactInfo(View):
    """One published artifact, as the index knows it."""

    id: str
    namespace: str
    fingerprint_id: str
    model_id: str
    token_count: int
    block_tokens: int
    block_count: int
    private_tokens: bool
    exactness: Literal["exact", "lossy"]
    parent: str | None
    created_at: datetime
    last_used_at: datetime | None = Field(
        default=None,
        description="Read, matched, or found by an index that did not know it; to within ten minutes. Null if not "
        "since it was published.",
    )
    total_bytes: int = Field(description="Bytes of all chunks the artifact refers to, tokens included.")
    annotations: dict[str, str]
    tags: list[str]


class TagInfo(View):
    """A movable name for an artifact."""

    namespace: str
    name: str
    artifact_id: str
    updated_at: datetime


class Match(View):
    """The longest stored prefix of a token sequence."""

    artifact_id: str = Field(description="An artifact that holds the matched blocks.")
    blocks: int = Field(description="Number of blocks matched, from the first.")
    tokens: int = Field(description="Number of tokens matched.")


class Divergence(View):
    """A refused push of other bytes under an existing block key (I2)."""

    id: str
    namespace: str
    block_key: str
    stored_record: str
    offered_record: str
    chunks: list[str] = Field(description="The arrays whose chunks differ.")
    created_at: datetime


class ArtifactQuery(View):
    """Conditions on artifacts, all of which must hold; None means no condition, unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = DEFAULT_NAMESPACE
    fingerprint_id: str | None = None
    model_id: str | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=0)
    covers: tuple[int, int] | None = Field(
        default=None, description="A token span [start, stop) that the artifact must hold."
    )
    block_key: str | None = None
    chunk: str | None = None
    token_prefix: list[int] | None = Field(default=None, description="Token ids the artifact must begin with.")
    tag: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64)
    exactness: Literal["exact", "lossy"] | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    text: str | None = Field(
        default=None,
        description="Words that the artifact's text must hold, in the full-text index: "
        f"at most {MAX_QUERY_WORDS}, in {MAX_QUERY_CHARACTERS} characters.",
    )
    sort: SortField = "created_at"
    descending: bool = True
    limit: int = Field(default=50, ge=1, le=1000)
    cursor: str | None = None

    @field_validator("text")
    @classmethod
    def _bounded(cls, text: str | None) -> str | None:
        query_words(text or "")
        return text


def query_words(text: str) -> list[str]:
    """The words that a query's ``text`` asks for; a NUL parts words too.

    Raises
    ------
    MalformedRequest
        If there is more than a query may have.
    """
    if len(text) > MAX_QUERY_CHARACTERS:
        raise MalformedRequest(
            f"the query's text has {len(text)} characters; the limit is {MAX_QUERY_CHARACTERS}",
            limit=MAX_QUERY_CHARACTERS,
        )
    words = text.replace("\0", " ").split()
    if len(words) > MAX_QUERY_WORDS:
        raise MalformedRequest(
            f"the query's text has {len(words)} words; the limit is {MAX_QUERY_WORDS}", limit=MAX_QUERY_WORDS
        )
    return words


class ArtifactPage(View):
    """One page of a query."""

    items: list[ArtifactInfo]
    next_cursor: str | None
    count: int = Field(description="Artifacts that the query selects, on all pages.")
    total_bytes: int = Field(description="Sum of the artifacts' sizes.")
    unique_bytes: int = Field(description="Bytes of the distinct chunks they refer to.")


class Stats(View):
    """Counts and bytes of one namespace."""

    namespace: str
    artifacts: int
    blocks: int
    chunks: int
    tags: int
    fingerprints: int
    tokens: int
    total_bytes: int
    unique_bytes: int
    divergences: int
    running_pushes: int


class PushOffer(View):
    """Answer to offered block records: the chunks that must be sent."""

    missing: list[str]


class StorageReport(View):
    """Result of reading and hashing everything an artifact holds."""

    artifact_id: str
    chunks: int
    bytes: int
    corrupt: list[str] = Field(description="Digests of chunks or documents that failed.")

    @property
    def ok(self) -> bool:
        return not self.corrupt


class DeleteReport(View):
    """What a namespace gave up with an artifact."""

    artifact_id: str
    tags: list[str]
    chunks: int
    bytes: int


class ReindexReport(View):
    """What a rebuild of the index found in the store."""

    artifacts: int
    blocks: int
    chunks: int
    tags: int
    divergences: int
    corrupt: list[str] = Field(
        description="Store keys that could not be read or did not verify. What the index knew of them it keeps; the rest is not indexed."
    )


class Removed(View):
    """One thing that garbage collection removed, or would."""

    kind: Literal["artifact", "block record", "chunk", "manifest", "quarantined copy", "temp file"]
    name: str = Field(description="Artifact id, block key, digest, or name in the store.")
    namespace: str | None = None
    bytes: int | None = Field(None, description="Where known: bytes freed in the store.")
    reason: str


class GarbageReport(View):
    """What a garbage collection did, or, as a dry run, would do."""

    dry_run: bool
    settled: int = Field(description="Documents after which the index was corrected, left by processes that died.")
    expired_pushes: int
    artifacts: int = Field(description="Artifacts that a retention rule let go.")
    chunks: int
    block_records: int
    manifests: int
    temp_files: int
    quarantined: int = Field(description="Copies of damaged objects that a scrub kept more than 30 days ago.")
    bytes: int = Field(description="Bytes of chunks freed.")
    unreadable: list[str] = Field(
        description="Entries and policies that can't be read. While there are such entries no chunk, block record or "
        "manifest is removed: it may be theirs. A policy that can't be read lets nothing go."
    )
    stuck: list[str] = Field(description="Store keys of what could not be removed; the next collection tries again.")
    removed: list[Removed] = Field(description="The first 1,000 things removed; all of them are in the audit log.")


class SchemaReport(View):
    """What bringing an index to this version's schema changed."""

    before: str | None = Field(description="The schema revision that was found; None in a new database.")
    after: str = Field(description="The revision it has now.")


class Damage(View):
    """Something stored that does not verify, or is gone."""

    kind: Literal["entry", "tag", "divergence", "policy", "manifest", "block record", "chunk"]
    name: str = Field(description="Store key of an entry, tag, divergence or policy; artifact id, block key or digest.")
    namespace: str | None = None
    artifacts: list[tuple[str, str]] = Field(description="Namespace and id of artifacts that need it, the first 100.")
    quarantined: str | None = Field(description="Where the damaged bytes were put; None if there were none.")
    healed: bool = Field(description="Written again from the index.")


class ScrubReport(View):
    """What reading and verifying everything that is stored found."""

    artifacts: int
    block_records: int
    chunks: int
    bytes: int = Field(description="Bytes of chunks read.")
    stored_bytes: int = Field(0, description="Bytes that they take in the store, as it encodes them.")
    complete: bool = Field(description="False where the scrub was ended before it had read everything.")
    damaged: int = Field(description="Damaged objects, healed ones included.")
    damage: list[Damage] = Field(description="The first 1,000 of them.")

    @property
    def touched(self) -> list[tuple[str, str]]:
        """Namespace and id of the artifacts listed that can't be read whole."""
        return sorted({artifact for item in self.damage if not item.healed for artifact in item.artifacts})
