"""Damage: bits that flip and files that end early, in everything a repository stores.

`Opened` says what an undamaged repository is; the other modules judge by it too.
"""

from __future__ import annotations

import functools
import http.client
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from unittest import mock
from urllib.parse import urlsplit

from pushing import Artifact, push
from serving import served
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.domain.errors import Corrupt, Divergence
from repo_service.domain.frame import BLOSC
from repo_service.domain.manifest import Manifest
from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.domain.repository import Repository
from repo_service.domain.views import ArtifactQuery
from repo_service.domain.views import Damage as FoundDamage
from repo_service.index import Index
from repo_service.services.documents import (
    DIVERGENCES,
    MARKER,
    block_record_key,
    chunk_key,
    entry_key,
    manifest_key,
    tag_place,
)
from repo_service.services.opening import open_local
from repo_service.services.places import CODEC_VARIABLE
from tests.fault.suite import Fault

KINDS = ("chunks", "blocks", "artifacts", "entries", "tags", "divergences")

# Those that no read of an artifact touches; the index is rebuilt from them.
_SEALED = ("entries", "tags", "divergences")


@functools.lru_cache(64)
def made(number: int, tokens: int = 60, prefix: int = 0, family: int = 0, seed: int = 0) -> Artifact:
    """The artifact with a number; those of a family share their first ``prefix`` tokens."""
    ids = random.Random(number).choices(range(1, 30000), k=tokens)
    ids[:prefix] = [7 + family] * prefix
    return artifact(ids, fingerprint(), seed=seed)


def read_whole(repository: Repository, artifact_id: str, expected: Mapping[str, bytes] | None = None) -> None:
    """Read all of an artifact, verified; its chunks must be the ``expected`` ones."""
    manifest = repository.manifest(artifact_id, DEFAULT_NAMESPACE)
    held = manifest.stored_chunks(repository.records(manifest, DEFAULT_NAMESPACE))
    assert expected is None or set(held) == set(expected), f"{artifact_id} holds other chunks than were pushed"
    for digest, spec in held.items():
        out = bytearray(spec.size)
        repository.read_chunk(artifact_id, DEFAULT_NAMESPACE, digest, spec, memoryview(out))
        assert expected is None or out == expected[digest], f"{artifact_id} was read with other bytes in {digest}"


class Opened:
    """An embedded repository with its files and its index, to be judged; ``seconds`` is how long opening took."""

    def __init__(self, root: Path) -> None:
        self.root = root
        began = time.monotonic()
        self.repository = open_local(f"file://{root}")
        self.seconds = time.monotonic() - began
        self.index: Index = self.repository._index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.repository.close()

    def visible(self) -> set[str]:
        """Ids of the artifacts that a query finds."""
        ids: set[str] = set()
        cursor: str | None = None
        while True:
            page = self.repository.query(ArtifactQuery(cursor=cursor))
            ids.update(info.id for info in page.items)
            cursor = page.next_cursor
            if cursor is None:
                return ids

    def check(self, known: Mapping[str, Artifact], *, must: Sequence[str] | set[str] = ()) -> None:
        """Every visible artifact is ``known`` and reads whole, those that ``must`` be are there, tags point to one."""
        visible = self.visible()
        assert visible >= set(must), f"lost: {sorted(set(must) - visible)}"
        assert visible <= set(known), f"never pushed: {sorted(visible - set(known))}"
        for artifact_id in visible:
            try:
                read_whole(self.repository, artifact_id, known[artifact_id][2])
            except Corrupt as error:
                raise AssertionError(f"{artifact_id} is visible and not whole: {error}") from error
        for tag in self.repository.tags(DEFAULT_NAMESPACE):
            assert tag.artifact_id in visible, f"the tag {tag.name} points to {tag.artifact_id}, which is not there"

    def check_index(self) -> None:
        """The index says what a new one made from the store alone says (I5)."""
        before = self.index.dump()
        report = self.repository.reindex()
        assert not report.corrupt, f"a reindex can't read {report.corrupt}"
        after = self.index.dump()
        extra = {
            table: set(rows) - set(after[table]) for table, rows in before.items() if set(rows) - set(after[table])
        }
        lacking = {
            table: set(rows) - set(before[table]) for table, rows in after.items() if set(rows) - set(before[table])
        }
        assert before == after, f"the index is not what the store says: extra {extra}, lacking {lacking}"[:1500]

    def files(self) -> set[str]:
        """Everything stored, temp files included; the index's own files are not."""
        found = (path for path in self.root.rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)) for path in found if not path.name.startswith("index.sqlite")}

    def needed(self) -> set[str]:
        """What is needed for what can be seen."""
        keys = {MARKER, *(tag_place(tag) for tag in self.repository.tags(DEFAULT_NAMESPACE))}
        for found in self.repository.divergences(DEFAULT_NAMESPACE):
            keys.add(f"{DIVERGENCES}/{found.namespace}/{found.id}.json")
        for artifact_id in self.visible():
            manifest = self.repository.manifest(artifact_id, DEFAULT_NAMESPACE)
            records = self.repository.records(manifest, DEFAULT_NAMESPACE)
            keys |= {entry_key(DEFAULT_NAMESPACE, artifact_id), manifest_key(artifact_id)}
            keys |= {block_record_key(DEFAULT_NAMESPACE, record.key) for record in records}
            keys |= {chunk_key(digest) for digest in manifest.stored_chunks(records)}
        return keys

    def expire_pushes(self) -> None:
        """End every push, as when its lease has run out."""
        self.index.expire_pushes(datetime.now(UTC) + timedelta(days=400))

    def collect(self) -> None:
        """One garbage collection once all leases have run out."""
        self.expire_pushes()
        self.repository.collect_garbage(grace_s=0)

    def check_files(self) -> None:
        """Exactly what is needed is stored."""
        files, needed = self.files(), self.needed()
        assert not needed - files, f"missing from the store: {sorted(needed - files)[:5]}"
        extra = files - needed
        assert not extra, f"{len(extra)} files are left that nothing needs: {sorted(extra)[:5]}"


