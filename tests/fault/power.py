"""Disks that forget what was not synced."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from pushing import Artifact, push
from sqlalchemy import Connection

from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.index.engine import Database, Mode
from repo_service.storage import local
from tests.fault.damage import Opened
from tests.fault.kills import Calling
from tests.fault.stores import what
from tests.fault.suite import Fault

SECTOR = 4096
"""Bytes that come to a disk together."""


@dataclass
class File:
    """A file's bytes, and how many of them are known to be on the disk."""

    data: bytes = b""
    synced: int = 0


@dataclass
class Name:
    """What a name in a directory stood for when the directory was last synced, and stood for since."""

    durable: File | bool | None = None
    since: list[File | bool | None] = field(default_factory=list)

    @property
    def now(self) -> File | bool | None:
        return self.since[-1] if self.since else self.durable


Event = tuple[Any, ...]


class Disk:
    """Records what a store asks of a disk, and says what the disk may hold if power is lost.

    A name of which the directory was not synced since may stand for anything it stood for after the
    last sync; a file's end that was not synced may be missing.
    """

    def __init__(self, root: Path) -> None:
        self.log: list[Event] = []
        self._root = root
        self._lock = threading.RLock()
        self._open: dict[int, str] = {}
        self._start = {path: None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}

    def note(self, *entry: Any) -> None:
        with self._lock:
            self.log.append(entry)

    @contextmanager
    def recording(self) -> Iterator[None]:
        disk = self
        write_of = Database._write

        @contextmanager
        def write(database: Database, mode: Mode, wait: float) -> Iterator[Connection]:
            with write_of(database, mode, wait) as connection:
                yield connection
                synchronous = connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
            files = [disk._root / f"index.sqlite{end}" for end in ("", "-wal")]
            disk.note("index", [path.read_bytes() for path in files], synchronous >= 2)

        with mock.patch.object(local, "os", Calling(self._recorded)), mock.patch.object(Database, "_write", write):
            yield

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                result = function(*arguments, **options)
                self._note_call(function.__name__, arguments, result)
                return result

        return call

    def _note_call(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        match name:
            case "open":
                self._open[result] = arguments[0]
                if arguments[1] & os.O_CREAT:
                    self.note("create", arguments[0])
            case "write":
                self.note("write", self._open[arguments[0]], bytes(arguments[1][:result]))
            case "fsync":
                self.note("fsync", self._open[arguments[0]])
            case "replace" | "link" | "unlink" | "mkdir":
                self.note(name, *arguments[:2])

    def moment(self, generator: random.Random) -> int:
        """Any moment, or one soon after something that decides what is visible."""
        deciding = [
            i
            for i, (call, *of) in enumerate(self.log)
            if call not in ("write", "index") and any(f"/{kind}/" in str(of) for kind in ("entries", "tags"))
        ]
        if not deciding or generator.random() < 0.5:
            return generator.randrange(len(self.log) + 1)
        return min(generator.choice(deciding) + generator.randint(1, 3), len(self.log))

    def lose_power(self, at: int, generator: random.Random, target: Path) -> None:
        """Fill ``target`` with what may be left if the power goes after the first ``at`` events."""
        names = {str(path): Name(True if data is None else File(data, len(data))) for path, data in self._start.items()}
        for entry in self.log[:at]:
            _replay(names, entry)
        kept = {path: generator.choice([name.durable, *name.since]) for path, name in names.items()}
        target.mkdir()
        for path in sorted(kept):
            copy = target / Path(path).relative_to(self._root)
            meant = kept[path]
            if meant is None or not copy.parent.is_dir() or copy.name.startswith("index.sqlite"):
                continue
            if isinstance(meant, File):
                copy.write_bytes(meant.data[: generator.randint(meant.synced, len(meant.data))])
            else:
                copy.mkdir()
        for end, data in zip(("", "-wal"), self._index(at, generator), strict=True):
            (target / f"index.sqlite{end}").write_bytes(data)

    def _index(self, at: int, generator: random.Random) -> list[bytes]:
        """The database after the last commit that was synced, or a later one, the one going on included and torn."""
        possible = [[self._start[self._root / "index.sqlite"] or b"", b""]]
        for i, entry in enumerate(self.log[: at + 1]):
            if entry[0] == "index":
                possible = [entry[1]] if entry[2] and i < at else [*possible, entry[1]]
        synced, chosen = possible[0], generator.choice(possible)
        if chosen[0] == synced[0] and chosen[1].startswith(synced[1]):
            return [chosen[0], _torn(chosen[1], len(synced[1]), generator)]
        return chosen


def _torn(data: bytes, synced: int, generator: random.Random) -> bytes:
    """Bytes of which all after the first ``synced`` may have come to the disk in any order, or not."""
    if generator.random() < 0.5:
        return data
    kept = bytearray(data[: generator.randint(synced, len(data))])
    for start in range(synced, len(kept), SECTOR):
        if generator.random() < 0.1:
            kept[start : start + SECTOR] = bytes(len(kept[start : start + SECTOR]))
    return bytes(kept)


def _replay(names: dict[str, Name], entry: Event) -> None:
    def name(path: str) -> Name:
        return names.setdefault(path, Name())

    match entry:
        case ("create", path):
            name(path).since.append(File())
        case ("write", path, data):
            file = name(path).now
            assert isinstance(file, File)
            file.data += data
        case ("fsync", path):
            file = name(path).now
            if isinstance(file, File):
                file.synced = len(file.data)
            else:
                for of, inside in names.items():
                    if os.path.dirname(of) == path:
                        inside.durable, inside.since = inside.now, []
        case ("replace", source, to):
            name(to).since.append(name(source).now)
            name(source).since.append(None)
        case ("link", source, to):
            name(to).since.append(name(source).now)
        case ("unlink", path):
            name(path).since.append(None)
        case ("mkdir", path, *_):
            name(path).since.append(True)


@dataclass
class Promised:
    """What was acknowledged up to a moment: artifacts and tags, and what the operation going on may change."""

    there: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)
    tags: dict[str, set[str | None]] = field(default_factory=dict)

    def begin(self, kind: str, artifact_id: str, tag: str) -> None:
        if kind in ("push", "delete"):
            self.maybe.add(artifact_id)
            self.there.discard(artifact_id)
        if kind == "delete":
            self.tags = {tag: ids | {None} if artifact_id in ids else ids for tag, ids in self.tags.items()}
        if kind in ("tag", "untag"):
            self.tags[tag] = self.tags.get(tag, {None}) | {artifact_id if kind == "tag" else None}

    def end(self, kind: str, artifact_id: str, tag: str) -> None:
        self.maybe.discard(artifact_id)
        if kind == "push":
            self.there.add(artifact_id)
        if kind == "delete":
            self.tags = {tag: {None} if artifact_id in ids else ids for tag, ids in self.tags.items()}
        if kind in ("tag", "untag"):
            self.tags[tag] = {artifact_id if kind == "tag" else None}


