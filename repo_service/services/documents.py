"""Where things lie in a store, and the small documents kept beside chunks, records and manifests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from pydantic import ConfigDict

from repo_service.domain.canonical import canonical_json, parse_loose_json
from repo_service.domain.digest import BLAKE3, SHA256, parse_digest, sha256_digest
from repo_service.domain.errors import DocumentCorrupt, InvalidInput
from repo_service.domain.names import check_namespace, check_tag
from repo_service.domain.policy import Policy
from repo_service.domain.views import Divergence, TagInfo, View
from repo_service.storage import Store

MARKER = "kvgraft.json"
OWNER = "index.json"
CHUNKS = "chunks"
BLOCKS = "blocks"
ARTIFACTS = "artifacts"
ENTRIES = "entries"
TAGS = "tags"
DIVERGENCES = "divergences"
POLICIES = "policies"
QUARANTINE = "quarantine"
UPLOADS = "uploads"

V = TypeVar("V", bound=View)


def chunk_key(digest: str) -> str:
    return f"{CHUNKS}/{_fanned(parse_digest(digest, BLAKE3))}"


def upload_key(push_id: str, digest: str) -> str:
    """Where a client puts a chunk itself; what lies there is unverified."""
    return f"{UPLOADS}/{push_id}/{parse_digest(digest, BLAKE3).hex()}"


def block_record_key(namespace: str, key: str) -> str:
    return f"{BLOCKS}/{check_namespace(namespace)}/{_fanned(parse_digest(key, SHA256))}.json"


def manifest_key(artifact_id: str) -> str:
    return f"{ARTIFACTS}/{_fanned(parse_digest(artifact_id, SHA256))}.json"


def entry_key(namespace: str, artifact_id: str) -> str:
    return f"{ENTRIES}/{check_namespace(namespace)}/{parse_digest(artifact_id, SHA256).hex()}.json"


def tag_key(namespace: str, name: str) -> str:
    return f"{TAGS}/{check_namespace(namespace)}/{check_tag(name)}.json"


def tag_place(tag: TagInfo) -> str:
    return tag_key(tag.namespace, tag.name)


def divergence_place(divergence: Divergence) -> str:
    return f"{DIVERGENCES}/{check_namespace(divergence.namespace)}/{divergence.id}.json"


def policy_key(namespace: str) -> str:
    return f"{POLICIES}/{check_namespace(namespace)}.json"


def _fanned(digest: bytes) -> str:
    text = digest.hex()
    return f"{text[:2]}/{text[2:]}"


class EntryDocument(View):
    """An artifact's publication in a namespace; writing it is what makes the artifact visible."""

    namespace: str
    artifact_id: str
    created_at: datetime

    @property
    def key(self) -> str:
        return entry_key(self.namespace, self.artifact_id)


class PolicyDocument(View):
    """A namespace's policy."""

    model_config = ConfigDict(extra="forbid")

    namespace: str
    policy: Policy


def policy_place(document: PolicyDocument) -> str:
    return policy_key(document.namespace)


def holds(store: Store, key: str, data: bytes) -> bool:
    """True if exactly these bytes lie under the key."""
    try:
        return store.get(key) == data
    except DocumentCorrupt:
        return False


def seal(view: View) -> bytes:
    """A small document together with the SHA-256 of its canonical form, so that damage shows."""
    value = view.model_dump(mode="json")
    return canonical_json({"document": value, "digest": sha256_digest(canonical_json(value))})


def unseal(key: str, data: bytes, kind: type[V], place: Callable[[V], str]) -> V:
    """Read a sealed document and check that it belongs where it lies.

    Raises
    ------
    DocumentCorrupt
    """
    try:
        sealed = parse_loose_json(data, what=key)
        value = sealed["document"]
        if canonical_json({"document": value, "digest": sha256_digest(canonical_json(value))}) != data:
            raise DocumentCorrupt(f"{key} does not match its own digest", key=key)
        view = kind.model_validate(value)
        expected = place(view)
    except (InvalidInput, KeyError, TypeError, ValueError) as error:
        raise DocumentCorrupt(f"{key} can't be read: {error}", key=key) from None
    if expected != key:
        raise DocumentCorrupt(f"{key} holds what belongs at {expected}", key=key)
    return view
