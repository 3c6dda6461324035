"""Liveness and readiness: they tell the truth, and nothing that hangs can hang them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import urllib3
from test_api import Service, serving
from test_api_serve import process
from test_metrics import scrape, value

from repo_service.api import readiness
from repo_service.services.repository import LocalRepository


class Hung:
    """A probe that hangs until it is let go, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.let_go = threading.Event()

    def ask(self) -> int:
        self.asked += 1
        assert self.let_go.wait(60)
        return 0


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, part: str) -> Iterator[Hung]:
    hung = Hung()
    monkeypatch.setattr(LocalRepository, f"probe_{part}", lambda _: hung.ask())
    try:
        yield hung
    finally:
        hung.let_go.set()


def down(service: Service) -> list[str]:
    answer = service.request("GET", "/readyz")
    if answer.status == 200:
        return []
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    error = json.loads(answer.data)["error"]
    assert error["code"] == "unavailable"
    assert all(part in error["message"] for part in error["details"]["down"])
    return list(error["details"]["down"])


@pytest.mark.parametrize("part", ["store", "index"])
def test_a_part_that_hangs_is_named_and_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(readiness, "DEADLINE_S", 0.3)
    with hanging(monkeypatch, part) as hung, serving(tmp_path / "repository") as service:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: down(service), range(8))) == [[part]] * 8
        assert down(service) == [part]
        assert service.request("GET", "/healthz").status == 200
        found = scrape(service)
        assert value(found, "up", part=part) == 0
        assert value(found, "up", part="store") + value(found, "up", part="index") == 1
        assert hung.asked == 1
        hung.let_go.set()
        for _ in range(500):
            if not down(service):
                break
            time.sleep(0.02)
        else:
            pytest.fail("the part answers again and is called down")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe stands for a disk that hangs")
def test_a_disk_that_hangs_holds_up_neither_probes_nor_the_end(tmp_path: Path) -> None:
    marker = tmp_path / "repository" / "kvgraft.json"
    with process(tmp_path / "repository") as (running, url, _):
        marker.unlink()
        # Whoever opens it for reading waits for a writer who never comes.
        os.mkfifo(marker)
        for _ in range(3):
            answer = urllib3.request("GET", f"{url}/readyz", retries=False, timeout=30)
            assert (answer.status, json.loads(answer.data)["error"]["details"]) == (503, {"down": ["store"]})
        assert urllib3.request("GET", f"{url}/healthz").status == 200
        assert urllib3.request("GET", f"{url}/v1/tags").status == 200
        running.terminate()
        assert running.wait(20) == 0


def test_an_answer_is_reused_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "REUSED_S", 600.0)
    with serving(tmp_path / "repository") as service:
        assert down(service) == []
        (tmp_path / "repository").rename(tmp_path / "gone")
        assert down(service) == []
        monkeypatch.setattr(readiness, "REUSED_S", 0.0)
        assert down(service) == ["store"]
        (tmp_path / "gone").rename(tmp_path / "repository")
        assert down(service) == []


def test_a_store_that_was_swapped_is_not_ready_and_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    with serving(root) as service:
        marker = root / "kvgraft.json"
        kept = marker.read_bytes()
        marker.unlink()
        assert down(service) == ["store"]
        assert not marker.exists(), "a probe made a new repository of what may be an unmounted disk"
        marker.write_bytes(kept)


def test_liveness_touches_neither_store_nor_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "repository") as service:
        for name in [name for name in vars(LocalRepository) if not name.startswith("_")]:
            monkeypatch.delattr(LocalRepository, name)
        assert service.json("GET", "/healthz") == {"status": "ok"}
        monkeypatch.undo()
