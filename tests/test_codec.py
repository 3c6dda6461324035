"""Encoded chunks: exact for every dtype, refused where anything about a frame is not as it must be, alike for all users."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from blake3 import blake3
from exactness import fresh_logits, sha256
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc
from places import Place
from pushing import Artifact, contents_of, push
from servers import S3Server
from serving import reached
from synthetic import artifact, fingerprint

from engine_adapter import GraftSession
from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.client.mirror import mirror
from repo_service.client.repair import repair
from repo_service.domain.canonical import canonical_json
from repo_service.domain.digest import chunk_digest
from repo_service.domain.errors import ChunkCorrupt, InvalidInput, NewerFormat, NotARepository
from repo_service.domain.frame import BLOSC, CODECS, MAGIC, NONE, decode_chunk, encode_chunk, longest_frame
from repo_service.domain.layout import DTYPE_BYTES, ChunkSpec
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import canonical_steps
from repo_service.services import marker
from repo_service.services.documents import chunk_key
from repo_service.services.opening import open_local
from repo_service.services.read import read_chunk
from repo_service.storage import MemoryStore

MADE_WITH = fingerprint(block_tokens=64)
MADE: Artifact = artifact(random.Random(1).choices(range(1000), k=100), MADE_WITH)

SPEC = ChunkSpec("bfloat16", (1, 1, 2, 8, 16))
# Half of it becomes smaller.
DATA = random.Random(2).randbytes(SPEC.size // 2) + bytes(SPEC.size // 2)
DIGEST = chunk_digest(DATA, SPEC.dtype, SPEC.shape)


def decoded(frame: bytes, spec: ChunkSpec = SPEC, digest: str = DIGEST) -> bytes:
    out = bytearray(spec.size)
    decode_chunk(memoryview(frame), digest, spec, memoryview(out))
    return bytes(out)


def parts(frame: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payload."""
    end = 12 + struct.unpack_from("<I", frame, 8)[0]
    return json.loads(frame[12:end]), frame[end:]


def framed(payload: bytes, text: bytes | None = None, **fields: Any) -> bytes:
    """A frame that says of its payload what is true, but for ``fields``, or for ``text`` in place of its header."""
    header = {
        "codec": BLOSC,
        "size": SPEC.size,
        "stored_digest": f"blake3:{blake3(payload).hexdigest()}",
        "stored_size": len(payload),
    } | fields
    text = canonical_json(header) if text is None else text
    return MAGIC + struct.pack("<I", len(text)) + text + payload


FRAME = encode_chunk(DATA, SPEC, BLOSC)
HEADER, PAYLOAD = parts(FRAME)


def patched(at: int, value: bytes) -> bytes:
    return PAYLOAD[:at] + value + PAYLOAD[at + len(value) :]


