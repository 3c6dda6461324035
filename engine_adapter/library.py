"""A library: documents as artifacts that fill the native window, each at its own positions.

The repository is all there is of it: which documents an artifact holds is in its annotations. So an interrupted
`Library.add` goes on where it stopped, and a second one of the same files does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING

from engine_adapter.deposit import RESUME, deposit_in_stages
from engine_adapter.documents import Document, Documents
from engine_adapter.engine import Progress
from engine_adapter.packing import Packed, Packer, Part, Piece, heading, parts_from_annotations, parts_to_annotations
from engine_adapter.prompt import Prompt
from repo_service.domain.errors import AccessDenied, InvalidInput, LibraryEmpty, NotFound
from repo_service.domain.repository import Repository, despite_expiry
from repo_service.domain.views import ArtifactInfo, ArtifactQuery

if TYPE_CHECKING:
    from engine_adapter.session import GraftSession

DEFAULT_RESERVE = 512
DEFAULT_STAGE_TOKENS = 2048

KIND = "kvgraft.library"
ARTIFACT = "artifact"
STAGE = "stage"


@dataclass(frozen=True)
class Held:
    """An artifact of a library, and the parts of documents in it."""

    info: ArtifactInfo
    parts: tuple[Part, ...]

    @property
    def beginnings(self) -> list[int]:
        """Where documents begin in the artifact's text, each with its heading."""
        return [part.at - len(heading(part.name, part.start)) for part in self.parts]


@dataclass(frozen=True)
class Plan:
    """What it takes to bring a library to what was read.

    Attributes
    ----------
    kept
        Artifacts that stay as they are.
    replaced
        Artifacts that hold a document that was changed or removed.
    packed
        What is to be computed.
    duplicates
        Documents whose text another document has too; it is held once.
    """

    kept: list[Held]
    replaced: list[Held]
    packed: list[Packed]
    duplicates: int


@dataclass(frozen=True)
class Added:
    """What `Library.add` did."""

    made: list[ArtifactInfo]
    kept: int
    replaced: int
    duplicates: int
    tokens: int


def library_artifacts(
    repository: Repository, namespace: str, fingerprint_id: str | None = None, since: datetime | None = None
) -> list[Held]:
    """The artifacts of the libraries in a namespace, oldest first; of all models, or of one fingerprint."""
    found = [
        Held(info, parts_from_annotations(info.annotations))
        for info in _of_kind(repository, namespace, fingerprint_id, ARTIFACT, since=since)
    ]
    return sorted(found, key=lambda held: (held.info.created_at, held.info.id))


