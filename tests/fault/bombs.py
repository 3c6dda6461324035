"""Bodies that swell, lie about their length, or do not end."""

from __future__ import annotations

import gzip
import re
import select
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from pushing import offer
from synthetic import artifact

from repo_service.client import open_repository
from tests.fault._served import MIB, Served, service
from tests.fault.suite import Fault

_JSON = "Content-Type: application/json"
_CHUNKED = "Transfer-Encoding: chunked"


@dataclass(frozen=True)
class _Bomb:
    """A request's first lines, what is sent after them, and the statuses it may be answered with."""

    name: str
    head: tuple[str, ...]
    body: Iterable[bytes]
    statuses: frozenset[int]


def _bomb(name: str, head: Iterable[str], body: Iterable[bytes], *statuses: int) -> _Bomb:
    return _Bomb(name, tuple(head), body, frozenset(statuses))


def bombs(directory: Path, _seed: int, *, gib: int, flood: int) -> dict[str, Any]:
    manifest, records, _ = artifact(range(20))
    answers: Counter[str] = Counter()
    wrong: list[str] = []
    grown = 0
    limits = {"stall_seconds": 2, "idle_seconds": 6, "body_seconds": 30}
    with (
        service(directory / "repository", directory / "log", **limits) as served,
        open_repository(served.url) as repository,
    ):
        running = repository.begin_push(manifest.fingerprint, "default")
        push = f"/v1/pushes/{running.id}"
        chunk = f"PUT {push}/chunks/{offer(running, manifest, records)[0]}"
        documents = "POST /v1/match", f"POST {push}/commit", f"POST {push}/blocks"
        before = served.memory()
        for bomb in (*_swelling(gib, (*documents, chunk)), *_endless(flood, documents, chunk), *_lies()):
            served.forget_peak()
            status = _explode(served, bomb)
            growth = served.memory("VmHWM") - before
            answers[str(status)] += 1
            grown = max(grown, growth)
            if status not in bomb.statuses:
                wrong.append(f"{bomb.name} is answered {status}, not {sorted(bomb.statuses)}")
            if growth > 64 * MIB:
                wrong.append(f"{bomb.name} takes {growth // MIB} MiB")
        if urllib3.request("GET", f"{served.url}/readyz").status != 200:
            wrong.append("not ready afterwards")
        wrong += served.failures()
    assert not wrong, "; ".join(wrong)
    return {"bombs": answers.total(), "answers": dict(sorted(answers.items())), "growth_mib": grown // MIB}


def _swelling(gib: int, places: Iterable[str]) -> Iterator[_Bomb]:
    """What would be ``gib`` GiB once decoded."""
    deflated = _zeros(gib * 1024, 15)
    zipped = _zeros(gib * 1024, 31)
    # Nothing here writes brotli; the service is to refuse it by its name.
    swelling = {"deflate": deflated, "br": deflated, "gzip": zipped, "gzip, gzip": gzip.compress(zipped)}
    swelling["zstd"] = _zstd_zeros(gib * 1024)
    for coding, data in swelling.items():
        for place in places:
            head = place, _JSON, f"Content-Encoding: {coding}", f"Content-Length: {len(data)}"
            yield _bomb(f"{coding} to {place}", head, [data], 413, 415)


def _zeros(mib: int, wbits: int) -> bytes:
    """A gzip or zlib stream of zeros; pieces between full flushes are alike."""
    packer = zlib.compressobj(9, zlib.DEFLATED, wbits)
    first, later = (packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + later * (mib - 1)


def _zstd_zeros(mib: int) -> bytes:
    """A zstd frame that states no size: blocks of one byte, repeated 128 KiB times."""
    block = (2**17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd" + bytes([0, 7 << 3]) + block * (8 * mib)


def _endless(flood: int, documents: Iterable[str], chunk: str) -> Iterator[_Bomb]:
    """Up to ``flood`` MiB of what has no end, and bodies that are too large or too deep."""
    piece = b"%x\r\n%b\r\n" % (MIB, b"[" * MIB)
    for place in documents:
        yield _bomb(f"100 MB to {place}", (place, _JSON, "Content-Length: 100000000"), _many(b" " * 10**6, 100), 413)
        yield _bomb(f"no end to {place}", (place, _JSON, _CHUNKED), _many(piece, flood), 400, 408, 413)
        for depth in 100, 10_000, 10**6:
            deep = b'{"keys":' + b"[" * depth + b"]" * depth + b"}"
            yield _bomb(
                f"{depth} deep to {place}", (place, _JSON, f"Content-Length: {len(deep)}"), [deep], 400, 413, 422
            )
    size = min(20, flood // 8) * 10**6
    for name, text in ("lists", b"[],"), ("objects", b'{"":0},'), ("numbers", b"1,"), ("texts", b'"a",'):
        dense = b'{"keys":[' + text * (size // len(text)) + b"0]}"
        yield _bomb(
            f"{size // 10**6} MB of {name}",
            ("POST /v1/match", _JSON, f"Content-Length: {len(dense)}"),
            [dense],
            400,
            413,
            422,
        )
    for place in "DELETE /v1/tags/x", "POST /v1/artifacts/latest/check":
        yield _bomb(f"no end to {place}", (place, _CHUNKED), _many(piece, flood), 404)
    yield _bomb(f"no end to {chunk}", (chunk, _CHUNKED), _many(piece, flood), 411)
    match = "POST /v1/match", _JSON, _CHUNKED
    line = b"X-Long: " + b"a" * 8000 + b"\r\n"
    yield _bomb("extension without end", match, _after(b"2;", _many(b"a" * MIB, flood)), 400, 408, 413, 431)
    trailer = _after(b"2\r\n{}\r\n0\r\n", _many(line * 128, flood))
    yield _bomb("trailer without end", match, trailer, 400, 408, 413, 431)
    yield _bomb("header without end", ("GET /healthz",), _many(line * 128, flood), 431, 0)
    yield _bomb("20,000 headers", ("GET /healthz", *(f"X-{n}: a" for n in range(20_000))), [], 431)
    yield _bomb("a header of 1 MiB", ("GET /healthz", "X: " + "a" * MIB), [], 431)
    yield _bomb("a target of 1 MiB", ("GET /" + "a" * MIB,), [], 414, 431)


def _lies() -> Iterator[_Bomb]:
    match = "POST /v1/match", _JSON
    yield _bomb("less than announced", (*match, "Content-Length: 100"), [b"{}"], 408)
    yield _bomb("more than announced", (*match, "Content-Length: 2"), _many(b"{}" * 1000, 100), 400, 422)
    for length in "-1", "+5", "1e9", "0x10", "5, 6", "9" * 30, "9" * 18, "":
        yield _bomb(f"length {length}", (*match, f"Content-Length: {length}"), [b"{}"], 400, 413, 422)
    yield _bomb("two lengths", (*match, "Content-Length: 2", "Content-Length: 5"), [b"{}"], 400)
    yield _bomb("a length, and chunked", (*match, "Content-Length: 2", _CHUNKED), [b"0\r\n\r\n"], 400)
    yield _bomb("a chunk size that is none", (*match, _CHUNKED), [b"zz\r\n{}"], 400)


def _many(piece: bytes, count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield piece


def _after(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _explode(served: Served, bomb: _Bomb) -> int:
    """Send all of it, or what is taken; the status of the answer, or 0 if the connection was cut without one."""
    first, *lines = bomb.head
    head = "\r\n".join([f"{first} HTTP/1.1", f"Host: {served.netloc}", *lines, ""]).encode()
    answer = bytearray()
    with served.connect() as connection:
        with suppress(OSError):
            connection.sendall(head if bomb.name == "header without end" else head + b"\r\n")
            for piece in bomb.body:
                connection.sendall(piece)
                if select.select([connection], [], [], 0)[0]:
                    break
        with suppress(OSError):
            while b"\r\n" not in answer and (piece := connection.recv(65536)):
                answer += piece
    found = re.match(rb"HTTP/1.1 (\d+)", answer)
    return int(found[1]) if found else 0


FAULTS = [
    Fault(
        "bombs",
        "bodies that swell, lie or do not end: refused with a 4xx, memory grows by less than 64 MiB",
        bombs,
        short={"gib": 1, "flood": 40},
        full={"gib": 10, "flood": 1024},
    )
]
