"""Libraries: documents packed into artifacts, made once, resumed, and brought up to date."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import served
from shelves import BLOCK, library_in, read, write_documents

from engine_adapter.library import STAGE, Library, _of_kind, library_artifacts
from engine_adapter.packing import Packer, Piece, heading, parts_from_annotations, parts_to_annotations
from engine_adapter.run import Run
from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.domain.access import Scope
from repo_service.domain.errors import AccessDenied, ContextTooLong, FingerprintMismatch, InvalidInput, LibraryEmpty
from repo_service.domain.repository import Repository

Words = st.lists(st.sampled_from(["mill", "wheel", "a", "tide.\n", "grain\n\n", "x" * 300]), max_size=400).map(" ".join)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Repository]:
    with open_repository((tmp_path / "repository").as_uri()) as repository:
        yield repository


def add(library: Library, *paths: Path, whole: bool = False) -> tuple[list[str], int, int]:
    """Artifacts made, and how many were kept and replaced."""
    added = library.add(library.plan(read(*paths), whole=whole), stage_tokens=2 * BLOCK)
    return [info.id for info in added.made], added.kept, added.replaced


def held_names(library: Library) -> dict[str, set[str]]:
    return {held.info.id: {part.name for part in held.parts} for held in library.artifacts()}


# Packing


def piece(name: str, text: str) -> Piece:
    return Piece(f"/{name}", name, "sha256:" + "0" * 64, len(text), 0, text)


@settings(max_examples=60)
@given(documents=st.lists(Words.filter(str.strip), min_size=1, max_size=6), room=st.integers(120, 400))
def test_packing_holds_every_character_once_in_order_within_the_room(documents: list[str], room: int) -> None:
    def pack() -> list[tuple[str, int, tuple[object, ...]]]:
        packer = Packer(str.split, lambda texts: [len(t.split()) for t in texts], room)
        return [
            (p.text, p.token_count, p.parts) for p in packer.pack([piece(f"{n}", t) for n, t in enumerate(documents)])
        ]

    packed = pack()
    found = [""] * len(documents)
    for text, count, parts in packed:
        assert count == len(text.split()) <= room
        for part in parts:
            assert text[: part.at].endswith(heading(part.name, part.start))
            assert part.start == len(found[int(part.name)])
            found[int(part.name)] += text[part.at : part.at + part.stop - part.start]
    assert found == documents
    assert packed == pack()


def test_packing_fills_the_room() -> None:
    text = "one two three four five six seven\n" * 2000
    packed = list(Packer(str.split, lambda texts: [len(t.split()) for t in texts], 1000).pack([piece("long", text)]))
    assert all(p.token_count > 940 for p in packed[:-1])
    assert len(packed) == 15


def test_whole_documents_are_never_cut_and_one_that_is_too_long_is_refused() -> None:
    def pack(*sizes: int) -> list[list[str]]:
        packer = Packer(str.split, lambda texts: [len(t.split()) for t in texts], 100, whole=True)
        pieces = [piece(f"{n}", "word " * size) for n, size in enumerate(sizes)]
        return [[part.name for part in packed.parts] for packed in packer.pack(pieces)]

    assert pack(60, 30, 70, 10) == [["0", "1"], ["2", "3"]]
    with pytest.raises(ContextTooLong) as error:
        pack(60, 130)
    assert error.value.details == {"source": "/1", "tokens": 132, "room": 100}
    assert "132" in error.value.message
    assert "100" in error.value.message


def test_a_room_smaller_than_a_passage_is_an_error() -> None:
    packer = Packer(str.split, lambda texts: [len(t.split()) for t in texts], 5)
    with pytest.raises(InvalidInput, match="choose a smaller reserve"):
        list(packer.pack([piece("a", "word " * 50)]))


def test_many_parts_survive_the_longest_annotation() -> None:
    parts = tuple(piece(f"folder é/{n}.txt", "text").part(n) for n in range(500))
    annotations = parts_to_annotations(parts)
    assert len(annotations) > 10
    assert parts_from_annotations({**annotations, "other": "x"}) == parts


# Adding


def test_a_second_add_of_the_same_paths_computes_and_changes_nothing(
    store: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_documents(tmp_path / "docs")
    with library_in(store) as library:
        made, kept, replaced = add(library, folder)
        assert (len(made) > 2, kept, replaced) == (True, 0, 0)
        assert all(library.room - 100 < held.info.token_count <= library.room for held in library.artifacts()[:-1])
        monkeypatch.setattr(library.session, "call", lambda *_: pytest.fail("computed again"))
        monkeypatch.chdir(folder)
        assert add(library, folder) == ([], len(made), 0)
        assert list(_of_kind(store, "default", None, STAGE)) == []


def test_a_changed_file_remakes_only_what_holds_it(store: Repository, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "docs", 6)
    with library_in(store) as library:
        add(library, folder)
        before = held_names(library)
        path = folder / "5-lighthouse.txt"
        path.write_text(path.read_text().replace("has the number", "lost the number"))
        made, kept, replaced = add(library, folder)
        after = held_names(library)
        holders = {artifact for artifact, names in before.items() if "docs/5-lighthouse.txt" in names}
        assert set(before) - set(after) == holders
        assert (len(holders), kept) == (replaced, len(before) - replaced)
        assert set(after) - set(before) == set(made)
        texts = "".join(store.manifest(artifact, "default").text or "" for artifact in after)
        assert "lighthouse of ward 5 has" not in texts
        assert texts.count("lighthouse of ward 5 lost") == 12
        assert texts.count("chapel of ward") == 0
        assert texts.count("mill of ward 0 has") == 12


def test_what_was_removed_goes_and_what_other_paths_gave_stays(store: Repository, tmp_path: Path) -> None:
    first, second = write_documents(tmp_path / "a", 1, 3), write_documents(tmp_path / "b", 2, 4)
    with library_in(store) as library:
        add(library, first, second)
        assert len(library.artifacts()) == 1
        (second / "0-mill.txt").unlink()
        # The other folder is not looked at, and its part is taken from the artifact that is replaced.
        (first / "0-mill.txt").unlink()
        made, _, replaced = add(library, second)
        assert (len(made), replaced) == (1, 1)
        assert held_names(library) == {made[0]: {"a/0-mill.txt", "b/1-ferry.txt"}}
        text = store.manifest(made[0], "default").text or ""
        assert text.count("mill of ward 0") == 3


def test_an_add_that_was_killed_before_it_deleted_what_it_replaced_repeats_nothing(
    store: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write_documents(tmp_path / "a", 1, 3), write_documents(tmp_path / "b", 2, 4)
    with library_in(store) as library:
        add(library, first, second)
        (second / "0-mill.txt").write_text("Nothing is left of the mill.\n")
        with monkeypatch.context() as patch:
            patch.setattr(library, "_delete", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                add(library, second)
        assert len(library.artifacts()) == 2
        assert add(library, second) == ([], 1, 1)
        assert list(held_names(library).values()) == [{"a/0-mill.txt", "b/0-mill.txt", "b/1-ferry.txt"}]


def test_a_token_that_may_not_delete_makes_a_library_and_is_refused_to_replace_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_documents(tmp_path / "docs", 1, 20)
    monkeypatch.setenv("KVGRAFT_AUTH", "tokens")
    url = (tmp_path / "repository").as_uri()
    with open_repository(url) as own:
        token = own.create_access_token(Scope.WRITE, ["default"]).token
    with served(url) as address, open_repository(address, token) as store, library_in(store) as library:
        assert add(library, folder)[1:] == (0, 0)
        assert len(list(_of_kind(store, "default", None, STAGE))) > 0
        (folder / "0-mill.txt").write_text("Nothing is left of the mill.\n")
        with pytest.raises(AccessDenied):
            add(library, folder)
    with open_repository(url) as own, library_in(own) as library:
        made, kept, replaced = add(library, folder)
        assert (made, kept) == ([], 1)
        assert replaced > 0
        assert list(_of_kind(own, "default", None, STAGE)) == []


def test_equal_documents_are_held_once(store: Repository, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "docs", 1, 3)
    (folder / "copy.txt").write_text((folder / "0-mill.txt").read_text())
    with library_in(store) as library:
        plan = library.plan(read(folder))
        assert (plan.duplicates, [len(packed.parts) for packed in plan.packed]) == (1, [1])
        library.add(plan)
        assert library.plan(read(folder)).packed == []


def test_a_smaller_room_remakes_what_does_not_fit(store: Repository, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "docs", 2)
    with library_in(store) as library:
        add(library, folder)
    with library_in(store, reserve=300) as library:
        made, _, replaced = add(library, folder)
        assert made
        assert replaced
        assert all(held.info.token_count <= 212 for held in library.artifacts())
    with library_in(store, reserve=10) as library:
        assert add(library, folder)[0] == []


def test_artifacts_hold_what_a_fresh_run_over_their_text_computes(store: Repository, tmp_path: Path) -> None:
    with library_in(store) as library:
        for artifact in add(library, write_documents(tmp_path / "docs", 2))[0]:
            assert library.session.verify(artifact, samples=3).exact
            text = store.manifest(artifact, "default").text or ""
            assert library.session.load(artifact)[2] == library.prompt.document(text)


# Interruption


def test_an_interrupted_artifact_costs_at_most_a_stage_again(
    store: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_documents(tmp_path / "docs", 1, 40)
    with library_in(store) as library:
        plan = library.plan(read(folder))

        def stop(_: str, done: int, __: int) -> None:
            if done >= 5 * BLOCK:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            library.add(plan, stage_tokens=2 * BLOCK, progress=stop)
        assert library_artifacts(store, "default") == []
        computed: list[int] = []
        call = library.session.call

        def counted(run: Run, ids: list[int], kind: str) -> torch.Tensor:
            computed.append(len(run.tokens))
            return call(run, ids, kind)

        monkeypatch.setattr(library.session, "call", counted)
        library.add(library.plan(read(folder)), stage_tokens=2 * BLOCK)
        assert computed[0] == 4 * BLOCK
        assert list(_of_kind(store, "default", None, STAGE)) == []
        assert all(library.session.verify(held.info.id, samples=2).exact for held in library.artifacts())


def test_after_kill_9_in_the_middle_a_second_add_goes_on(tmp_path: Path, model_directory: Path) -> None:
    folder = write_documents(tmp_path / "docs", 6, 40)
    url = (tmp_path / "repository").as_uri()
    sizes = ("--window", 400, "--reserve", 100, "--block-tokens", 32, "--stage-tokens", 64)
    options = ("--model", model_directory, *sizes)
    command = [sys.executable, "-m", "repo_service.cli", "library", "add", folder, "--repo", url, *options]
    process = subprocess.Popen(list(map(str, command)), start_new_session=True)
    survived: list[str] = []
    deadline = time.monotonic() + 120
    while len(survived) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if (tmp_path / "repository").exists():
            with open_repository(url) as repository:
                survived = [held.info.id for held in library_artifacts(repository, "default")]
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(survived) >= 2
    for url_of_one in (url, straight := (tmp_path / "straight").as_uri()):
        assert main(["library", "add", str(folder), "--repo", url_of_one, *map(str, options), "--json"]) == 0
    with open_repository(url) as resumed, open_repository(straight) as other:
        ids = {held.info.id for held in library_artifacts(resumed, "default")}
        assert set(survived) <= ids
        assert ids == {held.info.id for held in library_artifacts(other, "default")}
        assert list(_of_kind(resumed, "default", None, STAGE)) == []
        assert resumed.scrub().damaged == 0


# Refusals


def test_a_library_that_is_not_there_is_an_error_and_one_of_another_model_says_what_differs(
    store: Repository, tmp_path: Path
) -> None:
    with library_in(store) as library:
        with pytest.raises(LibraryEmpty, match="kvgraft library add"):
            library.artifacts()
        add(library, write_documents(tmp_path / "docs", 1, 3))
    with library_in(store, seed=1) as other:
        with pytest.raises(FingerprintMismatch) as error:
            other.artifacts()
        assert any(field.startswith("model.weights") for field in error.value.details["fields"])
        add(other, tmp_path / "docs")
        assert len(other.artifacts()) == 1
    assert len(library_artifacts(store, "default")) == 2


@pytest.mark.parametrize(
    ("window", "reserve", "said"),
    [(4096, 100, "native one of 2,048"), (100, 100, "leaves no room"), (100, 0, "no room")],
)
def test_windows_and_reserves_that_make_no_sense_are_refused(
    store: Repository, window: int, reserve: int, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said), library_in(store, window=window, reserve=reserve):
        pass


def test_whole_is_refused_before_anything_is_computed(store: Repository, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "docs", 2, 40)
    with library_in(store) as library:
        with pytest.raises(ContextTooLong):
            add(library, folder, whole=True)
        assert store.stats("default").artifacts == 0
