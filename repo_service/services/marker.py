"""The format marker at the root of every store: what makes a directory a repository."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from repo_service.domain.canonical import canonical_json, parse_loose_json
from repo_service.domain.errors import KvgraftError, NewerFormat, NotARepository
from repo_service.domain.frame import CODECS, NONE
from repo_service.services.documents import MARKER, UPLOADS
from repo_service.storage import S3Store, Store
from repo_service.version import FORMAT_VERSION

_FORMAT = "kvgraft.repository"

# Where a new repository tries out what its server can do.
_PROBES = f"{UPLOADS}/kvgraft-probe"

_RAW = 1
_FRAMED = 2


@dataclass(frozen=True)
class Marker:
    """What a repository is, from its beginning.

    Parameters
    ----------
    codec
        One of `CODECS`: none where chunks are stored raw, else they are framed, and encoded so if that makes them smaller.
    """

    repository_id: str
    codec: str

    @property
    def version(self) -> int:
        """Of the store's format; a repository of raw chunks has the first one, which every kvgraft reads."""
        return _RAW if self.codec == NONE else _FRAMED

    @property
    def data(self) -> bytes:
        framed = {} if self.codec == NONE else {"codec": self.codec}
        return canonical_json(
            {"format": _FORMAT, "version": self.version, "repository_id": self.repository_id, **framed}
        )


def prepare_directory(root: Path, *, create: bool) -> None:
    """Make ``root`` ready to hold a repository, or refuse it.

    Raises
    ------
    NotARepository
        If the directory is missing and ``create`` is false, is a file, or holds something else.
    """
    try:
        present, directory, marked = root.exists(), root.is_dir(), (root / MARKER).exists()
    except OSError as error:
        raise NotARepository(f"{str(root)[:200]} can't be opened: {error.strerror}", path=str(root)[:200]) from error
    if present and not directory:
        raise NotARepository(f"{root} is a file; a repository is a directory", path=str(root))
    if marked:
        return
    if not create:
        raise _absent(str(root))
    if root.is_dir():
        foreign = sorted(entry.name for entry in root.iterdir() if entry.name != "tmp")
        if foreign and not (root / MARKER).exists():
            raise NotARepository(
                f"{root} is not a repository and not empty (it holds {foreign[0]}): give an empty or new directory",
                path=str(root),
            )
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotARepository(f"{root} can't be created: {error.strerror}", path=str(root)) from error


def _absent(where: str) -> NotARepository:
    return NotARepository(
        f"there is no repository at {where}: the first kvgraft serve, deposit, import, pull or mirror to there makes it",
        path=where,
    )


def prepare_bucket(store: S3Store, url: str, codec: str, *, create: bool) -> None:
    """Make what lies under the URL a repository, or refuse it; ``codec`` is for a new one.

    Raises
    ------
    NotARepository
        If there is none and ``create`` is false, if something else lies there, or if the server can't publish.
    """
    if store.exists(MARKER):
        return
    if not create:
        raise _absent(url)
    if not store.is_empty(but=_PROBES) and not store.exists(MARKER):
        raise NotARepository(f"{url} is not a repository and not empty: give a prefix that nothing uses", path=url)
    # Before the marker, by which anyone may open what lies there. What a crash leaves goes with forgotten uploads.
    probe = f"{_PROBES}/{uuid.uuid4().hex}"
    store.put(probe, b"first")
    try:
        creates_again = store.put_if_absent(probe, b"second")
    finally:
        store.delete(probe)
    if creates_again:
        raise NotARepository(
            f"the S3 server of {url} ignores If-None-Match: a repository needs one that creates an object only once",
            path=url,
        )
    open_marker(store, url, codec)


def open_marker(store: Store, where: str, codec: str) -> Marker:
    """Return what the repository is, having written a marker with ``codec`` into a new store.

    From then on the store knows the codec that the repository's chunks are stored with.

    Raises
    ------
    NewerFormat, NotARepository
    """
    if store.get(MARKER) is None:
        store.put_if_absent(MARKER, Marker(str(uuid.uuid4()), codec).data)
    marker = read_marker(store, where)
    store.codec = marker.codec
    return marker


def read_marker(store: Store, where: str) -> Marker:
    """Return what the repository is; nothing is written.

    Raises
    ------
    NewerFormat, NotARepository
    """
    data = store.get(MARKER)
    if data is None:
        raise NotARepository(f"{where} has no {MARKER}: it is no repository, or what holds it is not mounted")
    try:
        value = parse_loose_json(data, what=MARKER)
    except KvgraftError as error:
        raise NotARepository(f"{where} has a damaged {MARKER}: {error.message}") from None
    match value:
        case {"format": "kvgraft.repository", "version": int(version), "repository_id": str(repository_id)} if (
            version is not True
        ):
            pass
        case _:
            raise NotARepository(f"{where} has a {MARKER} of another kind")
    if version > FORMAT_VERSION:
        raise NewerFormat(
            f"the repository at {where} has format version {version}; this kvgraft reads up to {FORMAT_VERSION}: upgrade kvgraft",
            found=version,
            supported=FORMAT_VERSION,
        )
    codec = value.get("codec", NONE)
    marker = Marker(repository_id, str(codec))
    if codec is None or marker.version != version:
        raise NotARepository(f"{where} has a {MARKER} of another kind")
    if codec not in CODECS:
        raise NewerFormat(
            f"the chunks of the repository at {where} are stored with the codec {marker.codec[:40]!r}; this kvgraft "
            f"knows {', '.join(CODECS)}: upgrade kvgraft",
            found=marker.codec,
            supported=list(CODECS),
        )
    return marker
