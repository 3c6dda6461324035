"""Fixtures that several test files share."""

from __future__ import annotations

import json
import os
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nothing is read from a cache that another test, or whoever runs the tests, has filled.
os.environ["KVGRAFT_CACHE_DIR"] = "off"
os.environ["KVGRAFT_ROUTER_DIR"] = "off"
# Tiny models run several times faster on one thread than on two; real ones ask for more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from faulty import Faults, faulty
from hypothesis import settings
from places import KINDS, Place, kinds, place_of
from servers import S3Server, s3_server
from serving import reached

from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.domain.repository import Repository
from repo_service.storage.s3 import S3Store

# The machines that run this are shared; how long an example takes says nothing.
settings.register_profile("kvgraft", deadline=None)
settings.load_profile("kvgraft")


@pytest.fixture(scope="session")
def matrix() -> list[str]:
    """The graft points that were compared, one line each."""
    return []


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def index_kind(request: pytest.FixtureRequest) -> str:
    """The databases that an index may be kept in."""
    return str(request.param)


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 server, one for the whole run, whose credentials are in the environment."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in _s3.environment.items():
        monkeypatch.setenv(name, value)
    return _s3


@pytest.fixture
def faults(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The S3 server behind a network that can be broken; the environment names the way through it."""
    with faulty(s3.url) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
        yield faults


@pytest.fixture
def store(faults: Faults, s3: S3Server) -> Iterator[S3Store]:  # noqa: ARG001
    """A store in S3 behind that network, which gives an operation 6 s."""
    store = S3Store(s3.bucket, s3.prefix(), seconds=6)
    yield store
    store.close()


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that transformers loads a tiny model and its tokenizer from."""
    # Most tests need no engine.
    import families
    import torch

    directory = tmp_path_factory.mktemp("model")
    families.build("llama", torch.float32, "eager").save_pretrained(directory)
    families.tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs ``kvgraft`` with ``--json``; returns the exit code and the result or error."""

    def run(*args: object) -> tuple[int, Any]:
        code = main([*map(str, args), "--json"])
        out, err = capsys.readouterr()
        assert (out == "") != (err == "")
        return code, json.loads(out) if out else json.loads(err)["error"]

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let tests that are marked for it run everywhere; see `places`."""
    marks = list(metafunc.definition.iter_markers("everywhere"))
    for name in ("module_root", "root"):
        if marks and name in metafunc.fixturenames:
            said = ChainMap(*(mark.kwargs for mark in marks))
            metafunc.parametrize(name, kinds(**said), indirect=True)
            return


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Where `repository` lies."""
    with place_of(getattr(request, "param", KINDS[0]), tmp_path, request) as place:
        yield place


@pytest.fixture(scope="module")
def module_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where a repository of all tests of a module lies."""
    with place_of(getattr(request, "param", KINDS[0]), tmp_path_factory.mktemp("module"), request) as place:
        yield place


@pytest.fixture(params=["embedded", "service"])
def repository(request: pytest.FixtureRequest, root: Place) -> Iterator[Repository]:
    """A new repository, opened in this process and through a service."""
    with reached(request.param, root.as_uri()) as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Repository]:
    """A new repository to copy from."""
    with open_repository((tmp_path / "source").as_uri()) as repository:
        yield repository


@pytest.fixture
def destination(root: Place) -> Iterator[Repository]:
    """A new repository to copy to."""
    with open_repository(root.as_uri()) as repository:
        yield repository
