"""Work that the service does by itself, on threads of its own."""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import WatchedFileHandler

from repo_service.domain.errors import InvalidInput, KvgraftError
from repo_service.services.audit import audit
from repo_service.services.repository import LocalRepository
from repo_service.settings import Settings

_log = logging.getLogger(__name__)

# Of the collections of garbage, every tenth goes through all of the store; the others remove what rows let go of.
_SWEEP_EVERY = 10


@contextmanager
def running(repository: LocalRepository, settings: Settings) -> Iterator[None]:
    """Collect garbage and scrub on their schedules until the block ends; a collection that runs then is finished."""
    ended = threading.Event()
    collections = 0

    def collect() -> None:
        nonlocal collections
        collections += 1
        sweep = collections % _SWEEP_EVERY == 0
        for key in repository.collect_garbage(grace_s=settings.gc_grace_seconds, sweep=sweep).unreadable:
            _log.error("%s can't be read; until it can, what the index does not know is not collected", key)

    def scrub() -> None:
        rate = settings.scrub_mib_per_second * 2**20
        report = repository.scrub(bytes_per_s=rate, ended=ended.wait)
        for item in report.damage:
            _log.error("%s %s is damaged%s", item.kind, item.name, "; it was written again" if item.healed else "")
        if report.damaged > len(report.damage):
            _log.error("%d more objects are damaged", report.damaged - len(report.damage))

    jobs = [("gc", settings.gc_seconds, collect), ("scrub", settings.scrub_seconds, scrub)]
    threads = [
        threading.Thread(target=_repeat, args=(repository, ended, name, seconds, job), name=f"kvgraft-{name}")
        for name, seconds, job in jobs
        if seconds
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def audited(settings: Settings) -> Iterator[None]:
    """Write the audit log to the file of ``settings``, or to standard error.

    Raises
    ------
    InvalidInput
        If the file can't be written to.
    """
    handler: logging.Handler
    if settings.audit_log:
        try:
            # Goes on in a new file when the old one was moved away.
            handler = WatchedFileHandler(settings.audit_log, encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"the audit log {settings.audit_log} can't be written: {error.strerror}") from None
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    audit.addHandler(handler)
    audit.setLevel(logging.INFO)
    audit.propagate = False
    try:
        yield
    finally:
        audit.removeHandler(handler)
        audit.propagate = True
        handler.close()


def _repeat(
    repository: LocalRepository, ended: threading.Event, name: str, seconds: float, job: Callable[[], None]
) -> None:
    # Services that were started together don't work together.
    wait = seconds * random.uniform(0.5, 1)
    while not ended.wait(wait):
        wait = seconds
        try:
            # Another service on the same index may be at it.
            with repository.alone(name) as ours:
                if ours:
                    job()
        except KvgraftError as error:
            _log.warning("%s could not be done: %s: %s", name, error.code, error.message)
        except Exception:
            _log.exception("%s could not be done", name)
