"""What commands that also work with a model do without one: look up token ids, hash what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repo_service.cli import output, progress

if TYPE_CHECKING:
    from repo_service.domain.repository import Repository
    from repo_service.domain.views import Match


def longest_prefix(repository: Repository, namespace: str, fingerprint_id: str, ids: Sequence[int]) -> Match | None:
    """The longest stored prefix of token ids under a fingerprint.

    The block size is that of the fingerprint's artifacts; where there are none, nothing can match.
    """
    from repo_service.domain.record import block_keys
    from repo_service.domain.schedule import canonical_steps
    from repo_service.domain.views import ArtifactQuery

    asked = ArtifactQuery.model_validate({"namespace": namespace, "fingerprint_id": fingerprint_id, "limit": 1})
    stored = repository.query(asked).items
    if not stored:
        return None
    size = stored[0].block_tokens
    return repository.match(namespace, block_keys(fingerprint_id, ids, canonical_steps(0, len(ids), size), size))


def check(repository: Repository, ref: str, namespace: str, as_json: bool) -> bool:
    """Hash everything an artifact holds, where it is, and print the result; returns whether it is whole."""
    with progress.shown("hashing what is stored"):
        report = repository.check(ref, namespace)
    if as_json:
        output.print_json(report.model_dump(mode="json"))
    else:
        verdict = "whole" if report.ok else f"{output.count(len(report.corrupt), 'object')} lost or altered"
        print(f"{report.artifact_id}: {output.count(report.chunks, 'chunk')}, {output.size(report.bytes)}: {verdict}")
        for digest in report.corrupt:
            print(f"lost or altered: {digest}")
    return report.ok
