"""The passages of a library on this node: a full-text index in a file, derived from what the repository holds.

It may be lost or deleted at any time.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from engine_adapter.packing import passages
from repo_service.domain.errors import InvalidInput

DIRECTORY_VARIABLE = "KVGRAFT_ROUTER_DIR"
OFF = "off"

_PASSAGE_CHARACTERS = 1000
# Raise it when the tables or the passages change.
_VERSION = 2
_BUSY_S = 60.0

_TOKENIZER = "tokenize = 'porter unicode61 remove_diacritics 2'"
_SCHEMA = f"""
CREATE TABLE artifacts (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE);
CREATE TABLE passages (
    id INTEGER PRIMARY KEY, artifact INTEGER NOT NULL REFERENCES artifacts (id), start INTEGER NOT NULL,
    stop INTEGER NOT NULL, embedding BLOB
);
CREATE INDEX passages_artifact ON passages (artifact);
CREATE INDEX passages_bare ON passages (id) WHERE embedding IS NULL;
CREATE TABLE listed (until TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5 (text, {_TOKENIZER});
"""
# Of one connection: passages that are about to be ranked, without the millions of others.
_RANKED = f"CREATE VIRTUAL TABLE temp.ranked USING fts5 (text, content = '', {_TOKENIZER})"


@dataclass(frozen=True)
class Passage:
    """A stretch of an artifact's text that was found, and how well it fits: greater is better."""

    number: int
    artifact_id: str
    start: int
    stop: int
    score: float


class PassageIndex:
    """Passages of the artifacts of one library.

    Parameters
    ----------
    path
        The index's file, made if it is not there; None keeps it in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        try:
            self._open()
        except sqlite3.DatabaseError:
            if path is None:
                raise
            # It is derived: a damaged file, or one of another version, is made anew.
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._open()

    @classmethod
    def of(cls, repository_id: str, namespace: str, fingerprint_id: str) -> PassageIndex:
        """The index of a library in the directory that ``KVGRAFT_ROUTER_DIR`` names.

        Raises
        ------
        InvalidInput
            If the directory can't be made.
        """
        directory = _directory()
        if directory is None:
            return cls(None)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"{directory} can't be made: {error.strerror}; {DIRECTORY_VARIABLE} names another, or {OFF}",
                path=str(directory),
            ) from None
        name = hashlib.sha256("\0".join((repository_id, namespace, fingerprint_id)).encode()).hexdigest()[:32]
        return cls(directory / f"{name}.sqlite")

    def close(self) -> None:
        self._connection.close()

    @property
    def listed(self) -> datetime | None:
        """When the newest artifact of the library was published that is held with all before it, if that was noted."""
        found = self._connection.execute("SELECT until FROM listed").fetchone()
        return None if found is None else datetime.fromisoformat(found[0])

    @listed.setter
    def listed(self, until: datetime) -> None:
        with self._transaction():
            self._connection.execute("DELETE FROM listed")
            self._connection.execute("INSERT INTO listed VALUES (?)", (until.isoformat(),))

    def update(self, artifacts: Mapping[str, Sequence[int]], read_text: Callable[[str], str]) -> None:
        """Hold the passages of these artifacts and of no others.

        Parameters
        ----------
        artifacts
            By their ids, where documents begin in their texts: no passage is of two documents.
        read_text
            Gives an artifact's text; called for those that are new.
        """
        held = {digest for (digest,) in self._connection.execute("SELECT digest FROM artifacts")}
        for digest in held - artifacts.keys():
            with self._transaction():
                self._remove(digest)
        self.add(artifacts, read_text)

    def add(self, artifacts: Mapping[str, Sequence[int]], read_text: Callable[[str], str]) -> None:
        """Hold the passages of these artifacts too; see `update`."""
        for digest, beginnings in artifacts.items():
            found = self._connection.execute("SELECT 1 FROM artifacts WHERE digest = ?", (digest,))
            if found.fetchone() is None:
                text = read_text(digest)
                with self._transaction():
                    self._remove(digest)
                    self._insert(digest, text, beginnings)

    def passages_with(self, word: str) -> int:
        """How many passages hold a word."""
        found = self._connection.execute("SELECT count(*) FROM words WHERE words MATCH ?", (_any([word]),))
        return int(found.fetchone()[0])

    def numbers(self, word: str, among: Sequence[str]) -> Iterator[int]:
        """The numbers of the passages that hold a word and any of some."""
        query = f"{_any([word])} AND ({_any(among)})"
        return (
            number for (number,) in self._connection.execute("SELECT rowid FROM words WHERE words MATCH ?", (query,))
        )

    def ranked(self, numbers: Sequence[int], weights: Mapping[str, float]) -> list[Passage]:
        """Passages by BM25, best first, in which each word has a weight in place of its rarity among them."""
        with self._transaction("DEFERRED"):
            self._connection.execute("INSERT INTO ranked (ranked) VALUES ('delete-all')")
            self._connection.executemany(
                "INSERT INTO ranked (rowid, text) SELECT rowid, text FROM words WHERE rowid = ?",
                [(number,) for number in numbers],
            )
            (total,) = self._connection.execute("SELECT count(*) FROM ranked").fetchone()
            scores = dict.fromkeys(sorted(numbers), 0.0)
            for word, weight in weights.items():
                found = self._connection.execute("SELECT rowid, rank FROM ranked WHERE ranked MATCH ?", (_any([word]),))
                rows = found.fetchall()
                # As SQLite weighs it here.
                rarity = max(math.log((total - len(rows) + 0.5) / (len(rows) + 0.5)), 1e-6)
                for number, rank in rows:
                    scores[number] -= rank / rarity * weight
        return self.passages(scores)

    def holds(self, passage: Passage, word: str) -> bool:
        """Whether a passage holds a word."""
        found = self._connection.execute(
            "SELECT 1 FROM words WHERE rowid = ? AND words MATCH ?", (passage.number, _any([word]))
        )
        return found.fetchone() is not None

    def bare_count(self) -> int:
        """How many passages have no embedding."""
        return int(self._connection.execute("SELECT count(*) FROM passages WHERE embedding IS NULL").fetchone()[0])

    def bare(self, limit: int) -> list[tuple[int, str]]:
        """Numbers and texts of passages without an embedding."""
        return self._connection.execute(
            "SELECT p.id, w.text FROM passages AS p JOIN words AS w ON w.rowid = p.id WHERE p.embedding IS NULL LIMIT ?",
            (limit,),
        ).fetchall()

    def embed(self, embeddings: Sequence[tuple[int, bytes]]) -> None:
        """Keep embeddings of passages, by their numbers."""
        with self._transaction():
            self._connection.executemany(
                "UPDATE passages SET embedding = ? WHERE id = ?", [(data, number) for number, data in embeddings]
            )

    def embeddings(self, at_once: int) -> Iterator[list[tuple[int, bytes]]]:
        """All embeddings, so many at once."""
        cursor = self._connection.execute("SELECT id, embedding FROM passages WHERE embedding IS NOT NULL")
        while rows := cursor.fetchmany(at_once):
            yield rows

    def passages(self, scores: Mapping[int, float]) -> list[Passage]:
        """Passages by their numbers, with scores from elsewhere, best first."""
        found = []
        for number in sorted(scores, key=lambda number: -scores[number]):
            row = self._connection.execute(
                "SELECT a.digest, p.start, p.stop FROM passages AS p JOIN artifacts AS a ON a.id = p.artifact WHERE p.id = ?",
                (number,),
            ).fetchone()
            if row is not None:
                artifact_id, start, stop = row
                found.append(Passage(number, artifact_id, start, stop, scores[number]))
        return found

    def __len__(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM passages").fetchone()[0])

    def _open(self) -> None:
        self._connection = sqlite3.connect(
            ":memory:" if self._path is None else self._path, timeout=_BUSY_S, isolation_level=None
        )
        if self._path is not None:
            self._path.chmod(0o600)
            self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute("PRAGMA temp_store = MEMORY")
        self._connection.execute(_RANKED)
        with self._transaction():
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise sqlite3.DatabaseError(f"version {version}")

    def _insert(self, digest: str, text: str, beginnings: Sequence[int]) -> None:
        artifact = self._connection.execute("INSERT INTO artifacts (digest) VALUES (?)", (digest,)).lastrowid
        edges = sorted({0, *beginnings, len(text)})
        spans = [
            (begin + start, begin + stop)
            for begin, end in pairwise(edges)
            for start, stop in passages(text[begin:end], _PASSAGE_CHARACTERS)
        ]
        for start, stop in spans:
            number = self._connection.execute(
                "INSERT INTO passages (artifact, start, stop) VALUES (?, ?, ?)", (artifact, start, stop)
            ).lastrowid
            self._connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (number, text[start:stop]))

    def _remove(self, digest: str) -> None:
        of_artifact = "SELECT id FROM passages WHERE artifact = (SELECT id FROM artifacts WHERE digest = ?)"
        self._connection.execute(f"DELETE FROM words WHERE rowid IN ({of_artifact})", (digest,))
        self._connection.execute(f"DELETE FROM passages WHERE id IN ({of_artifact})", (digest,))
        self._connection.execute("DELETE FROM artifacts WHERE digest = ?", (digest,))

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self._connection.execute(f"BEGIN {kind}")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise


def _any(words: Sequence[str]) -> str:
    """A query for passages with any of some words, whatever signs are in them."""
    return " OR ".join(f'"{word}"' for word in words)


def _directory() -> Path | None:
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named == OFF:
        return None
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    # A user without a home has no cache.
    return Path(base, "kvgraft", "routers") if os.path.isabs(base) else None