def flips(directory: Path, seed: int, *, flips: int, truncations: int, served_every: int) -> dict[str, Any]:
    generator = random.Random(seed)
    root = directory / "repository"
    with Opened(root) as opened:
        fill(opened.repository)
        kept = opened.visible()
        with served(root) as url, open_repository(url) as remote, closing(_raw(url)) as raw:
            damage = Damage(opened, remote, raw)
            for number in range(flips + truncations):
                through_service = number % served_every == 0
                damage.inflict(generator, cut=number >= flips, kind=KINDS[number % 6], through_service=through_service)
            assert opened.visible() == kept
        # What was damaged and is whole again is taken back.
        assert opened.repository.scrub().damaged == 0
        opened.check_index()
    return {
        "flips": flips,
        "truncations": truncations,
        "found_embedded": damage.embedded,
        "found_served": damage.through_service,
        "complete_corrupt_responses": damage.corrupt_responses,
        "found_by_scrub": damage.scrubbed,
    }


def flips_in_frames(directory: Path, seed: int, **sizes: int) -> dict[str, Any]:
    with mock.patch.dict(os.environ, {CODEC_VARIABLE: BLOSC}):
        return flips(directory, seed, **sizes)


def fill(repository: Repository) -> None:
    """A few artifacts that share blocks, tags, and a divergence: something of every kind."""
    for number in range(3):
        info, _ = push(repository, made(number, 60, 32))
        repository.set_tag(DEFAULT_NAMESPACE, f"tag-{number}", info.id)
    with suppress(Divergence):
        push(repository, made(0, 60, 32, seed=1))
    assert len(repository.divergences(DEFAULT_NAMESPACE)) == 1


@dataclass
class Stored:
    """Where a reader comes upon a file."""

    artifact_id: str
    route: str


