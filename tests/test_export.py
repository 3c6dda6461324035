"""Exports: plain Zarr for any reader, and the identical artifact again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from pushing import expiring_once
from synthetic import artifact, fingerprint
from test_zarr_store import assembled
from test_zarr_view import TOKENS, contents, many_dtypes, push

from repo_service.domain.errors import (
    ArtifactNotFound,
    ChunkCorrupt,
    Conflict,
    Corrupt,
    InvalidInput,
    KvgraftError,
    MalformedName,
)
from repo_service.domain.manifest import Exactness
from repo_service.domain.repository import Repository
from repo_service.domain.views import ArtifactQuery
from repo_service.services.export import export_artifact, import_artifact
from repo_service.services.opening import open_local
from repo_service.services.zarr_view import ZarrView


@pytest.fixture
def repository() -> Iterator[Repository]:
    with open_local("memory:") as opened:
        yield opened


@pytest.fixture
def other() -> Iterator[Repository]:
    with open_local("memory:") as opened:
        yield opened


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def chunk_file(repository_root: Path, digest: str) -> Path:
    name = digest.removeprefix("blake3:")
    return repository_root / "chunks" / name[:2] / name[2:]


@pytest.mark.parametrize("private", [False, True])
def test_export_then_import_gives_the_same_artifact(
    repository: Repository, other: Repository, tmp_path: Path, private: bool
) -> None:
    made = artifact(
        TOKENS,
        many_dtypes(),
        private=private,
        exactness=Exactness("lossy", "int8", "max 0.5"),
        parent="sha256:" + "ab" * 32,
        annotations={"user": "Åsa"},
        text="a text",
    )
    manifest = push(repository, made, "team-a")
    report = export_artifact(repository, manifest.id, "team-a", tmp_path / "export")
    assert report.artifact_id == manifest.id
    assert report.chunks == 3 * (6 * 2 + 4 * 2 + 2 * 2) + (not private)
    info = import_artifact(other, tmp_path / "export", "team-b", tag="latest")
    assert (info.id, info.namespace, info.tags) == (manifest.id, "team-b", ["latest"])
    assert other.manifest("latest", "team-b") == manifest
    there, back = ZarrView(repository, manifest.id, "team-a"), ZarrView(other, manifest.id, "team-b")
    assert contents(there) == contents(back)


def test_importing_again_changes_nothing(repository: Repository, tmp_path: Path) -> None:
    manifest = push(repository, artifact(TOKENS))
    before = repository.artifact(manifest.id, "default")
    export_artifact(repository, manifest.id, "default", tmp_path / "export")
    assert import_artifact(repository, tmp_path / "export", "default").id == before.id
    assert repository.query(ArtifactQuery()).count == 1


def test_two_exports_are_equal_byte_for_byte(repository: Repository, other: Repository, tmp_path: Path) -> None:
    manifest = push(repository, artifact(TOKENS, many_dtypes()))
    export_artifact(repository, manifest.id, "default", tmp_path / "first")
    import_artifact(other, tmp_path / "first", "default")
    export_artifact(other, manifest.id, "default", tmp_path / "second")
    assert files(tmp_path / "first") == files(tmp_path / "second")


def test_an_export_is_the_view_and_the_documents(repository: Repository, tmp_path: Path) -> None:
    made = artifact(TOKENS, many_dtypes())
    manifest, records, _ = made
    view = ZarrView(repository, push(repository, made).id, "default")
    export_artifact(repository, manifest.id, "default", tmp_path / "export")
    documents = {"kvgraft/manifest.json": manifest.data}
    documents |= {f"kvgraft/records/{i}.json": record.data for i, record in enumerate(records)}
    assert files(tmp_path / "export") == contents(view) | documents


_READ_WITHOUT_KVGRAFT = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"repo_service", "engine_adapter"}:
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
import zarr

group = zarr.open_group(sys.argv[1], mode="r")
arrays = {name: node for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
print(json.dumps({name: [str(a.dtype), a.shape, a[:].tobytes().hex()] for name, a in arrays.items()}))
"""


def test_an_export_opens_without_kvgraft(repository: Repository, tmp_path: Path) -> None:
    made = artifact(TOKENS, many_dtypes())
    manifest, records, chunks = made
    push(repository, made)
    export_artifact(repository, manifest.id, "default", tmp_path / "export")
    command = [sys.executable, "-I", "-W", "error", "-c", _READ_WITHOUT_KVGRAFT, str(tmp_path / "export")]
    run = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr.decode()
    found = json.loads(run.stdout)
    assert set(found) == {*manifest.layout.arrays, "tokens"}
    for name, layout in manifest.layout.arrays.items():
        _, shape, data = found[name]
        assert shape == list(layout.shape(3))
        assert bytes.fromhex(data) == assembled(layout, name, records, chunks).tobytes()
    assert bytes.fromhex(found["tokens"][2]) == np.array(TOKENS, "<u4").tobytes()


