"""Chunks fetched from and put at S3 itself by URLs of the service: verified, only by right, and never the only way."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

import pytest
import urllib3
from faulty import Faults, faulty
from places import FULL, Place, place_of
from servers import S3Server
from synthetic import artifact
from test_api import NO_DIGEST, Made, Service, error_of, serving
from test_http_client import NS, a_chunk, client, pull_all, push_all

from repo_service.client import direct
from repo_service.client.http import HttpRepository
from repo_service.domain.access import Scope
from repo_service.domain.errors import ArtifactNotFound, ChunkCorrupt, ChunkNotFound, DigestMismatch, SizeMismatch
from repo_service.domain.frame import CODECS, MAGIC
from repo_service.domain.repository import Push, Repository
from repo_service.services.documents import chunk_key

TOKENS = list(range(600))
MADE = artifact(TOKENS, seed=3)
OTHER = artifact(range(20), seed=4)


# All kinds of place that have URLs of objects; the full matrix takes both indexes.
PLACES = [(codec, kind) for codec in CODECS for kind in ("s3-sqlite", "s3-postgres")[: 2 if FULL else 1]]


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Place]:
    codec, kind = request.param
    with (
        mock.patch.dict(os.environ, {"KVGRAFT_CODEC": codec}),
        place_of(kind, tmp_path_factory.mktemp("index"), request) as place,
    ):
        yield place


@pytest.fixture(scope="module")
def service(place: Place) -> Iterator[Service]:
    with serving(place, direct_seconds=60) as running:
        with client(running.url) as opened:
            push_all(opened, MADE)
            push_all(opened, OTHER, "team-b")
        yield running


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_warned", set())


def count(service: Service, name: str) -> float:
    [line] = [
        line for line in service.request("GET", "/metrics").data.decode().splitlines() if line.startswith(f"{name} ")
    ]
    return float(line.split()[1])


@contextmanager
def counted(service: Service) -> Iterator[dict[str, float]]:
    """What the service read for readers, and the URLs that it gave, inside the block."""
    names = {"read": "kvgraft_chunks_read_total", "urls": "kvgraft_chunk_urls_total"}
    before = {short: count(service, name) for short, name in names.items()}
    found: dict[str, float] = {}
    yield found
    found |= {short: count(service, name) - before[short] for short, name in names.items()}


def urls_of(service: Service, digest: str, artifact_id: str = MADE[0].id) -> dict[str, str]:
    path = f"/v1/namespaces/{NS}/artifacts/{artifact_id}/chunks/{digest}/urls"
    answer = service.json("GET", path)
    assert answer["seconds"] == 60
    urls: dict[str, str] = answer["urls"]
    return urls


def test_a_node_pulls_from_s3_and_verifies(service: Service) -> None:
    with counted(service) as found, client(service.url) as repository:
        assert pull_all(repository, MADE) == MADE[2]
    assert found["read"] == 0
    assert found["urls"] >= len(MADE[2])


def test_pages_follow_each_other_through_an_artifact(service: Service) -> None:
    digests = list(MADE[2])
    assert len(digests) > 64
    first = urls_of(service, MADE[1][0].chunks["full/k"][0])
    assert len(first) == 64
    last = list(first)[-1]
    assert next(iter(urls_of(service, last))) == last
    for digest, url in first.items():
        data = urllib3.request("GET", url).data
        assert data == MADE[2][digest] or data.startswith(MAGIC)


@pytest.mark.parametrize("damage", ["altered", "shorter", "gone"])
def test_i3_what_s3_gives_is_hashed_and_the_repository_learns_of_damage(
    s3: S3Server, place: Place, service: Service, damage: str
) -> None:
    start = {"altered": 1000, "shorter": 2000, "gone": 3000}[damage]
    made = artifact(range(start, start + 40), seed=start)
    with client(service.url) as repository:
        push_all(repository, made)
        digest, spec, data = a_chunk(made)
        key = f"{place}/{chunk_key(digest)}"
        if damage == "gone":
            s3.client().delete_object(Bucket=s3.bucket, Key=key)
        else:
            body = b"\xff" + data[1:] if damage == "altered" else data[:-1]
            s3.client().put_object(Bucket=s3.bucket, Key=key, Body=body)
        with pytest.raises(ChunkCorrupt, match=digest):
            repository.read_chunk(made[0].id, NS, digest, spec, memoryview(bytearray(spec.size)))
        # It is awaited again, as after any read that met damage.
        push_all(repository, made)
        assert pull_all(repository, made) == made[2]


def test_i7_a_url_is_given_by_a_right_on_an_artifact_that_holds_the_chunk(place: Place) -> None:
    mine, theirs = a_chunk(MADE)[0], a_chunk(OTHER)[0]
    with serving(place, direct_seconds=60, auth="tokens") as running:
        tokens = {
            name: running.repository.create_access_token(Scope.READ, [name]).token for name in (NS, "team-b", "team-c")
        }

        def ask(token: str | None, artifact_id: str, digest: str, namespace: str = NS) -> urllib3.BaseHTTPResponse:
            more = {"Authorization": f"Bearer {tokens[token]}"} if token else {}
            path = f"/v1/namespaces/{namespace}/artifacts/{artifact_id}/chunks/{digest}/urls"
            return running.request("GET", path, **more)

        given = ask(NS, MADE[0].id, mine)
        assert given.status == 200
        assert given.headers["cache-control"] == "no-store"
        assert set(json.loads(given.data)["urls"]) <= set(MADE[2])
        assert error_of(ask(None, MADE[0].id, mine)) == (401, "unauthenticated")
        assert error_of(ask("team-c", MADE[0].id, mine)) == (403, "access_denied")
        assert error_of(ask("team-b", MADE[0].id, mine, "team-b")) == (404, "artifact_not_found")
        # What another namespace has and what nobody has look the same.
        for digest in (theirs, NO_DIGEST["blake3"]):
            assert error_of(ask(NS, MADE[0].id, digest)) == (404, "chunk_not_found")
            assert error_of(ask(NS, OTHER[0].id, digest)) == (404, "artifact_not_found")


@pytest.mark.parametrize("seconds", [0, 60])
def test_refusals_are_those_of_a_read_through_the_service(place: Place, seconds: int) -> None:
    digest, spec, _ = a_chunk(MADE)
    out = memoryview(bytearray(spec.size))
    with serving(place, direct_seconds=seconds) as running, client(running.url) as repository:
        with pytest.raises(ArtifactNotFound):
            repository.read_chunk(NO_DIGEST["sha256"], NS, digest, spec, out)
        with pytest.raises(ChunkNotFound):
            repository.read_chunk(MADE[0].id, NS, a_chunk(OTHER)[0], spec, out)


def asked(repository: HttpRepository) -> list[str]:
    """Paths that a client asks its service for, from now on."""
    paths: list[str] = []
    pool = repository._transport._pool
    ask = pool.ask

    def noting(method: str, path: str, *args: object, **kwargs: object) -> object:
        paths.append(path)
        return ask(method, path, *args, **kwargs)  # type: ignore[arg-type]

    pool.ask = noting  # type: ignore[method-assign, assignment]
    return paths


def test_a_service_without_it_is_asked_once(place: Place, tmp_path: Path) -> None:
    for where, seconds in ((place, 0), (tmp_path / "repository", 60)):
        with serving(where, direct_seconds=seconds) as running, client(running.url) as repository:
            if where is not place:
                push_all(repository, MADE)
            paths = asked(repository)
            assert pull_all(repository, MADE) == MADE[2]
            assert len([path for path in paths if path.endswith("/urls")]) == 1


def test_a_url_whose_time_is_over_is_asked_for_again(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with client(service.url) as repository:
        reads = repository._reads
        digest, spec, data = a_chunk(MADE)
        path = f"/v1/namespaces/{NS}/artifacts/{MADE[0].id}/chunks/{digest}"
        url = urls_of(service, digest)[digest]
        # S3 says of it what it says of one that is too old.
        reads._urls[path] = (url.replace("X-Amz-Expires=60", "X-Amz-Expires=59"), float("inf"))
        with counted(service) as found:
            out = bytearray(spec.size)
            repository.read_chunk(MADE[0].id, NS, digest, spec, memoryview(out))
        assert (out, found["read"]) == (data, 0)
        assert found["urls"] > 0
        # One that is old by its own count is not tried at all.
        reads._urls[path] = (url, 0.0)
        paths = asked(repository)
        repository.read_chunk(MADE[0].id, NS, digest, spec, memoryview(out))
        assert paths == [f"{path}/urls"]
    assert caplog.records == []


@pytest.fixture
def behind_faults(s3: S3Server, place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Service, Faults]]:
    """A service that names a proxy as S3's address."""
    with faulty(s3.url) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
        with serving(place, direct_seconds=60) as running:
            yield running, faults


