"""A repository against a model of it: whatever is done in whatever order, both say the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test, invariant, precondition, rule
from pushing import Artifact, offer
from synthetic import BLOCK_TOKENS, artifact
from test_api import serving

from repo_service.client import open_repository
from repo_service.client.http import HttpPush, HttpRepository
from repo_service.domain.errors import ArtifactNotFound, ChunksMissing, KvgraftError, PushNotFound, TagNotFound
from repo_service.domain.repository import Push, Repository
from repo_service.domain.views import ArtifactQuery
from repo_service.services.repository import LocalRepository
from tests.fault.suite import Fault

_NAMESPACES = ("default", "team-a")
_TAGS = ("latest", "v1", "V1")
# Nothing here ends in a crash, so that no disk is needed.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

_WORDS = ("apple", "pear", "plum")


@cache
def _made() -> tuple[Artifact, ...]:
    """Artifacts that share blocks, chunks and texts with one another."""
    tokens = [7 * n % 1000 for n in range(3 * BLOCK_TOKENS)]
    other = [*tokens[:BLOCK_TOKENS], *range(BLOCK_TOKENS)]
    sizes = (1, BLOCK_TOKENS, BLOCK_TOKENS + 4, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    made = [artifact(tokens[:size], text=_WORDS[size % 3], annotations={"size": str(size % 2)}) for size in sizes]
    made += [
        artifact(other, annotations={"size": "0"}),
        artifact(other, private=True),
        artifact(tokens[:20], text="plum"),
    ]
    return tuple(made)


@dataclass
class _Running:
    """A push that is not committed, and what the service still wanted of it when it was asked last."""

    push: Push
    namespace: str
    made: Artifact
    wanted: set[str] = field(default_factory=set)


class _Machine(RuleBasedStateMachine):
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._root = (
            Path(self._stack.enter_context(TemporaryDirectory(prefix="kvgraft-model-", dir=_MEMORY))) / "repository"
        )
        self._opened = ExitStack()
        self.published: dict[tuple[str, str], Artifact] = {}
        self.tagged: dict[tuple[str, str], str] = {}
        self.running: list[_Running] = []
        self.sent: set[tuple[str, str]] = set()
        self._reopen()

    def opened(self, root: Path) -> AbstractContextManager[Repository]:
        raise NotImplementedError(root)

    def taken_up(self, running: _Running) -> Push:
        raise NotImplementedError(running)

    def teardown(self) -> None:
        self._opened.close()
        self._stack.close()

    def _reopen(self) -> None:
        self._opened.close()
        self._opened = ExitStack()
        self.repository = self._opened.enter_context(self.opened(self._root))

    def _of(self, namespace: str) -> dict[str, Artifact]:
        return {name: made for (place, name), made in self.published.items() if place == namespace}

    @rule()
    def reopen(self) -> None:
        self._reopen()
        # A push is taken up by its id, by whoever knows it.
        for running in self.running:
            running.push = self.taken_up(running)

    @rule(namespace=st.sampled_from(_NAMESPACES), index=st.integers(0, 7), part=st.integers(0, 99))
    def push_part(self, namespace: str, index: int, part: int) -> None:
        made = _made()[index]
        running = _Running(self.repository.begin_push(made[0].fingerprint, namespace), namespace, made)
        self.running.append(running)
        self._offer(running)
        for digest in sorted(running.wanted)[: part % (len(running.wanted) + 1)]:
            self._put(running, digest)

    def _offer(self, running: _Running) -> list[str]:
        missing: list[str] = offer(running.push, running.made[0], running.made[1])
        held = {
            digest
            for manifest, records, _ in self._of(running.namespace).values()
            for digest in manifest.stored_chunks(records)
        }
        assert not held & set(missing), "a chunk of an artifact is said to be missing"
        unsent = {digest for digest in running.made[2] if (running.namespace, digest) not in self.sent}
        assert unsent <= set(missing), "a chunk that this namespace never sent is said to be there"
        running.wanted = set(missing)
        return missing

    def _put(self, running: _Running, digest: str) -> None:
        running.push.put(digest, running.made[2][digest])
        self.sent.add((running.namespace, digest))
        running.wanted.discard(digest)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), whole=st.booleans())
    def commit(self, data: st.DataObject, whole: bool) -> None:
        running = data.draw(st.sampled_from(self.running))
        missing = self._offer(running)
        if whole:
            for digest in missing:
                self._put(running, digest)
            missing = []
        try:
            info = running.push.commit(running.made[0])
        except ChunksMissing:
            assert missing, "nothing was missing"
            return
        assert not missing, f"committed without {missing}"
        assert info.id == running.made[0].id
        self.published[running.namespace, info.id] = running.made
        self.running.remove(running)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        running.push.abort()
        self.running.remove(running)
        try:
            running.push.offer(running.made[1])
        except PushNotFound:
            return
        raise AssertionError("an aborted push goes on")

    @rule(namespace=st.sampled_from(_NAMESPACES), index=st.integers(0, 7))
    def delete(self, namespace: str, index: int) -> None:
        name = _made()[index][0].id
        known = (namespace, name) in self.published
        try:
            report = self.repository.delete(name, namespace)
        except ArtifactNotFound:
            assert not known
            return
        assert known
        gone = sorted(tag for (place, tag), target in self.tagged.items() if place == namespace and target == name)
        assert sorted(report.tags) == gone
        del self.published[namespace, name]
        for tag in gone:
            del self.tagged[namespace, tag]

    @rule(namespace=st.sampled_from(_NAMESPACES), tag=st.sampled_from(_TAGS), index=st.integers(0, 7))
    def tag(self, namespace: str, tag: str, index: int) -> None:
        name = _made()[index][0].id
        try:
            self.repository.set_tag(namespace, tag, name)
        except ArtifactNotFound:
            assert (namespace, name) not in self.published
            return
        assert (namespace, name) in self.published
        self.tagged[namespace, tag] = name

    @rule(namespace=st.sampled_from(_NAMESPACES), tag=st.sampled_from(_TAGS))
    def delete_tag(self, namespace: str, tag: str) -> None:
        try:
            self.repository.delete_tag(namespace, tag)
        except TagNotFound:
            assert (namespace, tag) not in self.tagged
            return
        del self.tagged[namespace, tag]

    @rule(namespace=st.sampled_from(_NAMESPACES), index=st.integers(0, 7))
    def match(self, namespace: str, index: int) -> None:
        keys = [record.key for record in _made()[index][1]]
        stored = {record.key: record.stop for made in self._of(namespace).values() for record in made[1]}
        blocks = next((n for n, key in enumerate(keys) if key not in stored), len(keys))
        found = self.repository.match(namespace, keys)
        if not blocks:
            assert found is None
            return
        assert found is not None
        assert (found.blocks, found.tokens) == (blocks, stored[keys[blocks - 1]])
        holder = self._of(namespace)[found.artifact_id]
        assert [record.key for record in holder[1][:blocks]] == keys[:blocks]

    @rule(namespace=st.sampled_from(_NAMESPACES), data=st.data())
    def query(self, namespace: str, data: st.DataObject) -> None:
        least = data.draw(st.none() | st.integers(0, 60))
        text = data.draw(st.none() | st.sampled_from(_WORDS))
        size = data.draw(st.none() | st.sampled_from("01"))
        tag = data.draw(st.none() | st.sampled_from(_TAGS))
        annotations = {} if size is None else {"size": size}
        wanted = ArtifactQuery(
            namespace=namespace,
            min_tokens=least,
            text=text,
            annotations=annotations,
            tag=tag,
            limit=3,
            sort="token_count",
        )
        expected = {
            name
            for name, (manifest, _, _) in self._of(namespace).items()
            if manifest.token_count >= (least or 0)
            and text in (None, manifest.text)
            and annotations.items() <= manifest.annotations.items()
            and (tag is None or self.tagged.get((namespace, tag)) == name)
        }
        found: list[str] = []
        while True:
            page = self.repository.query(wanted)
            found += [info.id for info in page.items]
            assert page.count == len(expected)
            if page.next_cursor is None:
                break
            wanted = wanted.model_copy(update={"cursor": page.next_cursor})
        assert sorted(found) == sorted(expected)

    @rule()
    def reindex(self) -> None:
        report = self.repository.reindex()
        assert (report.artifacts, report.tags, report.corrupt) == (len(self.published), len(self.tagged), [])

    @rule(dry=st.booleans())
    def collect_garbage(self, dry: bool) -> None:
        report = self.repository.collect_garbage(grace_s=0, dry_run=dry)
        found = report.expired_pushes, report.artifacts, report.unreadable
        assert found == (0, 0, []), f"a collection reports {found}"
        if not dry:
            again = self.repository.collect_garbage(grace_s=0)
            assert not again.removed, f"a second collection finds {again.removed[:3]}"

    @invariant()
    def says_the_same(self) -> None:
        type(self).steps += 1
        for namespace in _NAMESPACES:
            own = self._of(namespace)
            tags = {tag: name for (place, tag), name in self.tagged.items() if place == namespace}
            assert {tag.name: tag.artifact_id for tag in self.repository.tags(namespace)} == tags
            page = self.repository.query(ArtifactQuery(namespace=namespace, limit=1000))
            assert {info.id: sorted(info.tags) for info in page.items} == {
                name: sorted(tag for tag, target in tags.items() if target == name) for name in own
            }
            stats = self.repository.stats(namespace)
            chunks = {
                d: s.size for manifest, records, _ in own.values() for d, s in manifest.stored_chunks(records).items()
            }
            blocks = {record.key for _, records, _ in own.values() for record in records}
            pushes = sum(running.namespace == namespace for running in self.running)
            assert (stats.artifacts, stats.tags, stats.running_pushes) == (len(own), len(tags), pushes)
            assert (stats.chunks, stats.unique_bytes, stats.blocks) == (len(chunks), sum(chunks.values()), len(blocks))
            for name, made in own.items():
                self._read_back(namespace, name, made)

    def _read_back(self, namespace: str, name: str, made: Artifact) -> None:
        manifest, records, contents = made
        assert self.repository.manifest(name, namespace).data == manifest.data
        assert self.repository.records(manifest, namespace) == records
        # One chunk and then the next, so that in the end all were read.
        held = list(manifest.stored_chunks(records).items())
        digest, spec = held[type(self).steps % len(held)]
        out = bytearray(spec.size)
        self.repository.read_chunk(name, namespace, digest, spec, memoryview(out))
        assert out == contents[digest]


class _Embedded(_Machine):
    @contextmanager
    def opened(self, root: Path) -> Iterator[Repository]:
        with open_repository(f"file://{root}") as repository:
            yield repository

    def taken_up(self, running: _Running) -> Push:
        assert isinstance(self.repository, LocalRepository)
        return self.repository.resume_push(running.push.id, running.namespace)


class _Http(_Machine):
    @contextmanager
    def opened(self, root: Path) -> Iterator[Repository]:
        with serving(root) as service, open_repository(service.url, cache="off") as repository:
            yield repository

    def taken_up(self, running: _Running) -> Push:
        assert isinstance(self.repository, HttpRepository)
        transport, reach = self.repository._transport, self.repository._reach
        return HttpPush(self.repository, transport, running.push.id, running.namespace, reach)


def model(_directory: Path, seed: int, *, runs: int, steps: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"runs": 2 * runs}
    for name, machine in ("embedded", _Embedded), ("http", _Http):
        machine.steps = 0
        configured = settings(
            max_examples=runs,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        try:
            seeded(seed)(get_state_machine_test(machine, settings=configured))()
        except KvgraftError as error:
            raise AssertionError(f"{name}: {error.code}: {error.message}; {' '.join(error.__notes__)}") from error
        figures[f"{name}_steps"] = machine.steps
    return figures


FAULTS = [
    Fault(
        "model",
        "random operations, embedded and over HTTP: after each of them repository and model agree",
        model,
        short={"runs": 2, "steps": 12},
        full={"runs": 200, "steps": 50},
    )
]
