"""Policies of namespaces: kept in the store, read when they are needed, applied by garbage collection."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from repo_service.domain.errors import UNREADABLE, ArtifactNotFound, DocumentCorrupt
from repo_service.domain.names import check_namespace
from repo_service.domain.policy import Policy, policy_of
from repo_service.domain.views import ArtifactInfo
from repo_service.index import Index, LetGo
from repo_service.services.documents import POLICIES, PolicyDocument, policy_key, policy_place, seal, unseal
from repo_service.services.withdraw import withdraw
from repo_service.storage import Store

_log = logging.getLogger(__name__)


class _Kept(Exception):
    """An artifact is to stay after all."""


class Clock:
    """The time that ages are measured by.

    A clock that is set back makes artifacts younger, which lets none go. One that is set forward while
    the process runs is believed after a day, lest what was just published looks old.
    """

    BELIEVED_AFTER_S = 24 * 3600.0
    DRIFT_S = 60.0

    def __init__(self, wall: Callable[[], float] = time.time, running: Callable[[], float] | None = None) -> None:
        # Goes on while the machine sleeps.
        boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        self._wall = wall
        self._running = running or (lambda: time.clock_gettime(boot))
        self._offset = self._wall() - self._running()
        self._ahead_since: float | None = None

    def now(self) -> datetime:
        running = self._running()
        offset = self._wall() - running
        if offset - self._offset <= self.DRIFT_S:
            self._offset, self._ahead_since = offset, None
        elif self._ahead_since is None:
            self._ahead_since = running
        elif running - self._ahead_since >= self.BELIEVED_AFTER_S:
            self._offset, self._ahead_since = offset, None
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=running + self._offset)


def read_policy(store: Store, namespace: str) -> Policy:
    """The policy of a namespace; without one, nothing is let go or refused.

    Raises
    ------
    MalformedName, DocumentCorrupt
    """
    key = policy_key(namespace)
    try:
        data = store.get(key)
        return Policy() if data is None else unseal(key, data, PolicyDocument, policy_place).policy
    except UNREADABLE as error:
        raise DocumentCorrupt(
            f"the policy of the namespace {namespace} can't be read: {error.message}; set it anew (kvgraft retain "
            "--clear takes it away)",
            key=key,
        ) from None


def write_policy(store: Store, namespace: str, policy: Policy) -> Policy:
    """Give a namespace a policy, whatever it had; an empty one leaves no document.

    Raises
    ------
    MalformedName, InvalidInput
    """
    key = policy_key(check_namespace(namespace))
    policy = policy_of(dict(policy))
    if policy == Policy():
        store.delete(key)
    else:
        store.put(key, seal(PolicyDocument(namespace=namespace, policy=policy)))
    return policy


def stored_policies(store: Store) -> Iterator[tuple[str, PolicyDocument | None]]:
    """Every policy of the store with its key, None for one that can't be read."""
    for key in store.list(POLICIES):
        try:
            data = store.get(key)
            document = None if data is None else unseal(key, data, PolicyDocument, policy_place)
        except UNREADABLE:
            yield key, None
            continue
        if document is not None:
            yield key, document


def apply_policies(
    store: Store, index: Index, now: datetime, gone: Callable[[LetGo], None], *, dry_run: bool
) -> tuple[list[LetGo], list[str]]:
    """Unpublish what the rules of all namespaces let go of.

    Parameters
    ----------
    gone
        Called with each artifact once it is unpublished, or, in a dry run, would be.

    Returns
    -------
    tuple
        The artifacts, and the keys of policies that can't be read, under which nothing is let go.
    """
    unreadable: list[str] = []
    all_gone: list[LetGo] = []
    for key, document in stored_policies(store):
        if document is None:
            _log.error("%s can't be read: its namespace keeps everything until the policy is set anew", key)
            unreadable.append(key)
            continue
        if not document.policy.lets_go:
            continue
        for artifact in index.let_go(document.namespace, document.policy, now):
            try:
                if not dry_run:
                    _withdraw(store, index, artifact, document.policy)
            except (ArtifactNotFound, _Kept):
                continue
            all_gone.append(artifact)
            gone(artifact)
    return all_gone, unreadable


def _withdraw(store: Store, index: Index, chosen: LetGo, policy: Policy) -> None:
    """Unpublish an artifact unless, since it was chosen, it was used or pinned or the policy changed."""

    def agree(artifact: ArtifactInfo) -> None:
        if artifact.last_used_at != chosen.last_used_at or policy.pins(artifact.tags):
            raise _Kept
        try:
            if read_policy(store, chosen.namespace) != policy:
                raise _Kept
        except DocumentCorrupt:
            raise _Kept from None

    withdraw(store, index, index.artifact(chosen.namespace, chosen.id), agree)
