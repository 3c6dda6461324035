"""The audit log: who did what, when, and how it ended."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from places import Place
from pushing import push
from synthetic import artifact
from test_api import Service, serving

from repo_service.api.jobs import audited
from repo_service.client import open_repository
from repo_service.domain.access import Scope
from repo_service.domain.errors import AccessDenied, ChunksMissing
from repo_service.domain.policy import Policy
from repo_service.services.audit import audit, record
from repo_service.settings import Settings

pytestmark = pytest.mark.everywhere


@pytest.fixture
def service(root: Place) -> Iterator[Service]:
    with serving(root, auth="tokens") as running:
        yield running


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What callers did; what was removed has lines of its own."""
    found = [json.loads(r.getMessage()) for r in caplog.records if r.name == audit.name]
    return [line for line in found if "did" in line]


def test_every_act_has_a_line_that_says_who_did_what_and_how_it_ended(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    made = artifact(range(20))
    artifact_id = made[0].id
    token = service.repository.create_access_token(Scope.ADMIN, ["*"])
    with caplog.at_level(logging.INFO, audit.name), open_repository(service.url, token.token) as repository:
        push(repository, made, "team-a")
        repository.set_tag("team-a", "latest", artifact_id)
        repository.manifest("latest", "team-a")
        repository.records(made[0], "team-a")
        repository.check(artifact_id, "team-a")
        repository.set_policy("team-a", Policy(max_age_s=60))
        repository.delete_tag("team-a", "latest")
        repository.delete(artifact_id, "team-a")
        repository.collect_garbage(dry_run=True)
        repository.scrub()
        repository.reindex()
        other = repository.create_access_token(Scope.READ, ["team-b"])
        repository.revoke_access_token(other.info.id)
        service.error("DELETE", f"/v1/tokens/{other.token}", Authorization=f"Bearer {token.token}")
    written = lines(caplog)
    mistaken = written.pop()
    assert mistaken["what"] == {"token_id": f"kvg_{other.info.id}_…"}
    assert mistaken["outcome"] == "malformed_name"
    policy = Policy(max_age_s=60).model_dump(mode="json")
    push_id = written[0]["what"].pop("push_id")
    assert len(push_id) == 32
    assert [(line["did"], line.get("namespace"), line["what"]) for line in written] == [
        ("push", "team-a", {"artifact_id": artifact_id}),
        ("tag", "team-a", {"name": "latest", "artifact_id": artifact_id}),
        ("pull", "team-a", {"ref": artifact_id, "artifact_id": artifact_id}),
        ("set policy", "team-a", {"policy": policy}),
        ("untag", "team-a", {"name": "latest"}),
        ("delete", "team-a", {"artifact_id": artifact_id}),
        ("gc", None, {"grace_ms": 3600000, "dry_run": True}),
        ("scrub", None, {}),
        ("reindex", None, {}),
        ("create token", None, {"scope": "read", "namespaces": ["team-b"], "token_id": other.info.id}),
        ("revoke token", None, {"token_id": other.info.id}),
    ]
    for line in written:
        assert line["who"] == {"token": token.info.id, "address": "127.0.0.1"}
        assert line["outcome"] == "done"
        assert abs(datetime.now(UTC) - datetime.fromisoformat(line["at"])) < timedelta(minutes=5)
    assert other.token not in caplog.text
    assert token.token not in caplog.text


def test_what_was_refused_has_a_line_with_the_code(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    made = artifact(range(20))
    writer = service.repository.create_access_token(Scope.WRITE, ["team-a"])
    with caplog.at_level(logging.INFO, audit.name), open_repository(service.url, writer.token) as repository:
        with suppress(AccessDenied):
            repository.delete(made[0].id, "team-a")
        with suppress(AccessDenied):
            repository.set_tag("team-b", "latest", made[0].id)
        running = repository.begin_push(made[0].fingerprint, "team-a")
        running.offer(made[1])
        with suppress(ChunksMissing):
            running.commit(made[0])
        service.error("POST", "/v1/gc", b"{}", Authorization=f"Bearer {writer.token}", X_Request_Id="a-request")
        service.error("GET", "/v1/artifacts/none/manifest")
    written = lines(caplog)
    assert [(line["did"], line["outcome"]) for line in written] == [
        ("delete", "access_denied"),
        ("tag", "access_denied"),
        ("push", "chunks_missing"),
        ("gc", "access_denied"),
    ]
    assert written[3]["who"] == {"token": writer.info.id, "address": "127.0.0.1", "request": "a-request"}


def test_a_fault_of_the_service_has_a_line(
    root: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("repo_service.services.repository.LocalRepository.delete_tag", fail)
    with caplog.at_level(logging.INFO, audit.name), serving(root) as service:
        assert service.error("DELETE", "/v1/tags/latest", Connection="close") == (500, "internal_error")
        assert service.error("DELETE", f"/v1/namespaces/{'x' * 3000}/tags/%0Aforged") == (500, "internal_error")
    first, second = lines(caplog)
    assert (first["who"]["token"], first["outcome"]) == ("anonymous", "internal_error")
    assert second["what"] == {"name": "\nforged"}
    assert len(second["namespace"]) == 200


def test_a_log_that_is_moved_away_goes_on_in_a_new_file(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    with audited(Settings(audit_log=str(log))):
        record(number=1)
        log.rename(tmp_path / "audit.log.1")
        record(number=2)
    assert json.loads((tmp_path / "audit.log.1").read_text())["number"] == 1
    assert json.loads(log.read_text())["number"] == 2
