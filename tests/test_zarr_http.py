"""Artifacts of a running service: through readers that know nothing of kvgraft, and as a remote repository."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore
import zarr
from places import Place
from synthetic import artifact
from test_zarr_store import assembled
from test_zarr_view import TOKENS, many_dtypes, push

from repo_service.api.context import Context
from repo_service.api.server import address, listen, make_server
from repo_service.client import open_repository
from repo_service.client.zarr_store import open_artifact
from repo_service.domain.errors import ChunkCorrupt
from repo_service.services.export import export_artifact, import_artifact
from repo_service.services.opening import open_local
from repo_service.services.repository import LocalRepository
from repo_service.settings import Settings

pytestmark = pytest.mark.everywhere


@pytest.fixture
def repository(root: Place) -> Iterator[LocalRepository]:
    with open_local(root.as_uri()) as opened:
        yield opened


@pytest.fixture
def url(repository: LocalRepository) -> Iterator[str]:
    settings = Settings(port=0)
    server = make_server(repository, settings)
    with listen(settings) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield address(listener)
        finally:
            server.should_exit = True
            thread.join()


def tensorstore_array(url: str, name: str) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "http", "base_url": f"{url}/{name}/"}}
    context = tensorstore.Context({"http_request_retries": {"max_retries": 1}})
    return tensorstore.open(spec, read=True, open=True, context=context).result().read().result()


def test_zarr_python_and_tensorstore_read_the_artifacts_bits(repository: LocalRepository, url: str) -> None:
    made = artifact(TOKENS, many_dtypes())
    manifest, records, chunks = made
    push(repository, made, "team-a")
    repository.set_tag("team-a", "latest", manifest.id)
    group_url = f"{url}/v1/namespaces/team-a/artifacts/{manifest.id}/zarr"
    for opened in group_url, group_url.replace(manifest.id, "latest"):
        group = zarr.open_group(opened, mode="r")
        assert group.attrs["artifact_id"] == manifest.id
        assert {"full/k", "sliding/c", "c/k", "tokens"} < set(dict(group.members(max_depth=None)))
        for name, layout in manifest.layout.arrays.items():
            expected = assembled(layout, name, records, chunks).tobytes()
            assert group[name][:].tobytes() == expected
            assert tensorstore_array(opened, name).tobytes() == expected
        assert group["tokens"][:].tolist() == tensorstore_array(opened, "tokens").tolist() == TOKENS


def test_i3_a_lost_chunk_is_an_error_not_zeros_in_both_readers(
    repository: LocalRepository, url: str, root: Place
) -> None:
    made = artifact(TOKENS)
    manifest, records, _ = made
    push(repository, made)
    group_url = f"{url}/v1/artifacts/{manifest.id}/zarr"
    array = zarr.open_group(group_url, mode="r")["full/k"]
    name = records[1].chunks["full/k"][0].removeprefix("blake3:")
    (root / "chunks" / name[:2] / name[2:]).unlink()
    assert array[0].any()
    with pytest.raises(Exception, match=r"HTTP code|status|message="):
        array[:]
    with pytest.raises(ValueError, match="HTTP code"):
        tensorstore_array(group_url, "full/k")


def test_i3_an_artifact_deleted_while_a_reader_is_open_is_an_error_not_the_fill_value(
    repository: LocalRepository, url: str
) -> None:
    manifest = push(repository, artifact(TOKENS, many_dtypes()))
    group_url = f"{url}/v1/artifacts/{manifest.id}/zarr"
    array = zarr.open_group(group_url, mode="r")["full/k"]
    repository.delete(manifest.id, "default")
    with pytest.raises(Exception, match=r"410|Gone"):
        array[:]


def test_a_remote_repository_opens_as_zarr(repository: LocalRepository, url: str, root: Place) -> None:
    made = artifact(TOKENS, many_dtypes())
    manifest, records, chunks = made
    push(repository, made)
    with open_repository(url) as remote:
        group = open_artifact(remote, manifest.id)
        for name, layout in manifest.layout.arrays.items():
            assert group[name][:].tobytes() == assembled(layout, name, records, chunks).tobytes()
        digest = records[2].chunks["c/k"][1]
        name = digest.removeprefix("blake3:")
        (root / "chunks" / name[:2] / name[2:]).unlink()
        with pytest.raises(ChunkCorrupt, match=digest):
            group["c/k"][2]


def test_a_remote_repository_exports_and_imports(repository: LocalRepository, url: str, tmp_path: Path) -> None:
    manifest = push(repository, artifact(TOKENS, many_dtypes()))
    with open_repository(url) as remote:
        export_artifact(remote, manifest.id, "default", tmp_path / "export")
        info = import_artifact(remote, tmp_path / "export", "team-b", tag="latest")
    assert info.id == manifest.id
    assert repository.artifact("latest", "team-b") == info


def test_views_of_more_artifacts_than_are_kept_are_given_to_many_threads_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("repo_service.api.context.ZarrView", lambda _, artifact_id, namespace: (artifact_id, namespace))
    monkeypatch.setattr(LocalRepository, "artifact", lambda _, ref, *__: SimpleNamespace(id=ref))
    switching = sys.getswitchinterval()
    with open_local("memory:") as repository, ThreadPoolExecutor(6) as pool:
        context = Context(repository, Settings())

        def ask(first: int) -> bool:
            return all(
                context.zarr_view(str(n % 40), "default") == (str(n % 40), "default")  # type: ignore[comparison-overlap]
                for n in range(first, 50_000, 7)
            )

        try:
            sys.setswitchinterval(1e-5)
            assert all(pool.map(ask, range(30)))
        finally:
            sys.setswitchinterval(switching)
