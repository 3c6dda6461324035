"""Manifests: what an artifact is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from repo_service.domain.canonical import canonical_json, parse_json
from repo_service.domain.digest import BLAKE3, SHA256, parse_digest, sha256_digest
from repo_service.domain.errors import DocumentCorrupt, MalformedDocument, NotStored
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import ChunkSpec, Layout
from repo_service.domain.record import BlockRecord, block_key, parse_digest_value, stored_chunks
from repo_service.domain.tokens import MAX_TOKENS, token_chunk_count, token_chunk_spec

MAX_MANIFEST_BYTES = 64 * 2**20
MAX_TEXT_CHARACTERS = 4 * 2**20
MAX_ANNOTATIONS = 64
MAX_ANNOTATION_CHARACTERS = 4096

MAX_ARTIFACT_CHUNKS = 2**20
"""Chunks that the blocks of an artifact may name to be published: whoever publishes holds all names at once."""

EXACT = "exact"
LOSSY = "lossy"

_FORMAT = "kvgraft.manifest"
_VERSION = 1
_RESUMED_VERSION = 2


@dataclass(frozen=True)
class Exactness:
    """``exact``, or ``lossy`` with the codec and the measured error as text."""

    kind: str = EXACT
    codec: str | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return (
            {"class": self.kind}
            if self.kind == EXACT
            else {"class": self.kind, "codec": self.codec, "error": self.error}
        )

    @classmethod
    def from_json(cls, value: Any) -> Exactness:
        match value:
            case {"class": "exact"} if len(value) == 1:
                return cls()
            case {"class": "lossy", "codec": str(codec), "error": str(error)} if len(value) == 3:
                return cls(LOSSY, codec, error)
        raise MalformedDocument(f"not an exactness class: {str(value)[:100]}")


@dataclass(frozen=True)
class Manifest:
    """An artifact: immutable, named by the SHA-256 of its canonical document.

    Parameters
    ----------
    fingerprint
        What the state was made with; it holds the layout.
    token_count
        Number of tokens; positions are ``[0, token_count)``.
    tokens
        Digests of the chunks of the ``tokens`` array, or None where the pusher keeps the ids private.
    blocks
        (block key, record digest) of each block, in order.
    exactness, parent, annotations, text
        Exactness class; artifact id this one continues, if any; free text fields; text for search.
    resume_from
        The token from which on the state can be resumed, where sliding groups are stored in part; see
        `Layout.first_stored`. 0 where everything is stored.
    """

    fingerprint: Fingerprint
    token_count: int
    tokens: tuple[str, ...] | None
    blocks: tuple[tuple[str, str], ...]
    exactness: Exactness = Exactness()
    parent: str | None = None
    annotations: dict[str, str] = field(default_factory=dict)
    text: str | None = None
    resume_from: int = 0

    def __post_init__(self) -> None:
        check_annotations(self.annotations)
        check_text(self.text)
        if self.resume_from != 0:
            self._check_resume_from()

    @cached_property
    def data(self) -> bytes:
        partial = {"resume_from": self.resume_from} if self.resume_from else {}
        return canonical_json(
            {
                "format": _FORMAT,
                "version": _RESUMED_VERSION if partial else _VERSION,
                "fingerprint": self.fingerprint.sections,
                "tokens": {"count": self.token_count, "chunks": None if self.tokens is None else list(self.tokens)},
                "blocks": [list(block) for block in self.blocks],
                "exactness": self.exactness.to_json(),
                "lineage": {"parent": self.parent},
                "annotations": self.annotations,
                "text": self.text,
                **partial,
            }
        )

    @cached_property
    def id(self) -> str:
        return sha256_digest(self.data)

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.fingerprint)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state as stored, partial blocks padded."""
        return self.layout.stored_bytes(len(self.blocks), self.resume_from)

    @property
    def chunk_count(self) -> int:
        """Chunks that its blocks name, each as often as it is named, stored or not."""
        return len(self.blocks) * self.layout.block_chunks

    def stored_chunks(self, records: Iterable[BlockRecord]) -> dict[str, ChunkSpec]:
        """Every chunk that the artifact stores, with the dtype and shape its digest commits to."""
        stored = stored_chunks(records, self.layout, self.resume_from)
        stored.update(dict.fromkeys(self.tokens or (), token_chunk_spec(self.token_count)))
        return stored

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read a manifest and check it by itself: grammar, spans, shapes and limits.

        Raises
        ------
        MalformedDocument, MalformedDigest, TooLarge
        """
        value = parse_json(data, limit=MAX_MANIFEST_BYTES, what="manifest")
        match value:
            case {
                "format": "kvgraft.manifest",
                "version": int(version),
                "fingerprint": dict(sections),
                "tokens": {"count": int(count), "chunks": chunks},
                "blocks": list(blocks),
                "exactness": exactness,
                "lineage": {"parent": parent},
                "annotations": dict(annotations),
                "text": text,
            } if len(value["tokens"]) == 2 and len(value["lineage"]) == 1:
                pass
            case _:
                raise MalformedDocument("not a manifest: its fields are not those of the format")
        if isinstance(version, bool) or version not in (_VERSION, _RESUMED_VERSION):
            raise MalformedDocument(
                f"the manifest has version {version}; this kvgraft reads versions {_VERSION} and {_RESUMED_VERSION}"
            )
        resume_from = value.get("resume_from") if version == _RESUMED_VERSION else 0
        if len(value) != (10 if version == _RESUMED_VERSION else 9) or resume_from is None:
            raise MalformedDocument(f"not a manifest: its fields are not those of version {version}")
        if version == _RESUMED_VERSION and resume_from == 0:
            raise MalformedDocument("the manifest's resume_from is 0, which is left out where everything is stored")
        if isinstance(count, bool) or not 0 < count <= MAX_TOKENS:
            raise MalformedDocument(f"the manifest has {count} tokens; it must have 1 to {MAX_TOKENS}")
        if parent is not None:
            parse_digest_value(parent, SHA256)
        manifest = cls(
            Fingerprint(sections),
            count,
            None if chunks is None else _digest_list(chunks),
            tuple(_block_pair(block) for block in blocks),
            Exactness.from_json(exactness),
            parent,
            annotations,
            text,
            resume_from,
        )
        expected_blocks = -(-count // manifest.layout.block_tokens)
        if len(manifest.blocks) != expected_blocks:
            raise MalformedDocument(
                f"the manifest lists {len(manifest.blocks)} blocks; {count} tokens make {expected_blocks}"
            )
        if manifest.tokens is not None and len(manifest.tokens) != token_chunk_count(count):
            raise MalformedDocument("the manifest's number of token chunks does not match its token count")
        # What was parsed is canonical, so it need not be encoded again.
        vars(manifest)["data"] = bytes(data)
        return manifest

    def _check_resume_from(self) -> None:
        start, size = self.resume_from, self.layout.block_tokens
        if not isinstance(start, int) or isinstance(start, bool) or not 0 < start < self.token_count or start % size:
            raise MalformedDocument(
                f"resume_from is {str(start)[:40]}; it must be a multiple of {size} below the {self.token_count} tokens"
            )
        if not any(self.layout.first_stored(start).values()):
            raise MalformedDocument(
                f"resume_from is {start}, with which an artifact of this layout leaves nothing out: leave it out"
            )

    def require_resumable(self, position: int) -> None:
        """Check that what a resume at token ``position`` needs is stored; at 0 it needs nothing.

        Raises
        ------
        NotStored
        """
        if 0 < position < self.resume_from:
            raise NotStored(
                f"the artifact {self.id} can't be resumed at token {position}: of sliding layers it stores what is "
                f"needed from token {self.resume_from} on",
                position=position,
                resume_from=self.resume_from,
            )

    def check_records(self, records: Sequence[BlockRecord]) -> None:
        """Check that the records are this manifest's, whole, in order, without gap or overlap.

        Raises
        ------
        MalformedDocument
        """
        if len(records) != len(self.blocks):
            raise MalformedDocument(f"{len(records)} block records for {len(self.blocks)} blocks")
        position, parent = 0, None
        for record, (key, digest) in zip(records, self.blocks, strict=True):
            if record.key != key or record.digest != digest:
                raise MalformedDocument(f"the record of block {key} is not the one the manifest names", block_key=key)
            record.check(self.layout)
            if record.start != position or record.parent != parent:
                raise MalformedDocument(
                    f"block {key} begins at {record.start}; the one before it ends at {position}", block_key=key
                )
            position, parent = record.stop, key
        if position != self.token_count:
            raise MalformedDocument(f"the blocks end at token {position}; the manifest has {self.token_count} tokens")

    def check_keys(self, records: Sequence[BlockRecord], tokens: Sequence[int]) -> None:
        """Check every block key against the token ids and the schedule it stands for.

        Raises
        ------
        MalformedDocument
        """
        if len(tokens) != self.token_count:
            raise MalformedDocument(f"{len(tokens)} token ids for {self.token_count} tokens")
        for record in records:
            expected = block_key(self.fingerprint.id, record.parent, tokens[record.start : record.stop], record.steps)
            if record.key != expected:
                raise MalformedDocument(
                    f"the key of block {record.start} to {record.stop} is {record.key}; its tokens and schedule give {expected}",
                    block_key=record.key,
                )


def require_digest(data: bytes, digest: str, what: str) -> bytes:
    """Return ``data`` if its SHA-256 is ``digest``.

    Raises
    ------
    DocumentCorrupt
    """
    found = sha256_digest(data)
    if found != digest:
        raise DocumentCorrupt(
            f"the {what} {digest} reads as {found}: its stored bytes were altered", digest=digest, found=found
        )
    return data


def _digest_list(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise MalformedDocument("the token chunks are not a list of digests")
    for digest in value:
        parse_digest_value(digest, BLAKE3)
    return tuple(value)


def _block_pair(value: Any) -> tuple[str, str]:
    match value:
        case [str(key), str(digest)]:
            parse_digest(key, SHA256)
            parse_digest(digest, SHA256)
            return key, digest
    raise MalformedDocument(f"not a block of a manifest: {str(value)[:100]}")


def check_annotations(value: dict[str, Any]) -> None:
    """Check the names and values of annotations.

    Raises
    ------
    MalformedDocument
    """
    if len(value) > MAX_ANNOTATIONS:
        raise MalformedDocument(f"{len(value)} annotations; the limit is {MAX_ANNOTATIONS}")
    for name, text in value.items():
        if (
            not isinstance(name, str)
            or not 0 < len(name) <= 128
            or not isinstance(text, str)
            or len(text) > MAX_ANNOTATION_CHARACTERS
        ):
            raise MalformedDocument(
                f"the annotation {str(name)[:128]!r} is not a text of at most {MAX_ANNOTATION_CHARACTERS} characters under a name of at most 128"
            )


def check_text(value: Any) -> None:
    """Check an artifact's text for search.

    Raises
    ------
    MalformedDocument
    """
    if value is not None and (not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS):
        raise MalformedDocument(f"the text is not a string of at most {MAX_TEXT_CHARACTERS} characters")
