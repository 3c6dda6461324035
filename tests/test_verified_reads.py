"""No altered byte is served (I3): bit flips and truncations over everything stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from places import Place
from pushing import push
from serving import served
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.domain.errors import ChunkCorrupt, Corrupt
from repo_service.domain.manifest import Manifest
from repo_service.domain.repository import Repository

pytestmark = pytest.mark.everywhere

FLIPS, TRUNCATIONS = 1000, 100
KINDS = ("chunks", "blocks", "artifacts")


@pytest.fixture(scope="module")
def stored(module_root: Place) -> Manifest:
    with open_repository(module_root.as_uri()) as repository:
        made = artifact(random.Random(1).choices(range(1000), k=200), fingerprint())
        push(repository, made)
        return made[0]


@contextmanager
def damaged(path: Place, data: bytes) -> Iterator[None]:
    whole = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(whole)


def flipped(data: bytes, generator: random.Random) -> bytes:
    bit = generator.randrange(8 * len(data))
    altered = bytearray(data)
    altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)


def read_everything(repository: Repository, artifact_id: str) -> None:
    manifest = repository.manifest(artifact_id, "default")
    records = repository.records(manifest, "default")
    for digest, spec in manifest.stored_chunks(records).items():
        repository.read_chunk(artifact_id, "default", digest, spec, memoryview(bytearray(spec.size)))


def read_file(repository: Repository, manifest: Manifest, kind: str, path: Place) -> None:
    """Read just what lies in one file, by the reader's usual way."""
    if kind == "artifacts":
        repository.manifest(manifest.id, "default")
    elif kind == "blocks":
        repository.records(manifest, "default")
    else:
        digest = f"blake3:{path.parent.name}{path.name}"
        held = manifest.stored_chunks(repository.records(manifest, "default"))
        repository.read_chunk(manifest.id, "default", digest, held[digest], memoryview(bytearray(held[digest].size)))


def check_damage(repository: Repository, root: Place, manifest: Manifest, flips: int, truncations: int) -> None:
    read_everything(repository, manifest.id)
    files = {kind: sorted(p for p in (root / kind).rglob("*") if p.is_file()) for kind in KINDS}
    assert all(files.values())
    generator = random.Random(7)
    for number in range(flips + truncations):
        kind = KINDS[number % len(KINDS)]
        path = generator.choice(files[kind])
        data = path.read_bytes()
        altered = flipped(data, generator) if number < flips else data[: generator.randrange(len(data))]
        with damaged(path, altered), pytest.raises(Corrupt):
            read_file(repository, manifest, kind, path)
    read_everything(repository, manifest.id)


def test_every_bit_flip_and_truncation_is_found_on_read(module_root: Place, stored: Manifest) -> None:
    with open_repository(module_root.as_uri()) as repository:
        check_damage(repository, module_root, stored, FLIPS, TRUNCATIONS)


def test_every_bit_flip_and_truncation_is_found_through_the_service(module_root: Place, stored: Manifest) -> None:
    with served(module_root.as_uri()) as url, open_repository(url) as repository:
        check_damage(repository, module_root, stored, 200, 40)


@pytest.mark.everywhere(always=True)
def test_the_error_names_the_chunk_and_checking_reports_it(module_root: Place, stored: Manifest) -> None:
    with open_repository(module_root.as_uri()) as repository:
        digest = repository.records(stored, "default")[3].chunks["full/v"][0]
        spec = stored.stored_chunks(repository.records(stored, "default"))[digest]
        path = module_root / "chunks" / digest[7:9] / digest[9:]
        with damaged(path, flipped(path.read_bytes(), random.Random(3))):
            with pytest.raises(ChunkCorrupt, match=digest):
                repository.read_chunk(stored.id, "default", digest, spec, memoryview(bytearray(spec.size)))
            assert repository.check(stored.id, "default").corrupt == [digest]
        assert repository.check(stored.id, "default").ok


def test_a_lost_file_is_corruption_not_zeros(module_root: Place, stored: Manifest) -> None:
    with open_repository(module_root.as_uri()) as repository:
        for kind in KINDS:
            path = next(p for p in (module_root / kind).rglob("*") if p.is_file())
            hidden = path.with_name("hidden")
            path.rename(hidden)
            with pytest.raises(Corrupt):
                read_file(repository, stored, kind, path)
            hidden.rename(path)


@pytest.mark.parametrize("kind", ["blocks", "artifacts"])
def test_pushing_again_heals_a_damaged_document(root: Place, kind: str) -> None:
    with open_repository(root.as_uri()) as repository:
        made = artifact(list(range(40)), fingerprint())
        push(repository, made)
        generator = random.Random(5)
        for path in sorted(p for p in (root / kind).rglob("*") if p.is_file()):
            for _ in range(5):
                path.write_bytes(flipped(path.read_bytes(), generator))
                push(repository, made)
                read_everything(repository, made[0].id)
        assert repository.stats("default").divergences == 0
