"""The error tree. Codes are stable: new ones are appended, none is renamed.

::

    KvgraftError
    ├── InvalidInput             malformed or contradictory input; nothing was changed
    │   ├── MalformedDigest
    │   ├── MalformedName        a namespace, tag or reference outside the grammar
    │   ├── MalformedDocument    a manifest, record or fingerprint that is not canonical or not whole
    │   ├── MalformedRequest     a request's parameters or cursor
    │   ├── MalformedUrl
    │   ├── InvalidTokens        token ids that are empty, negative, or outside the vocabulary
    │   ├── ContextTooLong       more tokens than the model's native window
    │   ├── DigestMismatch       uploaded bytes that are not those the digest names
    │   └── SizeMismatch         uploaded bytes of another length than the layout gives
    ├── TooLarge                 a body or document over its limit
    ├── NotFound
    │   ├── ArtifactNotFound
    │   ├── TagNotFound
    │   ├── PushNotFound
    │   ├── ChunkNotFound        a chunk that the artifact does not hold
    │   ├── NotStored            state of sliding layers that the artifact leaves out
    │   ├── TokenNotFound        an access token
    │   ├── PathNotFound         a file or folder that a library is to be made of
    │   └── LibraryEmpty         a question to a library that holds nothing
    ├── Conflict
    │   ├── Divergence           other bytes under an existing block key (I2)
    │   ├── ChunksMissing        a commit before every chunk has arrived
    │   └── Ambiguous            a shortened artifact id that several artifacts share
    ├── Corrupt                  stored bytes that no longer match their digest (I3)
    │   ├── ChunkCorrupt
    │   ├── DocumentCorrupt      a stored manifest, record, entry or tag
    │   └── PageCorrupt          a page of a running context, kept on the host
    ├── RepositoryError
    │   ├── NotARepository
    │   ├── NewerFormat          a store written by a later format version
    │   ├── StorageFull
    │   │   └── QuotaExceeded    a push beyond what its namespace may hold
    │   ├── Unavailable          the service or its storage does not answer
    │   │   └── RateLimited      more requests or bytes than a namespace may have in a second
    │   └── ServiceError         an answer from the service that no client understands
    ├── AccessDenied             a request without the rights it needs
    │   └── Unauthenticated      a request without a valid token
    ├── PortInUse
    ├── ModelUnavailable         a model that can't be had: not found, altered, or not convertible
    └── ExactnessError
        ├── FingerprintMismatch  names the differing fields (I1)
        ├── UnsupportedModel     a model or cache kind that can't be grafted exactly
        ├── WeightsChanged       weights altered since the session measured them
        └── InexactReplay        a replay that gave other bytes than the artifact
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class KvgraftError(Exception):
    """Base of every error that a user may see.

    Parameters
    ----------
    message
        What was wrong, with which values, and what to do.
    details
        JSON values for programs; equal in the library, the CLI and the HTTP API.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, Any] = details

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "details": dict(self.details)}


class InvalidInput(KvgraftError):
    code = "invalid_input"


class MalformedDigest(InvalidInput):
    code = "malformed_digest"


class MalformedName(InvalidInput):
    code = "malformed_name"


class MalformedDocument(InvalidInput):
    code = "malformed_document"


class MalformedRequest(InvalidInput):
    code = "malformed_request"


class MalformedUrl(InvalidInput):
    code = "malformed_url"


class InvalidTokens(InvalidInput):
    code = "invalid_tokens"


class ContextTooLong(InvalidInput):
    code = "context_too_long"


class DigestMismatch(InvalidInput):
    code = "digest_mismatch"


class SizeMismatch(InvalidInput):
    code = "size_mismatch"


class TooLarge(KvgraftError):
    code = "too_large"


class NotFound(KvgraftError):
    code = "not_found"


class ArtifactNotFound(NotFound):
    code = "artifact_not_found"


class TagNotFound(NotFound):
    code = "tag_not_found"


class PushNotFound(NotFound):
    code = "push_not_found"


class ChunkNotFound(NotFound):
    code = "chunk_not_found"


class NotStored(NotFound):
    code = "not_stored"


class TokenNotFound(NotFound):
    code = "token_not_found"


class PathNotFound(NotFound):
    code = "path_not_found"


class LibraryEmpty(NotFound):
    code = "library_empty"


class Conflict(KvgraftError):
    code = "conflict"


class Divergence(Conflict):
    code = "block_divergence"


class ChunksMissing(Conflict):
    code = "chunks_missing"


class Ambiguous(Conflict):
    code = "ambiguous_reference"


class Corrupt(KvgraftError):
    code = "corrupt"


class ChunkCorrupt(Corrupt):
    code = "chunk_corrupt"


class DocumentCorrupt(Corrupt):
    code = "document_corrupt"


class PageCorrupt(Corrupt):
    code = "page_corrupt"


UNREADABLE = (Corrupt, InvalidInput, TooLarge)
"""What reading a damaged or foreign document out of a store raises."""


class RepositoryError(KvgraftError):
    code = "repository_error"


class NotARepository(RepositoryError):
    code = "not_a_repository"


class NewerFormat(RepositoryError):
    code = "newer_format"


class StorageFull(RepositoryError):
    code = "storage_full"


class QuotaExceeded(StorageFull):
    code = "quota_exceeded"


class Unavailable(RepositoryError):
    code = "unavailable"


class RateLimited(Unavailable):
    code = "rate_limited"


class ServiceError(RepositoryError):
    code = "service_error"


class AccessDenied(KvgraftError):
    code = "access_denied"


class Unauthenticated(AccessDenied):
    code = "unauthenticated"


class PortInUse(KvgraftError):
    code = "port_in_use"


class ModelUnavailable(KvgraftError):
    code = "model_unavailable"


class ExactnessError(KvgraftError):
    code = "inexact"


class FingerprintMismatch(ExactnessError):
    code = "fingerprint_mismatch"


class UnsupportedModel(ExactnessError):
    code = "unsupported_model"


class WeightsChanged(ExactnessError):
    code = "weights_changed"


class InexactReplay(ExactnessError):
    code = "inexact_replay"


def error_types() -> dict[str, type[KvgraftError]]:
    """Every error type by its code, the base included."""
    types: dict[str, type[KvgraftError]] = {}
    pending: list[type[KvgraftError]] = [KvgraftError]
    while pending:
        kind = pending.pop()
        types[kind.code] = kind
        pending.extend(kind.__subclasses__())
    return types