def direct_reads(faults: Faults, kind: str) -> None:
    """Let a fault meet requests at presigned URLs only: those of the node."""
    faults.choose = lambda method, path: kind if method == "GET" and "X-Amz-Signature" in path else None


@pytest.mark.parametrize("kind", ["error", "drop", "reset"])
def test_what_s3_does_not_give_comes_through_the_service(
    behind_faults: tuple[Service, Faults], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    service, faults = behind_faults
    direct_reads(faults, kind)
    with counted(service) as found, client(service.url) as repository:
        assert pull_all(repository, OTHER, "team-b") == OTHER[2]
    assert found["read"] == len(OTHER[2])
    assert faults.met[kind] > 0
    assert "Signature" not in caplog.text


@pytest.mark.parametrize("port", ["9", None])
def test_s3_out_of_reach_is_told_once_and_left_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, port: str | None
) -> None:
    """Nobody listens, or who answers redirects elsewhere."""
    monkeypatch.setattr(direct, "_CONNECT_S", 0.5)
    url_of = service.repository._store.url_of

    def elsewhere(key: str, seconds: int) -> str | None:
        url = url_of(key, seconds)
        assert url is not None
        host = f"127.0.0.1:{port}" if port else "user@127.0.0.1"
        return url.replace(urlsplit(url).netloc, host)

    monkeypatch.setattr(service.repository._store, "url_of", elsewhere)
    with counted(service) as found, client(service.url) as repository:
        paths = asked(repository)
        assert pull_all(repository, MADE) == MADE[2]
    assert found["read"] == len(MADE[2])
    assert len([path for path in paths if path.endswith("/urls")]) <= 4
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "127.0.0.1" in warnings[0]
    assert service.url in warnings[0]
    assert "Signature" not in caplog.text


