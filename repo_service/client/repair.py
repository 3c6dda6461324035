"""Healing what a scrub found, from a repository that has it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pydantic import Field

from repo_service.client.transfer import copy_artifact
from repo_service.domain.errors import KvgraftError
from repo_service.domain.repository import Repository
from repo_service.domain.views import View


class Repair(View):
    """What became of one damaged artifact."""

    namespace: str
    artifact_id: str
    healed: bool = Field(description="Read whole and verified afterwards.")
    bytes_sent: int = 0
    reason: str | None = Field(None, description="Why not.")


def repair(
    source: Repository,
    destination: Repository,
    artifacts: Iterable[tuple[str, str]],
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Repair]:
    """Push damaged artifacts, by namespace and id, from where they are whole; only what is missing is sent.

    An artifact that can't be healed is named in the result, and the others go on.
    """
    wanted = list(artifacts)
    repairs: list[Repair] = []
    for namespace, artifact_id in wanted:
        repairs.append(_repair(source, destination, namespace, artifact_id))
        if progress is not None:
            progress("artifacts", len(repairs), len(wanted))
    return repairs


def _repair(source: Repository, destination: Repository, namespace: str, artifact_id: str) -> Repair:
    sent = 0
    try:
        sent = copy_artifact(source, destination, artifact_id, namespace, namespace, carry_tag=False).bytes_sent
        left = destination.check(artifact_id, namespace).corrupt
        reason = f"{left[0]} is still damaged" if left else None
    except KvgraftError as error:
        reason = f"{error.code}: {error.message}"
    return Repair(namespace=namespace, artifact_id=artifact_id, healed=reason is None, bytes_sent=sent, reason=reason)
