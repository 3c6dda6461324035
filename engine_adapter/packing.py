"""Documents packed into texts that fill a window, cut where passages end. Pure: no model, no repository."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate

from repo_service.domain.errors import ContextTooLong, InvalidInput, MalformedDocument
from repo_service.domain.manifest import MAX_ANNOTATION_CHARACTERS, MAX_ANNOTATIONS

# A text is filled to within a cut, about 60 tokens; at the end of a line or a sentence there mostly is one.
_CUT_CHARACTERS = 250
_PARTS = "kvgraft.library.parts"
# Some annotations are kept for others; a text with more parts than the rest can list is closed.
_MAX_PARTS_CHARACTERS = (MAX_ANNOTATIONS - 14) * MAX_ANNOTATION_CHARACTERS


@dataclass(frozen=True)
class Part:
    """A stretch of a document in an artifact's text.

    Attributes
    ----------
    source, name, digest, length
        The document: its absolute path, the name a model is shown, SHA-256 and characters of its text.
    start, stop
        The stretch, in the document's characters.
    at
        Where it begins in the artifact's text, after its heading.
    """

    source: str
    name: str
    digest: str
    length: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Piece:
    """A stretch of a document that is yet to be packed; the fields of `Part`, and its text."""

    source: str
    name: str
    digest: str
    length: int
    start: int
    text: str = field(repr=False)

    @property
    def stop(self) -> int:
        return self.start + len(self.text)

    def part(self, at: int) -> Part:
        return Part(self.source, self.name, self.digest, self.length, self.start, self.stop, at)

    def cut(self, start: int, stop: int) -> Piece:
        """A stretch of this one, in the document's characters."""
        return replace(self, start=start, text=self.text[start - self.start : stop - self.start])


@dataclass(frozen=True)
class Packed:
    """What becomes one artifact."""

    text: str = field(repr=False)
    token_count: int
    parts: tuple[Part, ...]


def heading(name: str, start: int) -> str:
    """The line that stands before a document, or before the rest of one."""
    return f"# {name}{' (continued)' if start else ''}\n\n"


def passages(text: str, longest: int) -> list[tuple[int, int]]:
    """A text cut into stretches of at most ``longest`` characters, where a paragraph, line, sentence or word ends."""
    spans = []
    start = 0
    while start < len(text):
        stop = min(start + longest, len(text))
        if stop < len(text):
            for mark in ("\n\n", "\n", ". ", " "):
                cut = text.rfind(mark, start + longest // 2, stop)
                if cut >= 0:
                    stop = cut + len(mark)
                    break
        spans.append((start, stop))
        start = stop
    return spans


class Packer:
    """Fills texts of at most ``room`` tokens, one after the other.

    Parameters
    ----------
    encode
        Token ids of an artifact's whole text, with whatever stands before it.
    counts
        Number of tokens of each of some stretches.
    room
        Most tokens of an artifact.
    whole
        Never cut a document.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        counts: Callable[[Sequence[str]], Sequence[int]],
        room: int,
        whole: bool = False,
    ) -> None:
        self._encode = encode
        self._counts = counts
        self._room = room
        self._whole = whole
        self._last: tuple[tuple[str, int], list[tuple[int, int, int]]] | None = None

    def pack(self, pieces: Sequence[Piece]) -> Iterator[Packed]:
        """Pack pieces in their order.

        Raises
        ------
        ContextTooLong
            If a document is to stay whole and is longer than the room.
        InvalidInput
            If there is no room for a single passage.
        """
        pending = list(reversed(pieces))
        while pending:
            room = self._room
            while True:
                taken, rest = self._take(pending, room)
                text, parts = _written(taken)
                count = len(self._encode(text))
                if count <= self._room:
                    break
                # Together, passages may have a few tokens more than they have apart.
                room -= count - self._room
            yield Packed(text, count, parts)
            del pending[-len(taken) :]
            if rest is not None:
                pending.append(rest)

    def _take(self, pending: Sequence[Piece], room: int) -> tuple[list[Piece], Piece | None]:
        """Pieces from the end of ``pending``, the last one cut, that fill the room; and what was cut off."""
        taken: list[Piece] = []
        left, listed = room - len(self._encode("")), 0
        for piece in reversed(pending):
            listed += len(json.dumps(asdict(piece.part(0))))
            if taken and listed > _MAX_PARTS_CHARACTERS:
                break
            measured = self._measured(piece)
            left -= self._counts([heading(piece.name, piece.start) + "\n\n"])[0]
            fitting = sum(1 for total in accumulate(count for *_, count in measured) if total <= left)
            if fitting < len(measured) and (self._whole or not fitting):
                if taken:
                    break
                raise self._too_long(piece, room - left + sum(count for *_, count in measured))
            left -= sum(count for *_, count in measured[:fitting])
            stop = measured[fitting - 1][1]
            taken.append(piece.cut(piece.start, stop))
            if stop < piece.stop:
                return taken, piece.cut(stop, piece.stop)
        return taken, None

    def _measured(self, piece: Piece) -> list[tuple[int, int, int]]:
        """Start, stop and tokens of a piece's passages; what is cut off a piece has those that it had in it."""
        key = piece.digest, piece.stop
        if self._last is None or self._last[0] != key or self._last[1][0][0] > piece.start:
            spans = passages(piece.text, _CUT_CHARACTERS)
            counts = self._counts([piece.text[a:b] for a, b in spans])
            measured = [(piece.start + a, piece.start + b, n) for (a, b), n in zip(spans, counts, strict=True)]
            self._last = key, measured
        return [passage for passage in self._last[1] if passage[0] >= piece.start]

    def _too_long(self, piece: Piece, tokens: int) -> InvalidInput:
        if self._whole:
            return ContextTooLong(
                f"{piece.source} has {tokens:,} tokens, and an artifact holds {self._room:,}, which is the window "
                "less the reserve: leave out --whole to cut it into parts",
                source=piece.source,
                tokens=tokens,
                room=self._room,
            )
        return InvalidInput(
            f"the window less the reserve is {self._room:,} tokens, which a passage of {piece.source} does not "
            "fit: choose a smaller reserve or a larger window",
            room=self._room,
        )


def _written(pieces: Sequence[Piece]) -> tuple[str, tuple[Part, ...]]:
    text = ""
    parts = []
    for piece in pieces:
        text += ("\n\n" if text else "") + heading(piece.name, piece.start)
        parts.append(piece.part(len(text)))
        text += piece.text
    return text, tuple(parts)


def parts_to_annotations(parts: Sequence[Part]) -> dict[str, str]:
    """Parts as annotations, which have a longest length."""
    text = json.dumps([list(asdict(part).values()) for part in parts], ensure_ascii=True, separators=(",", ":"))
    cuts = range(0, len(text), MAX_ANNOTATION_CHARACTERS)
    return {f"{_PARTS}.{number:02}": text[cut : cut + MAX_ANNOTATION_CHARACTERS] for number, cut in enumerate(cuts)}


def parts_from_annotations(annotations: Mapping[str, str]) -> tuple[Part, ...]:
    """The parts that an artifact's annotations list.

    Raises
    ------
    MalformedDocument
    """
    text = "".join(annotations[name] for name in sorted(annotations) if name.startswith(f"{_PARTS}."))
    try:
        return tuple(Part(*values) for values in json.loads(text))
    except (ValueError, TypeError):
        raise MalformedDocument("the annotations of an artifact of the library do not list its parts") from None