def test_no_token_goes_to_s3_and_no_signature_to_a_log(
    place: Place, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[dict[str, str]] = []
    with faulty(s3.url) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
        faults.hear = heard.append
        with caplog.at_level("INFO"), serving(place, direct_seconds=60, auth="tokens") as running:
            token = running.repository.create_access_token(Scope.READ, [NS]).token
            with HttpRepository(urlsplit(running.url), token) as repository:
                heard.clear()
                with ThreadPoolExecutor(4):
                    assert pull_all(repository, MADE) == MADE[2]
    direct_ones = [headers for headers in heard if "authorization" not in headers]
    assert len(direct_ones) == len(MADE[2])
    assert not [headers for headers in heard if token in str(headers)]
    assert "Signature" not in caplog.text


# Pushes


def uploads(s3: S3Server, place: Place) -> list[str]:
    """Keys of what was put and is still there."""
    page = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=f"{place}/uploads/")
    return [item["Key"] for item in page.get("Contents", ())]


def new(start: int) -> Made:
    return artifact(range(start, start + 60), seed=start)


def test_a_node_pushes_to_s3_and_the_service_verifies(s3: S3Server, place: Place, service: Service) -> None:
    made = new(10_000)
    with client(service.url) as repository:
        paths = asked(repository)
        push_all(repository, made)
        assert not [path for path in paths if re.search(r"/chunks/blake3:\w+$", path)]
        assert len([path for path in paths if path.endswith("/uploads")]) <= 1 + len(made[2]) // 64
        assert pull_all(repository, made) == made[2]
    assert service.repository.check(made[0].id, NS).ok
    assert uploads(s3, place) == []


def begun(repository: Repository, made: Made) -> tuple[Push, str, bytes]:
    """A push that has offered everything, and one chunk of it."""
    push = repository.begin_push(made[0].fingerprint, NS)
    push.offer(made[1])
    digest, _, data = a_chunk(made)
    return push, digest, data


