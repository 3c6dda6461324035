"""Objects of the store that no row knows, left by processes that died or by an index that was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, exists, select

from repo_service.domain.digest import BLAKE3, SHA256, format_digest, parse_digest
from repo_service.index.dialect import bound, digest_list
from repo_service.index.models import Artifact, Block, Chunk, LooseRecord, PushBlock, PushRecord, Tag
from repo_service.index.unsettled import ENTRY, Noted


class Objects(NamedTuple):
    """Objects of the store: chunks by digest, block records by namespace and key, manifests by artifact id."""

    chunks: Sequence[str] = ()
    records: Sequence[tuple[str, str]] = ()
    manifests: Sequence[str] = ()


_DIGESTS = digest_list()
_NO_CHUNK = select(_DIGESTS.c.digest).where(~exists().where(Chunk.digest == _DIGESTS.c.digest))
_NO_ARTIFACT = select(_DIGESTS.c.digest).where(~exists().where(Artifact.digest == _DIGESTS.c.digest))
_NO_BLOCK = select(_DIGESTS.c.digest).where(
    ~exists().where(Block.namespace == bindparam("namespace"), Block.key == _DIGESTS.c.digest),
    ~exists().where(LooseRecord.namespace == bindparam("namespace"), LooseRecord.key == _DIGESTS.c.digest),
    ~exists().where(
        PushBlock.key == _DIGESTS.c.digest,
        PushRecord.id == PushBlock.push_id,
        PushRecord.namespace == bindparam("namespace"),
    ),
)
_NOT_PUBLISHED = select(_DIGESTS.c.digest).where(
    ~exists().where(Artifact.namespace == bindparam("namespace"), Artifact.digest == _DIGESTS.c.digest)
)


def unknown(connection: Connection, objects: Objects) -> Objects:
    """Those of the objects that no row knows."""
    records: list[tuple[str, str]] = []
    for namespace in sorted({namespace for namespace, _ in objects.records}):
        keys = [parse_digest(key, SHA256) for of, key in objects.records if of == namespace]
        found = connection.scalars(_NO_BLOCK, bound(keys) | {"namespace": namespace})
        records += [(namespace, format_digest(SHA256, key)) for key in found]
    chunks = connection.scalars(_NO_CHUNK, bound([parse_digest(digest, BLAKE3) for digest in objects.chunks])).all()
    ids = connection.scalars(_NO_ARTIFACT, bound([parse_digest(name, SHA256) for name in objects.manifests])).all()
    return Objects(
        [format_digest(BLAKE3, digest) for digest in chunks], records, [format_digest(SHA256, name) for name in ids]
    )


def unindexed(connection: Connection, documents: Sequence[Noted]) -> list[Noted]:
    """Those of the entries and tags that no row stands for."""
    missing: list[Noted] = []
    for namespace in sorted({document.namespace for document in documents}):
        here = [document for document in documents if document.namespace == namespace]
        ids = {parse_digest(document.name, SHA256): document for document in here if document.kind == ENTRY}
        found = connection.scalars(_NOT_PUBLISHED, bound(list(ids)) | {"namespace": namespace})
        missing += [ids[digest] for digest in found]
        tags = {document.name: document for document in here if document.kind != ENTRY}
        known = set(connection.scalars(select(Tag.name).where(Tag.namespace == namespace, Tag.name.in_(list(tags)))))
        missing += [document for name, document in tags.items() if name not in known]
    return missing