class Damage:
    """Damages files one at a time, and looks whether readers notice."""

    def __init__(self, opened: Opened, remote: Repository, raw: http.client.HTTPConnection) -> None:
        self.embedded = self.through_service = self.corrupt_responses = self.scrubbed = 0
        self._opened = opened
        self._remote = remote
        self._http = raw
        files = sorted(opened.files())
        self._files = {kind: [name for name in files if name.startswith(f"{kind}/")] for kind in KINDS}
        self._users: dict[str, Stored] = {}
        self._manifests: dict[str, Manifest] = {}
        for artifact_id in opened.visible():
            self._find_users(artifact_id)
        assert all(self._files.values()), "nothing is stored of some kind"

    def _find_users(self, artifact_id: str) -> None:
        repository, place = self._opened.repository, f"/v1/namespaces/{DEFAULT_NAMESPACE}/artifacts/{artifact_id}"
        manifest = self._manifests[artifact_id] = repository.manifest(artifact_id, DEFAULT_NAMESPACE)
        records = repository.records(manifest, DEFAULT_NAMESPACE)
        self._users[manifest_key(artifact_id)] = Stored(artifact_id, f"{place}/manifest")
        for record in records:
            self._users[block_record_key(DEFAULT_NAMESPACE, record.key)] = Stored(artifact_id, f"{place}/blocks")
        for digest in manifest.stored_chunks(records):
            self._users[chunk_key(digest)] = Stored(artifact_id, f"{place}/chunks/{digest}")

    def inflict(self, generator: random.Random, *, kind: str, cut: bool, through_service: bool) -> None:
        """Damage one file of a kind, demand that reader and scrub notice, now and then the service too, and put the file right."""
        name = generator.choice(self._files[kind])
        data = (self._opened.root / name).read_bytes()
        whole = self._answer(name) if through_service and kind not in _SEALED else b""
        position = generator.randrange(len(data) if cut else 8 * len(data))
        with damaged(self._opened.root / name, data[:position] if cut else flipped(data, position)):
            what = f"{name}, {'cut' if cut else 'flipped'} at {position}"
            damage = (self._opened.root / name).read_bytes()
            self._scrub(name, data, kind)
            (self._opened.root / name).write_bytes(damage)
            assert self._found(self._opened.repository, name, kind), f"{what}: read without an error"
            self.embedded += 1
            if through_service:
                assert self._found(self._remote, name, kind), f"{what}: read from the service without an error"
                if kind not in _SEALED:
                    answer = self._answer(name)
                    self.corrupt_responses += answer not in (None, whole)
                    assert answer is None, f"{what}: the service answered in full"
                self.through_service += 1
        if kind in _SEALED:
            self._opened.repository.reindex()

    def _found(self, repository: Repository, name: str, kind: str) -> bool:
        if kind in _SEALED:
            return name in repository.reindex().corrupt
        # What a repository keeps in memory of what it read before must not hide the damage.
        manifest = self._manifests[self._users[name].artifact_id]
        try:
            if kind == "artifacts":
                repository.manifest(manifest.id, DEFAULT_NAMESPACE)
            elif kind == "blocks":
                repository.records(manifest, DEFAULT_NAMESPACE)
            else:
                digest = "blake3:" + "".join(name.split("/")[1:])
                spec = manifest.stored_chunks(repository.records(manifest, DEFAULT_NAMESPACE))[digest]
                out = memoryview(bytearray(spec.size))
                repository.read_chunk(manifest.id, DEFAULT_NAMESPACE, digest, spec, out)
        except Corrupt:
            return True
        return False

    def _scrub(self, name: str, data: bytes, kind: str) -> None:
        """A scrub finds the damage, and writes a sealed document as it was."""
        report = self._opened.repository.scrub()
        assert name in {_place(found) for found in report.damage}, f"{name}: a scrub found {report.damage}"
        healed = (self._opened.root / name).read_bytes() == data
        assert healed == (kind in _SEALED), f"{name}: {'' if healed else 'not '}healed"
        shutil.rmtree(self._opened.root / "quarantine")
        self.scrubbed += 1

    def _answer(self, name: str) -> bytes | None:
        """The body of a complete and successful answer of the service, nothing verified; None otherwise."""
        self._http.request("GET", self._users[name].route)
        try:
            response = self._http.getresponse()
            body = response.read()
        except (http.client.HTTPException, OSError):
            self._http.close()
            return None
        return body if response.status == 200 else None


def _place(found: FoundDamage) -> str:
    match found.kind:
        case "manifest":
            return manifest_key(found.name)
        case "block record":
            return block_record_key(found.namespace or DEFAULT_NAMESPACE, found.name)
        case "chunk":
            return chunk_key(found.name)
    return found.name


def _raw(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)


@contextmanager
def damaged(path: Path, data: bytes) -> Iterator[None]:
    """Let a file hold something else inside the block."""
    hidden = path.with_name(f".{path.name}.whole")
    shutil.copy2(path, hidden)
    path.write_bytes(data)
    try:
        yield
    finally:
        hidden.replace(path)


def flipped(data: bytes, bit: int) -> bytes:
    altered = bytearray(data)
    altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)


FAULTS = [
    Fault(
        "flips",
        "every bit flip and every truncation of anything stored is found by whoever reads it",
        flips,
        short={"flips": 48, "truncations": 12, "served_every": 7},
        full={"flips": 10_000, "truncations": 1_000, "served_every": 7},
    ),
    Fault(
        "flips-in-frames",
        "the same where chunks are stored encoded",
        flips_in_frames,
        short={"flips": 24, "truncations": 12, "served_every": 7},
        full={"flips": 10_000, "truncations": 1_000, "served_every": 7},
    ),
]
