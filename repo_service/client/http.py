"""A repository behind the HTTP service; everything that comes from it is verified here (I3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import SplitResult

from pydantic import TypeAdapter, ValidationError
from typing_extensions import Buffer

from repo_service.client.direct import DirectReads, DirectWrites, Reach
from repo_service.client.transport import RETRY_S, Transport
from repo_service.domain.access import DEFAULT_LIFETIME_S, AccessToken, NewAccessToken, Scope, check_token_id
from repo_service.domain.canonical import canonical_json, parse_loose_json
from repo_service.domain.digest import BLAKE3, SHA256, parse_digest, sha256_digest
from repo_service.domain.errors import (
    ArtifactNotFound,
    DocumentCorrupt,
    InvalidInput,
    PushNotFound,
    ServiceError,
    SizeMismatch,
    Unavailable,
)
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import MAX_CHUNK_BYTES, ChunkSpec
from repo_service.domain.manifest import MAX_MANIFEST_BYTES, Manifest
from repo_service.domain.names import check_namespace, check_tag, is_artifact_reference
from repo_service.domain.policy import Policy, policy_of
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
    PushOffer,
    ReindexReport,
    RepositoryInfo,
    ScrubReport,
    Stats,
    StorageReport,
    TagInfo,
)

MAX_ANSWER_BYTES = 64 * 2**20

OCTETS = "application/octet-stream"

# Offers stay well below the service's limits on JSON bodies, which count values too, unless one record alone is larger.
_OFFER_BYTES = 2 * 2**20
_OFFER_RECORDS = 1000

# Checks, rebuilds and commits answer when all is read, hashed or durable.
_SURVEY_S = 24 * 3600.0
_COMMIT_S = 3600.0

T = TypeVar("T")


class HttpRepository(Repository):
    """A repository at a kvgraft service. Methods may be called from several threads.

    Parameters
    ----------
    parts
        The service's URL.
    token
        Sent as a bearer token, if any.
    retry_s
        How long a busy or silent service is asked again.
    """

    def __init__(self, parts: SplitResult, token: str | None = None, *, retry_s: float = RETRY_S) -> None:
        self._transport = Transport(parts, token, retry_s=retry_s)
        self._reach = Reach(self._transport)
        self._reads = DirectReads(self._reach)
        self.url = self._transport.url

    def info(self) -> RepositoryInfo:
        return self._ask(RepositoryInfo, "GET", "/v1/info")

    def begin_push(self, fingerprint: Fingerprint, namespace: str) -> HttpPush:
        path = f"{_place(namespace)}/pushes"
        # A lost answer leaves a push that nobody uses, and that expires.
        data = self._call("POST", path, canonical_json({"fingerprint": fingerprint.sections}))
        match _parse(data, "POST", path):
            case {"id": str(push_id)} if push_id.isascii() and push_id.isalnum():
                return HttpPush(self, self._transport, push_id, namespace, self._reach)
        raise _nonsense("POST", path)

    def artifact(self, ref: str, namespace: str) -> ArtifactInfo:
        path = _artifact(namespace, ref)
        info = self._ask(ArtifactInfo, "GET", path)
        if is_artifact_reference(ref) and not info.id.startswith(ref):
            raise ServiceError(f"the service answered with the artifact {info.id} when asked for {ref}")
        return info

    def manifest(self, ref: str, namespace: str) -> Manifest:
        artifact_id = ref if _is_whole_id(ref) else self.artifact(ref, namespace).id
        data = self._call("GET", f"{_artifact(namespace, artifact_id)}/manifest", limit=MAX_MANIFEST_BYTES)
        found = sha256_digest(data)
        if found != artifact_id:
            raise DocumentCorrupt(
                f"the manifest {artifact_id} came as {found}: its bytes were altered on the way",
                digest=artifact_id,
                found=found,
            )
        return Manifest.parse(data)

    def records(self, manifest: Manifest, namespace: str) -> list[BlockRecord]:
        records: list[BlockRecord] = []
        while len(records) < len(manifest.blocks):
            path = f"{_artifact(namespace, manifest.id)}/blocks?start={len(records)}"
            page = _parse(self._call("GET", path), "GET", path)
            if not isinstance(page, list) or not 0 < len(page) <= len(manifest.blocks) - len(records):
                raise _nonsense("GET", path)
            for value in page:
                records.append(_record(value, *manifest.blocks[len(records)]))
        manifest.check_records(records)
        return records

    def read_chunk(self, artifact_id: str, namespace: str, digest: str, spec: ChunkSpec, out: memoryview) -> None:
        parse_digest(artifact_id, SHA256)
        parse_digest(digest, BLAKE3)
        path = f"{_artifact(namespace, artifact_id)}/chunks/{digest}"
        if not self._reads.fetch(path, digest, spec, out):
            self._transport.fetch_chunk(path, digest, spec, out)

    def match(self, namespace: str, keys: Sequence[str]) -> Match | None:
        path = f"{_place(namespace)}/match"
        data = self._call("POST", path, canonical_json({"keys": list(keys)}))
        return None if data == b"null" else _view(Match, data, "POST", path)

    def query(self, query: ArtifactQuery) -> ArtifactPage:
        conditions = query.model_dump(mode="json", exclude={"namespace"})
        return self._ask(ArtifactPage, "POST", f"{_place(query.namespace)}/artifacts/query", conditions)

    def namespaces(self) -> list[str]:
        return self._ask(list[str], "GET", "/v1/namespaces")

    def tags(self, namespace: str) -> list[TagInfo]:
        return self._ask(list[TagInfo], "GET", f"{_place(namespace)}/tags")

    def set_tag(self, namespace: str, name: str, artifact_id: str) -> TagInfo:
        path = f"{_place(namespace)}/tags/{check_tag(name)}"
        return self._ask(TagInfo, "PUT", path, {"artifact_id": artifact_id})

    def delete_tag(self, namespace: str, name: str) -> None:
        self._call("DELETE", f"{_place(namespace)}/tags/{check_tag(name)}", again=False)

    def delete(self, artifact_id: str, namespace: str) -> DeleteReport:
        parse_digest(artifact_id, SHA256)
        return self._ask(DeleteReport, "DELETE", _artifact(namespace, artifact_id), again=False, read_s=_COMMIT_S)

    def check(self, ref: str, namespace: str) -> StorageReport:
        return self._ask(StorageReport, "POST", f"{_artifact(namespace, ref)}/check", read_s=_SURVEY_S)

    def stats(self, namespace: str) -> Stats:
        return self._ask(Stats, "GET", f"{_place(namespace)}/stats")

    def policy(self, namespace: str) -> Policy:
        return self._ask(Policy, "GET", f"{_place(namespace)}/policy")

    def set_policy(self, namespace: str, policy: Policy) -> Policy:
        return self._ask(Policy, "PUT", f"{_place(namespace)}/policy", policy_of(dict(policy)).model_dump())

    def divergences(self, namespace: str) -> list[Divergence]:
        return self._ask(list[Divergence], "GET", f"{_place(namespace)}/divergences")

    def reindex(self) -> ReindexReport:
        return self._ask(ReindexReport, "POST", "/v1/reindex", again=False, read_s=_SURVEY_S)

    def collect_garbage(self, *, grace_s: float = 3600.0, dry_run: bool = False) -> GarbageReport:
        body = {"grace_ms": round(grace_s * 1000), "dry_run": dry_run}
        return self._ask(GarbageReport, "POST", "/v1/gc", body, read_s=_SURVEY_S)

    def scrub(self, *, bytes_per_s: float | None = None) -> ScrubReport:
        body = {"bytes_per_s": None if bytes_per_s is None else max(1, round(bytes_per_s))}
        return self._ask(ScrubReport, "POST", "/v1/scrub", body, again=False, read_s=_SURVEY_S)

    def access_tokens(self) -> list[AccessToken]:
        return self._ask(list[AccessToken], "GET", "/v1/tokens")

    def create_access_token(
        self,
        scope: Scope,
        namespaces: Sequence[str],
        *,
        lifetime_s: int | None = DEFAULT_LIFETIME_S,
        note: str = "",
    ) -> NewAccessToken:
        body = {"scope": scope.value, "namespaces": list(namespaces), "lifetime_s": lifetime_s, "note": note}
        # A lost answer leaves a token that nobody has.
        return self._ask(NewAccessToken, "POST", "/v1/tokens", body, again=False)

    def revoke_access_token(self, token_id: str) -> AccessToken:
        return self._ask(AccessToken, "DELETE", f"/v1/tokens/{check_token_id(token_id)}")

    def close(self) -> None:
        self._reach.close()
        self._transport.close()

    def _call(
        self, method: str, path: str, body: Buffer | None = None, *, limit: int = MAX_ANSWER_BYTES, **options: Any
    ) -> bytes:
        return self._transport.call(method, path, body, limit=limit, **options)

    def _ask(self, kind: type[T], method: str, path: str, body: Any = None, **options: Any) -> T:
        data = self._call(method, path, None if body is None else canonical_json(body), **options)
        return _view(kind, data, method, path)


class HttpPush(Push):
    """A push to a kvgraft service; chunks may be sent from several threads, past the service if ``reach`` is given."""

    def __init__(
        self, repository: HttpRepository, transport: Transport, push_id: str, namespace: str, reach: Reach | None = None
    ) -> None:
        self.id = push_id
        self._repository = repository
        self._transport = transport
        self._namespace = namespace
        self._path = f"{_place(namespace)}/pushes/{push_id}"
        self._writes = None if reach is None else DirectWrites(reach, self._path)

    def offer(self, records: Sequence[BlockRecord], resume_from: int = 0) -> list[str]:
        missing: list[str] = []
        # Left out where everything is stored: services of before take no other field.
        rest = b',"resume_from":%d' % resume_from if resume_from else b""
        for batch in _batches(records):
            missing += self._offer(b'{"records":[%b]%b}' % (b",".join(record.data for record in batch), rest))
        return missing

    def offer_tokens(self, token_count: int, chunks: Sequence[str]) -> list[str]:
        return self._offer(canonical_json({"records": [], "tokens": {"count": token_count, "chunks": list(chunks)}}))

    def put(self, digest: str, data: Buffer) -> None:
        parse_digest(digest, BLAKE3)
        octets = memoryview(data).cast("B")
        if len(octets) > MAX_CHUNK_BYTES:
            raise SizeMismatch(f"the chunk {digest} can't have {len(octets)} bytes", digest=digest)
        if self._writes is None or not self._writes.send(digest, octets):
            self._transport.call("PUT", f"{self._path}/chunks/{digest}", octets, media_type=OCTETS, limit=0)

    def commit(self, manifest: Manifest) -> ArtifactInfo:
        path = f"{self._path}/commit"
        try:
            data = self._transport.call("POST", path, manifest.data, limit=MAX_ANSWER_BYTES, read_s=_COMMIT_S)
        except PushNotFound as error:
            # A push is gone once it is committed: the answer to an earlier attempt may have been lost.
            try:
                return self._repository.artifact(manifest.id, self._namespace)
            except ArtifactNotFound:
                raise error from None
        info = _view(ArtifactInfo, data, "POST", path)
        if info.id != manifest.id:
            raise ServiceError(f"the service published {info.id} when {manifest.id} was pushed")
        return info

    def abort(self) -> None:
        # What can't be told to the service now, the push's expiry will.
        with suppress(Unavailable):
            self._transport.call("DELETE", self._path, limit=0, again=False)

    def _offer(self, body: bytes) -> list[str]:
        path = f"{self._path}/blocks"
        data = self._transport.call("POST", path, body, limit=MAX_ANSWER_BYTES)
        missing = _view(PushOffer, data, "POST", path).missing
        if self._writes is not None:
            self._writes.expect(missing)
        return missing


def _batches(records: Sequence[BlockRecord]) -> Iterator[list[BlockRecord]]:
    batch: list[BlockRecord] = []
    size = 0
    for record in records:
        if batch and (size + len(record.data) > _OFFER_BYTES or len(batch) == _OFFER_RECORDS):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += len(record.data)
    if batch:
        yield batch


def _record(value: Any, key: str, digest: str) -> BlockRecord:
    """The record that a manifest names by ``key`` and ``digest``."""
    try:
        record = BlockRecord.from_json(value)
        found = record.digest
    except InvalidInput as error:
        raise DocumentCorrupt(f"the record of block {key} came malformed: {error.message}", digest=digest) from None
    if found != digest:
        raise DocumentCorrupt(
            f"the record {digest} of block {key} came as {found}: its bytes were altered on the way",
            digest=digest,
            found=found,
        )
    return record


def _view(kind: type[T], data: bytes, method: str, path: str) -> T:
    try:
        adapter: TypeAdapter[T] = TypeAdapter(kind)
        return adapter.validate_json(data)
    except ValidationError:
        raise _nonsense(method, path) from None


def _parse(data: bytes, method: str, path: str) -> Any:
    try:
        return parse_loose_json(data, what="answer")
    except InvalidInput:
        raise _nonsense(method, path) from None


def _nonsense(method: str, path: str) -> ServiceError:
    return ServiceError(f"{method} {path} was answered with something else than this kvgraft expects", path=path)


def _is_whole_id(ref: str) -> bool:
    return is_artifact_reference(ref) and len(ref) == len("sha256:") + 64


def _place(namespace: str) -> str:
    return f"/v1/namespaces/{check_namespace(namespace)}"


def _artifact(namespace: str, ref: str) -> str:
    is_artifact_reference(ref)
    return f"{_place(namespace)}/artifacts/{ref}"
