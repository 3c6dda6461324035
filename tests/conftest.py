"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nothing is read from a cache that another test, or whoever runs the tests, has filled.
os.environ["KVGRAFT_CACHE_DIR"] = "off"
# Tiny models run several times faster on one thread than on two; real ones ask for more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings
from serving import served

from repo_service.client import open_repository
from repo_service.domain.repository import Repository

# The machines that run this are shared; how long an example takes says nothing.
settings.register_profile("kvgraft", deadline=None)
settings.load_profile("kvgraft")


@pytest.fixture(scope="session")
def matrix() -> list[str]:
    """The graft points that were compared, one line each."""
    return []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where `repository` lies."""
    return tmp_path / "repository"


@pytest.fixture(params=["embedded", "service"])
def repository(request: pytest.FixtureRequest, root: Path) -> Iterator[Repository]:
    """A new repository, opened in this process and through a service."""
    if request.param == "embedded":
        with open_repository(f"file://{root}") as opened:
            yield opened
    else:
        with served(root) as url, open_repository(url) as opened:
            yield opened


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Repository]:
    """A new repository to copy from."""
    with open_repository((tmp_path / "source").as_uri()) as repository:
        yield repository


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Repository]:
    """A new repository to copy to."""
    with open_repository((tmp_path / "destination").as_uri()) as repository:
        yield repository
