"""Haystacks of real text, with needles at known depths and questions about them.

The text is what every Python brings: the language reference as ``pydoc`` holds it, and the standard library's
source. Nothing of it repeats, and code and prose alternate. The tasks follow RULER (Hsieh et al., 2024, arXiv 2404.06654): one
needle, one of many keys, many values of one key, and a chain of variables.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Protocol


def _listed(text: str, between: str) -> list[str]:
    return text.split(between)


_ADJECTIVES = _listed(
    "amber ancient brass broken copper crimson crooked distant dusty faded frozen gentle golden green hidden hollow "
    "iron ivory lonely marble narrow northern orange painted purple quiet rusty scarlet silent silver southern stone "
    "striped sunken velvet violet western white winding wooden",
    " ",
)
_NOUNS = _listed(
    "anchor arch attic barrel basket bell boat bridge cabin candle castle cellar chapel chest clock cottage door drum "
    "engine fountain garden gate harbor kettle ladder lantern library lighthouse mill mirror orchard piano station "
    "stove tower tunnel vault wagon well window",
    " ",
)
# Facts that are not easily taken for one another.
_FACTS = _listed(
    "pass key|locker code|flight number|phone extension|invoice number|population of Oakville|price of the painting|"
    "serial number of the engine|postal code of Riverton|membership number of the librarian|weight of the whale|"
    "height of the mountain|length of the canal|depth of the lake|distance to the comet|capacity of the stadium|"
    "number of books in the archive|budget of the museum|speed of the rocket|age of the fossil|"
    "number of bricks in the chimney|license plate of the bus|number of steps in the lighthouse|"
    "room number of the laboratory|ticket number of the winner|temperature of the furnace|wage of the gardener|"
    "number of sheep on the island|frequency of the radio station|catalogue number of the stamp|"
    "area of the vineyard|voltage of the generator|case number of the lawsuit|rent of the workshop|"
    "number of seeds in the jar|value of the diamond|harvest of the orchard|patent number of the bicycle|"
    "mileage of the truck|tonnage of the ferry|number of pages in the encyclopedia|score of the chess engine|"
    "combination of the safe|account number of the bakery|number of lamps in the theatre|"
    "toll of the tunnel|output of the paper mill|number of bees in the hive|insurance number of the violin|"
    "elevation of the observatory",
    "|",
)


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Needle:
    """Sentences to hide, and what to ask about them.

    Attributes
    ----------
    task
        single, multi-key, multi-value or variables.
    sentences
        Hidden one after another, each in a place of its own.
    question
        Ends where the answer begins.
    answers
        All of them must be in the answer.
    """

    task: str
    sentences: tuple[str, ...]
    question: str
    answers: tuple[str, ...]

    def is_found(self, answer: str) -> bool:
        return all(part in answer for part in self.answers)


def facts(generator: random.Random, count: int) -> list[Needle]:
    """Numbers of different things, of which the pass key is one."""
    return [
        Needle(
            "single",
            (f"The {what} is {number}. Remember it. {number} is the {what}.",),
            f"What is the {what}? The {what} is",
            (number,),
        )
        for what, number in zip(generator.sample(_FACTS, count), _numbers(generator, count), strict=True)
    ]


def keyed(generator: random.Random, count: int) -> list[Needle]:
    """Numbers under different names, each a distractor of the others."""
    return [
        Needle(
            "multi-key",
            (f"The pass key of the {name} is {number}. Remember it. {number} is the pass key of the {name}.",),
            f"What is the pass key of the {name}? The pass key of the {name} is",
            (number,),
        )
        for name, number in zip(_names(generator, count), _numbers(generator, count), strict=True)
    ]


def valued(generator: random.Random, count: int, values: int = 4) -> list[Needle]:
    """Several numbers under one name, in as many places."""
    needles = []
    for name in _names(generator, count):
        numbers = tuple(_numbers(generator, values))
        sentences = tuple(f"One of the magic numbers of the {name} is {number}." for number in numbers)
        question = f"What are all {values} magic numbers of the {name}? The magic numbers of the {name} are"
        needles.append(Needle("multi-value", sentences, question, numbers))
    return needles


def chained(generator: random.Random, count: int, hops: int = 3) -> list[Needle]:
    """Chains of variables, the last of which has the first one's value."""
    needles = []
    for number in _numbers(generator, count):
        names = ["".join(generator.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(hops + 1)]
        sentences = [f"VAR {names[0]} = {number}."]
        sentences += [f"VAR {after} = VAR {before}." for before, after in pairwise(names)]
        question = f"What is the value of VAR {names[-1]}? The value of VAR {names[-1]} is"
        needles.append(Needle("variables", tuple(sentences), question, (number,)))
    return needles


def documents(seed: int) -> Iterator[tuple[str, str]]:
    """Names and texts of documents in an order that the seed decides, prose and code in turn."""
    generator = random.Random(seed)
    library = Path(sysconfig.get_path("stdlib"))
    code = sorted(
        path
        for path in library.rglob("*.py")
        if not {"site-packages", "test", "tests", "idle_test", "pydoc_data"} & set(path.parts)
    )
    prose = sorted(topics)
    generator.shuffle(code)
    generator.shuffle(prose)
    for number, path in enumerate(code):
        if number < len(prose):
            yield f"reference/{prose[number]}", topics[prose[number]]
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 1000:
            yield str(path.relative_to(library)), text


@dataclass
class Haystack:
    """Token ids with needles in them.

    Attributes
    ----------
    tokens
        Ids, without a question.
    places
        Where each needle's sentences begin, by the needle's number, in tokens.
    """

    tokens: list[int]
    needles: list[Needle]
    places: list[tuple[int, ...]] = field(default_factory=list)


def haystack(
    tokenizer: Tokenizer, length: int, hidden: Sequence[tuple[Needle, Sequence[float]]], seed: int
) -> Haystack:
    """A haystack of ``length`` tokens in which each needle's sentences lie at the given depths.

    Parameters
    ----------
    hidden
        Needles and, for each of their sentences, how deep it lies: tokens before it, of ``length`` (0 to 1).
    """
    sentences = [
        (depth, number, part, tokenizer.encode(f"\n{sentence}\n", add_special_tokens=False))
        for number, (needle, depths) in enumerate(hidden)
        for part, (sentence, depth) in enumerate(zip(needle.sentences, depths, strict=True))
    ]
    background = _tokens(tokenizer, length - sum(len(ids) for *_, ids in sentences), seed)
    tokens: list[int] = []
    taken = 0
    places = [[0] * len(needle.sentences) for needle, _ in hidden]
    for depth, number, part, ids in sorted(sentences):
        upto = max(taken, min(len(background), int(depth * length) - (len(tokens) - taken)))
        tokens += background[taken:upto]
        taken = upto
        places[number][part] = len(tokens)
        tokens += ids
    tokens += background[taken:]
    return Haystack(tokens, [needle for needle, _ in hidden], [tuple(place) for place in places])


def _tokens(tokenizer: Tokenizer, count: int, seed: int) -> list[int]:
    found: list[int] = []
    for _, text in documents(seed):
        # Piece by piece: a tokenizer takes longer than it should for texts of a MiB.
        for start in range(0, len(text), 20_000):
            found += tokenizer.encode(text[start : start + 20_000], add_special_tokens=False)
        if len(found) >= count:
            return found[:count]
    raise ValueError(f"the texts have {len(found)} tokens; {count} are asked for")


def _names(generator: random.Random, count: int) -> list[str]:
    pairs = [f"{adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
    return generator.sample(pairs, count)


def _numbers(generator: random.Random, count: int) -> list[str]:
    return [str(number) for number in generator.sample(range(10_000, 100_000), count)]
