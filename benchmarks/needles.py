"""What is hidden in a haystack and asked for: the tasks follow RULER (Hsieh et al., 2024, arXiv 2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# What a number can be for. No two of them name the same thing.
_KINDS = [
    "pass key", "secret code", "magic number", "door code", "locker combination", "account number", "ticket number",
    "serial number", "telephone extension", "flight number", "invoice number", "license plate", "room number",
    "badge number", "lottery number", "radio frequency", "launch code", "vault number", "alarm code", "parcel number",
]  # fmt: skip
_ADJECTIVES = [
    "amber",
    "ancient",
    "brass",
    "broken",
    "copper",
    "crimson",
    "crooked",
    "distant",
    "dusty",
    "faded",
    "frozen",
    "gentle",
    "golden",
    "green",
    "hidden",
    "hollow",
    "iron",
    "ivory",
    "lonely",
    "marble",
    "narrow",
    "northern",
    "orange",
    "painted",
    "purple",
    "quiet",
    "rusty",
    "scarlet",
    "silent",
    "silver",
    "southern",
    "stone",
    "striped",
    "sunken",
    "velvet",
    "violet",
    "western",
    "white",
    "winding",
    "wooden",
]
_NOUNS = [
    "anchor",
    "arch",
    "attic",
    "barrel",
    "basket",
    "bell",
    "boat",
    "bridge",
    "cabin",
    "candle",
    "castle",
    "cellar",
    "chapel",
    "chest",
    "clock",
    "cottage",
    "door",
    "drum",
    "engine",
    "fountain",
    "garden",
    "gate",
    "harbor",
    "kettle",
    "ladder",
    "lantern",
    "library",
    "lighthouse",
    "mill",
    "mirror",
    "orchard",
    "piano",
    "station",
    "stove",
    "tower",
    "tunnel",
    "vault",
    "wagon",
    "well",
    "window",
]
_VALUES = 4
_HOPS = 3


@dataclass(frozen=True)
class Needle:
    """Sentences to hide, each in a place of its own, and the question about them.

    Attributes
    ----------
    question
        Ends where the answer begins.
    answers
        Numbers; all of them are asked for.
    tokens
        How many tokens an answer may take.
    """

    sentences: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    tokens: int = 10

    def share(self, answer: str) -> float:
        """The share of the numbers that an answer has."""
        return sum(number in answer for number in self.answers) / len(self.answers)


def passkey(count: int, seed: int) -> list[Needle]:
    """The needle of the usual passkey task, with ``count`` numbers: each for a haystack of its own."""
    return [_single("pass key", number) for number in _numbers(count, seed)]


def kinds(count: int, seed: int) -> list[Needle]:
    """Needles that differ in what the number is for: as many questions out of one haystack."""
    return [_single(name, number) for name, number in zip(_KINDS[:count], _numbers(count, seed), strict=True)]


def multi_key(count: int, seed: int) -> list[Needle]:
    """Pass keys that differ in whose they are: harder, for each is the others' nearest mistake."""
    return [
        _single(f"pass key of the {owner}", number)
        for owner, number in zip(_owners(count, seed), _numbers(count, seed), strict=True)
    ]


def multi_value(count: int, seed: int) -> list[Needle]:
    """Several numbers of one owner, in as many places."""
    numbers = _numbers(count * _VALUES, seed)
    needles = []
    for place, owner in enumerate(_owners(count, seed)):
        own = tuple(numbers[place * _VALUES : (place + 1) * _VALUES])
        needles.append(
            Needle(
                tuple(f"\nOne of the magic numbers of the {owner} is {number}.\n" for number in own),
                f"\nWhat are all {_VALUES} magic numbers of the {owner}? The magic numbers of the {owner} are",
                own,
                48,
            )
        )
    return needles


def variables(count: int, seed: int) -> list[Needle]:
    """Chains of assignments, in order, the last of which has the first one's value."""
    chance = random.Random(seed)
    needles = []
    for number in _numbers(count, seed):
        names = ["".join(chance.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(_HOPS + 1)]
        needles.append(
            Needle(
                (
                    f"\nVAR {names[0]} = {number}.\n",
                    *(f"\nVAR {names[hop + 1]} = VAR {names[hop]}.\n" for hop in range(_HOPS)),
                ),
                f"\nWhat is the value of VAR {names[-1]}? The value of VAR {names[-1]} is",
                (number,),
            )
        )
    return needles


def owned_numbers(count: int, each: int, seed: int) -> list[tuple[str, str, tuple[str, ...]]]:
    """Of ``count`` owners what a number is for, the owner, and ``each`` numbers."""
    numbers = _numbers(count * each, seed)
    return [
        (_KINDS[place % len(_KINDS)], owner, tuple(numbers[place * each : (place + 1) * each]))
        for place, owner in enumerate(_owners(count, seed))
    ]


TASKS: Mapping[str, Callable[[int, int], list[Needle]]] = {
    "passkey": passkey,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "variables": variables,
}


def _single(name: str, number: str) -> Needle:
    return Needle(
        (f"\nThe {name} is {number}. Remember it. {number} is the {name}.\n",),
        f"\nWhat is the {name}? The {name} is",
        (number,),
    )


def _owners(count: int, seed: int) -> list[str]:
    return random.Random(seed).sample([f"{adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS], count)


def _numbers(count: int, seed: int) -> list[str]:
    return [str(number) for number in random.Random(seed).sample(range(10_000, 100_000), count)]
