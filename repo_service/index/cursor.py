"""Cursors: where a page ended, bound to the query it belongs to.

A cursor holds the sort value and id of the page's last artifact, so that rows inserted or removed
meanwhile shift nothing, and the first page's totals, so that later pages need not count again.
It is not secret and not signed: whoever alters it misleads only themselves.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass

from repo_service.domain.canonical import MAX_INTEGER
from repo_service.domain.digest import SHA256, parse_digest
from repo_service.domain.errors import KvgraftError, MalformedRequest
from repo_service.domain.views import ArtifactQuery

_MAX_CHARACTERS = 512


@dataclass(frozen=True)
class Totals:
    """Over all artifacts that a query selects."""

    count: int
    total_bytes: int
    unique_bytes: int


@dataclass(frozen=True)
class Cursor:
    """The place after one artifact in a query's order."""

    value: int
    artifact_id: str
    totals: Totals

    def encode(self, query: ArtifactQuery) -> str:
        totals = self.totals
        fields = [
            _conditions(query),
            self.value,
            self.artifact_id,
            totals.count,
            totals.total_bytes,
            totals.unique_bytes,
        ]
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()

    @classmethod
    def decode(cls, text: str, query: ArtifactQuery) -> Cursor:
        """Raises `MalformedRequest` for what is no cursor of this query."""
        try:
            fields = json.loads(base64.b64decode(text[:_MAX_CHARACTERS], altchars=b"-_", validate=True))
        except (ValueError, RecursionError):
            fields = None
        match fields:
            case [str(conditions), int(value), str(artifact_id), int(count), int(total), int(unique)] if all(
                0 <= number <= MAX_INTEGER for number in (value, count, total, unique)
            ) and _is_digest(artifact_id):
                pass
            case _:
                raise MalformedRequest(f"{text[:100]!r} is not a cursor: pass a page's next_cursor unchanged")
        if conditions != _conditions(query):
            raise MalformedRequest(
                "the cursor belongs to another query: repeat the conditions and the sort of the page it came from"
            )
        return cls(value, artifact_id, Totals(count, total, unique))


def _conditions(query: ArtifactQuery) -> str:
    """Digest of everything in a query that its cursors depend on."""
    fields = query.model_dump(mode="json", exclude={"cursor", "limit"})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _is_digest(text: str) -> bool:
    try:
        parse_digest(text, SHA256)
    except KvgraftError:
        return False
    return True