def test_tensorstore_reads_an_export(repository: Repository, tmp_path: Path) -> None:
    made = artifact(TOKENS, many_dtypes())
    manifest, records, chunks = made
    push(repository, made)
    export_artifact(repository, manifest.id, "default", tmp_path / "export")
    for name, layout in manifest.layout.arrays.items():
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/export/{name}/"}}
        array = tensorstore.open(spec, read=True, open=True).result()
        assert array.domain.labels == ("block", "layer", "head", "token", "dim")
        assert array.read().result().tobytes() == assembled(layout, name, records, chunks).tobytes()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/export/tokens/"}}
    assert tensorstore.open(spec, read=True, open=True).result().read().result().tolist() == TOKENS


def test_readers_pass_over_the_documents(repository: Repository, tmp_path: Path) -> None:
    manifest = push(repository, artifact(TOKENS))
    export_artifact(repository, manifest.id, "default", tmp_path / "export")
    names = {"full", "sliding", "tokens"}
    assert set(dict(zarr.open_group(tmp_path / "export", mode="r").members())) == names
    listing = zarr.open_group(tmp_path / "export", mode="r", use_consolidated=False)
    with pytest.warns(UserWarning, match="kvgraft is not recognized"):
        assert set(dict(listing.members())) == names


def faulty_exports(export: Path, fault: str) -> Iterator[str]:
    """Each file of an export in turn made faulty, and mended afterwards."""
    for name, data in files(export).items():
        path = export / name
        if fault == "missing":
            path.unlink()
        elif fault == "truncated":
            path.write_bytes(data[:-1])
        elif fault == "longer":
            path.write_bytes(data + b"\n")
        else:
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        yield name
        path.write_bytes(data)


@pytest.mark.parametrize("fault", ["missing", "truncated", "longer", "altered"])
def test_i3_an_export_with_any_file_at_fault_is_refused(
    repository: Repository, other: Repository, tmp_path: Path, fault: str
) -> None:
    made = artifact(TOKENS)
    manifest, records, _ = made
    push(repository, made)
    export = tmp_path / "export"
    export_artifact(repository, manifest.id, "default", export)
    digests = {f"full/k/c/{b}/{i}/0/0/0": records[b].chunks["full/k"][i] for b in range(3) for i in range(2)}
    for name in faulty_exports(export, fault):
        with pytest.raises(KvgraftError) as refused:
            import_artifact(other, export, "default")
        if name.split("/")[-1].isdigit():
            assert refused.type is ChunkCorrupt
            assert str(export / name) in refused.value.message
            assert refused.value.details["path"] == name
            assert refused.value.details["digest"] == digests.get(name, refused.value.details["digest"])
            assert refused.value.details["digest"] in refused.value.message
        elif fault != "altered":
            assert refused.type is InvalidInput or issubclass(refused.type, Corrupt | InvalidInput)
        with pytest.raises(ArtifactNotFound):
            other.artifact(manifest.id, "default")
        assert other.query(ArtifactQuery()).count == 0
    assert import_artifact(other, export, "default").id == manifest.id


def test_an_altered_manifest_that_is_whole_in_itself_is_refused(
    repository: Repository, other: Repository, tmp_path: Path
) -> None:
    manifest = push(repository, artifact(TOKENS, annotations={"checked": "no"}))
    export_artifact(repository, manifest.id, "default", tmp_path / "export")
    path = tmp_path / "export" / "kvgraft" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"checked":"no"', b'"checked":"ok"'))
    with pytest.raises(Corrupt, match="one of the two was altered"):
        import_artifact(other, tmp_path / "export", "default")


def test_a_push_that_expires_in_an_import_begins_again(repository: Repository, tmp_path: Path) -> None:
    info = push(repository, artifact(TOKENS))
    export_artifact(repository, info.id, "default", tmp_path / "export")
    with open_local(f"file://{tmp_path}/again") as again:
        ending = expiring_once(tmp_path / "again", 5)
        got = import_artifact(again, tmp_path / "export", "default", None, lambda n, total: ending("bytes", n, total))
        assert got.id == info.id
        assert again.check(info.id, "default").ok


