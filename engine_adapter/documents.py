"""Documents under paths: text, Markdown, code and the text of PDFs, and a reason for each file that is left out.

Needs ``pip install 'kvgraft[engine,library]'``: pathspec for ``.gitignore``, charset-normalizer for old encodings,
pypdf for PDFs.
"""

from __future__ import annotations

import codecs
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from repo_service.domain.digest import sha256_digest
from repo_service.domain.errors import InvalidInput, PathNotFound

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

DEFAULT_MAX_FILE_BYTES = 16 * 2**20

_PDF = b"%PDF-"
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Of all that charset-normalizer knows, rare ones that differ little from these are taken for them.
_ENCODINGS = ["cp1252", "cp1251", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr", "koi8_r"]
# What text never holds: control characters other than white space, backspace, form feed and escape.
_BINARY = bytes(code for code in range(32) if code not in b"\b\t\n\v\f\r\x1b")


@dataclass(frozen=True)
class Document:
    """One file's text, lines ended by ``\\n``.

    Attributes
    ----------
    source
        The file's absolute path.
    name
        Its path from the folder that holds the path it was found by: what a model is shown.
    """

    source: str
    name: str
    text: str = field(repr=False)

    @cached_property
    def digest(self) -> str:
        return sha256_digest(self.text.encode())


@dataclass(frozen=True)
class Skipped:
    """A file that is no document, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class Documents:
    """What lies under paths, ordered by source.

    Attributes
    ----------
    roots
        The paths, absolute.
    hidden
        Files and folders left out because their name begins with a dot or a ``.gitignore`` names them.
    """

    roots: list[str]
    documents: list[Document]
    skipped: list[Skipped]
    hidden: int


class _Unreadable(Exception):
    """Why a file is no document."""


def read_documents(paths: Sequence[str | os.PathLike[str]], max_file_bytes: int = DEFAULT_MAX_FILE_BYTES) -> Documents:
    """Read files, and trees as ripgrep walks them: no hidden names, nothing ``.gitignore`` names, no links.

    A file that is named itself is read whatever its name.

    Raises
    ------
    PathNotFound
    InvalidInput
        If a path is neither a file nor a folder, or nothing under the paths can be read.
    """
    roots = [Path(os.path.abspath(path)) for path in paths]
    found: dict[str, Document | Skipped] = {}
    hidden = 0
    for root in roots:
        for path in _files(root):
            if path is None:
                hidden += 1
            elif str(path) not in found:
                found[str(path)] = _document(path, path.relative_to(root.parent).as_posix(), max_file_bytes)
    ordered = [found[source] for source in sorted(found)]
    documents = [item for item in ordered if isinstance(item, Document)]
    skipped = [item for item in ordered if isinstance(item, Skipped)]
    if not documents:
        reasons = "; ".join(f"{item.source}: {item.reason}" for item in skipped[:3]) or "there are no files"
        raise InvalidInput(
            f"nothing under {', '.join(map(str, roots))} can be read as text ({reasons})",
            skipped=[[item.source, item.reason] for item in skipped[:100]],
            hidden=hidden,
        )
    return Documents([str(root) for root in roots], documents, skipped, hidden)


def _files(root: Path) -> Iterator[Path | None]:
    """Regular files at a path and below, None for each name that is left out unseen."""
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        raise PathNotFound(f"there is no {root}", path=str(root)) from None
    except OSError as error:
        raise InvalidInput(f"{root} can't be read: {error.strerror}", path=str(root)) from None
    if stat.S_ISDIR(mode):
        yield from _walk(root, [])
    elif stat.S_ISREG(mode):
        yield root
    else:
        raise InvalidInput(f"{root} is neither a file nor a folder", path=str(root))


def _walk(folder: Path, ignores: list[tuple[Path, GitIgnoreSpec]]) -> Iterator[Path | None]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise InvalidInput(f"{folder} can't be read: {error.strerror}", path=str(folder)) from None
    own = _ignore_rules(folder / ".gitignore") if any(entry.name == ".gitignore" for entry in entries) else None
    ignores = [*ignores, (folder, own)] if own is not None else ignores
    for entry in entries:
        path = folder / entry.name
        directory = entry.is_dir(follow_symlinks=False)
        if entry.name.startswith(".") or _ignored(path, directory, ignores):
            yield None
        elif directory:
            yield from _walk(path, ignores)
        elif entry.is_file(follow_symlinks=False):
            yield path


def _ignore_rules(path: Path) -> GitIgnoreSpec | None:
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(path.read_text(errors="replace").splitlines())
    except (OSError, ValueError):
        return None


def _ignored(path: Path, directory: bool, ignores: Sequence[tuple[Path, GitIgnoreSpec]]) -> bool:
    """By the deepest ``.gitignore`` that says anything about the path."""
    for folder, rules in reversed(ignores):
        verdict = rules.check_file(path.relative_to(folder).as_posix() + ("/" if directory else "")).include
        if verdict is not None:
            return verdict
    return False


def _document(path: Path, name: str, limit: int) -> Document | Skipped:
    try:
        text = _text(path, limit).replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
        if not text.strip():
            raise _Unreadable("it is empty")
    except _Unreadable as reason:
        return Skipped(str(path), str(reason))
    return Document(str(path), name.encode(errors="replace").decode(), text)


def _text(path: Path, limit: int) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise _Unreadable(f"it can't be read: {error.strerror}") from None
    if len(data) > limit:
        raise _Unreadable(f"it has more than {limit:,} bytes, which is the limit")
    if data.startswith(_PDF):
        return _pdf_text(path)
    return _decoded(data)


def _decoded(data: bytes) -> str:
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError as error:
                raise _Unreadable(f"it begins as {encoding} and goes on otherwise: {error.reason}") from None
    if len(data.translate(None, _BINARY)) < len(data):
        raise _Unreadable("it is binary")
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    from charset_normalizer import from_bytes

    best = from_bytes(data[: 2**20], cp_isolation=_ENCODINGS).best()
    if best is None:
        raise _Unreadable("its encoding is not known")
    return data.decode(best.encoding, errors="replace")


def _pdf_text(path: Path) -> str:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # What it mends on the way is of no use to a reader.
    try:
        reader = PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise _Unreadable("it is a PDF that needs a password")
        text = "\n\n".join(page.extract_text() for page in reader.pages)
    except _Unreadable:
        raise
    except Exception as error:  # A damaged PDF fails in as many ways as there are.
        raise _Unreadable(
            f"it is a damaged PDF: {' '.join(str(error).split())[:100] or type(error).__name__}"
        ) from None
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not text.strip():
        raise _Unreadable("it is a PDF without text, such as a scan: run text recognition on it first")
    return text
