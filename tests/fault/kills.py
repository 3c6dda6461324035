"""kill -9 at seeded points of a push, a garbage collection and a reindex.

A point is a moment, or a call: of the operating system by the store, of the store, of the index, or of
SQLite, just before it or just after. A process of its own is forked for each and killed there.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from pushing import Artifact, push
from sqlalchemy import Engine, event, update

from repo_service.client import open_repository
from repo_service.domain.names import DEFAULT_NAMESPACE
from repo_service.domain.repository import Repository
from repo_service.index import Index
from repo_service.index.models import PushRecord
from repo_service.storage import LocalStore, local
from tests.fault.damage import KINDS, Opened, made
from tests.fault.suite import Fault

OS_CALLS = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir")
TAG = "latest"

_KEPT = 4


Point = tuple[str, int]
"""A kind of call, and which of that kind; odd ones are before a call and even ones after it."""


class Calls:
    """Counts the calls of this process by kind, and kills it at one of them."""

    seen: ClassVar[list[str]] = []
    counts: ClassVar[Counter[str]] = Counter()
    fatal: Point | None = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def start(cls, fatal: Point | None) -> None:
        cls.seen, cls.counts, cls.fatal = [], Counter(), fatal

    @classmethod
    def tick(cls, kind: str) -> None:
        with cls._lock:
            cls.seen.append(kind)
            cls.counts[kind] += 1
            if (kind, cls.counts[kind]) == cls.fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    @classmethod
    def ticking(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with a point before it and one after it."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            kind = f"{function.__qualname__} {_place(arguments)}"
            cls.tick(kind)
            result = function(*arguments, **options)
            cls.tick(kind)
            return result

        return call

    @classmethod
    def count_all(cls) -> None:
        local.os = Calling(cls.ticking)  # type: ignore[assignment, attr-defined]
        for name in ("get", "put", "put_if_absent", "delete"):
            setattr(LocalStore, name, cls.ticking(getattr(LocalStore, name)))
        for name, method in list(vars(Index).items()):
            if not name.startswith("_") and callable(method):
                setattr(Index, name, cls.ticking(method))
        for moment in ("before_cursor_execute", "after_cursor_execute"):
            event.listen(Engine, moment, lambda *arguments: cls.tick(f"SQL {arguments[2][:60]}"))
        event.listen(Engine, "commit", lambda _: cls.tick("SQL COMMIT"))


def _place(arguments: Iterable[Any]) -> str:
    """The kind of file that a call is about."""
    paths = [argument for argument in arguments if isinstance(argument, str)]
    return next((kind for kind in ("tmp", *KINDS) for path in paths if kind in path.split("/")), "")


class Calling:
    """The module ``os`` as another module sees it, some of its functions wrapped."""

    def __init__(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], names: Sequence[str] = OS_CALLS
    ) -> None:
        self._wrapped = {name: wrap(getattr(os, name)) for name in names}

    def __getattr__(self, name: str) -> Any:
        return self._wrapped.get(name) or getattr(os, name)


@dataclass(frozen=True)
class Job:
    """What a child does; it tells what was acknowledged, in order."""

    kind: str
    number: int = 0
    tokens: int = 0
    artifact_id: str = ""

    def run(self, repository: Repository, acknowledge: Callable[[str], None]) -> None:
        if self.kind == "push":
            info, _ = push(repository, made(self.number, self.tokens, 32))
            acknowledge("pushed")
            repository.set_tag(DEFAULT_NAMESPACE, TAG, info.id)
            acknowledge("tagged")
        elif self.kind == "gc":
            repository.delete(self.artifact_id, DEFAULT_NAMESPACE)
            acknowledge("deleted")
            repository.collect_garbage(grace_s=0)
            acknowledge("collected")
        elif self.kind == "reindex":
            repository.reindex()
            acknowledge("rebuilt")
        else:
            # Opening it was the job.
            acknowledge("opened")


@dataclass
class Outcome:
    """How a child fared."""

    acknowledged: list[str] = field(default_factory=list)
    killed: bool = False
    calls: list[str] = field(default_factory=list)
    seconds: float = 0.0


def nursery(root: Path, orders: Connection) -> None:
    """Fork a child for each order (job, call to die at, moment to die at) until None comes."""
    Calls.count_all()
    while (order := orders.recv()) is not None:
        job, at_point, at_moment = order
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _live(root, job, at_point, writer)
        os.close(writer)
        if at_moment is not None:
            time.sleep(at_moment)
            os.kill(pid, signal.SIGKILL)
        outcome = Outcome()
        with os.fdopen(reader) as lines:
            # A last line without an end is of a child that was killed while it wrote.
            for line in (line for line in lines if line.endswith("\n")):
                match json.loads(line):
                    case str(what):
                        outcome.acknowledged.append(what)
                    case [list(calls), float(seconds)]:
                        outcome.calls, outcome.seconds = calls, seconds
        _, status = os.waitpid(pid, 0)
        outcome.killed = os.WIFSIGNALED(status)
        orders.send(outcome if outcome.killed or status == 0 else f"the child ended with the status {status}")


def _live(root: Path, job: Job, at_point: Point | None, writer: int) -> None:
    status = 1
    try:
        Calls.start(at_point)
        began = time.monotonic()
        with open_repository(f"file://{root}") as repository:
            job.run(repository, lambda what: _tell(writer, what))
        _tell(writer, [Calls.seen, time.monotonic() - began])
        status = 0
    finally:
        os._exit(status)


def _tell(writer: int, what: Any) -> None:
    os.write(writer, json.dumps(what).encode() + b"\n")


class Children:
    """Runs jobs in processes that may be killed."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders

    def run(self, job: Job, at_point: Point | None, at_moment: float | None) -> Outcome:
        self._orders.send((job, at_point, at_moment))
        outcome = self._orders.recv()
        assert isinstance(outcome, Outcome), f"{job}: {outcome}"
        return outcome


