"""Stores and databases that fail at any call."""

from __future__ import annotations

import errno
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from pushing import Artifact, push
from sqlalchemy import Engine, event

from repo_service.client.mirror import mirror
from repo_service.domain.errors import Corrupt, KvgraftError, NotFound, RepositoryError, StorageFull, Unavailable
from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.domain.policy import Policy
from repo_service.domain.repository import Repository
from repo_service.storage import LocalStore, local
from tests.fault.damage import Opened, made
from tests.fault.kills import Calling
from tests.fault.suite import Fault

# What fails: a store's method before it did anything, or after it did all, a call of the operating
# system by the store, a statement or commit of the database.
LAYERS = ("store", "answer", "os", "sql")

KEPT, DOOMED, NEW = 1, 2, 3


def what(number: int) -> Artifact:
    return made(number, 20, 16)


class Breakage:
    """Counts the calls of each layer, and lets the Nth of one fail, once or from then on."""

    def __init__(self, layer: str = "", nth: int = 0, *, sticky: bool = False) -> None:
        self.fired = False
        self.armed = False
        self.counts = dict.fromkeys(LAYERS, 0)
        self._layer, self._nth, self._sticky = layer, nth, sticky
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self._layer} call {self._nth} fails {'from then on' if self._sticky else 'once'}"

    def call(self, layer: str) -> None:
        with self._lock:
            if not self.armed:
                return
            self.counts[layer] += 1
            beyond = self.counts[layer] - self._nth
            if layer != self._layer or beyond < 0 or (beyond > 0 and not self._sticky):
                return
            self.fired = True
        raise self._error()

    def _error(self) -> Exception:
        full = self._nth % 2 == 0
        if self._layer == "os":
            return OSError(errno.ENOSPC if full else errno.EIO, "injected")
        if self._layer == "sql":
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
            return error
        return StorageFull("injected") if full else Unavailable("injected")

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(local, "os", Calling(self._breaking_os)))
            for name in ("get", "read_into", "put", "put_if_absent", "delete", "exists", "age_s"):
                method = getattr(LocalStore, name)
                stack.enter_context(mock.patch.object(LocalStore, name, self._breaking_method(method)))

            def statement(*_: Any) -> None:
                self.call("sql")

            for moment in ("before_cursor_execute", "begin", "commit"):
                event.listen(Engine, moment, statement)
                stack.callback(event.remove, Engine, moment, statement)
            yield

    def _breaking_os(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.call("os")
            return function(*arguments, **options)

        return call

    def _breaking_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: LocalStore, *arguments: Any, **options: Any) -> Any:
            self.call("store")
            result = method(store, *arguments, **options)
            self.call("answer")
            return result

        return call


@dataclass(frozen=True)
class Operation:
    """What is tried, and what of it must be there afterwards; with ``lost``, on opening a repository without those files."""

    name: str
    run: Callable[[Repository], object]
    there: frozenset[int]
    tags: Mapping[str, int]
    lost: str | None = None


def operations(source: Repository) -> list[Operation]:
    """What a repository does; ``source`` holds all that is ever pushed, for a mirror."""
    ids = {number: what(number)[0].id for number in (KEPT, DOOMED, NEW)}
    tags = {"kept": KEPT, "doomed": DOOMED}
    both = frozenset({KEPT, DOOMED})
    return [
        Operation("push", lambda r: push(r, what(NEW)), both | {NEW}, tags),
        Operation("delete", lambda r: r.delete(ids[DOOMED], DEFAULT_NAMESPACE), frozenset({KEPT}), {"kept": KEPT}),
        Operation(
            "move a tag", lambda r: r.set_tag(DEFAULT_NAMESPACE, "kept", ids[DOOMED]), both, tags | {"kept": DOOMED}
        ),
        Operation("make a tag", lambda r: r.set_tag(DEFAULT_NAMESPACE, "new", ids[KEPT]), both, tags | {"new": KEPT}),
        Operation("delete a tag", lambda r: r.delete_tag(DEFAULT_NAMESPACE, "doomed"), both, {"kept": KEPT}),
        Operation("collect garbage", lambda r: r.collect_garbage(grace_s=0), both, tags),
        Operation("reindex", lambda r: r.reindex(), both, tags),
        Operation("retain", _retain, frozenset({KEPT}), {"kept": KEPT}),
        Operation("scrub", lambda r: r.scrub(), both, tags),
        Operation("mirror", lambda r: mirror(source, r, workers=1), both | {NEW}, tags | {"new": NEW}),
        Operation("open", lambda r: r.info(), both, tags, lost=""),
        Operation("open without an index", lambda r: r.info(), both, tags, lost="index.sqlite*"),
    ]


def _retain(repository: Repository) -> None:
    repository.set_policy(DEFAULT_NAMESPACE, Policy(keep_tags=["kept"], max_bytes=1))
    repository.collect_garbage(grace_s=0)
    repository.set_policy(DEFAULT_NAMESPACE, Policy())


