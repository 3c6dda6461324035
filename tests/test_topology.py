"""What compose.yaml describes, started from its own settings without containers: PostgreSQL, S3, two replicas, nginx."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import postgres
import pytest
import urllib3
import yaml
from fleet import PROJECT, Replica, Team
from pushing import push
from servers import S3Server, free_ports
from synthetic import artifact
from test_nginx import nginx

from repo_service.client import open_repository
from repo_service.domain.errors import AccessDenied

DOCKER = PROJECT / "docker"


def settings(s3: S3Server) -> dict[str, str]:
    """The environment of the service in compose.yaml, with this machine's addresses and secrets in place of the containers'."""
    environment = yaml.safe_load((DOCKER / "compose.yaml").read_text())["x-service"]["environment"]
    here = {
        "KVGRAFT_INDEX": postgres.empty_database(),
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_ACCESS_KEY_ID": s3.environment["AWS_ACCESS_KEY_ID"],
        "AWS_SECRET_ACCESS_KEY": s3.environment["AWS_SECRET_ACCESS_KEY"],
        "KVGRAFT_FORWARDED_ALLOW_IPS": "127.0.0.1",
    }
    assert set(here) < set(environment)
    # The password is all that compose fills in.
    assert not re.search(r"\$", str({name: value for name, value in environment.items() if name not in here}))
    return {**environment, **here}


def command(environment: dict[str, str], *arguments: str) -> Any:
    """What a command says, run as one of the containers would."""
    done = subprocess.run(
        [sys.executable, "-m", "repo_service.cli", *arguments, "--json"],
        env={**os.environ, **environment, "PYTHONPATH": str(PROJECT)}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def front(_s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Team]]:
    """The URL of nginx, and what is behind it."""
    directory = tmp_path_factory.mktemp("topology")
    environment = settings(_s3)
    bucket = urlsplit(environment["KVGRAFT_REPO"]).netloc
    _s3.client().create_bucket(Bucket=bucket)
    # The migration job comes before the replicas.
    assert command(environment, "migrate")["after"]
    with ExitStack() as stack:
        replicas = []
        for number, port in enumerate(free_ports(2)):
            replicas.append(Replica(port, environment, directory / f"replica-{number}.log"))
            stack.callback(replicas[-1].kill)
            replicas[-1].start()
        url = stack.enter_context(nginx(directory / "nginx", *(replica.url for replica in replicas)))
        yield url, Team(environment, replicas)


def test_a_team_pushes_pulls_and_asks_through_what_compose_describes(front: tuple[str, Team], tmp_path: Path) -> None:
    url, served = front
    given = command(served.environment, "token", "create", "--scope", "write", "--namespace", "default")
    made = artifact(range(40))
    with pytest.raises(AccessDenied), open_repository(url) as nobody:
        nobody.tags("default")
    with open_repository(url, given["token"]) as repository:
        info, _ = push(repository, made)
        repository.set_tag("default", "latest", info.id)
    for replica in served.replicas:
        with open_repository(replica.url, given["token"]) as repository:
            assert repository.artifact("latest", "default").id == info.id
            assert repository.check(info.id, "default").ok
    environment = {"KVGRAFT_FROM_TOKEN": given["token"]}
    pulled = command(environment, "pull", "latest", "--from", url, "--to", f"file://{tmp_path}/pulled")
    assert pulled["artifact"]["id"] == info.id


def test_with_one_replica_down_the_other_answers(front: tuple[str, Team]) -> None:
    url, served = front
    given = command(served.environment, "token", "create", "--scope", "write", "--namespace", "default")
    served.replicas[0].kill()
    try:
        with open_repository(url, given["token"]) as repository:
            for n in range(4):
                info, _ = push(repository, artifact(range(100 + n, 120)))
                assert repository.check(info.id, "default").ok
    finally:
        served.replicas[0].start()


def test_without_its_database_a_replica_is_not_ready_and_comes_back(s3: S3Server, tmp_path: Path) -> None:
    """Down-time is answered with 503, and what was acknowledged is there afterwards."""
    server = postgres.Server()
    environment = settings(s3) | {
        "KVGRAFT_INDEX": server.url, "KVGRAFT_AUTH": "none", "KVGRAFT_REPO": f"s3://{s3.bucket}/{s3.prefix()}",
    }  # fmt: skip
    replica = Replica(free_ports(1)[0], environment, tmp_path / "replica.log")
    try:
        replica.start()
        with open_repository(replica.url) as repository:
            info, _ = push(repository, artifact(range(40)))
            server.stop("immediate")
            down = status(f"{replica.url}/readyz"), status(f"{replica.url}/v1/artifacts/{info.id}")
            assert down == (503, 503)
            assert status(f"{replica.url}/healthz") == 200
            server.start()
            assert repository.check(info.id, "default").ok
    finally:
        replica.kill()
        server.end()
    assert replica.failures() == []


def status(url: str) -> int:
    return urllib3.request("GET", url, retries=False, timeout=10).status
