"""Keys and paths that try to leave the store."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import shutil
import socket
import string
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3
from pushing import push
from synthetic import artifact

from repo_service.domain.errors import KvgraftError
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.repository import Repository
from repo_service.services.opening import open_local
from repo_service.storage import LocalStore, MemoryStore, Store
from tests.fault._served import Served, service
from tests.fault.suite import Fault

_SECRET = b"the canary outside of the store"

_PIECES = [
    *("..", "../", "..\\", ".", "...", "....//", "/", "//", "\\", "\\\\?\\", "C:\\", "~", "\0", "\r\n", " ", "\t", "%"),
    *("%2e%2e%2f", "%2E%2e/", "..%2f", "%252e%252e%252f", "%25252e", "..%5c", "%00", "%c0%ae%c0%ae%c0%af", "%u002e"),
    *("\u2025", "\uff0e\uff0e\uff0f", "\u2215", "\u2024\u2024/", "\u202e", "\ufeff", "e\u0301", "\ud800", "\U0001f4a9"),
    *("outside", "secret", "tmp", "index.sqlite", "kvgraft.json", "chunks", ".json", "a", "sha256:", "blake3:"),
]


def _hostile_key(rng: random.Random, outside: Path) -> str:
    """One path that would do harm if it were taken for one."""
    up = rng.randrange(1, 12)
    target = rng.choice(["secret", "made", "below/secret"])
    step = rng.choice(["../", "..\\", "%2e%2e%2f", "%252e%252e%252f", "....//", "\uff0e\uff0e\uff0f", "./../", "..%5c"])
    digits = rng.choice(["0" * 64, "ab" * 32, "../" * 21 + "a"])
    return rng.choice(
        [
            f"{step * up}outside/{target}",
            f"{rng.choice(['chunks', 'tags/default', 'a', 'tmp'])}/{step * up}outside/{target}",
            f"{outside}/{target}",
            f"//{outside}/{target}",
            f"file://{outside}/{target}",
            quote(f"{outside}/{target}", safe=""),
            f"{target}\0.json",
            f"a/{step}b",
            "a" * rng.choice([255, 256, 512, 513, 4097, 20000]),
            "/".join("a" * rng.choice([0, 1, 255, 256]) for _ in range(rng.randrange(2, 9))),
            f"{rng.choice(['sha256', 'blake3', 'SHA256', 'md5', ''])}:{digits}",
            "".join(rng.choice(_PIECES) for _ in range(rng.randrange(1, 9))),
            "".join(chr(rng.randrange(1, 0x3000)) for _ in range(rng.randrange(1, 40))),
        ]
    )


def keys(directory: Path, seed: int, *, count: int) -> dict[str, Any]:
    rng = random.Random(seed)
    outside, bytes_, root = (directory / name for name in ("outside", "bytes", "repository"))
    with open_local(f"file://{root}", create=True) as repository:
        made, _ = push(repository, artifact(range(20)))
        repository.set_tag("default", "latest", made.id)
    bytes_.mkdir()
    hostile = [_hostile_key(rng, outside) for _ in range(count)]

    def local(seen: _Seen) -> None:
        for key in hostile:
            _try_store(LocalStore(bytes_), key, seen)

    def memory(seen: _Seen) -> None:
        store = MemoryStore()
        for key in hostile:
            _try_store(store, key, seen)

    def embedded(seen: _Seen) -> None:
        with open_local(f"file://{root}") as repository:
            for key in hostile:
                _try_repository(repository, key, made.id, seen)

    def http(seen: _Seen) -> None:
        with service(root, directory / "log") as served:
            _try_routes(served, hostile, made.id, rng, seen)
            seen.unexpected.extend(served.failures())

    figures: dict[str, Any] = {"keys": count}
    wrong: list[str] = []
    for stage in local, memory, embedded, http:
        seen, before = _Seen(), _plant(outside)
        stage(seen)
        after = _canary(outside)
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        figures[stage.__name__] = dict(sorted(seen.counts.items()))
        wrong += [f"{stage.__name__}: {what}" for what in (*seen.leaked[:2], *seen.unexpected[:2])]
        wrong += [f"{stage.__name__} changed {path}" for path in changed[:4]]
    assert not wrong, "; ".join(wrong)
    return figures | {"escapes": 0, "tracebacks": 0}


class _Seen:
    """What one kind of attempt came to: counts, texts from outside, and what must not happen."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.leaked: list[str] = []
        self.unexpected: list[str] = []


def _plant(outside: Path) -> dict[str, tuple[int, int, str]]:
    shutil.rmtree(outside, ignore_errors=True)
    (outside / "below").mkdir(parents=True)
    for name in "secret", "secret.json", "below/secret":
        (outside / name).write_bytes(_SECRET)
    return _canary(outside)