class Library:
    """The library of a session's model in its namespace.

    Parameters
    ----------
    session
        With a tokenizer.
    window
        Most tokens of a document, its question and the answer; by default the model's native window.
    reserve
        Tokens of the window that artifacts leave to the question and the answer.

    Raises
    ------
    InvalidInput
        If the window is none the model has, or the reserve leaves no room.
    """

    def __init__(self, session: GraftSession, *, window: int | None = None, reserve: int = DEFAULT_RESERVE) -> None:
        if session.tokenizer is None:
            raise InvalidInput("a library needs a session with a tokenizer")
        native = session.window
        window = window or native
        if window is None:
            raise InvalidInput("the model names no native window: give one")
        if native is not None and window > native:
            raise InvalidInput(
                f"a window of {window:,} tokens is more than the model's native one of {native:,}", window=native
            )
        if not 0 < reserve < window:
            raise InvalidInput(
                f"a reserve of {reserve:,} tokens leaves no room in a window of {window:,}: choose from 1 to {window - 1:,}",
                window=window,
            )
        self.session = session
        self.window = window
        self.room = window - reserve
        self.prompt = Prompt.of(session.tokenizer)

    def artifacts(self) -> list[Held]:
        """The artifacts that this session can graft, oldest first.

        Raises
        ------
        LibraryEmpty
            If no library is there.
        FingerprintMismatch
            If what is there is of another model or machine; names the differing fields.
        """
        session = self.session
        found = library_artifacts(session.repository, session.namespace, session.fingerprint.id)
        if not found:
            others = _of_kind(session.repository, session.namespace, None, ARTIFACT, limit=1)
            for other in others:
                manifest = session.repository.manifest(other.id, session.namespace)
                session.fingerprint.require_equal(manifest.fingerprint, "the library")
            raise LibraryEmpty(
                f"there is no library in the namespace {session.namespace} of {session.repository.url}: "
                "make one with kvgraft library add"
            )
        return found

    def published_since(self, since: datetime) -> list[Held]:
        """Those of `artifacts` that were published at a time or after it."""
        session = self.session
        return library_artifacts(session.repository, session.namespace, session.fingerprint.id, since)

    def held(self, artifact_id: str) -> Held | None:
        """One artifact of the library, or None if it is not there."""
        try:
            info = self.session.repository.artifact(artifact_id, self.session.namespace)
        except NotFound:
            return None
        return Held(info, parts_from_annotations(info.annotations))

    def plan(self, read: Documents, *, whole: bool = False) -> Plan:
        """Compare what is held with what was read under some paths, and pack what is missing.

        Parameters
        ----------
        whole
            Never cut a document.

        Raises
        ------
        ContextTooLong
            If ``whole`` is asked and a document does not fit.
        """
        session = self.session
        wanted = {document.source: document for document in read.documents}
        kept: list[Held] = []
        replaced: list[Held] = []
        for held in library_artifacts(session.repository, session.namespace, session.fingerprint.id):
            stays = not any(_under(part.source, read.roots) for part in held.parts) or (
                held.info.token_count <= self.room and all(_current(part, read, wanted, whole) for part in held.parts)
            )
            (kept if stays else replaced).append(held)
        covered: dict[str, list[tuple[int, int]]] = {}
        for part in (part for held in kept for part in held.parts):
            covered.setdefault(part.digest, []).append((part.start, part.stop))
        pieces: list[Piece] = []
        for piece in chain(self._from_elsewhere(replaced, read.roots), map(_piece, read.documents)):
            spans = covered.setdefault(piece.digest, [])
            pieces += [piece.cut(*gap) for gap in _gaps(spans, piece.start, piece.stop)]
            spans.append((piece.start, piece.stop))
        duplicates = len(read.documents) - len({document.digest for document in read.documents})
        packer = Packer(self.prompt.document, self._counts, self.room, whole)
        return Plan(kept, replaced, list(packer.pack(pieces)), duplicates)

    def add(
        self,
        plan: Plan,
        *,
        stage_tokens: int = DEFAULT_STAGE_TOKENS,
        sliding: str = RESUME,
        progress: Progress | None = None,
    ) -> Added:
        """Compute and publish what a plan packed; then delete what it replaces.

        Parameters
        ----------
        stage_tokens
            At most so many tokens are computed again after an interruption.
        sliding
            As of `GraftSession.deposit`; artifacts of a library are grafted whole.

        Raises
        ------
        AccessDenied
            If artifacts are to be replaced and this token may not delete; what was computed is published by then.
        """
        session = self.session
        every = max(stage_tokens // session.block_tokens, 1) * session.block_tokens
        total = sum(packed.token_count for packed in plan.packed)
        made: list[ArtifactInfo] = []
        done = 0
        for packed in plan.packed:
            report = None if progress is None else _shifted(progress, done, total)
            made.append(despite_expiry(lambda packed=packed, report=report: self._make(packed, every, sliding, report)))  # type: ignore[misc]
            done += packed.token_count
        for stage in _of_kind(session.repository, session.namespace, session.fingerprint.id, STAGE):
            with suppress(AccessDenied):
                self._delete(stage.id)
        for held in plan.replaced:
            self._delete(held.info.id)
        return Added(made, len(plan.kept), len(plan.replaced), plan.duplicates, total)

    def _from_elsewhere(self, replaced: Iterable[Held], roots: Sequence[str]) -> Iterator[Piece]:
        """What artifacts that are replaced hold of documents that were not read now."""
        for held in replaced:
            parts = [part for part in held.parts if not _under(part.source, roots)]
            if parts:
                text = self.session.repository.manifest(held.info.id, self.session.namespace).text or ""
                for part in parts:
                    stretch = text[part.at : part.at + part.stop - part.start]
                    yield Piece(part.source, part.name, part.digest, part.length, part.start, stretch)

    def _make(self, packed: Packed, every: int, sliding: str, progress: Progress | None) -> ArtifactInfo:
        return deposit_in_stages(
            self.session,
            self.session.encode(self.prompt.document(packed.text)),
            every=every,
            text=packed.text,
            annotations={KIND: ARTIFACT, **parts_to_annotations(packed.parts)},
            stage_annotations={KIND: STAGE},
            sliding=sliding,
            progress=progress,
        )

    def _delete(self, artifact_id: str) -> None:
        with suppress(NotFound):
            self.session.repository.delete(artifact_id, self.session.namespace)

    def _counts(self, texts: Sequence[str]) -> list[int]:
        tokenizer = self.prompt.tokenizer
        return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def _of_kind(
    repository: Repository,
    namespace: str,
    fingerprint_id: str | None,
    kind: str,
    *,
    limit: int | None = None,
    since: datetime | None = None,
) -> Iterator[ArtifactInfo]:
    query = ArtifactQuery(
        namespace=namespace,
        fingerprint_id=fingerprint_id,
        annotations={KIND: kind},
        created_after=since,
        limit=limit or 1000,
    )
    items: list[ArtifactInfo] = []
    while True:
        page = repository.query(query)
        items.extend(page.items)
        if page.next_cursor is None or limit is not None:
            return iter(items)
        query = query.model_copy(update={"cursor": page.next_cursor})


def _under(source: str, roots: Iterable[str]) -> bool:
    return any(source == root or source.startswith(root.rstrip("/") + "/") for root in roots)


def _current(part: Part, read: Documents, wanted: dict[str, Document], whole: bool) -> bool:
    """Whether a part is still one of what was read; a part from elsewhere is."""
    if not _under(part.source, read.roots):
        return True
    document = wanted.get(part.source)
    cut = (part.start, part.stop) != (0, part.length)
    return document is not None and document.digest == part.digest and not (whole and cut)


def _piece(document: Document) -> Piece:
    return Piece(document.source, document.name, document.digest, len(document.text), 0, document.text)


def _gaps(spans: Iterable[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """What spans leave out of ``[start, stop)``."""
    for begin, end in sorted(spans):
        if start < min(begin, stop):
            yield start, min(begin, stop)
        start = max(start, end)
    if start < stop:
        yield start, stop


def _shifted(progress: Progress, done: int, total: int) -> Callable[[str, int, int], None]:
    def report(kind: str, here: int, _: int) -> None:
        if kind == "tokens":
            progress(kind, done + here, total)

    return report
