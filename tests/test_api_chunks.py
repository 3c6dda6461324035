"""Chunks over HTTP: ranges, conditional requests, verification before the first byte, and the Zarr keys."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from places import Place
from synthetic import artifact
from test_api import Made, Service, push_over_http, serving

pytestmark = pytest.mark.everywhere

MADE = artifact(list(range(40)))


@pytest.fixture(scope="module")
def service(module_root: Place) -> Iterator[Service]:
    with serving(module_root) as running:
        push_over_http(running, MADE)
        running.json("PUT", "/v1/tags/latest", {"artifact_id": MADE[0].id})
        yield running


def a_chunk(made: Made = MADE) -> tuple[str, bytes]:
    digest = made[1][0].chunks["full/k"][0]
    return digest, made[2][digest]


DIGEST, DATA = a_chunk()
CHUNK = f"/v1/artifacts/{MADE[0].id}/chunks/{DIGEST}"
ZARR = f"/v1/artifacts/{MADE[0].id}/zarr"
KEY = f"{ZARR}/full/k/c/0/0/0/0/0"
SIZE = len(DATA)


@pytest.mark.parametrize("path", [CHUNK, KEY])
@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=10-", 10, SIZE),
        ("bytes=-7", SIZE - 7, SIZE),
        (f"bytes=5-{SIZE * 10}", 5, SIZE),
        (f"bytes=-{SIZE * 10}", 0, SIZE),
    ],
)
def test_a_single_range_is_answered(service: Service, path: str, asked: str, start: int, stop: int) -> None:
    answer = service.request("GET", path, Range=asked)
    assert answer.status == 206
    assert answer.data == DATA[start:stop]
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{SIZE}"


@pytest.mark.parametrize("asked", ["bytes=1-2,5-6", "lines=1-2", "bytes=5-4", "bytes=-", "bytes=a-b", "bytes"])
def test_what_is_no_single_range_gets_the_whole(service: Service, asked: str) -> None:
    answer = service.request("GET", CHUNK, Range=asked)
    assert (answer.status, answer.data) == (200, DATA)
    assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("asked", [f"bytes={SIZE}-", f"bytes={SIZE}-{SIZE + 5}", "bytes=-0", "bytes=99999999999-"])
def test_a_range_outside_is_refused(service: Service, asked: str) -> None:
    assert service.error("GET", CHUNK, Range=asked) == (416, "range_not_satisfiable")
    assert service.request("GET", CHUNK, Range=asked).headers["content-range"] == f"bytes */{SIZE}"


def test_if_range_compares_the_etag(service: Service) -> None:
    assert service.request("GET", CHUNK, Range="bytes=0-1", If_Range=f'"{DIGEST}"').status == 206
    assert service.request("GET", CHUNK, Range="bytes=0-1", If_Range='"other"').status == 200


@pytest.mark.parametrize("path", [CHUNK, KEY, f"/v1/artifacts/{MADE[0].id}/manifest", f"{ZARR}/zarr.json"])
def test_what_the_client_has_is_not_sent_again(service: Service, path: str) -> None:
    answer = service.request("GET", path)
    etag = answer.headers["etag"]
    assert etag.startswith('"')
    assert "immutable" in answer.headers["cache-control"]
    for condition in etag, f"W/{etag}", f'"a", {etag}', "*":
        again = service.request("GET", path, If_None_Match=condition)
        assert (again.status, again.data, again.headers["etag"]) == (304, b"", etag)
    assert service.request("GET", path, If_None_Match='"another"').status == 200


def test_etags_are_the_digests_and_the_id(service: Service) -> None:
    assert service.request("GET", CHUNK).headers["etag"] == f'"{DIGEST}"'
    assert service.request("GET", "/v1/artifacts/latest/manifest").headers["etag"] == f'"{MADE[0].id}"'


def test_through_a_tag_nothing_is_immutable(service: Service) -> None:
    for path in "manifest", "zarr/zarr.json", "zarr/full/k/c/0/0/0/0/0":
        answer = service.request("GET", f"/v1/artifacts/latest/{path}")
        assert "no-cache" in answer.headers["cache-control"]


def test_a_chunk_of_another_artifact_is_not_served(service: Service) -> None:
    other = artifact([5, 6, 7], seed=9)
    push_over_http(service, other)
    digest, _ = a_chunk(other)
    path = f"/v1/artifacts/{MADE[0].id}/chunks/{digest}"
    assert service.error("GET", path) == (404, "chunk_not_found")
    assert service.error("GET", CHUNK.replace("/v1/", "/v1/namespaces/other/")) == (404, "artifact_not_found")


def test_zarr_keys_and_their_heads(service: Service) -> None:
    assert service.request("GET", KEY).data == DATA
    assert json.loads(service.request("GET", f"{ZARR}/zarr.json").data)["node_type"] == "group"
    for path in KEY, f"{ZARR}/zarr.json":
        whole, head = service.request("GET", path), service.request("HEAD", path)
        assert (head.status, head.data) == (200, b"")
        for name in "content-length", "etag", "cache-control", "content-type":
            assert head.headers[name] == whole.headers[name]


@pytest.mark.parametrize(
    "key", ["", "zarr", ".zarray", "full/k/c/9/0/0/0/0", "full/k/c/0", "../zarr.json", "full//k/zarr.json"]
)
def test_keys_outside_the_hierarchy_are_not_found(service: Service, key: str) -> None:
    assert service.error("GET", f"{ZARR}/{key.replace('..', '%2e%2e')}") == (404, "not_found")


@pytest.mark.parametrize("damage", ["lost", "altered", "short", "long"])
def test_i3_no_byte_of_a_damaged_chunk_goes_out(root: Place, damage: str) -> None:
    with serving(root) as service:
        push_over_http(service, MADE)
        name = DIGEST.removeprefix("blake3:")
        stored = root / "chunks" / name[:2] / name[2:]
        match damage:
            case "lost":
                stored.unlink()
            case "altered":
                stored.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
            case "short":
                stored.write_bytes(DATA[:-1])
            case "long":
                stored.write_bytes(DATA + b"\0")
        for path in CHUNK, KEY:
            assert service.error("GET", path) == (500, "chunk_corrupt")
            assert service.error("GET", path, Range="bytes=0-0") == (500, "chunk_corrupt")
        assert service.json("POST", f"/v1/artifacts/{MADE[0].id}/check")["corrupt"] == [DIGEST]
