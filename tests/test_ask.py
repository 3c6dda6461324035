"""Questions to a library: answers bit-equal to a fresh run, a confidence gate, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from exactness import fresh_logits, sha256
from shelves import library_in, read, write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_adapter import GraftSession
from engine_adapter.ask import Answer, ask
from engine_adapter.demo_models import fetch
from engine_adapter.library import Library
from engine_adapter.library_router import LibraryRouter
from engine_adapter.passages import DIRECTORY_VARIABLE, PassageIndex
from engine_adapter.prompt import Prompt
from engine_adapter.routers import LexicalRouter, Route, Routing
from repo_service.cli import errors
from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.domain.errors import ContextTooLong, InvalidInput, LibraryEmpty
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import canonical_steps

Kvgraft = Callable[..., tuple[int, Any]]
QUESTION = "What number has the ferry of ward 1?"


def _interrupted() -> Any:
    raise KeyboardInterrupt


class To:
    """A router that names an artifact."""

    def __init__(self, artifact: str, confidence: float = 1.0) -> None:
        self._routing = Routing([Route(artifact, 1.0, 0, 10)], confidence)

    def route(self, question: str, limit: int = 5) -> Routing:  # noqa: ARG002
        return self._routing


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Repository]:
    with open_repository((tmp_path / "repository").as_uri()) as repository:
        yield repository


@pytest.fixture
def library(store: Repository, tmp_path: Path) -> Iterator[Library]:
    with library_in(store) as library:
        library.add(library.plan(read(write_documents(tmp_path / "docs"))))
        yield library


def fresh(library: Library, artifact: str, question: str, count: int) -> list[str]:
    """SHA-256 of the logits of a run that uses nothing stored: artifact, question, then each token chosen."""
    text = library.session.repository.manifest(artifact, "default").text or ""
    document, asked = library.prompt.document(text), library.prompt.after_document(question)
    size = library.session.block_tokens
    end = len(document) + len(asked)
    steps = canonical_steps(0, len(document), size) + canonical_steps(len(document), end, size)
    tokens, digests = document + asked, []
    for _ in range(count):
        logits = fresh_logits(library.session.model, tokens, [*steps, *canonical_steps(end, len(tokens), 1)])
        digests.append(f"sha256:{sha256(logits)}")
        tokens = [*tokens, int(logits.argmax())]
    return digests


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_i1_every_answer_is_bit_equal_to_a_fresh_run_on_its_artifact(
    store: Repository, tmp_path: Path, family: str
) -> None:
    with library_in(store, family=family) as library:
        library.add(library.plan(read(write_documents(tmp_path / "docs", 3))), stage_tokens=64)
        assert len(library.artifacts()) > 2
        for held in library.artifacts():
            answer = ask(library, To(held.info.id), QUESTION, max_new_tokens=4)
            assert answer.artifact_id == held.info.id
            assert answer.grafted_tokens == held.info.token_count
            assert answer.generation.run.computed_tokens < 64
            digests = answer.generation.logits_sha256
            assert digests == fresh(library, held.info.id, QUESTION, len(digests))


def test_the_source_is_where_the_passage_is(library: Library, tmp_path: Path) -> None:
    with LibraryRouter(library) as router:
        answer = ask(library, router, QUESTION, max_new_tokens=1)
    assert answer.source is not None
    assert (answer.source.name, answer.source.source) == ("docs/1-ferry.txt", str(tmp_path / "docs" / "1-ferry.txt"))
    assert (
        "ferry of ward 1" in (tmp_path / "docs" / "1-ferry.txt").read_text()[answer.source.start : answer.source.stop]
    )


def test_a_router_follows_its_library_without_listing_it_all_again(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "routers"))
    with LibraryRouter(library) as router:
        (ferry, *_) = router.route(QUESTION).routes
    added = library.add(library.plan(read(write_documents(tmp_path / "more", 8))))
    with monkeypatch.context() as patch:
        patch.setattr(library, "artifacts", lambda: pytest.fail("listed"))
        with LibraryRouter(library) as router:
            (chapel, *_) = router.route("What number has the chapel of ward 7?").routes
    assert chapel.artifact_id in {info.id for info in added.made}
    with LibraryRouter(library) as router:
        library.session.repository.delete(ferry.artifact_id, "default")
        routes = router.route(QUESTION).routes
        assert ferry.artifact_id not in [route.artifact_id for route in routes]
        for held in library.artifacts():
            library.session.repository.delete(held.info.id, "default")
        with pytest.raises(LibraryEmpty):
            router.route(QUESTION)
    with pytest.raises(LibraryEmpty):
        LibraryRouter(library).route(QUESTION)


def test_what_an_interrupted_reading_left_out_is_read_by_the_next_router(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "routers"))
    repository = library.session.repository
    last = library.artifacts()[-1].info.id

    with monkeypatch.context() as patch:
        read_manifest = repository.manifest
        patch.setattr(
            repository, "manifest", lambda name, space: _interrupted() if name == last else read_manifest(name, space)
        )
        with pytest.raises(KeyboardInterrupt):
            LibraryRouter(library)
    with LibraryRouter(library) as router:
        found = {route.artifact_id for route in router.route("number ward", 100).routes}
    assert found == {held.info.id for held in library.artifacts()}


def test_below_the_threshold_nothing_is_grafted(library: Library) -> None:
    artifact = library.artifacts()[0].info.id

    def asked(confidence: float, threshold: float) -> Answer:
        return ask(library, To(artifact, confidence), QUESTION, threshold=threshold, max_new_tokens=1)

    assert asked(0.49, 0.5).artifact_id is None
    assert asked(0.5, 0.5).artifact_id == artifact
    assert asked(0.0, 0.0).artifact_id == artifact
    alone = asked(0.9, 0.95)
    assert (alone.source, alone.grafted_tokens) == (None, 0)
    assert alone.generation.run.tokens == library.prompt.alone(QUESTION)
    # An artifact that was deleted after it was routed to counts as none.
    assert ask(library, To("sha256:" + "0" * 64), QUESTION, max_new_tokens=1).artifact_id is None


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_out_of_range_is_an_error(library: Library, threshold: float) -> None:
    with pytest.raises(InvalidInput, match="from 0 to 1"):
        ask(library, To("x"), QUESTION, threshold=threshold)


def test_a_question_that_does_not_fit_is_an_error_with_the_numbers(library: Library) -> None:
    artifact = library.artifacts()[0].info
    with pytest.raises(ContextTooLong) as error:
        ask(library, To(artifact.id), "ferry " * 600)
    assert error.value.details["artifact_tokens"] == 0
    fits = "why " * 60
    with pytest.raises(ContextTooLong) as error:
        ask(library, To(artifact.id), fits)
    assert error.value.details["artifact_tokens"] == artifact.token_count
    assert "512" in error.value.message
    assert ask(library, To(artifact.id, 0.0), fits, max_new_tokens=1).artifact_id is None
    with pytest.raises(InvalidInput, match="empty"):
        ask(library, To(artifact.id), " ")


def test_an_answer_ends_at_the_window(library: Library) -> None:
    artifact = library.artifacts()[0].info
    answer = ask(library, To(artifact.id), QUESTION, max_new_tokens=10_000)
    assert len(answer.generation.run.tokens) <= library.window


def test_an_empty_library_is_an_error(store: Repository) -> None:
    with library_in(store) as library, pytest.raises(LibraryEmpty):
        ask(library, LexicalRouter(PassageIndex(None)), QUESTION)


def test_documents_stand_in_the_first_turn_of_a_chat() -> None:
    tokenizer = families.tiny_tokenizer()
    plain = Prompt.of(tokenizer)
    assert tokenizer.decode(plain.document("text") + plain.after_document("Why?")) == "text\n\nQuestion: Why?\nAnswer:"
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = Prompt.of(tokenizer)
    assert (
        tokenizer.decode(chat.document(" text") + chat.after_document("Why?"))
        == "<bos>[user] text\n\nWhy?[/][assistant]"
    )
    assert tokenizer.decode(chat.alone("Why?")) == "<bos>[user]Why?[/][assistant]"


# The command


@pytest.fixture
def kvgraft(run_json: Kvgraft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_directory: Path) -> Kvgraft:
    """Runs a command on the model and a repository, in a small window."""
    monkeypatch.setenv("KVGRAFT_REPO", (tmp_path / "repo").as_uri())

    def run(*args: object) -> tuple[int, Any]:
        given: tuple[object, ...] = ("--model", model_directory, "--window", 512) if args[1] != "list" else ()
        if args[1] == "add":
            given += ("--reserve", 256)
        return run_json(*args, *given)

    return run


def test_the_commands_add_list_and_ask(kvgraft: Kvgraft, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_documents(tmp_path / "docs")
    (folder / "photo.png").write_bytes(b"\x89PNG\0")
    code, added = kvgraft("library", "add", folder)
    assert (code, added["documents"], added["kept"]) == (0, 4, 0)
    assert added["skipped"] == [{"source": str(folder / "photo.png"), "reason": "it is binary"}]
    assert kvgraft("library", "add", folder)[1]["made"] == []
    code, listed = kvgraft("library", "list")
    assert [item["artifact_id"] for item in listed] == [item["id"] for item in added["made"]]
    assert {part["name"] for item in listed for part in item["documents"]} == {
        f"docs/{path.name}" for path in folder.glob("*.txt")
    }
    code, answer = kvgraft("ask", QUESTION, "--max-new-tokens", 3)
    assert (code, answer["exact"], answer["grafted"], answer["router"]) == (0, True, True, "lexical")
    assert answer["source"]["name"] == "docs/1-ferry.txt"
    assert answer["artifact_id"] == answer["routes"][0]["artifact_id"]
    code, alone = kvgraft("ask", "Who composed the Goldberg variations?", "--max-new-tokens", 3)
    assert (code, alone["grafted"], alone["artifact_id"], alone["source"]) == (0, False, None, None)
    assert main(["ask", QUESTION, "--model", str(tmp_path.parent), "--json"]) == errors.MISSING
    capsys.readouterr()


def test_the_command_refuses_bad_input(kvgraft: Kvgraft, tmp_path: Path) -> None:
    code, error = kvgraft("library", "add", tmp_path / "nowhere")
    assert (code, error["code"]) == (errors.NOT_FOUND, "path_not_found")
    folder = write_documents(tmp_path / "docs", 1, 3)
    (folder / "0-mill.txt").write_bytes(b"\0")
    code, error = kvgraft("library", "add", folder)
    assert (code, error["code"]) == (errors.USAGE, "invalid_input")
    with open_repository((tmp_path / "repo").as_uri()):
        pass
    code, error = kvgraft("ask", QUESTION)
    assert (code, error["code"]) == (errors.NOT_FOUND, "library_empty")
    write_documents(folder, 1, 60)
    code, error = kvgraft("library", "add", folder, "--whole")
    assert (code, error["code"], error["details"]["room"]) == (errors.USAGE, "context_too_long", 256)
    assert kvgraft("library", "add", folder)[0] == 0
    for option, value in (("--threshold", 1.5), ("--router", "psychic"), ("--max-new-tokens", 0)):
        code, error = kvgraft("ask", QUESTION, option, value)
        assert (code, error["code"]) == (errors.USAGE, "usage")
    code, error = kvgraft("ask", "mill " * 700)
    assert (code, error["code"]) == (errors.USAGE, "context_too_long")
    code, error = kvgraft("ask", QUESTION, "--block-tokens", 64)
    assert (code, error["code"]) == (errors.MISMATCH, "fingerprint_mismatch")
    assert error["details"]["fields"]


def test_without_the_readers_the_command_says_what_to_install(
    kvgraft: Kvgraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_adapter.cli.library.find_spec", lambda name: None if name == "pypdf" else name)
    code, error = kvgraft("library", "add", tmp_path)
    assert (code, error["code"]) == (errors.MISSING, "readers_missing")
    assert "pypdf" in error["message"]


def test_smollm2_answers_from_its_library(store: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "archive.md").write_text("The pass key for the archive is 71834. It is changed every spring.\n")
    (folder / "ferry.md").write_text("The ferry to Sandholm leaves from pier seven. It carries six cars.\n")
    path = fetch("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with GraftSession(model, AutoTokenizer.from_pretrained(path), store) as session:
        library = Library(session, window=256, reserve=100)
        library.add(library.plan(read(folder)))
        (held,) = library.artifacts()
        answer = ask(library, To(held.info.id), "What is the pass key for the archive?", max_new_tokens=20)
        assert "71834" in answer.text
        assert answer.generation.logits_sha256[:1] == fresh(
            library, held.info.id, "What is the pass key for the archive?", 1
        )
