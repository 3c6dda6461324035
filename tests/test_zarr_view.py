"""The Zarr view: keys, metadata and verified chunks, with no Zarr library at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import artifact, fingerprint

from repo_service.domain.digest import chunk_digest
from repo_service.domain.errors import ArtifactNotFound, ChunkCorrupt, ChunkNotFound
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Repository
from repo_service.domain.tokens import encode_tokens
from repo_service.services.opening import open_local
from repo_service.services.zarr_view import Hierarchy, ZarrView

TOKENS = list(range(40))


def many_dtypes() -> Fingerprint:
    """Every dtype, several chunks a block along layers and heads, and arrays named to confuse a parser of keys."""

    def array(name: str, dtype: str) -> dict[str, Any]:
        return {"name": name, "dtype": dtype, "heads": 4, "dim": 3, "chunk_layers": 1, "chunk_heads": 2}

    def group(name: str, kind: str, layers: list[int], *dtypes: str, window: int | None = None) -> dict[str, Any]:
        arrays = [array(name, dtype) for name, dtype in zip("kc", dtypes, strict=False)]
        return {"name": name, "kind": kind, "layers": layers, "window": window, "arrays": arrays}

    return fingerprint(
        state={
            "groups": [
                group("full", "full", [0, 1, 4], "bfloat16", "float16"),
                group("sliding", "sliding", [2, 3], "float8_e4m3fn", "float8_e5m2", window=32),
                group("c", "recurrent", [5], "float32", "uint32"),
            ]
        }
    )


def push(
    repository: Repository, made: tuple[Manifest, list[BlockRecord], dict[str, bytes]], namespace: str = "default"
) -> Manifest:
    manifest, records, chunks = made
    with repository.begin_push(manifest.fingerprint, namespace) as running:
        missing = running.offer(records)
        if manifest.tokens is not None:
            missing += running.offer_tokens(manifest.token_count, manifest.tokens)
        for digest in missing:
            running.put(digest, chunks[digest])
        running.commit(manifest)
    return manifest


def contents(view: ZarrView) -> dict[str, bytes | None]:
    listed = view.keys()
    return {key: view.get(key) for key in listed}


@pytest.fixture
def repository() -> Iterator[Repository]:
    with open_local("memory:") as opened:
        yield opened


@pytest.fixture(scope="module")
def view() -> Iterator[ZarrView]:
    with open_local("memory:") as opened:
        yield ZarrView(opened, push(opened, artifact(TOKENS)).id, "default")


def test_every_key_gives_the_artifacts_own_bytes(repository: Repository) -> None:
    manifest, records, chunks = artifact(TOKENS, many_dtypes())
    view = ZarrView(repository, push(repository, (manifest, records, chunks)).id, "default")
    keys = view.keys()
    assert len(set(keys)) == len(keys)
    found = []
    for key in keys:
        data = view.get(key)
        assert data is not None
        assert view.size(key) == len(data)
        if not key.endswith("zarr.json"):
            found.append(data)
    expected = [chunks[digest] for digest in manifest.tokens or ()]
    for record in records:
        expected += [chunks[digest] for name in manifest.layout.arrays for digest in record.chunks[name]]
    assert found == expected


def test_chunk_index_follows_layers_and_heads(repository: Repository) -> None:
    manifest, records, chunks = artifact(TOKENS, many_dtypes())
    view = ZarrView(repository, push(repository, (manifest, records, chunks)).id, "default")
    for position, (layer, head) in enumerate((layer, head) for layer in range(3) for head in range(2)):
        assert view.get(f"full/c/c/1/{layer}/{head}/0/0") == chunks[records[1].chunks["full/c"][position]]


def test_root_and_groups_describe_the_artifact(repository: Repository) -> None:
    manifest = push(repository, artifact(TOKENS, annotations={"user": "Åsa"}))
    view = ZarrView(repository, manifest.id, "default")
    root = json.loads(view.get("zarr.json") or b"")
    assert root["attributes"] == {
        "artifact_id": manifest.id,
        "fingerprint_id": manifest.fingerprint.id,
        "model_id": manifest.fingerprint.model_id,
        "token_count": 40,
        "block_tokens": 16,
        "private_tokens": False,
        "exactness": {"class": "exact"},
        "parent": None,
        "annotations": {"user": "Åsa"},
    }
    assert json.loads(view.get("sliding/zarr.json") or b"")["attributes"] == {
        "kind": "sliding",
        "window": 32,
        "layers": [1],
    }
    inline = root["consolidated_metadata"]["metadata"]
    assert inline == {
        path: json.loads(view.get(f"{path}/zarr.json") or b"")
        for path in ("full", "full/k", "full/v", "sliding", "sliding/k", "sliding/v", "tokens")
    }


def test_partial_last_block_is_padded_with_zeros(view: ZarrView) -> None:
    chunk = view.get("full/k/c/2/0/0/0/0") or b""
    row, held = 4 * 2, 40 - 2 * 16
    for head in range(2):
        plane = chunk[head * 16 * row : (head + 1) * 16 * row]
        assert any(plane[: held * row])
        assert not any(plane[held * row :])


def test_tokens_are_readable_unless_private(view: ZarrView, repository: Repository) -> None:
    assert view.get("tokens/c/0") == encode_tokens(TOKENS)
    private = ZarrView(repository, push(repository, artifact(TOKENS, private=True)).id, "default")
    assert not [key for key in contents(private) if key.startswith("tokens")]
    assert private.get("tokens/zarr.json") is None
    assert private.get("tokens/c/0") is None
    root = json.loads(private.get("zarr.json") or b"")
    assert root["attributes"]["private_tokens"] is True
    assert "tokens" not in root["consolidated_metadata"]["metadata"]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "/zarr.json",
        "//zarr.json",
        "zarr.json/",
        "./zarr.json",
        "full/../zarr.json",
        "full//zarr.json",
        "full\\zarr.json",
        "full",
        "full/k",
        "full/k/",
        "full/k/c",
        "full/k/c/0",
        "/full/k/c/0/0/0/0/0",
        "full/k/c/0/0/0/0/0/",
        "full/k/c/0/0/0/0/0/0",
        "full/k/c/00/0/0/0/0",
        "full/k/c/+0/0/0/0/0",
        "full/k/c/-1/0/0/0/0",
        "full/k/c/0/0/0/0/1",
        "full/k/c/3/0/0/0/0",
        "full/k/c/0/2/0/0/0",
        "full/k/c/ 0/0/0/0/0",
        "full/k/c/0/0/0/0/0\n",
        "full/k/c/٠/0/0/0/0",
        "full/k/c/0.0.0.0.0",
        "full/k/0/0/0/0/0",
        "full/k/c/" + "9" * 5000 + "/0/0/0/0",
        "Full/k/zarr.json",
        "tokens/c/1",
        "tokens/c/0/0",
        "tokens/c/",
        ".zgroup",
        "full/k/.zarray",
        "kvgraft/manifest.json",
    ],
)
def test_zarr_python_2357_keys_outside_the_grammar_are_not_in_the_view(view: ZarrView, key: str) -> None:
    assert view.get(key) is None
    assert view.size(key) is None


_HIERARCHY = Hierarchy(artifact(TOKENS, many_dtypes())[0])
_LISTED = set(_HIERARCHY)
_SEGMENTS = ["", "c", "k", "full", "sliding", "tokens", "zarr.json", "0", "1", "2", "3", "00", ".."]


@given(st.lists(st.sampled_from(_SEGMENTS), max_size=8).map("/".join) | st.text())
def test_a_key_names_a_chunk_exactly_if_it_is_listed(key: str) -> None:
    named = key in _HIERARCHY.documents or _HIERARCHY.chunk(key) is not None
    assert named == (key in _LISTED)


@pytest.mark.parametrize("fault", ["lost", "altered", "short"])
def test_i3_a_chunk_lost_or_altered_is_an_error_never_zeros(tmp_path: Path, fault: str) -> None:
    with open_local(f"file://{tmp_path}/repository") as repository:
        manifest, records, chunks = artifact(TOKENS)
        view = ZarrView(repository, push(repository, (manifest, records, chunks)).id, "default")
        digest = records[1].chunks["full/v"][1]
        name = digest.removeprefix("blake3:")
        file = tmp_path / "repository" / "chunks" / name[:2] / name[2:]
        if fault == "lost":
            file.unlink()
        elif fault == "short":
            file.write_bytes(chunks[digest][:-1])
        else:
            file.write_bytes(bytes([chunks[digest][0] ^ 1]) + chunks[digest][1:])
        with pytest.raises(ChunkCorrupt, match=digest):
            view.get("full/v/c/1/1/0/0/0")
        assert view.get("full/v/c/1/0/0/0/0") == chunks[records[1].chunks["full/v"][0]]


def test_a_chunk_the_repository_does_not_find_is_an_error_naming_it(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = ZarrView(repository, push(repository, artifact(TOKENS)).id, "default")

    def absent(*_: object) -> None:
        raise ChunkNotFound("no such chunk")

    monkeypatch.setattr(repository, "read_chunk", absent)
    with pytest.raises(ChunkCorrupt, match=r"blake3:[0-9a-f]{64} of full/k of artifact sha256:"):
        view.get("full/k/c/0/0/0/0/0")


def test_only_the_artifacts_namespace_has_the_view(repository: Repository) -> None:
    manifest = push(repository, artifact(TOKENS), "team-a")
    with pytest.raises(ArtifactNotFound):
        ZarrView(repository, manifest.id, "team-b")


def test_tokens_beyond_one_chunk_have_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repo_service.domain.tokens.TOKEN_CHUNK", 16)
    manifest, _, chunks = artifact(TOKENS)
    hierarchy = Hierarchy(manifest)
    placed = dict(hierarchy.token_chunks())
    assert list(placed) == ["tokens/c/0", "tokens/c/1", "tokens/c/2"]
    last = placed["tokens/c/2"]
    assert chunks[hierarchy.digest(last, [])] == encode_tokens(TOKENS[32:]).ljust(64, b"\0")
    assert chunk_digest(encode_tokens(TOKENS[:16]), "uint32", (16,)) == hierarchy.digest(placed["tokens/c/0"], [])
