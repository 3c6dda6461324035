"""The service's log: a line for each request, with an id that its answer carries too, and no secrets."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
from test_api import serving

from repo_service.api import logs
from repo_service.api.logs import JsonLines, TextLines, logged
from repo_service.services.repository import LocalRepository
from repo_service.settings import Settings


@contextmanager
def served(root: Path, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """A service in a process of its own: its URL, and the lines of its log once the block has ended."""
    command = [sys.executable, "-m", "repo_service.cli", "serve", "--repo", f"file://{root}", "--port", "0", "--json"]
    lines: list[str] = []
    with (root.parent / "log").open("w+") as log:
        environ = {**os.environ, **environment}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ) as process:
            try:
                assert process.stdout is not None
                yield json.loads(process.stdout.readline())["url"], lines
            finally:
                process.terminate()
                process.wait(30)
        log.seek(0)
        lines += log.read().splitlines()


def test_each_request_leaves_a_line_of_json_and_its_id_is_answered(tmp_path: Path) -> None:
    with served(tmp_path / "repository", KVGRAFT_LOG_FORMAT="json") as (url, lines):
        headers = {"X-Request-Id": "build-7.a_b", "Authorization": "Bearer s3cret"}
        asked = urllib3.request("GET", f"{url}/v1/artifacts/absent?token=s3cret", headers=headers)
        assert asked.headers["x-request-id"] == "build-7.a_b"
        other = urllib3.request("POST", f"{url}/v1/match", json={"keys": []})
        urllib3.request("GET", f"{url}/healthz")
    found = [json.loads(line) for line in lines]
    first, second = (line for line in found if line["logger"] == "kvgraft.access")
    assert first["request_id"] == "build-7.a_b"
    expected = {
        "method": "GET",
        "route": "/v1/artifacts/{ref}",
        "path": "/v1/artifacts/absent",
        "status": 404,
        "code": "tag_not_found",
    }
    assert expected.items() <= first.items()
    assert first["sent_bytes"] == len(asked.data)
    assert first["remote"].startswith("127.0.0.1:")
    assert second["request_id"] == other.headers["x-request-id"]
    assert second["received_bytes"] == len('{"keys":[]}')
    assert 0 < second["seconds"] < 60
    assert "s3cret" not in "\n".join(lines)


def test_lines_of_text_are_the_default(tmp_path: Path) -> None:
    with served(tmp_path / "repository") as (url, lines):
        identified = urllib3.request("GET", f"{url}/v1/info").headers["x-request-id"]
    (line,) = lines
    assert " INFO kvgraft.access GET /v1/info 200, " in line
    assert line.endswith(f"request_id={identified}")


def test_a_level_silences_the_lines_of_requests() -> None:
    with logged(Settings(log_level="warning")):
        assert not logs.access.isEnabledFor(logging.INFO)
    with logged(Settings()):
        assert logs.access.isEnabledFor(logging.INFO)
        assert not logs.access.isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "é", "a\tb", "a;b", '"x"'])
def test_an_id_that_is_not_well_formed_is_replaced(tmp_path: Path, given: str) -> None:
    with serving(tmp_path / "repository") as service:
        answer = service.request("GET", "/healthz", None, X_Request_Id=given.encode().decode("latin-1"))
    assert answer.headers["x-request-id"] != given
    assert len(answer.headers["x-request-id"]) == 32


def test_services_log_with_the_id_of_the_request_they_work_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def info(_: LocalRepository) -> Any:
        seen.append(logs.REQUEST_ID.get())
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(LocalRepository, "info", info)
    with serving(tmp_path / "repository") as service:
        answer = service.request("GET", "/v1/info", None, X_Request_Id="abc")
    assert seen == ["abc"]
    assert answer.status == 500
    assert answer.headers["x-request-id"] == "abc"
    assert json.loads(answer.data)["error"]["details"] == {"request_id": "abc"}


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("repo_service", logging.ERROR, "", 0, message, args, None)


def test_a_clients_words_make_no_lines_of_their_own() -> None:
    hostile = record("no artifact %s", "x\n2026-01-01 INFO forged\r\x1b[2J\u2028")
    for line in TextLines().format(hostile), JsonLines().format(hostile):
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line


def test_the_log_is_as_it_was_afterwards() -> None:
    before = list(logging.getLogger().handlers), logging.getLogger("repo_service").level
    with logged(Settings(log_level="debug")):
        assert logging.getLogger("repo_service.api").isEnabledFor(logging.DEBUG)
    assert (list(logging.getLogger().handlers), logging.getLogger("repo_service").level) == before
