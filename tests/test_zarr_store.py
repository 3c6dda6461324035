"""Artifacts through zarr-python, from a repository opened here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from synthetic import artifact
from test_zarr_view import TOKENS, many_dtypes, push
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, default_buffer_prototype

from repo_service.client.zarr_store import ArtifactStore, open_artifact
from repo_service.domain.errors import ArtifactNotFound, ChunkCorrupt, TagNotFound
from repo_service.domain.layout import ArrayLayout
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Repository
from repo_service.services.opening import open_local
from repo_service.services.zarr_view import ZarrView

BITS = {1: "u1", 2: "<u2", 4: "<u4"}


@pytest.fixture
def repository() -> Iterator[Repository]:
    with open_local("memory:") as opened:
        yield opened


@pytest.fixture(scope="module")
def view() -> Iterator[ZarrView]:
    with open_local("memory:") as opened:
        yield ZarrView(opened, push(opened, artifact(TOKENS)).id, "default")


def assembled(array: ArrayLayout, name: str, records: list[BlockRecord], chunks: dict[str, bytes]) -> np.ndarray:
    """An array's bits as unsigned integers, put together from its chunks without a Zarr library."""
    bits = BITS[array.chunk.size // int(np.prod(array.chunk.shape))]
    layers, heads = array.chunk_layers, array.chunk_heads
    whole = np.empty(array.shape(len(records)), bits)
    for b, record in enumerate(records):
        for position, digest in enumerate(record.chunks[name]):
            i, j = divmod(position, array.grid[1])
            part = np.frombuffer(chunks[digest], bits).reshape(array.chunk.shape)[0]
            whole[b, i * layers : (i + 1) * layers, j * heads : (j + 1) * heads] = part
    return whole


def test_zarr_specs_130_every_dtype_reads_bit_exactly(repository: Repository) -> None:
    made = artifact(TOKENS, many_dtypes())
    manifest, records, chunks = made
    group = open_artifact(repository, push(repository, made).id)
    dtypes = {}
    for name, layout in manifest.layout.arrays.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        values = array[:]
        assert isinstance(values, np.ndarray)
        np.testing.assert_array_equal(values.view(f"u{values.itemsize}"), assembled(layout, name, records, chunks))
        assert array.metadata.dimension_names == ("block", "layer", "head", "token", "dim")
        dtypes[name] = (str(array.dtype), array.attrs["kvgraft_dtype"])
    assert dtypes == {
        "full/k": ("uint16", "bfloat16"),
        "full/c": ("float16", "float16"),
        "sliding/k": ("uint8", "float8_e4m3fn"),
        "sliding/c": ("uint8", "float8_e5m2"),
        "c/k": ("float32", "float32"),
        "c/c": ("uint32", "uint32"),
    }
    np.testing.assert_array_equal(group["tokens"][:], TOKENS)


def test_bfloat16_and_float8_keep_their_bits_as_ml_dtypes(repository: Repository) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = artifact(TOKENS, many_dtypes())
    _, records, chunks = made
    group = open_artifact(repository, push(repository, made).id)
    for name in ("full/k", "sliding/k", "sliding/c"):
        array = group[name]
        typed = array[1, 0, :2].view(getattr(ml_dtypes, array.attrs["kvgraft_dtype"]))
        assert typed.tobytes() == chunks[records[1].chunks[name][0]]


def test_part_of_an_array_reads_its_chunks_only(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    made = artifact(TOKENS, many_dtypes())
    _, records, chunks = made
    array = open_artifact(repository, push(repository, made).id)["full/c"]
    asked = []
    read = repository.read_chunk
    monkeypatch.setattr(repository, "read_chunk", lambda *a: (asked.append(a[2]), read(*a))[1])
    part = array[1, 2, 3]
    assert asked == [records[1].chunks["full/c"][5]]
    assert part.tobytes() == chunks[asked[0]][-part.nbytes :]


@pytest.mark.parametrize("use_consolidated", [None, False])
def test_members_are_found_with_and_without_consolidated_metadata(
    view: ZarrView, use_consolidated: bool | None
) -> None:
    group = zarr.open_group(ArtifactStore(view), mode="r", use_consolidated=use_consolidated)
    members = dict(group.members(max_depth=None))
    assert set(members) == {"full", "full/k", "full/v", "sliding", "sliding/k", "sliding/v", "tokens"}
    assert members["sliding"].attrs.asdict() == {"kind": "sliding", "window": 32, "layers": [1]}


def test_listing_gives_the_views_keys(view: ZarrView) -> None:
    store = ArtifactStore(view)

    async def listed() -> None:
        assert [key async for key in store.list()] == view.keys()
        assert [key async for key in store.list_prefix("full/k/c/0/")] == [f"full/k/c/0/{i}/0/0/0" for i in (0, 1)]
        assert [name async for name in store.list_dir("")] == ["zarr.json", "full", "sliding", "tokens"]
        assert [name async for name in store.list_dir("full/k/")] == ["zarr.json", "c"]
        assert [name async for name in store.list_dir("full/k/c")] == ["0", "1", "2"]
        assert [name async for name in store.list_dir("ful")] == []
        assert await store.exists("full/k/c/0/0/0/0/0")
        assert not await store.exists("/full/k/c/0/0/0/0/0")
        assert await store.getsize("full/k/c/0/0/0/0/0") == 256
        assert await store.getsize_prefix("sliding/v/c") == 3 * 256
        with pytest.raises(FileNotFoundError):
            await store.getsize("full/k/c/9/0/0/0/0")

    asyncio.run(listed())


@pytest.mark.parametrize(
    ("byte_range", "expected"),
    [
        (None, slice(None)),
        (RangeByteRequest(10, 20), slice(10, 20)),
        (RangeByteRequest(250, 900), slice(250, 256)),
        (OffsetByteRequest(200), slice(200, None)),
        (OffsetByteRequest(256), slice(256, None)),
        (SuffixByteRequest(7), slice(-7, None)),
        (SuffixByteRequest(1000), slice(None)),
    ],
)
def test_byte_ranges(view: ZarrView, byte_range: ByteRequest | None, expected: slice) -> None:
    store, prototype, key = ArtifactStore(view), default_buffer_prototype(), "full/k/c/1/1/0/0/0"
    whole = view.get(key) or b""
    found = asyncio.run(store.get(key, prototype, byte_range))
    assert found is not None
    assert found.to_bytes() == whole[expected]
    parts = asyncio.run(store.get_partial_values(prototype, [(key, byte_range), ("absent", None)]))
    assert [None if part is None else part.to_bytes() for part in parts] == [whole[expected], None]


def test_i6_writing_raises(view: ZarrView) -> None:
    store = ArtifactStore(view)
    group = zarr.open_group(store, mode="r")
    with pytest.raises(ValueError, match="immutable"):
        group["full/k"][0] = 1
    with pytest.raises(ValueError, match="immutable"):
        asyncio.run(store.set("zarr.json", default_buffer_prototype().buffer.from_bytes(b"{}")))
    with pytest.raises(ValueError, match="immutable"):
        asyncio.run(store.delete("zarr.json"))
    with pytest.raises(ValueError, match="immutable"):
        store.with_read_only(False)
    with pytest.raises(ValueError, match="read"):
        zarr.open_group(store, mode="r+")
    assert store.with_read_only(True) == store


def test_i3_a_lost_chunk_is_an_error_not_zeros(tmp_path: Path) -> None:
    with open_local(f"file://{tmp_path}/repository") as repository:
        made = artifact(TOKENS)
        group = open_artifact(repository, push(repository, made).id)
        digest = made[1][2].chunks["full/k"][0]
        name = digest.removeprefix("blake3:")
        (tmp_path / "repository" / "chunks" / name[:2] / name[2:]).unlink()
        with pytest.raises(ChunkCorrupt, match=digest):
            group["full/k"][:]


def test_i3_an_artifact_deleted_meanwhile_is_an_error_not_zeros(repository: Repository) -> None:
    manifest = push(repository, artifact(TOKENS))
    array = open_artifact(repository, manifest.id)["full/k"]
    assert array[0].any()
    repository.delete(manifest.id, "default")
    with pytest.raises(ArtifactNotFound):
        array[:]


def test_a_repositorys_calls_leave_the_event_loop_free(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    view = ZarrView(repository, push(repository, artifact(TOKENS)).id, "default")
    store = ArtifactStore(view)
    released = threading.Event()
    read = repository.read_chunk

    def slow(*args: object) -> None:
        assert released.wait(30), "the event loop did not run while the repository was called"
        read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(repository, "read_chunk", slow)

    async def concurrently() -> Buffer | None:
        reading = asyncio.create_task(store.get("full/k/c/0/0/0/0/0", default_buffer_prototype()))
        await asyncio.sleep(0.05)
        released.set()
        return await reading

    found = asyncio.run(concurrently())
    assert found is not None
    assert found.to_bytes() == view.get("full/k/c/0/0/0/0/0")


def test_open_artifact_takes_tags_and_namespaces(repository: Repository) -> None:
    manifest = push(repository, artifact(TOKENS, private=True), "team-a")
    repository.set_tag("team-a", "latest", manifest.id)
    group = open_artifact(repository, "latest", "team-a")
    assert group.attrs["artifact_id"] == manifest.id
    assert "tokens" not in group
    with pytest.raises(TagNotFound):
        open_artifact(repository, "latest")


def test_stores_are_equal_for_one_artifact_of_one_repository(repository: Repository) -> None:
    first, second = push(repository, artifact(TOKENS)), push(repository, artifact(TOKENS[:20]))
    store = ArtifactStore(ZarrView(repository, first.id, "default"))
    assert store == ArtifactStore(ZarrView(repository, first.id, "default"))
    assert hash(store) == hash(ArtifactStore(ZarrView(repository, first.id, "default")))
    assert store != ArtifactStore(ZarrView(repository, second.id, "default"))
    assert first.id in repr(store)