@st.composite
def chunks(draw: st.DrawFn) -> tuple[ChunkSpec, bytes]:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    spec = ChunkSpec(dtype, tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))))
    generator = random.Random(draw(st.integers(0, 2**32)))
    unit = draw(st.integers(1, max(1, spec.size)))
    data = generator.randbytes(unit) * (spec.size // unit + 1)
    return spec, data[: spec.size]


@given(chunks(), st.sampled_from(CODECS))
def test_every_chunk_comes_back_bit_for_bit(chunk: tuple[ChunkSpec, bytes], codec: str) -> None:
    spec, data = chunk
    frame = encode_chunk(data, spec, codec)
    header, payload = parts(frame)
    assert decoded(frame, spec, chunk_digest(data, spec.dtype, spec.shape)) == data
    assert len(payload) <= spec.size
    assert (header["codec"] == BLOSC) == (len(payload) < spec.size)
    assert len(frame) <= longest_frame(spec)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_bits_are_put_together_by_the_width_of_the_dtype(dtype: str) -> None:
    spec = ChunkSpec(dtype, (1, 1, 1, 256, 64))
    frame = encode_chunk(bytes(spec.size), spec, BLOSC)
    assert parts(frame)[1][3] == DTYPE_BYTES[dtype]


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 1.2), ("float32", 1.08), ("float16", 1.02)])
def test_state_becomes_smaller(dtype: str, ratio: float) -> None:
    spec = ChunkSpec(dtype, (1, 4, 4, 256, 64))
    normal = torch.randn(spec.shape, generator=torch.Generator().manual_seed(3))
    data = normal.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    assert len(encode_chunk(data, spec, BLOSC)) < spec.size / ratio


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no frame"),
    "the chunk's own bytes": (DATA, "no frame"),
    "another magic": (b"kvgchunK" + FRAME[8:], "no frame"),
    "the magic alone": (MAGIC, "header"),
    "no header": (MAGIC + bytes(4), "JSON"),
    "a header of 4 GiB": (MAGIC + b"\xff" * 4 + FRAME[12:], "header of 4294967295"),
    "a header of 513 bytes": (framed(PAYLOAD, b" " * 513), "header of 513"),
    "a header beyond the end": (FRAME[:60], "header of"),
    "a header that is no JSON": (framed(PAYLOAD, b"\xff\xfe"), "UTF-8"),
    "a header that is no object": (framed(PAYLOAD, b"[]"), "codec 'None'"),
    "a deep header": (framed(PAYLOAD, b"[" * 512), "JSON|deep"),
    "a deep header that ends": (framed(PAYLOAD, b"[" * 256 + b"]" * 256), "deep"),
    "a header with spaces": (framed(PAYLOAD, json.dumps(HEADER).encode()), "not canonical"),
    "a header in another order": (framed(PAYLOAD, json.dumps(dict(reversed(HEADER.items()))).encode()), "not canonical"),
    "a field twice": (framed(PAYLOAD, b'{"codec":"none","codec":"none"}'), "twice"),
    "one field more": (framed(PAYLOAD, more=1), "more than it may"),
    "a field missing": (framed(PAYLOAD, b'{"codec":"none"}'), "size None"),
    "an unknown codec": (framed(PAYLOAD, codec="zstd"), "'zstd'.*none, blosc-lz4-bitshuffle"),
    "a codec that is no text": (framed(PAYLOAD, codec=[["none"]]), "reads none"),
    "a size of text": (framed(PAYLOAD, size=str(SPEC.size)), "header says size"),
    "a size of 8 EiB": (framed(PAYLOAD, size=2**63 - 1), "size 9223372036854775807 instead of 512"),
    "a size beyond 64 bits": (framed(PAYLOAD, b'{"size":' + b"9" * 400 + b"}"), "64 bits"),
    "a smaller size": (framed(PAYLOAD, size=SPEC.size - 1), "size 511 instead of 512"),
    "a larger stored size": (framed(PAYLOAD, stored_size=len(PAYLOAD) + 1), "stored_size"),
    "another stored digest": (framed(PAYLOAD, stored_digest=DIGEST), "stored_digest"),
    "a payload cut": (FRAME[:-1], "stored_size"),
    "trailing bytes": (FRAME + b"\0", "stored_size"),
    "no payload": (framed(b""), "payload of 0 bytes"),
    "the chunk stored plain, as encoded": (framed(DATA), "payload"),
    "the chunk stored plain, too short": (framed(DATA[:-1], codec=NONE), "511 bytes; it must have 512"),
    "the chunk stored plain, too long": (framed(DATA + b"\0", codec=NONE), "513 bytes; it must have 512"),
    "the payload, as plain": (framed(PAYLOAD, codec=NONE), "it must have 512"),
    "another chunk stored plain": (framed(bytes(SPEC.size), codec=NONE), "decodes to blake3:"),
    "another chunk": (framed(blosc.compress(bytes(SPEC.size), b"lz4", 5, blosc.BITSHUFFLE)), "decodes to blake3:"),
    "Blosc of another kind": (framed(blosc.compress(DATA, b"zstd", 5, blosc.BITSHUFFLE)), "not of blosc-lz4"),
    "Blosc of another version": (framed(patched(0, b"\x03")), "not of blosc-lz4"),
    "Blosc of more": (framed(blosc.compress(DATA * 2, b"lz4", 5, blosc.BITSHUFFLE)), "says 1024 bytes"),
    "Blosc of less": (framed(blosc.compress(DATA[:64], b"lz4", 5, blosc.BITSHUFFLE)), "says 64 bytes"),
    "Blosc of 4 GiB": (framed(patched(4, b"\xff" * 4)), "says 4294967295 bytes"),
    "Blosc that ends later": (framed(patched(12, struct.pack("<I", 2**20))), "in 1048576"),
    "Blosc that ends earlier": (framed(PAYLOAD + b"\0"), f"in {len(PAYLOAD)};"),
    "Blosc with huge blocks": (framed(patched(8, b"\xff\xff\xff\x7f")), "payload|decodes to"),
    "Blosc with no blocks": (framed(patched(8, bytes(4))), "payload|decodes to"),
    "Blosc with elements of no width": (framed(patched(3, b"\0")), "payload|decodes to"),
    "Blosc that begins elsewhere": (framed(patched(16, b"\xff\xff\xff\x7f")), "payload|decodes to"),
    "Blosc of the header alone": (framed(PAYLOAD[:12] + struct.pack("<I", 16)), "payload|decodes to"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_frame_that_is_not_as_it_must_be_is_an_error_that_names_the_chunk(name: str) -> None:
    frame, why = HOSTILE[name]
    with pytest.raises(ChunkCorrupt, match=why) as caught:
        decoded(frame)
    assert caught.value.details["digest"] == DIGEST
    assert DIGEST in caught.value.message
    assert len(caught.value.message) < 800


@pytest.mark.parametrize("name", ["a size of 8 EiB", "a header of 4 GiB", "Blosc of 4 GiB", "Blosc of more"])
def test_zarr_python_2056_nothing_decodes_past_the_size_that_the_layout_gives(name: str) -> None:
    room = bytearray(SPEC.size + 4096)
    tracemalloc.start()
    with pytest.raises(ChunkCorrupt):
        decode_chunk(memoryview(HOSTILE[name][0]), DIGEST, SPEC, memoryview(room)[: SPEC.size])
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert not any(room[SPEC.size :])


def test_every_flipped_bit_and_every_length_is_found() -> None:
    for bit in range(8 * len(FRAME)):
        altered = bytearray(FRAME)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkCorrupt):
            decoded(bytes(altered))
    for length in range(len(FRAME)):
        with pytest.raises(ChunkCorrupt):
            decoded(FRAME[:length])