def test_two_chunks_exchanged_are_refused(repository: Repository, other: Repository, tmp_path: Path) -> None:
    manifest = push(repository, artifact(TOKENS))
    export = tmp_path / "export"
    export_artifact(repository, manifest.id, "default", export)
    first, second = (export / "full" / array / "c/0/0/0/0/0" for array in "kv")
    first.rename(export / "aside")
    second.rename(first)
    (export / "aside").rename(second)
    with pytest.raises(ChunkCorrupt, match="altered"):
        import_artifact(other, export, "default")


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_an_existing_destination_is_refused(repository: Repository, tmp_path: Path, kind: str) -> None:
    manifest = push(repository, artifact(TOKENS))
    destination = tmp_path / "export"
    if kind == "directory":
        destination.mkdir()
    elif kind == "file":
        destination.write_bytes(b"mine")
    else:
        destination.symlink_to(tmp_path / "nowhere")
    with pytest.raises(Conflict, match="exists"):
        export_artifact(repository, manifest.id, "default", destination)
    assert os.listdir(tmp_path) == ["export"]
    assert kind != "file" or destination.read_bytes() == b"mine"


def test_a_destination_that_appears_meanwhile_is_kept(repository: Repository, tmp_path: Path) -> None:
    manifest = push(repository, artifact(TOKENS))
    destination = tmp_path / "export"

    def appear(*_: int) -> None:
        destination.mkdir(exist_ok=True)
        (destination / "mine").touch()

    with pytest.raises(Conflict, match="exists"):
        export_artifact(repository, manifest.id, "default", destination, appear)
    assert os.listdir(tmp_path) == ["export"]
    assert os.listdir(destination) == ["mine"]


def test_a_destination_without_a_parent_is_refused(repository: Repository, tmp_path: Path) -> None:
    manifest = push(repository, artifact(TOKENS))
    with pytest.raises(InvalidInput, match="create it first"):
        export_artifact(repository, manifest.id, "default", tmp_path / "absent" / "export")


def test_an_export_of_a_lost_chunk_leaves_nothing_behind(tmp_path: Path) -> None:
    with open_local(f"file://{tmp_path}/repository") as repository:
        made = artifact(TOKENS)
        manifest = push(repository, made)
        digest = made[1][2].chunks["sliding/v"][0]
        chunk_file(tmp_path / "repository", digest).unlink()
        (tmp_path / "out").mkdir()
        with pytest.raises(ChunkCorrupt, match=digest):
            export_artifact(repository, manifest.id, "default", tmp_path / "out" / "export")
        assert os.listdir(tmp_path / "out") == []


def test_a_directory_that_is_no_export_is_refused(other: Repository, tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "plain")
    for source in (tmp_path / "plain", tmp_path / "absent"):
        with pytest.raises(InvalidInput, match=r"no file kvgraft/manifest\.json"):
            import_artifact(other, source, "default")


def test_a_malformed_tag_is_refused_before_anything_is_sent(
    repository: Repository, other: Repository, tmp_path: Path
) -> None:
    manifest = push(repository, artifact(TOKENS))
    export_artifact(repository, manifest.id, "default", tmp_path / "export")
    with pytest.raises(MalformedName):
        import_artifact(other, tmp_path / "export", "default", tag="no/slash")
    assert other.query(ArtifactQuery()).count == 0


def test_progress_ends_at_the_artifacts_size(repository: Repository, other: Repository, tmp_path: Path) -> None:
    manifest = push(repository, artifact(TOKENS))
    size = repository.artifact(manifest.id, "default").total_bytes
    for run in (
        lambda progress: export_artifact(repository, manifest.id, "default", tmp_path / "export", progress),
        lambda progress: import_artifact(other, tmp_path / "export", "default", progress=progress),
    ):
        seen: list[tuple[int, int]] = []
        run(lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == sorted(seen)
        assert seen[-1] == (size, size)
        assert {total for _, total in seen} == {size}


def test_i8_export_and_import_hold_a_few_chunks_at_a_time(tmp_path: Path) -> None:
    chunk = 2 * 2**20
    array = {"name": "k", "dtype": "bfloat16", "heads": 1, "dim": 2**16, "chunk_layers": 1, "chunk_heads": 1}
    group = {"name": "full", "kind": "full", "layers": list(range(12)), "window": None, "arrays": [array]}
    made = artifact(list(range(32)), fingerprint(state={"groups": [group]}))
    with (
        open_local(f"file://{tmp_path}/first") as repository,
        open_local(f"file://{tmp_path}/second") as other,
    ):
        manifest = push(repository, made)
        del made
        tracemalloc.start()
        try:
            export_artifact(repository, manifest.id, "default", tmp_path / "export")
            import_artifact(other, tmp_path / "export", "default")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 8 * chunk < manifest.state_bytes / 2
