"""The storage contract, run against every backend, and what a local disk adds to it."""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from repo_service.domain.errors import DocumentCorrupt, InvalidInput, StorageFull, Unavailable
from repo_service.storage import LocalStore, MemoryStore, S3Store, Store
from repo_service.storage.store import check_key

ROOT = Path(__file__).parent.parent
PIECE = 512 * 1024
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def connected() -> Iterator[list[S3Store]]:
    """The S3 store whose connections the others use, once there is one: making them takes a tenth of a second."""
    stores: list[S3Store] = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture(params=["memory", "local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, connected: list[S3Store]) -> Store:
    if request.param != "s3":
        return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store")
    server = request.getfixturevalue("s3")
    made = S3Store(server.bucket, server.prefix())
    if connected:
        made._bucket = connected[0]._bucket
    else:
        connected.append(made)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def local(root: Path) -> LocalStore:
    return LocalStore(root)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def files(root: Path) -> list[str]:
    """Every file below a directory, by its path in it."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def read(store: Store, key: str, out: bytearray) -> tuple[int | None, bytes]:
    pieces: list[bytes] = []
    size = store.read_into(key, memoryview(out), lambda piece: pieces.append(bytes(piece)))
    return size, b"".join(pieces)


# Objects


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 8 * 2**20])
def test_an_object_is_what_was_put(store: Store, size: int) -> None:
    data = content(size)
    store.put("a/b", data)
    assert store.get("a/b") == data
    out = bytearray(size)
    assert read(store, "a/b", out) == (size, data)
    assert out == data


def test_an_object_larger_than_the_limit_is_refused(store: Store) -> None:
    store.put("a/b", b"x" * 1000)
    assert store.get("a/b", 1000) == b"x" * 1000
    with pytest.raises(DocumentCorrupt, match="a/b has 1000 bytes"):
        store.get("a/b", 999)
    assert read(store, "a/b", bytearray(10)) == (1000, b"x" * 10)


def test_no_memory_is_taken_for_a_file_of_any_size(local: LocalStore, root: Path) -> None:
    local.put("a", b"x")
    os.truncate(root / "a", 2**40)
    with pytest.raises(DocumentCorrupt, match="a has 1099511627776 bytes"):
        local.get("a")


@pytest.mark.parametrize(
    "data",
    [
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"xabcdx")[1:5],
        array("I", [0x64636261]),
        memoryview(array("H", [25185, 25699])),
    ],
    ids=["bytes", "bytearray", "slice", "array", "view of shorts"],
)
@pytest.mark.parametrize("put", ["put", "put_if_absent"])
def test_any_contiguous_buffer_may_be_put(store: Store, put: str, data: Any) -> None:
    getattr(store, put)("key", data)
    assert store.get("key") == b"abcd"


def test_an_object_does_not_follow_the_buffer_it_came_from(store: Store) -> None:
    data = bytearray(b"before")
    store.put("key", data)
    data[:] = b"after!"
    assert store.get("key") == b"before"


def test_what_is_absent_reads_as_none(store: Store) -> None:
    store.put("a/b", b"x")
    for key in ("b", "a/c", "a/b/c", "a"):
        out = bytearray(b"untouched")
        assert store.get(key) is None
        assert read(store, key, out) == (None, b"")
        assert out == b"untouched"
        assert not store.exists(key)


def test_put_replaces(store: Store) -> None:
    store.put("key", b"a longer object")
    store.put("key", b"short")
    assert store.get("key") == b"short"
    assert store.exists("key")


def test_put_if_absent_keeps_the_first(store: Store) -> None:
    assert store.put_if_absent("a/key", b"first") is True
    assert store.put_if_absent("a/key", b"second") is False
    assert store.get("a/key") == b"first"
    store.delete("a/key")
    assert store.put_if_absent("a/key", b"third") is True
    assert store.get("a/key") == b"third"


def test_deleting_removes_and_may_be_repeated(store: Store) -> None:
    store.put("a/b", b"x")
    store.put("a/c", b"y")
    for _ in range(2):
        store.delete("a/b")
        assert store.get("a/b") is None
        assert not store.exists("a/b")
    store.delete("never/was")
    store.delete("a/c/d")
    store.delete("a")
    assert store.get("a/c") == b"y"


def test_keys_are_listed_below_whole_segments(store: Store) -> None:
    keys = ["a/b/c", "a/b/d/e", "a/b-c", "a/bc", "a/b.json", "ab", "b/a/b", "a/B/c"]
    for key in keys:
        store.put(key, b"x")
    assert sorted(store.list("a/b")) == ["a/b/c", "a/b/d/e"]
    assert sorted(store.list("a")) == sorted(key for key in keys if key.startswith("a/"))
    assert list(store.list("a")) == list(store.list("a"))
    assert (
        list(store.list("ab"))
        == list(store.list("a/b/c"))
        == list(store.list("a/b/c/d"))
        == list(store.list("z"))
        == []
    )
    store.delete("a/b/c")
    assert list(store.list("a/b")) == ["a/b/d/e"]


# Reading into memory that the caller has


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5])
@pytest.mark.parametrize("room", [0, 1, PIECE, 2 * PIECE + 5, 2 * PIECE + 6])
def test_read_into_fills_what_there_is_room_for_and_tells_the_size(store: Store, size: int, room: int) -> None:
    data = content(size)
    store.put("key", data)
    out = bytearray(b"\xee" * (room + 8))
    seen: list[bytes] = []
    found = store.read_into("key", memoryview(out)[:room], lambda piece: seen.append(bytes(piece)))
    held = min(size, room)
    assert found == size
    assert b"".join(seen) == data[:held]
    assert out[:held] == data[:held]
    assert out[held:] == b"\xee" * (room + 8 - held)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=64), room=st.integers(0, 80))
def test_pieces_are_shown_in_order_as_they_lie_in_the_callers_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch, data: bytes, room: int
) -> None:
    monkeypatch.setattr("repo_service.storage.local._PIECE", 7)
    store.put("key", data)
    out = bytearray(room)
    view = memoryview(out)
    end = 0

    def seen(piece: memoryview) -> None:
        nonlocal end
        assert piece == view[end : end + len(piece)] == data[end : end + len(piece)]
        assert piece.obj is out
        end += len(piece)

    assert store.read_into("key", view, seen) == len(data)
    assert end == min(len(data), room)


def test_an_error_of_the_caller_ends_the_read(store: Store) -> None:
    store.put("key", content(3 * PIECE))

    def refuse(_: memoryview) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        store.read_into("key", memoryview(bytearray(3 * PIECE)), refuse)
    assert store.get("key") == content(3 * PIECE)


# Keys

OPERATIONS: dict[str, Callable[[Store, str], Any]] = {
    "get": lambda store, key: store.get(key),
    "read_into": lambda store, key: store.read_into(key, memoryview(bytearray(8)), len),
    "put": lambda store, key: store.put(key, b"x"),
    "put_if_absent": lambda store, key: store.put_if_absent(key, b"x"),
    "delete": lambda store, key: store.delete(key),
    "exists": lambda store, key: store.exists(key),
    "list": lambda store, key: list(store.list(key)),
}

HOSTILE = [
    "",
    "/",
    "/a",
    "//a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/..",
    "a/../b",
    "a/./b",
    "./a",
    "a/.hidden",
    ".hidden",
    "-rf",
    "a/-b",
    "~",
    "~root/a",
    "a b",
    "a\n",
    "\na",
    "a\0b",
    "a\\b",
    "a\\..\\b",
    "C:\\a",
    "C:/a",
    "file:///etc/passwd",
    "%2e%2e/a",
    "a%2fb",
    "a?b",
    "a*",
    "a:b",
    "$HOME/a",
    "\u0430/b",
    "a/\u2025/b",
    "a\u2215b",
    "\uff0e\uff0e/a",
    "\u202ea",
    "\ud800",
    "tmp",
    "tmp/a",
    "a" * 513,
    "a/" * 256 + "a",
    "a" * 256,
    "b/" + "a" * 256,
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_zarr_python_2357_a_key_outside_the_grammar_is_refused(store: Store, operation: str) -> None:
    for key in HOSTILE:
        with pytest.raises(InvalidInput, match="not a storage key") as caught:
            OPERATIONS[operation](store, key)
        assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "key", ["a", "_", "0", "a.b-c_d", "a/b/c", "tmp2", "a/tmp", "Tmp/x", "a..b", "a" * 255, ("a" * 255 + "/") * 2]
)
def test_keys_of_the_grammar_are_taken(store: Store, key: str) -> None:
    key = key.rstrip("/")
    store.put(key, b"x")
    assert store.get(key) == b"x"
    assert store.exists(key)


def hostile_keys(choice: random.Random) -> Iterator[str]:
    alphabet = ["a", "B", "7", "_", "tmp", "a.json", "kvgraft.json"]
    fragments = [
        "/",
        "//",
        "..",
        ".",
        "../",
        "/..",
        "./",
        "\\",
        "\0",
        "\n",
        " ",
        "~",
        "%2e",
        "-",
        "\u00e9",
        "\u2024",
        "\x7f",
        "\ud800",
    ]
    while True:
        parts = choice.choices(alphabet, k=choice.randrange(1, 5))
        for _ in range(choice.randrange(1, 4)):
            parts.insert(choice.randrange(len(parts) + 1), choice.choice(fragments))
        yield choice.choice(["", "/"]).join(parts)


def test_zarr_python_2357_no_key_leaves_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    root = outside / "a" / "b" / "store"
    store = LocalStore(root)
    choice = random.Random(2357)
    keys = hostile_keys(choice)
    before = files(outside)
    refused = 0
    accepted: set[str] = set()
    for _ in range(5000):
        key = next(keys)
        operation = choice.choice(list(OPERATIONS.values()))
        try:
            check_key(key)
        except InvalidInput:
            refused += 1
            with pytest.raises(InvalidInput):
                operation(store, key)
            continue
        accepted.add(key)
        path = os.path.normpath(f"{root}/{key}")
        assert path == f"{root}/{key}"
        assert not path.startswith(f"{root}/tmp/")
    assert refused > 3000
    assert files(outside) == before == []
    assert accepted


def test_objects_lie_below_the_root_under_their_keys(local: LocalStore, root: Path) -> None:
    for key in ("a", "b/c", "d/e/f.json"):
        local.put(key, key.encode())
        local.put_if_absent(f"{key}-2", key.encode())
    assert files(root.parent) == [
        "store/a",
        "store/a-2",
        "store/b/c",
        "store/b/c-2",
        "store/d/e/f.json",
        "store/d/e/f.json-2",
    ]


# Any sequence of operations

keys = st.builds("{}/{}/{}".format, *[st.sampled_from(["a", "b", "a.b"])] * 3)
prefixes = st.sampled_from(["a", "b", "a.b", "a/a", "a/b", "a.b/a.b", "a/a/a", "c"])


class StoreMachine(RuleBasedStateMachine):
    """A store against a dict."""

    store: Store
    model: dict[str, bytes]

    def make(self) -> Store:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.store = self.make()
        self.model = {}

    @rule(key=keys, data=st.binary(max_size=40))
    def put(self, key: str, data: bytes) -> None:
        self.store.put(key, data)
        self.model[key] = data

    @rule(key=keys, data=st.binary(max_size=40))
    def put_if_absent(self, key: str, data: bytes) -> None:
        assert self.store.put_if_absent(key, data) == (key not in self.model)
        self.model.setdefault(key, data)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=keys, room=st.integers(0, 50))
    def look(self, key: str, room: int) -> None:
        expected = self.model.get(key)
        assert self.store.get(key) == expected
        assert self.store.exists(key) == (expected is not None)
        size, seen = read(self.store, key, bytearray(room))
        assert size == (None if expected is None else len(expected))
        assert seen == (expected or b"")[:room]

    @rule(prefix=prefixes)
    def list_below(self, prefix: str) -> None:
        assert sorted(self.store.list(prefix)) == sorted(key for key in self.model if key.startswith(f"{prefix}/"))


class MemoryMachine(StoreMachine):
    def make(self) -> Store:
        return MemoryStore()


class LocalMachine(StoreMachine):
    directory: str | None = None

    def make(self) -> Store:
        self.directory = tempfile.mkdtemp()
        return LocalStore(Path(self.directory))

    @invariant()
    def nothing_is_left_in_tmp(self) -> None:
        if self.directory is not None:
            assert os.listdir(f"{self.directory}/tmp") == []

    def teardown(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory)


TestMemoryAgainstADict = MemoryMachine.TestCase
TestMemoryAgainstADict.settings = settings(deadline=None, max_examples=50, stateful_step_count=40)
TestLocalAgainstADict = LocalMachine.TestCase
TestLocalAgainstADict.settings = settings(deadline=None, max_examples=20, stateful_step_count=25)


# Several writers


def test_of_many_threads_one_creates_an_object(store: Store) -> None:
    # SeaweedFS lets a writer wait for a second and more where several write one key.
    rounds = 1 if isinstance(store, S3Store) else 20
    with ThreadPoolExecutor(8) as pool:
        for number in range(rounds):
            barrier = threading.Barrier(8)

            def create(name: int, number: int = number, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait(60)
                return store.put_if_absent(f"a/{number}", bytes([name]) * 1000)

            won = list(pool.map(create, range(8)))
            assert won.count(True) == 1
            assert store.get(f"a/{number}") == bytes([won.index(True)]) * 1000


def test_readers_see_whole_objects_while_they_are_replaced(store: Store) -> None:
    versions = [bytes([i]) * (PIECE + i) for i in range(4)]
    store.put("key", versions[0])
    stop = threading.Event()

    def replace() -> None:
        for i in range(60):
            store.put("key", versions[i % 4])
        stop.set()

    with ThreadPoolExecutor(3) as pool:
        writer = pool.submit(replace)
        while not stop.is_set():
            assert store.get("key") in versions
            out = bytearray(PIECE + 8)
            size, seen = read(store, "key", out)
            assert size == len(seen)
            assert seen in versions
        writer.result()


_CREATE = """
import os, sys, time
from pathlib import Path
from repo_service.storage import LocalStore
root, name, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = LocalStore(Path(root))
print("ready", flush=True)
sys.stdin.readline()
print([i for i in range(count) if store.put_if_absent(f"a/{i}", bytes([name]) * 100_000)])
"""


def test_of_many_processes_one_creates_an_object(root: Path) -> None:
    count, number = 40, 4
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CREATE, str(root), str(name), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for name in range(number)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    assert sorted(i for wins in won for i in wins) == list(range(count))
    store = LocalStore(root)
    for name, wins in enumerate(won):
        assert all(store.get(f"a/{i}") == bytes([name]) * 100_000 for i in wins)
    assert not os.listdir(root / "tmp")


# Faults

_DIE = """
import os, signal, sys
from pathlib import Path
from repo_service.storage import LocalStore
root, operation, call = sys.argv[1:]
store = LocalStore(Path(root))
real = getattr(os, call)
def die(*args, **options):
    if call == "write":
        real(args[0], bytes(args[1])[: len(args[1]) // 2])
    elif operation.endswith("after"):
        real(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, call, die)
getattr(store, operation.removesuffix(" after"))("a/new/key", b"n" * 1_000_000)
"""


@pytest.mark.parametrize(
    ("operation", "call", "whole"),
    [
        ("put", "write", False),
        ("put_if_absent", "write", False),
        ("put", "fsync", False),
        ("put after", "fsync", False),
        ("put", "replace", False),
        ("put after", "replace", True),
        ("put_if_absent", "link", False),
        ("put_if_absent after", "link", True),
    ],
)
def test_zarr_python_3411_a_kill_at_any_step_leaves_no_short_object(
    local: LocalStore, root: Path, operation: str, call: str, whole: bool
) -> None:
    local.put("a/old", b"o" * 1000)
    local.put("a/new/other", b"x")
    command = [sys.executable, "-c", _DIE, str(root), operation, call]
    assert subprocess.run(command, env=ENVIRONMENT, check=False, timeout=120).returncode == -signal.SIGKILL
    assert local.get("a/new/key") == (b"n" * 1_000_000 if whole else None)
    assert local.get("a/old") == b"o" * 1000
    assert sorted(local.list("a")) == sorted(["a/new/other", "a/old", *(["a/new/key"] if whole else [])])
    assert {name.split("/")[0] for name in files(root)} <= {"a", "tmp"}
    again = LocalStore(root)
    again.put("a/new/key", b"again")
    assert again.get("a/new/key") == b"again"


_WRITE = """
import itertools, sys
from pathlib import Path
from repo_service.storage import LocalStore
root, first = sys.argv[1], int(sys.argv[2])
store = LocalStore(Path(root))
print("ready", flush=True)
for i in itertools.count(first):
    store.put(f"a/{i % 7}/{i}", bytes([i % 256]) * 2_000_000)
    store.put("a/replaced", bytes([i % 256]) * 2_000_000)
"""


def test_zarr_python_3411_a_kill_at_any_time_leaves_no_short_object(root: Path) -> None:
    choice = random.Random(3411)
    for number in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITE, str(root), str(number * 1000)],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(choice.uniform(0, 0.2))
        process.kill()
        process.communicate(timeout=60)
        store = LocalStore(root)
        for key in store.list("a"):
            data = store.get(key)
            assert data is not None
            assert len(data) == 2_000_000
            assert data.count(data[0]) == len(data)
            assert key == "a/replaced" or data[0] == int(key.rpartition("/")[2]) % 256
        assert {name.split("/")[0] for name in files(root)} <= {"a", "tmp"}


def mounted(directory: Path, options: str) -> bool:
    directory.mkdir()
    mount = shutil.which("mount")
    if mount is None or sys.platform != "linux" or os.geteuid() != 0:
        return False
    command = [mount, "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system with little room."""
    directory = tmp_path / "tiny"
    if not mounted(directory, request.param):
        pytest.skip("mounting a small file system needs privileges; the file size limit stands in for it")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize("tiny", ["size=1m"], indirect=True)
@pytest.mark.parametrize("put", ["put", "put_if_absent"])
def test_a_full_disk_refuses_a_write_and_keeps_everything_else(tiny: Path, put: str) -> None:
    store = LocalStore(tiny)
    store.put("a/old", b"o" * 600_000)
    for key in ("a/new", "b/c/new", "a/old") if put == "put" else ("a/new", "b/c/new"):
        with pytest.raises(StorageFull, match="no space") as caught:
            getattr(store, put)(key, b"n" * 600_000)
        assert caught.value.code == "storage_full"
        assert files(tiny) == ["a/old"]
        assert store.get("a/old") == b"o" * 600_000
    assert store.put_if_absent("a/old", b"n" * 600_000) is False
    store.put("a/small", b"s")
    store.delete("a/old")
    getattr(store, put)("a/new", b"n" * 600_000)
    assert store.get("a/new") == b"n" * 600_000


@pytest.mark.parametrize("tiny", ["size=1m,nr_inodes=8"], indirect=True)
def test_a_disk_without_inodes_is_full(tiny: Path) -> None:
    store = LocalStore(tiny)
    number = 0

    def fill() -> None:
        nonlocal number
        while True:
            store.put(f"a/{number}/b", b"x")
            number += 1

    with pytest.raises(StorageFull):
        fill()
    assert 0 < number < 8
    assert not os.listdir(tiny / "tmp")
    assert [store.get(key) for key in store.list("a")] == [b"x"] * number


_LIMITED = """
import os, resource, sys
from pathlib import Path
from repo_service.domain.errors import StorageFull
from repo_service.storage import LocalStore
store = LocalStore(Path(sys.argv[1]))
store.put("a/old", b"o" * 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for put in (store.put, store.put_if_absent):
    for key in ("a/old", "a/new", "b/c/new"):
        try:
            print(put(key, b"n" * 100_000))
        except StorageFull as error:
            print(error.code)
print(store.get("a/old") == b"o" * 1000, store.get("a/new"), os.listdir(f"{sys.argv[1]}/tmp"))
"""


def test_a_file_size_limit_is_a_full_disk(root: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(root)]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120)
    full = "storage_full\n"
    assert run.stdout == full * 3 + "False\n" + full * 2 + "True None []\n"
    assert files(root) == ["a/old"]


def test_a_store_that_lost_its_directory_is_unavailable(local: LocalStore, root: Path) -> None:
    shutil.rmtree(root)
    for put in (local.put, local.put_if_absent):
        with pytest.raises(Unavailable, match="No such file"):
            put("a/b", b"x")
    assert not root.exists()


def test_a_directory_that_can_not_be_read_fails_the_listing(
    local: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put("a/b/c", b"x")
    local.put("a/d/e", b"x")
    scan = os.scandir

    def failing(path: str) -> Any:
        if path == f"{root}/a/b":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(Unavailable, match="Permission denied"):
        list(local.list("a"))


def test_what_is_no_object_is_not_listed(local: LocalStore, root: Path) -> None:
    local.put("a/b", b"x")
    for name in (".nfs0001", "b~", "b c", "\u00e9", "-b"):
        (root / "a" / name).write_bytes(b"foreign")
    (root / "tmp" / "left-by-a-killed-writer").write_bytes(b"short")
    assert list(local.list("a")) == ["a/b"]


# Directories and objects


def test_a_key_that_leads_through_an_object_is_refused_and_nothing_is_lost(local: LocalStore, root: Path) -> None:
    local.put("a/b", b"object")
    for put in (local.put, local.put_if_absent):
        with pytest.raises(Unavailable):
            put("a/b/c", b"x")
    assert local.get("a/b") == b"object"
    assert files(root) == ["a/b"]


def test_a_directory_is_no_object(local: LocalStore, root: Path) -> None:
    local.put("a/b", b"object")
    for put in (local.put, local.put_if_absent):
        with pytest.raises(Unavailable):
            put("a", b"x")
    assert local.get("a") is None
    assert local.read_into("a", memoryview(bytearray()), len) is None
    assert not local.exists("a")
    local.delete("a")
    assert files(root) == ["a/b"]


def test_safetensors_762_an_open_object_keeps_its_bytes_when_it_is_replaced_or_deleted(
    local: LocalStore, root: Path
) -> None:
    local.put("a/b", b"before" * 1000)
    with open(root / "a" / "b", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        local.put("a/b", bytes(view).replace(b"before", b"after!"))
        assert view[:] == b"before" * 1000
        local.delete("a/b")
        assert view[:] == b"before" * 1000


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made durable and what is placed, in order, as paths without the temp file's random name."""
    calls: list[str] = []
    fsync, rename, link = os.fsync, os.replace, os.link

    def name(path: str) -> str:
        return "temp" if os.path.dirname(path).endswith("/tmp") else path

    def synced(fd: int) -> None:
        fsync(fd)
        calls.append(f"sync {name(os.readlink(f'/proc/self/fd/{fd}'))}")

    def renamed(source: str, target: str) -> None:
        rename(source, target)
        calls.append(f"place {target}")

    def linked(source: str, target: str) -> None:
        link(source, target)
        calls.append(f"place {target}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "link", linked)
    return calls


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("put", ["put", "put_if_absent"])
def test_i4_an_object_and_every_new_directory_are_durable_before_put_returns(
    local: LocalStore, root: Path, put: str, journal: list[str]
) -> None:
    getattr(local, put)("a/b/c", b"x")
    assert [call for call in journal if call != "sync temp"] == [
        f"sync {root}",
        f"sync {root}/a",
        f"place {root}/a/b/c",
        f"sync {root}/a/b",
    ]
    assert journal.index("sync temp") < journal.index(f"place {root}/a/b/c")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_i4_an_object_found_present_is_durable_before_put_if_absent_returns(
    local: LocalStore, root: Path, journal: list[str]
) -> None:
    local.put_if_absent("a/b", b"x")
    journal.clear()
    assert local.put_if_absent("a/b", b"y") is False
    assert journal == [f"sync {root}/a"]
