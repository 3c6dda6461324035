"""Routers: the right artifact, a confidence that tells, and an index that may be lost."""

from __future__ import annotations

import math
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.embeddings import Encoder, fetch_encoder
from engine_adapter.passages import DIRECTORY_VARIABLE, PassageIndex
from engine_adapter.routers import CombinedRouter, LexicalRouter, Route, Routing, content_words, make_router
from repo_service.domain.errors import InvalidInput

TEXTS = {
    "mill": "# mill.md\n\nThe tide mill at Eling was rebuilt after a storm in 1785. Its wheel has eighteen paddles.",
    "valve": "# valve.md\n\nThe coolant valve opens at a pressure of 42 bar. It is tested with KVGRAFT_VALVE_TEST set.",
    "ferry": "# ferry.md\n\nThe ferry to Sandholm leaves from pier seven, twice a day, and carries six cars.",
    "fees": "# fees.md\n\nParking costs two euros an hour. Residents pay nothing on Sundays, and visitors half.",
}
QUESTIONS = {
    "In what year was the mill rebuilt?": "mill",
    "What pressure do the coolant valves open at?": "valve",
    "Which pier does the ferry leave from?": "ferry",
    "What is kvgraft_valve_test?": "valve",
}
STRANGE = (
    "Who composed the Goldberg variations?",
    "How does photosynthesis work?",
    "Is quantum gravity renormalizable?",
)


def fill(index: PassageIndex, texts: dict[str, str]) -> list[str]:
    """Update an index; the artifacts whose texts it read."""
    read: list[str] = []
    index.update(dict.fromkeys(texts, (0,)), lambda artifact: (read.append(artifact), texts[artifact])[1])
    return read


@pytest.fixture
def index() -> Iterator[PassageIndex]:
    index = PassageIndex(None)
    fill(index, TEXTS)
    yield index
    index.close()


def test_a_question_finds_the_artifact_with_its_words(index: PassageIndex) -> None:
    router = LexicalRouter(index)
    for question, expected in QUESTIONS.items():
        routing = router.route(question)
        assert routing.routes[0].artifact_id == expected
        assert routing.confidence > 0.5, question
        best = routing.routes[0]
        assert TEXTS[expected][best.start : best.stop] == TEXTS[expected]


def test_a_question_about_something_else_has_little_confidence(index: PassageIndex) -> None:
    for question in STRANGE:
        assert LexicalRouter(index).route(question).confidence < 0.3
    assert LexicalRouter(index).route("xyzzy") == Routing([], 0.0)


@pytest.mark.parametrize("question", ['"', "a AND (b OR", "NEAR/3 *", "' OR 1=1 --", "what is it?", "?!", "\0 \ud800"])
def test_signs_in_a_question_are_no_query_language(index: PassageIndex, question: str) -> None:
    for route in LexicalRouter(index).route(question).routes:
        assert route.artifact_id in TEXTS


def test_words_that_any_question_has_do_not_count() -> None:
    assert content_words("What is the Pressure of the valve, the valve?") == ["pressure", "valve"]
    assert content_words("what is it") == ["what", "is", "it"]
    assert len(content_words(" ".join(f"w{n}" for n in range(1000)))) == 64


def test_long_artifacts_are_found_by_their_best_passage() -> None:
    index = PassageIndex(None)
    filler = "The valve and the pressure of the ferry were talked about at the mill. " * 300
    fact = "The archive was flooded in 1911 when the dam at Orlen broke."
    texts = {"long": filler[:9000] + fact + filler[9000:], "other": filler, "third": filler}
    fill(index, texts)
    (best, *_) = LexicalRouter(index).route("When was the archive flooded?").routes
    assert best.artifact_id == "long"
    assert fact in texts["long"][best.start : best.stop]
    assert best.stop - best.start <= 1000


def test_a_word_that_the_library_does_not_have_hides_no_passage(index: PassageIndex) -> None:
    routing = LexicalRouter(index).route("xyzzy plugh frobnicate the coolant valve")
    assert routing.routes[0].artifact_id == "valve"
    assert routing.confidence < 0.5


def test_a_score_is_that_of_bm25_with_other_weights() -> None:
    chance = random.Random(5)
    words = [f"word{n}" for n in range(30)]
    index = PassageIndex(None)
    fill(index, {f"a{n}": " ".join(chance.choices(words, range(30, 0, -1), k=20)) for n in range(200)})
    counts = {word: index.passages_with(word) for word in ("word3", "word20", "word29")}
    assert min(counts.values()) < 100 < max(counts.values())
    weights = {word: max(math.log((200 - count + 0.5) / (count + 0.5)), 1e-6) for word, count in counts.items()}
    query = "SELECT rowid, -rank FROM words WHERE words MATCH ?"
    expected = dict(index._connection.execute(query, (" OR ".join(weights),)))
    found = index.ranked(list(expected), weights)
    assert {passage.number: passage.score for passage in found} == pytest.approx(expected)
    assert [passage.score for passage in found] == sorted((passage.score for passage in found), reverse=True)


