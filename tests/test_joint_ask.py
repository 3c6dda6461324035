"""Documents as one context beyond the window, and the command that asks about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from shelves import read, write_documents

from engine_adapter.joint import JointSession
from engine_adapter.joint_ask import JointReader
from engine_adapter.joint_settings import JointSettings
from repo_service.cli import errors
from repo_service.domain.errors import InvalidInput

QUESTION = "What number has the ferry of ward 1?"
SETTINGS = JointSettings(window=512, sinks=32, local=64, blocks=8, block_tokens=16, chunk=64, representatives=4)

Kvgraft = Callable[..., tuple[int, Any]]


@pytest.fixture
def session() -> Iterator[JointSession]:
    model = families.build("llama", torch.float32, "sdpa")
    with JointSession(model, families.tiny_tokenizer(), SETTINGS) as session:
        yield session


def test_a_question_leaves_no_trace_for_the_next(session: JointSession, tmp_path: Path) -> None:
    documents = read(write_documents(tmp_path / "docs")).documents
    reader = JointReader(session, documents)
    held = list(reader.run.tokens)
    assert len(held) > SETTINGS.window
    answers = [reader.ask(question, 4) for question in (QUESTION, "Who rang the bell?", QUESTION)]
    assert reader.run.tokens == held
    assert answers[0].generation.tokens == answers[2].generation.tokens
    assert answers[0].sources == answers[2].sources
    assert answers[0].sources
    assert set(answers[0].sources) <= {document.name for document in documents}
    assert not answers[0].generation.exact
    fresh = session.extend(
        session.prefill(held), reader._prompt.after_document(QUESTION)
    )  # An answer is that of a context that was only asked this.
    assert session.generate(fresh, 4).tokens == answers[0].generation.tokens


def test_what_fits_is_seen_whole(session: JointSession, tmp_path: Path) -> None:
    reader = JointReader(session, read(write_documents(tmp_path / "docs", 1, 1)).documents)
    assert reader.ask(QUESTION, 2).sources is None


def test_nothing_to_read_and_nothing_asked_are_errors(session: JointSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no document"):
        JointReader(session, [])
    reader = JointReader(session, read(write_documents(tmp_path / "docs", 1, 1)).documents)
    with pytest.raises(InvalidInput, match="question is empty"):
        reader.ask("  ")


def test_the_command_says_that_it_is_lossy_and_refuses_bad_input(
    run_json: Kvgraft, model_directory: Path, tmp_path: Path
) -> None:
    folder = write_documents(tmp_path / "docs")
    (folder / "photo.png").write_bytes(b"\x89PNG\0")
    joint = ("joint", folder, "--model", model_directory, "--max-new-tokens", 2)
    code, found = run_json(*joint, "--ask", QUESTION, "--ask", "Who rang the bell?")
    assert (code, found["exact"], found["way"], found["documents"]) == (0, False, "joint", 4)
    assert [answer["question"] for answer in found["answers"]] == [QUESTION, "Who rang the bell?"]
    assert found["skipped"] == [{"source": str(folder / "photo.png"), "reason": "it is binary"}]
    assert run_json(*joint)[1]["code"] == "usage"
    for given, expected in (
        (("--ask", " "), "invalid_input"),
        (("--ask", QUESTION, "--window", 300), "invalid_input"),
        (("--ask", QUESTION, "--local", 100), "invalid_input"),
        (("--ask", QUESTION, "--blocks", 0), "usage"),
        (("--ask", QUESTION, "--pages-dir", tmp_path / "nowhere"), "usage"),
    ):
        code, error = run_json(*joint, *given)
        assert (code, error["code"]) == (errors.USAGE, expected), given
    code, error = run_json("joint", tmp_path / "nowhere", "--model", model_directory, "--ask", QUESTION)
    assert (code, error["code"]) == (errors.NOT_FOUND, "path_not_found")


def test_smollm2_finds_a_fact_far_before_its_window(run_json: Kvgraft, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "0-archive.md").write_text("The pass key for the archive is 71834. It is changed every spring.\n")
    lines = (f"On day {day} the ferry carried {day % 7} cars, and {day % 5} bicycles.\n" for day in range(220))
    (folder / "1-log.md").write_text("".join(lines))
    code, found = run_json(
        *("joint", folder, "--model", "smollm2", "--window", 2048, "--local", 256, "--max-new-tokens", 20),
        *("--ask", "What is the pass key for the archive?"),
    )
    assert code == 0
    assert found["context_tokens"] > 2048
    assert "71834" in found["answers"][0]["answer"]