@given(st.binary(max_size=600), st.booleans())
def test_whatever_lies_there_is_that_chunk_or_an_error(data: bytes, is_payload: bool) -> None:
    with pytest.raises(ChunkCorrupt):
        decoded(framed(data) if is_payload else data)


@given(st.lists(st.tuples(st.integers(16, len(PAYLOAD) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_payload_made_to_deceive_gives_that_chunk_or_an_error(changes: list[tuple[int, int]]) -> None:
    payload = bytearray(PAYLOAD)
    for at, value in changes:
        payload[at] = value
    with suppress(ChunkCorrupt):
        assert decoded(framed(bytes(payload))) == DATA


def test_an_object_of_any_size_is_read_into_bounded_memory() -> None:
    store = MemoryStore()
    store.codec = BLOSC
    store.put(chunk_key(DIGEST), FRAME + bytes(1000))
    with pytest.raises(ChunkCorrupt, match=f"{len(FRAME) + 1000} bytes; its frame can't have more than 1036"):
        read_chunk(store, DIGEST, SPEC, memoryview(bytearray(SPEC.size)))


def test_chunks_decode_in_threads_and_in_forks() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(decoded, [FRAME] * 400)) == {DATA}
        running = [pool.submit(encode_chunk, DATA * 1, SPEC, BLOSC) for _ in range(400)]
        children = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                os._exit(0 if decoded(encode_chunk(DATA, SPEC, BLOSC)) == DATA else 1)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        assert {parts(item.result())[0]["size"] for item in running} == {SPEC.size}


# In repositories.


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repositories made from here on encode their chunks."""
    monkeypatch.setenv("KVGRAFT_CODEC", BLOSC)


def stored(root: Place) -> dict[str, Any]:
    """Files of chunks by digest."""
    files = (path for path in (root / "chunks").rglob("*") if path.is_file())
    return {f"blake3:{path.parent.name}{path.name}": path for path in files}


def check_whole(repository: Repository, made: Artifact = MADE) -> None:
    assert contents_of(repository, made[0].id) == made[2]
    assert repository.check(made[0].id, "default").ok
    assert repository.scrub().damage == []


@pytest.mark.everywhere(always=True)
@pytest.mark.usefixtures("encoded")
def test_an_encoded_repository_serves_what_was_pushed(repository: Repository, root: Place) -> None:
    push(repository, MADE)
    check_whole(repository)
    info = repository.info()
    assert (info.format_version, info.codec) == (2, BLOSC)
    frames = {digest: path.read_bytes() for digest, path in stored(root).items()}
    assert frames.keys() == MADE[2].keys()
    report = repository.scrub()
    assert (report.bytes, report.stored_bytes) == (sum(map(len, MADE[2].values())), sum(map(len, frames.values())))
    used = {parts(frame)[0]["codec"] for frame in frames.values()}
    assert used == {BLOSC, NONE}, "what does not become smaller is not encoded"
    stats = repository.stats("default")
    assert stats.unique_bytes == sum(map(len, MADE[2].values())), "decoded bytes are counted"
    assert repository.reindex().corrupt == []
    assert repository.collect_garbage(grace_s=0).unreadable == []
    check_whole(repository)
    assert repository.delete(MADE[0].id, "default").bytes == stats.unique_bytes
    assert stored(root) == {}


@pytest.fixture
def codecs(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str | None], tuple[int, str]]:
    """Makes a repository and says what it became, given its kind and the setting."""
    monkeypatch.setenv("KVGRAFT_INDEX", f"sqlite:///{tmp_path}/{s3.prefix().replace('/', '-')}.sqlite")
    urls = {"s3": f"s3://{s3.bucket}/{s3.prefix()}", "file": f"file://{tmp_path}/repository", "memory": "memory:"}

    def make(kind: str, setting: str | None) -> tuple[int, str]:
        if setting is None:
            monkeypatch.delenv("KVGRAFT_CODEC", raising=False)
        else:
            monkeypatch.setenv("KVGRAFT_CODEC", setting)
        if kind != "s3":
            monkeypatch.delenv("KVGRAFT_INDEX", raising=False)
        with open_repository(urls[kind]) as repository:
            push(repository, MADE)
            check_whole(repository)
            info = repository.info()
        return info.format_version, info.codec

    return make


@pytest.mark.parametrize(
    ("kind", "setting", "becomes"),
    [
        ("s3", None, (2, BLOSC)),
        ("s3", "", (2, BLOSC)),
        ("s3", NONE, (1, NONE)),
        ("file", None, (1, NONE)),
        ("file", BLOSC, (2, BLOSC)),
        ("memory", None, (1, NONE)),
        ("memory", BLOSC, (2, BLOSC)),
    ],
)
def test_a_lossless_codec_is_the_default_on_s3_and_a_setting_elsewhere(
    codecs: Callable[[str, str | None], tuple[int, str]], kind: str, setting: str | None, becomes: tuple[int, str]
) -> None:
    assert codecs(kind, setting) == becomes
    if kind != "memory":
        assert codecs(kind, NONE if setting != NONE else BLOSC) == becomes, "it is so from its beginning"


def test_an_unknown_codec_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVGRAFT_CODEC", "gzip")
    with pytest.raises(InvalidInput, match=r"KVGRAFT_CODEC.*'gzip'.*none, blosc-lz4-bitshuffle"):
        open_repository(f"file://{tmp_path}/repository")
    assert not (tmp_path / "repository" / "kvgraft.json").exists()
    assert main(["stats", "--repo", f"file://{tmp_path}/repository"])
    assert "KVGRAFT_CODEC" in capsys.readouterr().err


@pytest.mark.usefixtures("encoded")
def test_an_older_kvgraft_refuses_an_encoded_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/repository"
    with open_repository(url):
        pass
    monkeypatch.setattr(marker, "FORMAT_VERSION", 1)
    with pytest.raises(NewerFormat, match="format version 2; this kvgraft reads up to 1"):
        open_repository(url)


def test_a_raw_repository_is_what_it_always_was(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    with open_repository(f"file://{root}") as repository:
        push(repository, MADE)
        value = json.loads((root / "kvgraft.json").read_bytes())
        assert value == {"format": "kvgraft.repository", "repository_id": value["repository_id"], "version": 1}
        assert {digest: path.read_bytes() for digest, path in stored(root).items()} == MADE[2]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"codec": "zstd-9"}, NewerFormat, "'zstd-9'.*none, blosc-lz4-bitshuffle"),
        ({"codec": None}, NotARepository, "another kind"),
        ({"codec": 7}, NewerFormat, "'7'"),
        ({"codec": NONE}, NotARepository, "another kind"),
        ({"version": 0}, NotARepository, "another kind"),
        ({"version": 1}, NotARepository, "another kind"),
        ({"version": True}, NotARepository, "another kind"),
        ({"version": 3}, NewerFormat, "version 3"),
    ],
)
@pytest.mark.usefixtures("encoded")
def test_a_marker_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    url, path = f"file://{tmp_path}/repository", tmp_path / "repository" / "kvgraft.json"
    with open_repository(url):
        pass
    path.write_bytes(canonical_json(json.loads(path.read_bytes()) | changes))
    with pytest.raises(error, match=message):
        open_repository(url)


@pytest.mark.usefixtures("encoded")
def test_stats_name_the_codec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/repository"
    with open_repository(url) as repository:
        push(repository, MADE)
    main(["stats", "--repo", url, "--json"])
    assert json.loads(capsys.readouterr().out)["repository"]["codec"] == BLOSC
    main(["stats", "--repo", url])
    assert BLOSC in capsys.readouterr().out
    main(["scrub", "--repo", url])
    assert ", stored in " in capsys.readouterr().out


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Repository, Repository]]:
    """A raw repository and an encoded one."""
    monkeypatch.setenv("KVGRAFT_CODEC", NONE)
    with open_repository(f"file://{tmp_path}/raw") as raw:
        monkeypatch.setenv("KVGRAFT_CODEC", BLOSC)
        with open_repository(f"file://{tmp_path}/encoded") as encoded:
            yield raw, encoded


@pytest.mark.parametrize("way", [1, -1])
def test_a_mirror_moves_artifacts_between_raw_and_encoded(both: tuple[Repository, Repository], way: int) -> None:
    source, destination = both[::way]
    push(source, MADE)
    source.set_tag("default", "name", MADE[0].id)
    assert mirror(source, destination).artifacts_copied == 1
    check_whole(destination)
    assert mirror(source, destination).artifacts_copied == 0
    assert mirror(destination, source).artifacts_copied == 0


def test_what_is_damaged_in_an_encoded_repository_is_healed_from_a_raw_one(
    both: tuple[Repository, Repository], tmp_path: Path
) -> None:
    raw, encoded = both
    for repository in both:
        push(repository, MADE)
    for digest, path in stored(tmp_path / "encoded").items():
        frame = path.read_bytes()
        path.write_bytes(MADE[2][digest])
        (found,) = encoded.scrub().damage
        assert (found.kind, found.name) == ("chunk", digest)
        (healed,) = repair(raw, encoded, [("default", MADE[0].id)])
        assert healed.healed, healed.reason
        assert path.read_bytes() == frame
    check_whole(encoded)


@pytest.mark.everywhere(always=True)
@pytest.mark.usefixtures("encoded")
def test_frames_of_other_encoders_are_as_good(root: Place) -> None:
    other = {}
    for digest, data in MADE[2].items():
        payload = blosc.compress(memoryview(data).cast("H"), b"lz4", 9, blosc.BITSHUFFLE, 256)
        other[digest] = framed(payload, size=len(data))
    with open_local(root.as_uri()) as repository:
        push(repository, MADE)
        for digest, path in stored(root).items():
            assert path.read_bytes() != other[digest]
            path.write_bytes(other[digest])
        check_whole(repository)
        assert push(repository, MADE)[1] == [], "nothing is sent again"
        assert {digest: path.read_bytes() for digest, path in stored(root).items()} == other
        # As when two kvgrafts send a chunk at once: whichever is last lies there.
        running = repository.begin_push(MADE_WITH, "other")
        for digest in running.offer(MADE[1]):
            running.put(digest, MADE[2][digest])
        check_whole(repository)


@pytest.mark.usefixtures("encoded")
def test_a_scrub_finds_an_encoder_that_lied(tmp_path: Path) -> None:
    with open_repository(f"file://{tmp_path}/repository") as repository:
        push(repository, MADE)
        digest, path = min(stored(tmp_path / "repository").items())
        size = len(MADE[2][digest])
        path.write_bytes(framed(bytes(size), codec=NONE, size=size))
        (found,) = repository.scrub().damage
        assert found.name == digest


@pytest.mark.parametrize(("how", "dtype"), [("embedded", torch.float32), ("service", torch.bfloat16)], ids=str)
@pytest.mark.usefixtures("encoded")
def test_a_graft_out_of_an_encoded_repository_gives_the_logits_of_a_fresh_run(
    tmp_path: Path, how: str, dtype: torch.dtype
) -> None:
    model = families.build("gemma3", dtype, "sdpa")
    tokens = random.Random(4).choices(range(3, families.VOCAB_SIZE), k=150)
    url = f"file://{tmp_path}/repository"
    with reached(how, url) as repository, GraftSession(model, None, repository, block_tokens=32) as session:
        session.deposit(tokens[:128])
        run = session.prefill(tokens)
        assert run.grafted_tokens == 128
        assert sha256(run.logits) == sha256(fresh_logits(model, tokens, canonical_steps(0, len(tokens), 32)))
    used = {parts(path.read_bytes())[0]["codec"] for path in stored(tmp_path / "repository").values()}
    assert BLOSC in used