def test_words_of_many_passages_are_looked_up_only_beside_rarer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PassageIndex(None)
    common = {f"a{n}": f"The pump and the motor of machine {n} were oiled." for n in range(2000)}
    fill(index, {**common, "fact": "The pump of the Sandholm ferry has a motor of brass."})
    looked_at: list[int] = []
    ranked = index.ranked
    monkeypatch.setattr(
        index, "ranked", lambda numbers, weights: (looked_at.extend(numbers), ranked(numbers, weights))[1]
    )
    routing = LexicalRouter(index).route("Of what metal is the motor in the pump of the Sandholm ferry?")
    assert [route.artifact_id for route in routing.routes] == ["fact"]
    assert len(looked_at) == 1


def test_equal_passages_are_found_in_the_same_order_each_time() -> None:
    texts = {f"a{n}": "The ferry to Sandholm leaves from pier seven." for n in range(300)}
    found = []
    for _ in range(2):
        index = PassageIndex(None)
        fill(index, texts)
        found.append([LexicalRouter(index).route("Where does the Sandholm ferry leave?", 10).routes for _ in range(2)])
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def test_no_passage_is_of_two_documents() -> None:
    index = PassageIndex(None)
    index.update({"a": (0, 40)}, lambda _: "# one\n\nabout a mill and its wheel\n\n......# two\n\nabout a ferry")
    (route,) = LexicalRouter(index).route("ferry").routes
    assert route.start == 40


def test_an_index_follows_the_repository_and_is_kept_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "routers"))
    index = PassageIndex.of("repository", "default", "sha256:1")
    assert fill(index, TEXTS) == list(TEXTS)
    index.close()
    index = PassageIndex.of("repository", "default", "sha256:1")
    rest = {name: text for name, text in TEXTS.items() if name != "mill"}
    assert fill(index, {**rest, "new": "A lighthouse with a red lamp."}) == ["new"]
    assert LexicalRouter(index).route("lighthouse").routes[0].artifact_id == "new"
    assert LexicalRouter(index).route("paddles of the wheel").routes == []
    index.close()
    assert fill(PassageIndex.of("repository", "other", "sha256:1"), TEXTS) == list(TEXTS)
    assert stat.S_IMODE((tmp_path / "routers").stat().st_mode) == 0o700


def test_a_damaged_index_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    index = PassageIndex.of("repository", "default", "sha256:1")
    fill(index, TEXTS)
    index.close()
    (file,) = tmp_path.glob("*.sqlite")
    file.write_bytes(b"no database" * 1000)
    index = PassageIndex.of("repository", "default", "sha256:1")
    assert fill(index, TEXTS) == list(TEXTS)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(file / "below"))
    with pytest.raises(InvalidInput, match=DIRECTORY_VARIABLE):
        PassageIndex.of("repository", "default", "sha256:1")


def test_an_unknown_router_is_an_error_that_names_the_known(index: PassageIndex) -> None:
    with pytest.raises(InvalidInput, match="lexical, dense, both"):
        make_router("psychic", index)


class Fixed:
    """A router that always says the same."""

    def __init__(self, confidence: float, *artifacts: str) -> None:
        self._routing = Routing(
            [Route(artifact, 9.0 - n, n, n + 1) for n, artifact in enumerate(artifacts)], confidence
        )

    def route(self, question: str, limit: int = 5) -> Routing:  # noqa: ARG002
        return self._routing


def test_ranks_are_combined() -> None:
    router = CombinedRouter([Fixed(0.8, "a", "b", "c"), Fixed(0.4, "b", "d")])
    routing = router.route("anything", 3)
    assert [route.artifact_id for route in routing.routes] == ["b", "a", "d"]
    assert 0.4 <= routing.confidence <= 0.8
    assert CombinedRouter([Fixed(0.0), Fixed(0.0)]).route("x") == Routing([], 0.0)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(fetch_encoder())


def test_meaning_finds_what_words_do_not(
    index: PassageIndex, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_adapter.embeddings.Encoder", lambda _: encoder)
    counted: list[tuple[int, int]] = []
    dense = make_router("dense", index, lambda _, done, total: counted.append((done, total)))
    assert counted == [(4, 4)]
    question = "What is the price of keeping my automobile there?"
    assert LexicalRouter(index).route(question).routes == []
    assert dense.route(question).routes[0].artifact_id == "fees"
    for asked, expected in QUESTIONS.items():
        routing = make_router("both", index).route(asked)
        assert routing.routes[0].artifact_id == expected
    for strange in STRANGE:
        assert dense.route(strange).confidence < 0.2
    # What is embedded already is not embedded again.
    counted.clear()
    make_router("dense", index, lambda _, done, total: counted.append((done, total)))
    assert counted == []
