"""Text of any length that nobody has to keep: words by Zipf's law, from a seed, with facts hidden in it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy

CHARACTERS_PER_TOKEN = 4
VOCABULARY = 500_000

_SHIFT = 2.7  # of Mandelbrot's form of the law
_SENTENCE_WORDS = 16
_PARAGRAPH_SENTENCES = 8
_FREQUENT = (
    "the of and to a in is it you that he was for on are with as i his they be at one have this from or had by not but "
    "what all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see no way could people my than "
    "been its now find"
)
_ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "st", "tr", "pl", "sh")
_NUCLEI = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
_CODAS = ("", "", "", "d", "k", "l", "m", "n", "p", "r", "s", "t", "nd", "rt")
# Words of a fact by their rank: those that thousands of passages in a million have, and names that hardly any has.
_FAMILIAR = (100, 5_000)
_UNUSUAL = (20_000, VOCABULARY)


@dataclass(frozen=True)
class Fact:
    """A sentence in an artifact, and a question that has four of its words and one of its own."""

    sentence: str
    question: str


class Babble:
    """The texts of a library.

    Parameters
    ----------
    artifacts, tokens
        How many, and the length of each, in tokens of four characters.
    facts
        How many of each kind are hidden, each in an artifact of its own.

    Attributes
    ----------
    named, plain
        The facts by their artifacts: with a rare name in them, and of familiar words alone.
    strange
        Questions like those about plain facts, about what is nowhere.
    """

    def __init__(self, artifacts: int, tokens: int, facts: int, seed: int = 1) -> None:
        self.characters = tokens * CHARACTERS_PER_TOKEN
        self._seed = seed
        chance = random.Random(seed)
        self._words = _vocabulary(chance)
        shares = 1 / (numpy.arange(1, VOCABULARY + 1) + _SHIFT)
        self._shares = shares.cumsum() / shares.sum()
        homes = chance.sample(range(artifacts), 2 * facts)
        self.named = {home: self._fact(chance, _UNUSUAL) for home in homes[:facts]}
        self.plain = {home: self._fact(chance, _FAMILIAR) for home in homes[facts:]}
        self.strange = [self._fact(chance, _FAMILIAR).question for _ in range(facts)]

    def text(self, artifact: int) -> str:
        """An artifact's text, the same each time."""
        chance = numpy.random.default_rng((self._seed, artifact))
        # No word is shorter than one character and a space.
        drawn = self._shares.searchsorted(chance.random(self.characters // CHARACTERS_PER_TOKEN))
        words = list(map(self._words.__getitem__, drawn.tolist()))
        cuts = range(0, len(words), _SENTENCE_WORDS)
        sentences = [" ".join(words[cut : cut + _SENTENCE_WORDS]).capitalize() + "." for cut in cuts]
        fact = self.named.get(artifact) or self.plain.get(artifact)
        if fact is not None:
            sentences.insert(int(chance.integers(len(sentences) // 2)), fact.sentence)
        cuts = range(0, len(sentences), _PARAGRAPH_SENTENCES)
        return "\n\n".join(" ".join(sentences[cut : cut + _PARAGRAPH_SENTENCES]) for cut in cuts)[: self.characters]

    def _fact(self, chance: random.Random, name_ranks: tuple[int, int]) -> Fact:
        thing, doing, place, other = (self._word(chance, _FAMILIAR) for _ in range(4))
        name = self._word(chance, name_ranks)
        return Fact(
            f"The {thing} of {name} was {doing} at the {place} by {chance.randrange(10_000, 100_000)}.",
            f"By which {other} was the {thing} of {name} {doing} at the {place}?",
        )

    def _word(self, chance: random.Random, ranks: tuple[int, int]) -> str:
        """Any magnitude of rank is as likely."""
        return self._words[int(math.exp(chance.uniform(*map(math.log, ranks))))]


def _vocabulary(chance: random.Random) -> list[str]:
    """Words by rank: the most frequent of English, and then made-up ones, the rarer the longer."""
    words = dict.fromkeys(_FREQUENT.split())
    while len(words) < VOCABULARY:
        syllables = 1 + (len(words) > 1_000) + (len(words) > 50_000)
        words["".join(chance.choice(part) for _ in range(syllables) for part in (_ONSETS, _NUCLEI, _CODAS))] = None
    return list(words)