@contextmanager
def children(root: Path) -> Iterator[Children]:
    """Forks come from a fresh process: this one may have threads, and torch."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=nursery, args=(root, there), daemon=False)
    process.start()
    there.close()
    try:
        yield Children(here)
    finally:
        here.send(None)
        process.join(30)
        here.close()


class Trial:
    """One repository, its children killed again and again, judged after each."""

    def __init__(self, root: Path, seed: int) -> None:
        self.generator = random.Random(seed)
        self.root = root
        self.known: dict[str, Artifact] = {}
        self.must: set[str] = set()
        self.tagged: set[str | None] = {None}
        self.acknowledged = self.restart_s = 0.0
        self._number = 0

    def new(self, tokens: int) -> tuple[int, int, str]:
        """Number, tokens and id of the next artifact; now and then of one whose push was cut."""
        if self._number == 0 or self.generator.random() > 0.3:
            self._number += 1
        number = self._number
        tokens += 20 * (number % 8)
        what = made(number, tokens, 32)
        self.known[what[0].id] = what
        return number, tokens, what[0].id

    def push(self, repository: Repository) -> str:
        number, tokens, artifact_id = self.new(20)
        push(repository, made(number, tokens, 32))
        self.must.add(artifact_id)
        return artifact_id

    def judge(self, where: str) -> None:
        try:
            with Opened(self.root) as opened:
                self.restart_s = max(self.restart_s, opened.seconds)
                opened.check(self.known, must=self.must)
                self._check_tag(opened.repository)
                opened.check_index()
                opened.collect()
                left = [name for name in opened.files() if name.startswith("tmp/")]
                assert not left, f"temp files are left: {left[:3]}"
                opened.check_files()
                opened.check(self.known, must=self.must)
                self._thin_out(opened)
        except AssertionError as error:
            raise AssertionError(f"killed {where}: {error}") from error

    def _check_tag(self, repository: Repository) -> None:
        found = next((tag.artifact_id for tag in repository.tags(DEFAULT_NAMESPACE)), None)
        assert found in self.tagged, f"the tag points to {found}; it was acknowledged for one of {self.tagged}"
        self.tagged = {found}

    def _thin_out(self, opened: Opened) -> None:
        self.must = opened.visible()
        for artifact_id in sorted(self.must - self.tagged)[_KEPT:]:
            opened.repository.delete(artifact_id, DEFAULT_NAMESPACE)
            self.must.discard(artifact_id)
        self.known = {name: what for name, what in self.known.items() if name in self.must}

    def job(self, kind: str) -> Job:
        """Prepare what a job works on."""
        if kind == "push":
            number, tokens, artifact_id = self.new(100)
            return Job(kind, number, tokens, artifact_id)
        with Opened(self.root) as opened:
            victim, other = self.push(opened.repository), self.push(opened.repository)
            opened.repository.set_tag(DEFAULT_NAMESPACE, TAG, victim)
            self.tagged = {victim}
            self._abandon(opened)
            if kind == "reindex" and other in opened.visible() and victim != other:
                opened.repository.delete(other, DEFAULT_NAMESPACE)
                self.must.discard(other)
        if kind == "rebuild":
            for path in self.root.glob("index.sqlite*"):
                path.unlink()
        return Job(kind, artifact_id=victim)

    def _abandon(self, opened: Opened) -> None:
        """A push that ends in the middle and has expired."""
        manifest, records, contents = made(self.generator.randrange(10**9), 40, 16)
        name = f"abandoned{self.generator.randrange(10**9)}"
        opened.index.begin_push(name, DEFAULT_NAMESPACE, manifest.fingerprint, datetime.now(UTC) + timedelta(hours=1))
        running = opened.repository.resume_push(name, DEFAULT_NAMESPACE)
        for digest in running.offer(records)[:5]:
            running.put(digest, contents[digest])
        with opened.index._database.write() as connection:
            connection.execute(update(PushRecord).where(PushRecord.name == name).values(expires_at=1))

    def settle(self, job: Job, outcome: Outcome) -> None:
        """Take note of what a job may have changed and what it was acknowledged."""
        self.acknowledged += len(outcome.acknowledged)
        if job.kind == "push":
            if "pushed" in outcome.acknowledged:
                self.must.add(job.artifact_id)
                self.tagged.add(job.artifact_id)
            if "tagged" in outcome.acknowledged:
                self.tagged = {job.artifact_id}
        elif job.kind == "gc":
            self.must.discard(job.artifact_id)
            self.tagged.add(None)
            if "deleted" in outcome.acknowledged:
                self.known.pop(job.artifact_id)
                self.tagged = {None}


def choose(calls: Sequence[str], generator: random.Random) -> Point:
    """Any call, any kind of call, or any of those about what makes artifacts and tags visible."""
    if generator.random() < 0.3:
        at = generator.randrange(len(calls))
        return calls[at], calls[: at + 1].count(calls[at])
    kinds = sorted(set(calls))
    deciding = [kind for kind in kinds if kind.endswith((" entries", " tags"))]
    kind = generator.choice(deciding if deciding and generator.random() < 0.5 else kinds)
    return kind, generator.randint(1, calls.count(kind))


def kill(directory: Path, seed: int, *, kind: str, points: int) -> dict[str, Any]:
    root = directory / "repository"
    with Opened(root), children(root) as run:
        trial = Trial(root, seed)
        killed = unharmed = 0
        # What a job calls and how long it takes, from a run that nothing happened to.
        calls: list[str] = []
        seconds = 0.0
        while killed < points:
            assert unharmed < 2 * points + 20, "children end before their point"
            job = trial.job(kind)
            at_point: Point | None = None
            at_moment: float | None = None
            if (killed + unharmed) % 20 > 0:
                if trial.generator.random() < 0.75:
                    at_point = choose(calls, trial.generator)
                else:
                    at_moment = trial.generator.uniform(0, seconds)
            outcome = run.run(job, at_point, at_moment)
            if outcome.calls:
                calls, seconds = outcome.calls, outcome.seconds
            killed += outcome.killed
            unharmed += not outcome.killed
            trial.settle(job, outcome)
            # One in four is not looked at before the next: a crash may find the traces of another.
            if trial.generator.random() < 0.75 or killed == points:
                where = f"at {at_point}" if at_point else f"after {at_moment} s of {seconds}"
                trial.judge(f"{where} of {job}, acknowledged {outcome.acknowledged}")
    return {
        "points": killed,
        "ended_unharmed": unharmed,
        "calls_of_one": len(calls),
        "kinds_of_calls": len(set(calls)),
        "acknowledged": int(trial.acknowledged),
        "lost": 0,
        "corrupt": 0,
        "temp_files_left": 0,
        "restart_s": round(trial.restart_s, 4),
    }


def _fault(kind: str, what: str, *, short: int, full: int) -> Fault:
    return Fault(
        f"kill-{kind}",
        f"kill -9 in {what}: nothing acknowledged is lost, what is seen is whole, the index agrees, nothing is left over",
        functools.partial(kill, kind=kind),
        short={"points": short},
        full={"points": full},
    )


FAULTS = [
    _fault("push", "a push", short=6, full=500),
    _fault("gc", "a deletion and garbage collection", short=5, full=200),
    _fault("reindex", "a reindex", short=5, full=100),
    _fault("rebuild", "opening a repository whose index was lost", short=5, full=100),
]