def test_i7_what_a_pusher_puts_is_nothing_until_it_is_verified(
    s3: S3Server, place: Place, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = new(20_000)
    with client(service.url) as repository:
        push, digest, data = begun(repository, made)
        path = f"/v1/namespaces/{NS}/pushes/{push.id}/uploads"

        def take() -> tuple[int, str]:
            answer = service.request("POST", f"{path}/{digest}")
            return (204, "") if answer.status == 204 else error_of(answer)

        assert take() == (404, "chunk_not_found")
        answer = service.json("POST", path, {"digests": [digest]})
        assert answer["seconds"] == 60
        url = answer["urls"][digest]
        # Its length is signed.
        assert urllib3.request("PUT", url, body=data + b"x").status == 403
        assert urllib3.request("PUT", url, body=b"y" * len(data)).status == 200
        assert take() == (400, "digest_mismatch")
        assert uploads(s3, place) == []
        assert urllib3.request("PUT", url, body=data).status == 200
        # Whoever has the URL may use it again at any moment: between the look at the bytes and their storing, too.
        read_into = service.repository._store.read_into

        def read_and_alter(key: str, out: memoryview, seen: Callable[[memoryview], object]) -> int | None:
            size = read_into(key, out, seen)
            if "/uploads/" in f"/{key}":
                assert urllib3.request("PUT", url, body=b"z" * len(data)).status == 200
            return size

        monkeypatch.setattr(service.repository._store, "read_into", read_and_alter)
        assert take() == (204, "")
        # Once more, as after a lost answer, with nothing there and with something else there.
        assert take() == (204, "")
        key = f"{place}/{chunk_key(digest)}"
        stored = s3.client().get_object(Bucket=s3.bucket, Key=key)["Body"].read()
        assert stored == data or stored.startswith(MAGIC)
        push.abort()


def test_i7_no_url_is_given_for_what_was_not_offered(service: Service) -> None:
    with client(service.url) as repository:
        push, digest, _ = begun(repository, new(30_000))
        path = f"/v1/namespaces/{NS}/pushes/{push.id}/uploads"
        for other in (a_chunk(MADE)[0], NO_DIGEST["blake3"]):
            body = json.dumps({"digests": [digest, other]}).encode()
            assert service.error("POST", path, body) == (404, "chunk_not_found")
        assert service.error("POST", path.replace(NS, "team-b"), body) == (404, "push_not_found")
        push.abort()


def test_a_caller_who_sends_other_bytes_is_told(service: Service) -> None:
    with client(service.url) as repository:
        push, digest, data = begun(repository, new(40_000))
        with pytest.raises(DigestMismatch, match=digest):
            push.put(digest, bytes(len(data)))
        with pytest.raises(SizeMismatch):
            push.put(digest, data + b"x")
        push.put(digest, data)
        push.abort()


@pytest.mark.parametrize("kind", ["error", "drop", "lost"])
def test_what_s3_does_not_take_goes_through_the_service(behind_faults: tuple[Service, Faults], kind: str) -> None:
    service, faults = behind_faults
    made = new({"error": 50_000, "drop": 60_000, "lost": 70_000}[kind])
    faults.choose = lambda method, path: kind if method == "PUT" and "X-Amz-Signature" in path else None
    with client(service.url) as repository:
        push_all(repository, made)
        assert pull_all(repository, made) == made[2]
    assert faults.met[kind] > 0


def test_what_was_put_and_never_taken_is_collected(s3: S3Server, place: Place, service: Service) -> None:
    with client(service.url) as repository:
        push, digest, data = begun(repository, new(80_000))
        answer = service.json("POST", f"/v1/namespaces/{NS}/pushes/{push.id}/uploads", {"digests": [digest]})
        assert urllib3.request("PUT", answer["urls"][digest], body=data).status == 200
        put = uploads(s3, place)
        assert put
        assert repository.collect_garbage().temp_files == 0
        assert repository.collect_garbage(grace_s=0, dry_run=True).temp_files == len(put)
        assert uploads(s3, place) == put
        assert repository.collect_garbage(grace_s=0).temp_files == len(put)
        assert uploads(s3, place) == []
        push.abort()