def nth_call_fails(directory: Path, seed: int, *, sample: int) -> dict[str, Any]:
    template = directory / "template"
    tagged = {"kept": KEPT, "doomed": DOOMED, "new": NEW}
    with Opened(template) as opened:
        _fill(opened.repository, tagged, KEPT, DOOMED)
        _abandon(opened.repository, 9)
        opened.expire_pushes()
    with Opened(directory / "source") as source:
        _fill(source.repository, tagged, KEPT, DOOMED, NEW)
        return _every_call(directory, template, operations(source.repository), random.Random(seed), sample)


def _every_call(
    directory: Path, template: Path, tried: Sequence[Operation], generator: random.Random, sample: int
) -> dict[str, Any]:
    calls: dict[str, dict[str, int]] = {}
    faults: list[tuple[Operation, str, int, bool]] = []
    for operation in tried:
        counting = Breakage()
        _trial(directory, template, operation, counting, reopen=True)
        calls[operation.name] = counting.counts
        for layer, count in counting.counts.items():
            faults += [(operation, layer, nth, sticky) for nth in range(1, count + 1) for sticky in (False, True)]
    if sample:
        faults = generator.sample(faults, sample)
    fired = 0
    for operation, layer, nth, sticky in faults:
        fault = Breakage(layer, nth, sticky=sticky)
        _trial(directory, template, operation, fault, reopen=generator.random() < 0.5)
        fired += fault.fired
    return {"trials": len(faults), "fired": fired, "calls": calls, "partly_visible": 0, "retries_failed": 0}


def _fill(repository: Repository, tagged: Mapping[str, int], *numbers: int) -> None:
    for name, number in tagged.items():
        if number in numbers:
            info, _ = push(repository, what(number))
            repository.set_tag(DEFAULT_NAMESPACE, name, info.id)


def _abandon(repository: Repository, number: int) -> None:
    manifest, records, contents = made(number, 40)
    running = repository.begin_push(manifest.fingerprint, DEFAULT_NAMESPACE)
    for digest in running.offer(records)[:4]:
        running.put(digest, contents[digest])


def _trial(directory: Path, template: Path, operation: Operation, fault: Breakage, *, reopen: bool) -> None:
    """Let one call fail, look, try again without the fault, look again."""
    root = directory / "trial"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    known = {what(number)[0].id: what(number) for number in (KEPT, DOOMED, NEW)}
    must = {what(number)[0].id for number in operation.there - {NEW}}
    try:
        with fault.installed():
            if operation.lost is not None:
                for path in root.glob(operation.lost) if operation.lost else ():
                    path.unlink()
                fault.armed = True
                # What can't be read while a repository is opened is looked for by the next to open it.
                reopen = True
            try:
                opened = Opened(root)
            except (RepositoryError, Corrupt):
                assert operation.lost is not None, "it can't be opened"
                assert fault.fired, "it can't be opened, without a fault"
                fault.armed = False
            else:
                with opened:
                    fault.armed = True
                    failed = _attempt(operation, opened.repository)
                    fault.armed = False
                    assert fault.fired or not failed, "it failed without a fault"
                    opened.check(known, must=() if operation.lost is not None else must)
                    if not reopen:
                        _retry(operation, opened, known)
        if reopen:
            with Opened(root) as opened:
                opened.check(known, must=must)
                opened.check_index()
                _retry(operation, opened, known)
    except (AssertionError, KvgraftError) as error:
        raise AssertionError(f"{operation.name}, {fault}{', reopened' if reopen else ''}: {error}") from error


def _attempt(operation: Operation, repository: Repository) -> bool:
    try:
        operation.run(repository)
    except (RepositoryError, Corrupt):
        return True
    return False


def _retry(operation: Operation, opened: Opened, known: Mapping[str, Artifact]) -> None:
    with suppress(NotFound):
        operation.run(opened.repository)
    ids = {number: what(number)[0].id for number in (KEPT, DOOMED, NEW)}
    must = {ids[number] for number in operation.there}
    opened.check(known, must=must)
    assert opened.visible() == must, f"after the retry there are {opened.visible()}, not {must}"
    found = {tag.name: tag.artifact_id for tag in opened.repository.tags(DEFAULT_NAMESPACE)}
    wanted = {name: ids[number] for name, number in operation.tags.items()}
    assert found == wanted, f"after the retry the tags are {found}, not {wanted}"
    opened.check_index()
    opened.collect()
    # Copies of what a scrub found unreadable are kept for whoever looks into it.
    shutil.rmtree(opened.root / "quarantine", ignore_errors=True)
    opened.check_files()


FAULTS = [
    Fault(
        "nth-call-fails",
        "whichever call of the store or the database fails, artifacts are whole or absent, and a retry succeeds",
        nth_call_fails,
        short={"sample": 12},
        full={"sample": 0},
    ),
]
