"""What commands print: JSON for programs, aligned columns for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def print_json(value: Any) -> None:
    """One result on one line, ASCII only, so that any terminal encoding can carry it."""
    print(json.dumps(value), flush=True)


def print_either(value: Any, text: str, as_json: bool) -> None:
    """A result as JSON, or the text that says the same to people."""
    if as_json:
        print_json(value)
    else:
        print(text)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content, wherever the output goes; the last one is not padded."""
    lines = [list(header), *(list(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name.ljust(width)}  {printable(value)}".rstrip())


def note(text: str) -> None:
    """Tell a person something that is no part of the result."""
    print(text, file=sys.stderr)


def printable(text: str) -> str:
    """Text that can't move a terminal's cursor or change its state: control characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def print_text(text: str) -> None:
    """Print a text of several lines, each made printable."""
    for line in text.splitlines() or [""]:
        print(printable(line))


def size(count: int) -> str:
    """Bytes for people: ``1.5 MiB``."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def seconds(value: float) -> str:
    """A duration for people: ``18.1 ms``, ``2.4 s``, ``3 min 5 s``."""
    if value < 1:
        return f"{value * 1000:.1f} ms"
    if value < 100:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def moment(value: datetime) -> str:
    """A time in the local zone, to the second."""
    return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def short(digest: str) -> str:
    """A digest cut to what still works as a reference."""
    return digest[:19]


def count(number: int, noun: str) -> str:
    """``1 block``, ``2,048 tokens``; the noun is given in the singular."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