def power_loss(directory: Path, seed: int, *, seeds: int, points: int) -> dict[str, Any]:
    generator = random.Random(seed)
    acknowledged = events = 0
    for number in range(seeds):
        root = directory / f"repository-{number}"
        known = {what(n)[0].id: what(n) for n in range(4)}
        with Opened(root) as opened:
            for artifact_id in list(known)[:2]:
                push(opened.repository, known[artifact_id])
        disk = Disk(root)
        with disk.recording(), Opened(root) as opened:
            _work(opened, disk, known, generator)
        events += len(disk.log)
        for point in range(points):
            at = disk.moment(generator)
            target = directory / f"after-{number}-{point}"
            disk.lose_power(at, generator, target)
            try:
                acknowledged += _judge(target, disk.log[:at], known)
            except AssertionError as error:
                last = [" ".join(map(str, e[: 1 + (e[0] != "index")])) for e in disk.log[max(0, at - 4) : at]]
                raise AssertionError(f"power lost after event {at} of {len(disk.log)}, {last}: {error}") from error
            shutil.rmtree(target)
        shutil.rmtree(root)
    return {"seeds": seeds, "points": seeds * points, "events": events, "acknowledged": acknowledged, "lost": 0}


def _work(opened: Opened, disk: Disk, known: Mapping[str, Artifact], generator: random.Random) -> None:
    """A few operations, each noted when it begins and when it is acknowledged."""
    repository, ids = opened.repository, list(known)
    for _ in range(generator.randint(3, 6)):
        there = opened.visible()
        kind = generator.choice(["push", "push", "delete", "tag", "tag", "untag", "gc", "reindex"])
        tag = generator.choice(["a", "b"])
        artifact_id = generator.choice(sorted(set(ids) - there if kind == "push" else there) or [""])
        if not artifact_id:
            continue
        if kind == "untag" and tag not in {found.name for found in repository.tags(DEFAULT_NAMESPACE)}:
            continue
        disk.note("began", kind, artifact_id, tag)
        match kind:
            case "push":
                push(repository, known[artifact_id])
            case "delete":
                repository.delete(artifact_id, DEFAULT_NAMESPACE)
            case "tag":
                repository.set_tag(DEFAULT_NAMESPACE, tag, artifact_id)
            case "untag":
                repository.delete_tag(DEFAULT_NAMESPACE, tag)
            case "gc":
                repository.collect_garbage(grace_s=0)
            case "reindex":
                repository.reindex()
        disk.note("acknowledged", kind, artifact_id, tag)


def _judge(root: Path, log: list[Event], known: Mapping[str, Artifact]) -> int:
    promised = Promised(set(list(known)[:2]))
    for entry in log:
        if entry[0] == "began":
            promised.begin(*entry[1:])
        elif entry[0] == "acknowledged":
            promised.end(*entry[1:])
    with Opened(root) as opened:
        allowed = {name: known[name] for name in promised.there | promised.maybe}
        opened.check(allowed, must=promised.there)
        tags = {tag.name: tag.artifact_id for tag in opened.repository.tags(DEFAULT_NAMESPACE)}
        for name, ids in promised.tags.items():
            assert tags.get(name) in ids, f"the tag {name} points to {tags.get(name)}; acknowledged was one of {ids}"
        opened.check_index()
        opened.collect()
        opened.check_files()
        opened.check(allowed, must=promised.there)
    return sum(entry[0] == "acknowledged" for entry in log)


FAULTS = [
    Fault(
        "power-loss",
        "whatever was not synced may be gone: everything acknowledged is there after reopening",
        power_loss,
        short={"seeds": 8, "points": 2},
        full={"seeds": 200, "points": 3},
    ),
]
