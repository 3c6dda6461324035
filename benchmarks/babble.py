"""Text of any length that nobody has to keep: words by Zipf's law, from a seed, with facts hidden in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

CHARACTERS_PER_TOKEN = 4
VOCABULARY = 500_000

_SHIFT = 2.7  # of Mandelbrot's form of the law
_SENTENCE_WORDS = 16
_SENTENCES_PER_PARAGRAPH = 8
_FREQUENT = """
the of and to a in is it you that he was for on are with as i his they be at one have this from or had by not but what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see no way could people my than been its now find
""".split()
_ONSETS = "b d f g h k l m n p r s t v w z br st tr pl ch sh".split()
_NUCLEI = "a e i o u ai ea oo".split()
_CODAS = ["", "", "", "d", "k", "l", "m", "n", "p", "r", "s", "t", "nd", "rt"]
# By rank among the words that questions are not made of; the rarer, the easier to find.
_FAMILIAR = (200, 5_000)
_UNUSUAL = (20_000, VOCABULARY)


@dataclass(frozen=True)
class Fact:
    """A sentence in one artifact, and a question about it that does not repeat it."""

    artifact: int
    sentence: str
    question: str


class Babble:
    """The texts of a library.

    Parameters
    ----------
    artifacts, tokens
        How many, and the length of each in tokens of four characters.
    facts
        How many facts of each kind are hidden, in artifacts spread evenly.
    """

    def __init__(self, artifacts: int, tokens: int, facts: int, seed: int = 1) -> None:
        self._characters = tokens * CHARACTERS_PER_TOKEN
        self._seed = seed
        chance = random.Random(seed)
        self._words = _vocabulary(chance)
        ranks = torch.arange(1, len(self._words) + 1, dtype=torch.float64)
        self._cumulated = (1 / (ranks + _SHIFT)).cumsum(0)
        self._cumulated /= self._cumulated[-1].clone()
        homes = chance.sample(range(artifacts), min(artifacts, 2 * facts))
        self.unusual = [self._fact(home, chance, _UNUSUAL) for home in homes[: len(homes) // 2]]
        self.familiar = [self._fact(home, chance, _FAMILIAR) for home in homes[len(homes) // 2 :]]

    @cached_property
    def _hidden(self) -> dict[int, str]:
        return {fact.artifact: fact.sentence for fact in (*self.unusual, *self.familiar)}

    def text(self, artifact: int) -> str:
        """An artifact's text, the same each time."""
        chance = torch.Generator().manual_seed(self._seed * 2**32 + artifact)
        count = self._characters // 5
        drawn = torch.rand(count, generator=chance, dtype=torch.float64)
        words = list(map(self._words.__getitem__, torch.searchsorted(self._cumulated, drawn).tolist()))
        sentences = list(_sentences(words))
        hidden = self._hidden.get(artifact)
        if hidden is not None:
            sentences.insert(int(torch.randint(len(sentences) // 2, (1,), generator=chance)), hidden)
        text = "".join(
            sentence + ("\n\n" if number % _SENTENCES_PER_PARAGRAPH == 0 else " ")
            for number, sentence in enumerate(sentences, 1)
        )
        return text[: self._characters]

    def _fact(self, home: int, chance: random.Random, ranks: tuple[int, int]) -> Fact:
        """Three words of the sentence are in the question, which has one of its own."""
        thing, doing, other = (self._words[chance.randrange(*_FAMILIAR)] for _ in range(3))
        name = self._words[chance.randrange(*ranks)]
        number = chance.randrange(10_000, 100_000)
        return Fact(
            home,
            f"The {thing} of {name} was {doing} by {number}.",
            f"By which {other} was the {thing} of {name} {doing}?",
        )


def _sentences(words: list[str]) -> Iterator[str]:
    for start in range(0, len(words), _SENTENCE_WORDS):
        yield " ".join(words[start : start + _SENTENCE_WORDS]).capitalize() + "."


def _vocabulary(chance: random.Random) -> list[str]:
    """Words by rank: those of any text first, and then made-up ones, the rarer the longer."""
    words = dict.fromkeys(_FREQUENT)
    while len(words) < VOCABULARY:
        syllables = 1 + (len(words) > 1_000) + (len(words) > 50_000)
        words["".join(chance.choice(part) for _ in range(syllables) for part in (_ONSETS, _NUCLEI, _CODAS))] = None
    return list(words)
