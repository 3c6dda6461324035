"""Repositories as earlier versions made them: read whole, upgraded in place, and refused where they are newer.

``fixtures/repository-<n>`` is a repository whose index has the n-th schema, as the version of that
time left it: two artifacts that share two blocks, a tag, a divergence, one of them in a second
namespace too, and a push that was running. ``fixtures/repository-framed`` has the same in the store's format 2, as numcodecs
0.16.6 encoded it: 25 chunks that did not become smaller, and the token ids, which did.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from repo_service.domain.errors import NewerFormat
from repo_service.domain.views import ArtifactQuery
from repo_service.services.opening import open_local

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("repository-*"))
FIRST = "sha256:547e9a2e83540f7d03845cd7a19c6b6e8c0b22a7ca1f598484400d14ed5a9573"


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(request.param, tmp_path / "repository"))


def test_an_older_repository_is_read_whole_and_upgraded(root: Path) -> None:
    with open_local(f"file://{root}") as repository:
        stats = repository.stats("default")
        assert (stats.artifacts, stats.blocks, stats.chunks, stats.tags, stats.divergences) == (2, 4, 26, 1, 1)
        assert repository.artifact("handbook", "default").id == FIRST
        for namespace in ("default", "team"):
            for info in repository.query(ArtifactQuery(namespace=namespace)).items:
                assert repository.check(info.id, namespace).ok
        before = repository._index.dump()
        assert repository.reindex().corrupt == []
        assert repository._index.dump() == before
        assert repository.scrub().damage == []
        assert repository.collect_garbage(grace_s=0).unreadable == []
        assert repository.check(FIRST, "team").ok
    with closing(sqlite3.connect(root / "index.sqlite")) as connection:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(artifacts)")}
    assert "last_used_at" in columns


def test_an_older_repository_without_its_index_is_indexed_anew(root: Path) -> None:
    (root / "index.sqlite").unlink()
    with open_local(f"file://{root}") as repository:
        assert repository.stats("default").artifacts == 2
        assert repository.check("handbook", "default").ok


def test_code_older_than_the_data_refuses_politely_and_changes_nothing(root: Path) -> None:
    with open_local(f"file://{root}"):
        pass
    with closing(sqlite3.connect(root / "index.sqlite")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    before = (root / "index.sqlite").read_bytes()
    with pytest.raises(NewerFormat, match="9999"):
        open_local(f"file://{root}")
    assert (root / "index.sqlite").read_bytes() == before
