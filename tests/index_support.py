"""What the tests of the index share: entries without a model, and pushes without a store."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import postgres
from synthetic import artifact

from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.views import ArtifactInfo
from repo_service.index import Entry, Index

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)

_PUSH_NUMBERS = itertools.count()


def empty_index(directory: Path, kind: str = "sqlite") -> str:
    """URL of an empty index, in a directory or on a PostgreSQL server, copied from one made before: migrating takes a while."""
    if kind == "postgres":
        return postgres.empty_index()
    directory.mkdir(exist_ok=True)
    (directory / "index.db").write_bytes(_migrated())
    return f"sqlite:///{directory / 'index.db'}"


@functools.cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "index.db"
        Index.open(f"sqlite:///{path}").close()
        return path.read_bytes()


def entry(
    tokens: Sequence[int],
    fingerprint: Fingerprint | None = None,
    *,
    namespace: str = "default",
    created_at: datetime = EPOCH,
    **options: Any,
) -> Entry:
    """An entry of a synthetic artifact; ``options`` are those of `synthetic.artifact`."""
    manifest, records, _ = artifact(tokens, fingerprint, **options)
    return Entry(namespace, manifest, records, None if options.get("private") else list(tokens), created_at)


def begin(index: Index, namespace: str = "default", *, lease: timedelta = DAY) -> str:
    """A new push; returns its id."""
    push_id = f"push-{next(_PUSH_NUMBERS)}"
    index.begin_push(push_id, namespace, entry([1]).manifest.fingerprint, datetime.now(UTC) + lease)
    return push_id


def send(index: Index, push_id: str, what: Entry) -> list[str]:
    """Offer an entry and let everything missing arrive; returns what was missing."""
    missing = index.offer(push_id, what.records, what.specs()).missing
    for digest in missing:
        index.arrived(push_id, digest)
    return missing


def publish(index: Index, what: Entry) -> ArtifactInfo:
    """Push an entry from beginning to end."""
    push_id = begin(index, what.namespace)
    send(index, push_id, what)
    info = index.publish(what)
    index.end_push(push_id)
    return info


def keys(what: Entry) -> list[str]:
    return [record.key for record in what.records]


def first_chunk(what: Entry) -> str:
    return next(iter(what.records[0].chunks.values()))[0]