def _canary(outside: Path) -> dict[str, tuple[int, int, str]]:
    return {
        str(path.relative_to(outside)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted([outside, *outside.rglob("*")])
    }


def _attempt(what: str, call: Callable[[], object], seen: _Seen) -> None:
    """Anything may be refused, by an error of the project's own."""
    found: object = None
    try:
        found = call()
        seen.counts["done"] += 1
    except KvgraftError as error:
        seen.counts["refused"] += 1
        found = error.message
    except Exception as error:
        seen.unexpected.append(f"{what}: {type(error).__name__}: {error}"[:300])
    if _SECRET in (found if isinstance(found, bytes) else str(found).encode(errors="replace")):
        seen.leaked.append(f"{what} reads from outside")


def _try_store(store: Store, key: str, seen: _Seen) -> None:
    out = bytearray(100)
    for call in (
        lambda: store.get(key),
        lambda: (store.read_into(key, memoryview(out), lambda _: None), bytes(out))[1],
        lambda: store.exists(key),
        lambda: store.put_if_absent(key, b"x"),
        lambda: store.put(key, b"y"),
        lambda: [*store.list(key)],
        lambda: store.delete(key),
    ):
        _attempt(ascii(key[:80]), call, seen)


def _try_repository(repository: Repository, key: str, whole: str, seen: _Seen) -> None:
    spec = ChunkSpec("uint32", (1,))
    out = memoryview(bytearray(4))
    manifest = repository.manifest(whole, "default")
    zero = f"blake3:{'0' * 64}"
    for call in (
        lambda: repository.artifact(key, "default"),
        lambda: repository.manifest(key, "default"),
        lambda: repository.check(key, "default"),
        lambda: repository.delete(key, "default"),
        lambda: repository.read_chunk(key, "default", zero, spec, out),
        lambda: repository.read_chunk(whole, "default", key, spec, out),
        lambda: repository.set_tag("default", key, whole),
        lambda: repository.set_tag("default", "x", key),
        lambda: repository.delete_tag("default", key),
        lambda: repository.artifact(whole, key),
        lambda: repository.records(manifest, key),
        lambda: repository.set_tag(key, "x", whole),
        lambda: repository.delete_tag(key, "x"),
        lambda: repository.tags(key),
        lambda: repository.stats(key),
        lambda: repository.divergences(key),
        lambda: repository.match(key, []),
        lambda: repository.match("default", [key]),
        lambda: push(repository, artifact(range(20)), key),
        lambda: _zarr(repository, whole, key),
    ):
        _attempt(ascii(key[:80]), call, seen)


def _zarr(repository: Repository, artifact_id: str, key: str) -> bytes | None:
    from repo_service.services.zarr_view import ZarrView

    return ZarrView(repository, artifact_id, "default").get(key)


class Raw:
    """A connection that sends request lines as they are, and comes back when it is closed."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._socket: socket.socket | None = None

    def ask(self, method: str, path: bytes, body: bytes = b"") -> tuple[int, bytes]:
        head = b"%b %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
            method.encode(),
            path,
            self._served.netloc.encode(),
            len(body),
        )
        for last in False, True:
            if self._socket is None:
                self._socket = self._served.connect()
            try:
                self._socket.sendall(head + body)
                answer = http.client.HTTPResponse(self._socket, method=method)
                answer.begin()
            except (OSError, http.client.HTTPException):
                self.close()
                if last:
                    raise
                continue
            data = answer.read()
            if answer.will_close:
                self.close()
            return answer.status, data
        raise AssertionError

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _try_routes(served: Served, hostile: list[str], whole: str, rng: random.Random, seen: _Seen) -> None:
    valid = {"namespace": "default", "ref": whole, "artifact_id": whole, "digest": f"blake3:{'0' * 64}"}
    valid |= {"name": "x", "push_id": "0" * 32, "key": "zarr.json"}
    paths = json.loads(urllib3.request("GET", f"{served.url}/v1/openapi.json").data)["paths"]
    places = [
        (method.upper(), path, name)
        for path, operations in paths.items()
        for method in operations
        for _, name, _, _ in string.Formatter().parse(path.replace(":path", ""))
        if name
    ]
    bodies = {"tags": {"artifact_id": whole}, "pushes": {"fingerprint": {}}, "blocks": {"records": []}}
    raw = Raw(served)
    for key in hostile:
        for method, path, name in places:
            written = quote(key.encode(errors="surrogatepass"), safe=rng.choice(["/", "", "/%\\.", "/%.:\\?#"]))
            if rng.random() < 0.3:
                written = "".join(f"%{byte:02x}" if rng.random() < 0.5 else chr(byte) for byte in written.encode())
            line = path.replace(f"{{{name}}}", written).format(**valid)
            body = bodies.get(path.split("/")[-1], bodies["tags"] if "tags" in path else {"keys": []})
            status, data = raw.ask(method, line.encode(), b"" if method == "GET" else json.dumps(body).encode())
            seen.counts["requests"] += 1
            seen.counts[f"{status // 100}xx"] += 1
            if _SECRET in data or b"Traceback" in data or status >= 500:
                seen.leaked.append(f"{method} {line[:200]} {status} {data[:200]!r}")
    raw.close()


FAULTS = [
    Fault(
        "keys",
        "5,000 hostile keys against stores, repository and routes: 0 escapes, 0 tracebacks, 0 5xx",
        keys,
        short={"count": 12},
        full={"count": 5000},
    ),
]
